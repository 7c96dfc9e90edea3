// The product in AVX-2.
#include "linear_cpu.h"

#ifdef __AVX2__
#define DAGENGINE_WIDTH 8
#define DAGENGINE_STRIP 3
#include "linear_cpu_kernel.h"

namespace dagengine::cpu {
const LinearIsa* linear_avx2() {
    static const LinearIsa isa{"avx2", prepare, panels};
    return &isa;
}
}  // namespace dagengine::cpu
#else
namespace dagengine::cpu {
const LinearIsa* linear_avx2() { return nullptr; }
}  // namespace dagengine::cpu
#endif
