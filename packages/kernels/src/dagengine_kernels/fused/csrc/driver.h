// The CUDA driver and NVRTC as Python sees them: `_native.cuda`. Both libraries are opened at run time, so this builds
// and imports without a CUDA toolkit and without a GPU.
#pragma once

#include <pybind11/pybind11.h>

void bind_cuda(pybind11::module_& module);
