// The table of kernels that one instruction set offers; picked once, when the module is loaded.
#pragma once

#include <string>
#include <vector>

#include "kv.h"
#include "layout.h"

namespace tokenpath {

struct Kernels {
    const char* name;
    size_t (*tile_rows)(bool int8, int columns, size_t rows);
    size_t (*matmul_groups)(const MatmulArgs&);
    void (*matmul_panel)(const MatmulArgs&, int panel, size_t group, size_t groups);
    void (*scale_row)(const QuantizeArgs&, size_t row);
    void (*quantize_tile)(const QuantizeArgs&, size_t tile, int begin);
    void (*norm_row)(const float* x, const float* weight, float eps, int columns, float* to, bool add);
    void (*split_row)(const SplitArgs&, size_t token);
    void (*attend_unit)(const AttendArgs&, const AttendUnit&, void* scratch);
    void (*merge_unit)(const AttendArgs&, const AttendUnit&, void* scratch);
    void (*chunk_maxima)(const float* logits, size_t count, float* maxima);
    void (*chunk_sums)(const float* logits, size_t count, float best, float temperature, float* sums);
    size_t attend_scratch_bytes;
    int attend_unit_rows;
};

extern const Kernels portable_kernels;
#if defined(TOKENPATH_X86)
extern const Kernels avx2_kernels;
extern const Kernels avx512_kernels;
#endif
#if defined(TOKENPATH_AMX)
extern const Kernels amx_kernels;
#endif

// Those that this processor can run, fastest first.
std::vector<const Kernels*> usable_kernels();

}  // namespace tokenpath
