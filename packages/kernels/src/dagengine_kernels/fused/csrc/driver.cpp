// Compiling, loading and launching kernels through libcuda and NVRTC, both opened with dlopen.
//
// Knows cubins, kernel parameters and stream handles; not tensors. It works in a device's primary context (torch's) and
// a launch neither allocates device memory nor waits, so that it can be captured into a CUDA graph.
//
// The few types of the driver's stable ABI that are needed are declared here; their layout is that of <cuda.h>.

#include "driver.h"

#include <dlfcn.h>
#include <pybind11/stl.h>

#include <array>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

namespace py = pybind11;

namespace {

using Result = int;
using Device = int;
using Context = void*;
using ModuleHandle = void*;
using Function = void*;
using Stream = void*;

struct LaunchAttribute {
    int id;
    char pad[4];
    union {
        char raw[64];
        struct {
            unsigned x, y, z;
        } cluster;
        int enabled;
    } value;
};
static_assert(sizeof(LaunchAttribute) == 72, "CUlaunchAttribute has 72 bytes");

struct LaunchConfig {
    unsigned grid[3];
    unsigned block[3];
    unsigned shared_bytes;
    Stream stream;
    LaunchAttribute* attributes;
    unsigned num_attributes;
};
static_assert(sizeof(LaunchConfig) == 56, "CUlaunchConfig has 56 bytes");

constexpr int LAUNCH_CLUSTER_DIMENSION = 4;
constexpr int LAUNCH_PROGRAMMATIC_STREAM_SERIALIZATION = 6;
constexpr int FUNCTION_MAX_THREADS = 0;
constexpr int FUNCTION_SHARED_BYTES = 1;
constexpr int FUNCTION_LOCAL_BYTES = 3;
constexpr int FUNCTION_REGISTERS = 4;
constexpr int FUNCTION_MAX_DYNAMIC_SHARED_BYTES = 8;
constexpr int FUNCTION_NON_PORTABLE_CLUSTER = 14;
constexpr size_t PARAMS_LIMIT = 4096;
constexpr size_t TENSOR_MAP_BYTES = 128;
constexpr size_t TENSOR_MAP_RANK = 5;

class CudaError : public std::runtime_error {
    using std::runtime_error::runtime_error;
};

template <typename F>
void resolve(void* library, const char* name, F& function, bool optional = false) {
    function = reinterpret_cast<F>(dlsym(library, name));
    if (!function && !optional) throw CudaError(std::string("the library has no function ") + name);
}

struct Driver {
    Result (*init)(unsigned);
    Result (*version)(int*);
    Result (*error_name)(Result, const char**);
    Result (*error_string)(Result, const char**);
    Result (*device_get)(Device*, int);
    Result (*device_attribute)(int*, int, Device);
    Result (*primary_context)(Context*, Device);
    Result (*get_current)(Context*);
    Result (*set_current)(Context);
    Result (*load_data)(ModuleHandle*, const void*);
    Result (*get_function)(Function*, ModuleHandle, const char*);
    Result (*get_attribute)(int*, int, Function);
    Result (*set_attribute)(Function, int, int);
    Result (*param_info)(Function, size_t, size_t*, size_t*);
    Result (*occupancy)(int*, Function, int, size_t);
    Result (*launch)(const LaunchConfig*, Function, void**, void**);
    Result (*encode_tiled)(
        void*, int, unsigned, void*, const uint64_t*, const uint64_t*, const uint32_t*, const uint32_t*, int, int, int, int);

    Driver() {
        void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
        if (!library) throw CudaError(std::string("no NVIDIA driver here: ") + dlerror());
        resolve(library, "cuInit", init);
        resolve(library, "cuDriverGetVersion", version);
        resolve(library, "cuGetErrorName", error_name);
        resolve(library, "cuGetErrorString", error_string);
        resolve(library, "cuDeviceGet", device_get);
        resolve(library, "cuDeviceGetAttribute", device_attribute);
        resolve(library, "cuDevicePrimaryCtxRetain", primary_context);
        resolve(library, "cuCtxGetCurrent", get_current);
        resolve(library, "cuCtxSetCurrent", set_current);
        resolve(library, "cuModuleLoadData", load_data);
        resolve(library, "cuModuleGetFunction", get_function);
        resolve(library, "cuFuncGetAttribute", get_attribute);
        resolve(library, "cuFuncSetAttribute", set_attribute);
        resolve(library, "cuFuncGetParamInfo", param_info, true);
        resolve(library, "cuOccupancyMaxActiveBlocksPerMultiprocessor", occupancy);
        resolve(library, "cuLaunchKernelEx", launch);
        resolve(library, "cuTensorMapEncodeTiled", encode_tiled, true);
        check(init(0), "cuInit");
    }

    void check(Result result, const std::string& what) const {
        if (result == 0) return;
        const char* name = nullptr;
        const char* text = nullptr;
        error_name(result, &name);
        error_string(result, &text);
        throw CudaError(what + ": " + (name ? name : "error " + std::to_string(result)) + (text ? std::string(" (") + text + ")" : ""));
    }
};

const Driver& driver() {
    static const Driver instance;
    return instance;
}

// Makes a context current for a scope. A thread that had none keeps it, as it does after a runtime call.
class Current {
public:
    explicit Current(Context context) {
        driver().check(driver().get_current(&before_), "cuCtxGetCurrent");
        changed_ = before_ != context;
        if (changed_) driver().check(driver().set_current(context), "cuCtxSetCurrent");
    }
    ~Current() {
        if (changed_ && before_) driver().set_current(before_);
    }
    Current(const Current&) = delete;
    Current& operator=(const Current&) = delete;

private:
    Context before_ = nullptr;
    bool changed_ = false;
};

Context primary_context(int ordinal) {
    static std::map<int, Context> contexts;
    auto found = contexts.find(ordinal);
    if (found != contexts.end()) return found->second;
    Device device;
    driver().check(driver().device_get(&device, ordinal), "cuDeviceGet");
    Context context = nullptr;
    driver().check(driver().primary_context(&context, device), "cuDevicePrimaryCtxRetain");
    return contexts[ordinal] = context;
}

using Dim = std::array<unsigned, 3>;

class Kernel {
public:
    Kernel(Context context, Function function, std::string name)
        : context_(context), function_(function), name_(std::move(name)) {
        Current current(context_);
        max_shared_ = attribute(FUNCTION_MAX_DYNAMIC_SHARED_BYTES);
        if (!driver().param_info) return;
        size_t offset = 0, size = 0;
        if (driver().param_info(function_, 0, &offset, &size) != 0) return;
        params_bytes_ = size;
        if (driver().param_info(function_, 1, &offset, &size) == 0)
            throw CudaError(name_ + ": a kernel takes one struct, this one takes more parameters");
    }

    int attribute(int which) const {
        int value = 0;
        driver().check(driver().get_attribute(&value, which, function_), name_ + ": cuFuncGetAttribute");
        return value;
    }

    int read_attribute(int which) const {
        Current current(context_);
        return attribute(which);
    }

    int blocks_per_sm(int threads, size_t shared_bytes) {
        Current current(context_);
        allow_shared(shared_bytes);
        int blocks = 0;
        driver().check(driver().occupancy(&blocks, function_, threads, shared_bytes), name_ + ": occupancy");
        return blocks;
    }

    void launch(const Dim& grid, const Dim& block, size_t shared_bytes, uintptr_t stream, const py::object& params, bool pdl,
                const Dim& cluster) {
        alignas(128) thread_local static char bytes[PARAMS_LIMIT];
        Py_buffer view;
        if (PyObject_GetBuffer(params.ptr(), &view, PyBUF_SIMPLE) != 0) throw py::error_already_set();
        const size_t size = static_cast<size_t>(view.len);
        const bool fits = size <= PARAMS_LIMIT && (params_bytes_ == 0 || size == params_bytes_);
        if (fits) std::memcpy(bytes, view.buf, size);
        PyBuffer_Release(&view);
        if (!fits)
            throw CudaError(name_ + ": its parameters have " + std::to_string(params_bytes_) + " bytes, " + std::to_string(size) +
                            " were given");

        Current current(context_);
        allow_shared(shared_bytes);
        LaunchAttribute attributes[2] = {};
        unsigned count = 0;
        if (pdl) {
            attributes[count].id = LAUNCH_PROGRAMMATIC_STREAM_SERIALIZATION;
            attributes[count++].value.enabled = 1;
        }
        const unsigned blocks = cluster[0] * cluster[1] * cluster[2];
        if (blocks > 1) {
            if (blocks > 8 && !non_portable_) {
                driver().check(driver().set_attribute(function_, FUNCTION_NON_PORTABLE_CLUSTER, 1), name_ + ": cluster size");
                non_portable_ = true;
            }
            attributes[count].id = LAUNCH_CLUSTER_DIMENSION;
            attributes[count++].value.cluster = {cluster[0], cluster[1], cluster[2]};
        }
        LaunchConfig config{};
        for (int i = 0; i < 3; ++i) {
            config.grid[i] = grid[i];
            config.block[i] = block[i];
        }
        config.shared_bytes = static_cast<unsigned>(shared_bytes);
        config.stream = reinterpret_cast<Stream>(stream);
        config.attributes = attributes;
        config.num_attributes = count;
        void* arguments[1] = {bytes};
        driver().check(driver().launch(&config, function_, arguments, nullptr), name_ + ": cuLaunchKernelEx");
    }

    const std::string& name() const { return name_; }
    size_t params_bytes() const { return params_bytes_; }

private:
    void allow_shared(size_t bytes) {
        if (bytes <= static_cast<size_t>(max_shared_)) return;
        const int wanted = static_cast<int>(bytes);
        driver().check(driver().set_attribute(function_, FUNCTION_MAX_DYNAMIC_SHARED_BYTES, wanted),
                       name_ + ": " + std::to_string(bytes) + " bytes of dynamic shared memory");
        max_shared_ = wanted;
    }

    Context context_;
    Function function_;
    std::string name_;
    int max_shared_ = 0;
    size_t params_bytes_ = 0;
    bool non_portable_ = false;
};

// A loaded cubin. It stays loaded for the life of the process: captured graphs may hold its functions.
class Module {
public:
    Module(const py::bytes& cubin, int ordinal) : context_(primary_context(ordinal)) {
        Current current(context_);
        const std::string image = cubin;
        driver().check(driver().load_data(&handle_, image.data()), "cuModuleLoadData");
    }

    std::unique_ptr<Kernel> function(const std::string& name) const {
        Current current(context_);
        Function found = nullptr;
        driver().check(driver().get_function(&found, handle_, name.c_str()), "cuModuleGetFunction " + name);
        return std::make_unique<Kernel>(context_, found, name);
    }

private:
    Context context_;
    ModuleHandle handle_ = nullptr;
};

py::bytes tensor_map(uintptr_t address, int data_type, const std::vector<uint64_t>& dims, const std::vector<uint64_t>& strides,
                     const std::vector<uint32_t>& box, int swizzle, int l2_promotion) {
    if (!driver().encode_tiled) throw CudaError("this NVIDIA driver has no tensor maps (it is older than CUDA 12)");
    if (dims.empty() || dims.size() > TENSOR_MAP_RANK || strides.size() + 1 != dims.size() || box.size() != dims.size())
        throw CudaError("tensor_map: dims and box have 1 to 5 entries each, strides one fewer (the innermost is contiguous)");
    alignas(64) char map[TENSOR_MAP_BYTES] = {};
    const std::vector<uint32_t> steps(dims.size(), 1);
    driver().check(driver().encode_tiled(map, data_type, static_cast<unsigned>(dims.size()), reinterpret_cast<void*>(address),
                                         dims.data(), strides.data(), box.data(), steps.data(), 0, swizzle, l2_promotion, 0),
                   "cuTensorMapEncodeTiled");
    return py::bytes(map, TENSOR_MAP_BYTES);
}

class Nvrtc {
public:
    explicit Nvrtc(const std::string& path) {
        void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
        if (!library) throw CudaError(std::string("NVRTC: ") + dlerror());
        resolve(library, "nvrtcVersion", version_);
        resolve(library, "nvrtcGetErrorString", error_string_);
        resolve(library, "nvrtcCreateProgram", create_);
        resolve(library, "nvrtcDestroyProgram", destroy_);
        resolve(library, "nvrtcCompileProgram", compile_);
        resolve(library, "nvrtcGetCUBINSize", cubin_size_);
        resolve(library, "nvrtcGetCUBIN", cubin_);
        resolve(library, "nvrtcGetProgramLogSize", log_size_);
        resolve(library, "nvrtcGetProgramLog", log_);
    }

    std::pair<int, int> version() const {
        int major = 0, minor = 0;
        check(version_(&major, &minor), "nvrtcVersion");
        return {major, minor};
    }

    py::bytes compile(const std::string& source, const std::string& name, const std::vector<std::string>& options) const {
        std::string cubin;
        {
            py::gil_scoped_release release;
            Program program(*this, source, name);
            std::vector<const char*> pointers;
            for (const auto& option : options) pointers.push_back(option.c_str());
            const int result = compile_(program.handle, static_cast<int>(pointers.size()), pointers.data());
            if (result != 0) {
                size_t size = 0;
                std::string log;
                if (log_size_(program.handle, &size) == 0 && size > 1) {
                    log.resize(size);
                    log_(program.handle, log.data());
                    log.resize(size - 1);
                }
                throw CudaError(name + ": " + error_string_(result) + "\n" + log);
            }
            size_t size = 0;
            check(cubin_size_(program.handle, &size), "nvrtcGetCUBINSize");
            cubin.resize(size);
            check(cubin_(program.handle, cubin.data()), "nvrtcGetCUBIN");
        }
        return py::bytes(cubin);
    }

private:
    struct Program {
        Program(const Nvrtc& owner, const std::string& source, const std::string& name) : nvrtc(owner) {
            nvrtc.check(nvrtc.create_(&handle, source.c_str(), name.c_str(), 0, nullptr, nullptr), "nvrtcCreateProgram");
        }
        ~Program() { nvrtc.destroy_(&handle); }
        Program(const Program&) = delete;
        Program& operator=(const Program&) = delete;

        const Nvrtc& nvrtc;
        void* handle = nullptr;
    };

    void check(int result, const char* what) const {
        if (result != 0) throw CudaError(std::string(what) + ": " + error_string_(result));
    }

    int (*version_)(int*, int*);
    const char* (*error_string_)(int);
    int (*create_)(void**, const char*, const char*, int, const char* const*, const char* const*);
    int (*destroy_)(void**);
    int (*compile_)(void*, int, const char* const*);
    int (*cubin_size_)(void*, size_t*);
    int (*cubin_)(void*, char*);
    int (*log_size_)(void*, size_t*);
    int (*log_)(void*, char*);
};

}  // namespace

void bind_cuda(py::module_& module) {
    module.doc() = "The CUDA driver and NVRTC, opened at run time.";
    py::register_exception<CudaError>(module, "CudaError", PyExc_RuntimeError);
    module.def("driver_version", [] {
        int version = 0;
        driver().check(driver().version(&version), "cuDriverGetVersion");
        return version;
    });
    module.def("device_attribute", [](int which, int ordinal) {
        Device device;
        int value = 0;
        driver().check(driver().device_get(&device, ordinal), "cuDeviceGet");
        driver().check(driver().device_attribute(&value, which, device), "cuDeviceGetAttribute");
        return value;
    }, py::arg("which"), py::arg("device"));
    module.def("tensor_map", &tensor_map, py::arg("address"), py::arg("data_type"), py::arg("dims"), py::arg("strides"),
               py::arg("box"), py::arg("swizzle"), py::arg("l2_promotion"));

    py::class_<Nvrtc>(module, "Nvrtc")
        .def(py::init<const std::string&>(), py::arg("path"))
        .def_property_readonly("version", &Nvrtc::version)
        .def("compile", &Nvrtc::compile, py::arg("source"), py::arg("name"), py::arg("options"));

    py::class_<Module>(module, "Module")
        .def(py::init<const py::bytes&, int>(), py::arg("cubin"), py::arg("device"))
        .def("function", &Module::function, py::arg("name"));

    py::class_<Kernel>(module, "Kernel")
        .def_property_readonly("name", &Kernel::name)
        .def_property_readonly("params_bytes", &Kernel::params_bytes)
        .def_property_readonly("registers", [](const Kernel& k) { return k.read_attribute(FUNCTION_REGISTERS); })
        .def_property_readonly("local_bytes", [](const Kernel& k) { return k.read_attribute(FUNCTION_LOCAL_BYTES); })
        .def_property_readonly("shared_bytes", [](const Kernel& k) { return k.read_attribute(FUNCTION_SHARED_BYTES); })
        .def_property_readonly("max_threads", [](const Kernel& k) { return k.read_attribute(FUNCTION_MAX_THREADS); })
        .def("blocks_per_sm", &Kernel::blocks_per_sm, py::arg("threads"), py::arg("shared_bytes"))
        .def("launch", &Kernel::launch, py::arg("grid"), py::arg("block"), py::arg("shared_bytes"), py::arg("stream"),
             py::arg("params"), py::arg("pdl"), py::arg("cluster"));
}
