// Products of int8 activations with packed int8 or int4 weights.
//
// Weights [N, K] are cut into panels of 32 output channels; a panel is one stream of bytes in the
// order in which it is read. For every 4 places of K it holds 32 * 4 weights, so that one
// instruction multiplies 16 channels' worth by 4 activations. Weights are stored unsigned (the
// instruction wants one factor so): w + 128 in int8, and the bare 4-bit code in int4. What that adds
// to the product is a multiple of the activations' sum, which the quantizer leaves beside them.
//
// int8: y[t, n] = w_scale[n] * sum over runs r of 128 of a_scale[t, r] * (acc[r] - 128 * a_sum[t, r]),
//       added in order of r; acc is exact in int32.
// int4: K falls into groups of 32 with a scale and a minimum, 8-bit integers in units that 8 groups
//       share: a block. y[t, n] = a_scale[t] * sum over blocks of
//       (unit[n] * sum over g of scale[g, n] * acc[g] - low_unit[n] * sum of minimum[g, n] * a_sum[t, g])
//       in a fixed order. A block begins with its head: 32 units and 32 units of the minima (half
//       floats), [8][32] scales, and [4][32][2] minima; the groups' codes follow.
//
// Neither depends on how many rows are computed together, so a request's result does not depend on
// its neighbours.
//
// A product of few rows waits for memory, so a tile asks for what comes next while it computes. The
// first tile of a panel reads ahead in its own; if there are more, each of them asks for a part of
// the next panel instead.
#pragma once

#include "layout.h"
#include "matrix_tiles.h"
#include "vec.h"

namespace tokenpath::ISA {

// What becomes of a finished tile of 2 * 16 channels.
inline F32 activate(Activation kind, F32 x) {
    if (kind == Activation::silu) return x / (splat(1.0f) + vexp(-vmax(x, splat(-80.0f))));
    const F32 inner = splat(0.7978845608f) * (x + splat(0.044715f) * x * x * x);
    return splat(0.5f) * x * (splat(1.0f) + vtanh(inner));
}

inline void put(float* to, F32 value, int count, bool add) {
    if (count >= LANES) {
        store(to, add ? load<F32>(to) + value : value);
        return;
    }
    for (int i = 0; i < count; i++) to[i] = add ? to[i] + value[i] : value[i];
}

inline void finish_tile(const MatmulArgs& args, int panel, size_t row, F32 low, F32 high) {
    const Weights& w = *args.weights;
    const int column = panel * PANEL;
    if (w.bias != nullptr) {
        low += load<F32>(w.bias + column);
        high += load<F32>(w.bias + column + LANES);
    }
    if (args.output == Output::gated) {
        // Channels of gate and up alternate, 16 by 16.
        put(args.out + row * args.out_stride + panel * LANES, activate(args.activation, low) * high,
            w.rows / 2 - panel * LANES, false);
        return;
    }
    const bool add = args.output == Output::add;
    float* to = args.out + row * args.out_stride + column;
    put(to, low, w.rows - column, add);
    if (w.rows - column > LANES) put(to + LANES, high, w.rows - column - LANES, add);
}

// What a tile asks for, while it walks over a panel: bytes from `from` on, `step` a cache line of
// weights read.
struct Ahead {
    const uint8_t* from;
    int parts;  // tiles that share a panel; 0: nothing is asked for
};

constexpr int LINE = 64;
constexpr int AHEAD_BYTES = 9472;
constexpr int MOST_PARTS = 4;

// int4: into the first-level cache what this thread reads next, into the second what it reads after
// this panel. Unpacking leaves little time to wait for the second; int8 does not feel the difference.
inline void ask(const Ahead& ahead, int bytes) {
    if (ahead.parts == 1)
        for (int at = 0; at < bytes; at += LINE) __builtin_prefetch(ahead.from + at, 0, 3);
    else
        for (int at = 0; at < bytes; at += LINE) __builtin_prefetch(ahead.from + at, 0, 2);
}

template <int M>
void tile_int8(const MatmulArgs& args, int panel, size_t tile, Ahead ahead) {
    const Weights& w = *args.weights;
    const size_t row = args.activations.tiling.begin(tile);
    const uint8_t* from = w.data + size_t(panel) * w.panel_bytes;
    const int8_t* a = args.activations.values + row * w.columns;
    const float* scale = args.activations.run_scale + row * args.activations.runs();
    const int32_t* shift = args.activations.run_shift + row * args.activations.runs();
    const int step = ahead.parts == 0 ? 0 : 4 * PANEL / ahead.parts;
    const bool both = ahead.parts == 1;
    F32 total[M][2];  // in memory: the registers are for the sums within a run
    for (int m = 0; m < M; m++) total[m][0] = total[m][1] = F32{};
    for (int k = 0; k < w.columns; k += RUN, scale += M, shift += M) {
        const int quads = (w.columns - k < RUN ? w.columns - k : RUN) / 4;
        I32 acc[M][2];
#pragma GCC unroll 12
        for (int m = 0; m < M; m++) acc[m][0] = acc[m][1] = splat(shift[m]);
        for (int quad = 0; quad < quads; quad++, from += 4 * PANEL, a += 4 * M, ahead.from += step) {
            const U8x64 w0 = load<U8x64>(from), w1 = load<U8x64>(from + 64);
            __builtin_prefetch(ahead.from, 0, 2);
            if (both) __builtin_prefetch(ahead.from + LINE, 0, 2);
#pragma GCC unroll 12
            for (int m = 0; m < M; m++) {
                int32_t four;
                std::memcpy(&four, a + m * 4, 4);
                acc[m][0] = dot_u8s8(acc[m][0], w0, four);
                acc[m][1] = dot_u8s8(acc[m][1], w1, four);
            }
        }
#pragma GCC unroll 12
        for (int m = 0; m < M; m++) {
            const F32 s = splat(scale[m]);
            total[m][0] = fused(s, to_float(acc[m][0]), total[m][0]);
            total[m][1] = fused(s, to_float(acc[m][1]), total[m][1]);
        }
    }
    const F32 s0 = load<F32>(w.scale + panel * PANEL), s1 = load<F32>(w.scale + panel * PANEL + LANES);
#pragma GCC unroll 12
    for (int m = 0; m < M; m++)
        finish_tile(args, panel, row + m, total[m][0] * s0, total[m][1] * s1);
}

// The part of a block that the minima make: total = -low_unit * sum of minimum * a_sum.
template <int M>
inline void take_minima(const uint8_t* head, const int16_t* sums, int pairs, F32 total[M][2]) {
    I32 acc[M][2];
#pragma GCC unroll 12
    for (int m = 0; m < M; m++) acc[m][0] = acc[m][1] = I32{};
    const uint8_t* minima = head + 4 * PANEL + BLOCK * PANEL;
    for (int pair = 0; pair < pairs; pair++, minima += 2 * PANEL, sums += 2 * M) {
#pragma GCC unroll 12
        for (int m = 0; m < M; m++) {
            int32_t both;
            std::memcpy(&both, sums + 2 * m, 4);
            acc[m][0] = dot_u8s16(acc[m][0], minima, both);
            acc[m][1] = dot_u8s16(acc[m][1], minima + PANEL, both);
        }
    }
    const uint16_t* units = reinterpret_cast<const uint16_t*>(head) + PANEL;
    const F32 u0 = load_f16(units), u1 = load_f16(units + LANES);
#pragma GCC unroll 12
    for (int m = 0; m < M; m++) {
        total[m][0] -= u0 * to_float(acc[m][0]);
        total[m][1] -= u1 * to_float(acc[m][1]);
    }
}

template <int M>
void tile_int4(const MatmulArgs& args, int panel, size_t tile, Ahead ahead) {
    const Weights& w = *args.weights;
    const size_t row = args.activations.tiling.begin(tile);
    const int groups = w.columns / GROUP;
    const uint8_t* from = w.data + size_t(panel) * w.panel_bytes;
    const int8_t* a = args.activations.values + row * w.columns;
    const int16_t* sums = args.activations.group_sum + row * args.activations.pairs() * 2;
    const int step = ahead.parts == 0 ? 0 : (INT4_GROUP_BYTES + INT4_HEAD_BYTES / BLOCK) / ahead.parts;
    F32 total[M][2];  // in memory: the registers are for the sums within a group
    for (int m = 0; m < M; m++) total[m][0] = total[m][1] = F32{};
    const U8x64 low_bits = U8x64{} + uint8_t(15);
    for (int first = 0; first < groups; first += BLOCK) {
        const uint8_t* head = from;
        const uint16_t* units = reinterpret_cast<const uint16_t*>(head);
        const F32 u0 = load_f16(units), u1 = load_f16(units + LANES);
        const int count = groups - first < BLOCK ? groups - first : BLOCK;
        take_minima<M>(head, sums + first * M, (count + 1) / 2, total);
        from += INT4_HEAD_BYTES;
        for (int g = 0; g < count; g++, from += INT4_GROUP_BYTES, a += GROUP * M) {
            ask(ahead, step);
            ahead.from += step;
            I32 acc[M][2];
#pragma GCC unroll 12
            for (int m = 0; m < M; m++) acc[m][0] = acc[m][1] = I32{};
#pragma GCC unroll 4
            for (int pair = 0; pair < 4; pair++) {
                const U8x64 c0 = load<U8x64>(from + pair * 128), c1 = load<U8x64>(from + pair * 128 + 64);
                const U8x64 w00 = c0 & low_bits, w10 = c1 & low_bits;
                const U8x64 w01 = (U8x64)((U32)c0 >> 4) & low_bits;
                const U8x64 w11 = (U8x64)((U32)c1 >> 4) & low_bits;
#pragma GCC unroll 12
                for (int m = 0; m < M; m++) {
                    int32_t low, high;
                    std::memcpy(&low, a + (pair * 2 * M + m) * 4, 4);
                    std::memcpy(&high, a + ((pair * 2 + 1) * M + m) * 4, 4);
                    acc[m][0] = dot_u8s8(acc[m][0], w00, low);
                    acc[m][1] = dot_u8s8(acc[m][1], w10, low);
                    acc[m][0] = dot_u8s8(acc[m][0], w01, high);
                    acc[m][1] = dot_u8s8(acc[m][1], w11, high);
                }
            }
            const uint8_t* scales = head + 4 * PANEL + g * PANEL;
            const F32 s0 = u0 * load_u8(scales), s1 = u1 * load_u8(scales + LANES);
#pragma GCC unroll 12
            for (int m = 0; m < M; m++) {
                total[m][0] = fused(s0, to_float(acc[m][0]), total[m][0]);
                total[m][1] = fused(s1, to_float(acc[m][1]), total[m][1]);
            }
        }
    }
#pragma GCC unroll 12
    for (int m = 0; m < M; m++) {
        const F32 scale = splat(args.activations.scale[row + m]);
        finish_tile(args, panel, row + m, total[m][0] * scale, total[m][1] * scale);
    }
}

using TileFunction = void (*)(const MatmulArgs&, int panel, size_t tile, Ahead);

template <int M>
inline TileFunction tile_of(int bits, size_t height) {
    if constexpr (M > 1)
        if (height < M) return tile_of<M - 1>(bits, height);
    return bits == 8 ? tile_int8<M> : tile_int4<M>;
}

#if defined(__AMX_INT8__)

// Tiles `begin` to `end` of one panel, in matrices.
inline void matrix_panel(const MatmulArgs& args, int panel, size_t begin, size_t end) {
    const Weights& w = *args.weights;
    const Tiling& tiling = args.activations.tiling;
    const size_t runs = args.activations.runs();
    const uint8_t* own = w.data + size_t(panel) * w.panel_bytes;
    const size_t parts = end - begin < MOST_PARTS ? end - begin : MOST_PARTS;
    const F32 s0 = load<F32>(w.scale + panel * PANEL), s1 = load<F32>(w.scale + panel * PANEL + LANES);
    size_t configured = 0;
    for (size_t tile = begin; tile < end; tile++) {
        const size_t row = tiling.begin(tile), height = tiling.begin(tile + 1) - row;
        if (height != configured) configure(configured = height);
        // The first tile of a panel that is alone reads ahead in its own; see above.
        const size_t part = tile - begin;
        const uint8_t* ahead = parts > 1 ? own + w.panel_bytes + w.panel_bytes / parts * part
                                         : own + AHEAD_BYTES;
        const int ask = part < parts ? int(RUN * PANEL / parts) : 0;
        F32 total[MATRIX_ROWS][2];
        for (size_t m = 0; m < height; m++) total[m][0] = total[m][1] = F32{};
        const auto multiply = height > 16 ? multiply_matrix<true> : multiply_matrix<false>;
        multiply(w, own, args.activations.values + row * w.columns,
                 args.activations.run_scale + row * runs, args.activations.run_shift + row * runs,
                 height, ahead, ask, total);
        for (size_t m = 0; m < height; m++)
            finish_tile(args, panel, row + m, total[m][0] * s0, total[m][1] * s1);
    }
    _tile_release();
}

#endif

// Parts into which a product's tiles are cut, each of them done for all panels before the next: so
// many that the activations of a part stay in a cache near the core.
inline size_t matmul_groups(const MatmulArgs& args) {
#if defined(__AMX_INT8__)
    const Weights& w = *args.weights;
    const size_t rows = args.activations.tiling.rows;
    if (in_matrices(w.bits == 8, w.columns, rows))
        return (rows * size_t(w.columns) + GROUP_BYTES - 1) / GROUP_BYTES;
#endif
    return 1;
}

// All rows of a group, for one panel.
inline void matmul_panel(const MatmulArgs& args, int panel, size_t group, size_t groups) {
    const Weights& w = *args.weights;
    const Tiling& tiling = args.activations.tiling;
    const size_t tiles = tiling.count();
#if defined(__AMX_INT8__)
    if (in_matrices(w.bits == 8, w.columns, tiling.rows)) {
        matrix_panel(args, panel, tiles * group / groups, tiles * (group + 1) / groups);
        return;
    }
#endif
    const int parts = int(tiles < MOST_PARTS ? tiles : MOST_PARTS);
    const uint8_t* own = w.data + size_t(panel) * w.panel_bytes;
    for (size_t tile = 0; tile < tiles; tile++) {
        Ahead ahead{own + AHEAD_BYTES, parts};
        if (tile >= MOST_PARTS) ahead.parts = 0;
        if (tiles > 1) ahead.from = own + w.panel_bytes + w.panel_bytes / parts * tile;
        const size_t height = tiling.begin(tile + 1) - tiling.begin(tile);
        tile_of<TILE_ROWS>(w.bits, height)(args, panel, tile, ahead);
    }
}

}  // namespace tokenpath::ISA
