#include "kernels.h"

#if defined(TOKENPATH_AMX)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace tokenpath {

#if defined(TOKENPATH_AMX)
// The processor has tiles of 8-bit integers, and Linux lets this process use them: each process asks
// once, because tiles make what is saved of a thread larger by 8 KiB.
static bool may_use_amx() {
    constexpr long REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;
    constexpr unsigned TILE = 1u << 24, INT8 = 1u << 25;
    unsigned a = 0, b = 0, c = 0, d = 0;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & TILE) == 0 || (d & INT8) == 0) return false;
    return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
}
#endif

std::vector<const Kernels*> usable_kernels() {
    std::vector<const Kernels*> found;
#if defined(TOKENPATH_X86)
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    const bool avx512 =
        avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bf16");
#if defined(TOKENPATH_AMX)
    static const bool amx = may_use_amx();
    if (avx512 && amx) found.push_back(&amx_kernels);
#endif
    if (avx512) found.push_back(&avx512_kernels);
    if (avx2) found.push_back(&avx2_kernels);
#endif
    found.push_back(&portable_kernels);
    return found;
}

}  // namespace tokenpath
