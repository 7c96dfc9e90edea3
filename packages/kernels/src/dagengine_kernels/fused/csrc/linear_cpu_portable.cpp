// The product in whatever vectors every machine of the architecture has.
#define DAGENGINE_WIDTH 4
#define DAGENGINE_STRIP 1
#include "linear_cpu_kernel.h"

namespace dagengine::cpu {
const LinearIsa* linear_portable() {
    static const LinearIsa isa{"portable", prepare, panels};
    return &isa;
}
}  // namespace dagengine::cpu
