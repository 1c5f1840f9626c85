#include "kernels.h"

namespace tokenpath {

std::vector<const Kernels*> usable_kernels() {
    std::vector<const Kernels*> found;
#if defined(TOKENPATH_X86)
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    if (avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bf16"))
        found.push_back(&avx512_kernels);
    if (avx2) found.push_back(&avx2_kernels);
#endif
    found.push_back(&portable_kernels);
    return found;
}

}  // namespace tokenpath
