// Packing a weight, sharing its panels among threads, and the binding to Python.
#include "linear_cpu.h"
#include "threads.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <atomic>
#include <cstdlib>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <vector>
#ifdef __linux__
#include <sys/mman.h>
#endif

namespace py = pybind11;

namespace dagengine::cpu {
namespace {

// Rows are taken in blocks whose x stays in a core's cache while the panels go by.
constexpr int64_t BLOCK_FLOATS = 192 * 1024;
// Products of a call from which on a second thread pays.
constexpr int64_t WORTH_A_THREAD = 1 << 18;
// Panels that a thread takes at once.
constexpr int TAKE = 4;
constexpr size_t HUGE_PAGE = size_t(1) << 21;

std::vector<const LinearIsa*> linear_isas() {
    std::vector<const LinearIsa*> found;
#if defined(__x86_64__) || defined(__i386__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
        found.push_back(linear_avx512());
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) found.push_back(linear_avx2());
#endif
    found.push_back(linear_portable());
    std::vector<const LinearIsa*> usable;
    for (const LinearIsa* isa : found)
        if (isa) usable.push_back(isa);
    return usable;
}

const LinearIsa* linear_isa_named(const std::string& name) {
    for (const LinearIsa* isa : linear_isas())
        if (name == isa->name) return isa;
    throw py::value_error("this machine cannot run " + name);
}

// Zeroed memory in huge pages where the system grants them: a weight is read from end to end in every step.
class Pages {
public:
    explicit Pages(size_t bytes) {
        size_t whole = (bytes + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE;
        bool huge = bytes >= HUGE_PAGE / 2;
        memory_ = std::aligned_alloc(huge ? HUGE_PAGE : 64, huge ? whole : (bytes + 63) / 64 * 64);
        if (!memory_) throw std::bad_alloc();
#ifdef __linux__
        if (huge) madvise(memory_, whole, MADV_HUGEPAGE);
#endif
        std::memset(memory_, 0, bytes);
    }
    ~Pages() { std::free(memory_); }
    Pages(const Pages&) = delete;
    Pages& operator=(const Pages&) = delete;
    template <class T>
    T* as() const {
        return static_cast<T*>(memory_);
    }

private:
    void* memory_;
};

class PackedLinear {
public:
    // weight [out, in] in bfloat16, contiguous; a gated layer's has the gate's rows, then up's. bias [rows of weight] and
    // norm [in] in float32.
    PackedLinear(uintptr_t weight, int out, int in, bool gated, uintptr_t bias, uintptr_t norm, float eps,
                 const std::string& isa)
        : isa_(linear_isa_named(isa)) {
        if (in < 1 || out < 1 || (gated && out % 2)) throw py::value_error("a weight has outputs and inputs");
        layer_ = {in, gated ? out / 2 : out, gated, nullptr, nullptr, nullptr, eps};
        const int parts = gated ? 2 : 1;
        const int64_t panels = int64_t(layer_.panels()) * parts, size = int64_t(layer_.pairs()) * 2 * PANEL;
        weight_ = std::make_unique<Pages>(size_t(panels * size) * 2);
        if (bias) bias_ = std::make_unique<Pages>(size_t(panels) * PANEL * 4);
        for (int o = 0; o < out; o++) {
            const int part = o / layer_.out, of = o % layer_.out;
            const int64_t panel = int64_t(of / PANEL) * parts + part;
            const uint16_t* from = reinterpret_cast<const uint16_t*>(weight) + int64_t(o) * in;
            uint16_t* to = weight_->as<uint16_t>() + panel * size + of % PANEL * 2;
            for (int k = 0; k < in; k++) to[int64_t(k / 2) * 2 * PANEL + k % 2] = from[k];
            if (bias)
                bias_->as<float>()[panel * PANEL + of % PANEL] = reinterpret_cast<const float*>(bias)[o];
        }
        if (norm) {
            norm_ = std::make_unique<Pages>(size_t(in) * 4);
            std::memcpy(norm_->as<float>(), reinterpret_cast<const void*>(norm), size_t(in) * 4);
        }
        layer_.weight = weight_->as<uint16_t>();
        layer_.bias = bias_ ? bias_->as<float>() : nullptr;
        layer_.norm = norm_ ? norm_->as<float>() : nullptr;
    }

    // x [rows, in] and y [rows, out], rows this many elements apart.
    void run(uintptr_t x, int64_t x_row, int x_dtype, int rows, uintptr_t residual, int64_t residual_row, uintptr_t y,
             int64_t y_row, int y_dtype, int allowed) const {
        py::gil_scoped_release released;
        static thread_local std::vector<float> scratch;
        const int padded = 2 * layer_.pairs();
        if (scratch.size() < size_t(rows) * padded) scratch.resize(size_t(rows) * padded);
        isa_->prepare(layer_, reinterpret_cast<const void*>(x), x_row, Dtype(x_dtype), 0, rows, scratch.data());
        Launch launch{isa_, {&layer_, rows, scratch.data(), reinterpret_cast<const void*>(residual), residual_row,
                             reinterpret_cast<void*>(y), y_row, Dtype(y_dtype)}, 8, 1, {0}};
        const int64_t block = BLOCK_FLOATS / padded / 24 * 24;  // whole strips of every instruction set
        launch.block = block > 24 ? int(block) : 24;
        launch.blocks = (rows + launch.block - 1) / launch.block;
        const int64_t work = int64_t(layer_.out) * layer_.in * (layer_.gated ? 2 : 1) * (rows > 8 ? rows / 8 : 1);
        on_threads(work < WORTH_A_THREAD ? 1 : allowed, share, &launch);
    }

    int in() const { return layer_.in; }
    int out() const { return layer_.out; }

private:
    struct Launch {
        const LinearIsa* isa;
        LinearCall call;
        int block, blocks;
        std::atomic<int> next;
    };

    static void share(void* context) {
        Launch& l = *static_cast<Launch*>(context);
        const int panels = l.call.layer->panels(), takes = (panels + TAKE - 1) / TAKE;
        for (int i; (i = l.next.fetch_add(1)) < takes * l.blocks;) {
            const int first = i % takes * TAKE, begin = i / takes * l.block;
            const int last = first + TAKE < panels ? first + TAKE : panels;
            const int end = begin + l.block < l.call.rows ? begin + l.block : l.call.rows;
            l.isa->panels(l.call, first, last, begin, end);
        }
    }

    const LinearIsa* isa_;
    Linear layer_;
    std::unique_ptr<Pages> weight_, bias_, norm_;
};

}  // namespace
}  // namespace dagengine::cpu

void bind_linear(py::module_& module) {
    using namespace dagengine::cpu;
    module.def("isas", [] {
        std::vector<std::string> names;
        for (const LinearIsa* isa : linear_isas()) names.push_back(isa->name);
        return names;
    });
    py::class_<PackedLinear>(module, "PackedLinear")
        .def(py::init<uintptr_t, int, int, bool, uintptr_t, uintptr_t, float, const std::string&>())
        .def("run", &PackedLinear::run)
        .def_property_readonly("num_inputs", &PackedLinear::in)
        .def_property_readonly("num_outputs", &PackedLinear::out);
}
