// int8 products of many rows on AMX: two-dimensional registers (tiles) of 16 rows by 64 bytes.
//
// One instruction multiplies up to 16 rows of 64 activations with 64 places of K of 16 channels; the
// packed weights have the order that it wants. Up to 32 rows times the 32 channels of a panel are
// computed at once, in four tiles of sums. After each run of activations the sums go to memory, and
// are scaled and added up there while the tiles compute the next run. The sums are exact and what
// follows is done in the same order as for few rows, so the results are those of tile_int8, bit for
// bit.
#pragma once

#include <initializer_list>

#include "layout.h"
#include "vec.h"

namespace tokenpath::ISA {

#if defined(__AMX_INT8__)

constexpr int MATRIX_ROWS = 32;    // rows of a tile of activations, at most
constexpr int MATRIX_COLUMNS = 64;  // of K, that one instruction takes
constexpr size_t GROUP_BYTES = 1 << 20;  // activations that stay in the second-level cache

// What configures the tiles; the processor's own format.
struct alignas(64) TileShapes {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t bytes[16] = {};
    uint8_t rows[16] = {};

    void set(int tile, size_t count) {
        bytes[tile] = 64;
        rows[tile] = uint8_t(count);
    }
};

inline size_t upper_rows(size_t height) { return height > 16 ? (height + 1) / 2 : height; }

// Tiles 0 to 3 are sums, 4 and 5 activations, 6 and 7 weights.
inline void configure(size_t height) {
    TileShapes shapes;
    const size_t upper = upper_rows(height), lower = height - upper;
    for (int tile : {0, 1, 4}) shapes.set(tile, upper);
    if (lower)
        for (int tile : {2, 3, 5}) shapes.set(tile, lower);
    for (int tile : {6, 7}) shapes.set(tile, 16);
    // GCC's intrinsic tells the compiler of the first bytes only.
    asm volatile("" : : "r"(&shapes) : "memory");
    _tile_loadconfig(&shapes);
}

// total += scale * (sums + shift), row by row: the end of a run.
inline void add_run(const int32_t* sums, const float* scale, const int32_t* shift, size_t height,
                    F32 total[][2]) {
    for (size_t m = 0; m < height; m++, sums += PANEL) {
        const F32 s = splat(scale[m]);
        const I32 begin = splat(shift[m]);
        total[m][0] = fused(s, to_float(load<I32>(sums) + begin), total[m][0]);
        total[m][1] = fused(s, to_float(load<I32>(sums + LANES) + begin), total[m][1]);
    }
}

// One panel times a tile of rows, into `total` [height][2]. While it computes, bytes from `ahead` on
// are fetched, `ask` of them in each run.
template <bool BOTH>  // more than 16 rows
void multiply_matrix(const Weights& w, const uint8_t* from, const int8_t* a, const float* scale,
                     const int32_t* shift, size_t height, const uint8_t* ahead, int ask,
                     F32 total[][2]) {
    alignas(64) int32_t sums[2][MATRIX_ROWS * PANEL];
    const size_t upper = upper_rows(height);
    const int runs = (w.columns + RUN - 1) / RUN;
    for (int run = 0; run < runs; run++) {
        const int left = w.columns - run * RUN;
        _tile_zero(0);
        _tile_zero(1);
        if constexpr (BOTH) {
            _tile_zero(2);
            _tile_zero(3);
        }
        for (int k = 0; k < (left < RUN ? left : RUN); k += MATRIX_COLUMNS) {
            _tile_loadd(6, from, 4 * PANEL);
            _tile_loadd(4, a, MATRIX_COLUMNS);
            _tile_dpbsud(0, 4, 6);
            _tile_loadd(7, from + 64, 4 * PANEL);
            _tile_dpbsud(1, 4, 7);
            if constexpr (BOTH) {
                _tile_loadd(5, a + upper * MATRIX_COLUMNS, MATRIX_COLUMNS);
                _tile_dpbsud(2, 5, 6);
                _tile_dpbsud(3, 5, 7);
            }
            from += MATRIX_COLUMNS * PANEL;
            a += height * MATRIX_COLUMNS;
        }
        for (int at = 0; at < ask; at += 64) __builtin_prefetch(ahead + at, 0, 2);
        ahead += ask;
        if (run > 0)
            add_run(sums[(run - 1) % 2], scale + (run - 1) * height, shift + (run - 1) * height, height,
                    total);
        int32_t* to = sums[run % 2];
        _tile_stored(0, to, 4 * PANEL);
        _tile_stored(1, to + LANES, 4 * PANEL);
        if constexpr (BOTH) {
            _tile_stored(2, to + upper * PANEL, 4 * PANEL);
            _tile_stored(3, to + upper * PANEL + LANES, 4 * PANEL);
        }
    }
    const int last = runs - 1;
    add_run(sums[last % 2], scale + last * height, shift + last * height, height, total);
}

// Whether a product is computed in matrices. It depends on the number of rows, but not its result.
inline bool in_matrices(bool int8, int columns, size_t rows) {
    return int8 && columns % MATRIX_COLUMNS == 0 && rows > TILE_ROWS;
}

#else

constexpr int MATRIX_ROWS = TILE_ROWS;
constexpr int MATRIX_COLUMNS = 4;
constexpr bool in_matrices(bool, int, size_t) { return false; }

#endif

// Rows of a tile of activations; both the quantizer and the product go by it.
inline size_t tile_rows(bool int8, int columns, size_t rows) {
    return in_matrices(int8, columns, rows) ? MATRIX_ROWS : TILE_ROWS;
}

}  // namespace tokenpath::ISA
