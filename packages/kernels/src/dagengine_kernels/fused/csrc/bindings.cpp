// The module `dagengine_kernels._native`: one submodule for each part that this build has.
#include <pybind11/pybind11.h>

namespace py = pybind11;

void bind_planner(py::module_& module);
#ifdef DAGENGINE_HAS_CPU
void bind_cpu(py::module_& module);
void bind_linear(py::module_& module);
void bind_append(py::module_& module);
#endif
#ifdef DAGENGINE_HAS_CUDA
void bind_cuda(py::module_& module);
#endif

PYBIND11_MODULE(_native, module) {
    auto planner = module.def_submodule("planner");
    bind_planner(planner);
#ifdef DAGENGINE_HAS_CPU
    auto cpu = module.def_submodule("cpu");
    bind_cpu(cpu);
    auto linear = module.def_submodule("linear");
    bind_linear(linear);
    auto append = module.def_submodule("append");
    bind_append(append);
#endif
#ifdef DAGENGINE_HAS_CUDA
    auto cuda = module.def_submodule("cuda");
    bind_cuda(cuda);
#endif
}
