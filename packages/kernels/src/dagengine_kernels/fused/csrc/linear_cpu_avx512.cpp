// The product in AVX-512.
#include "linear_cpu.h"

#ifdef __AVX512F__
#define DAGENGINE_WIDTH 16
#define DAGENGINE_STRIP 8
#include "linear_cpu_kernel.h"

namespace dagengine::cpu {
const LinearIsa* linear_avx512() {
    static const LinearIsa isa{"avx512", prepare, panels};
    return &isa;
}
}  // namespace dagengine::cpu
#else
namespace dagengine::cpu {
const LinearIsa* linear_avx512() { return nullptr; }
}  // namespace dagengine::cpu
#endif
