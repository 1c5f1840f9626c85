// Products of int8 activations with packed int8 or int4 weights.
//
// Weights [N, K] are cut into panels of 32 output channels; a panel is one stream of bytes in the
// order in which it is read. For every 4 places of K it holds 32 * 4 weights, so that one
// instruction multiplies 16 channels' worth by 4 activations. Weights are stored unsigned (the
// instruction wants one factor so): w + 128 in int8, and the bare 4-bit code in int4. What that adds
// to the product is a multiple of the activations' sum, which the quantizer leaves beside them.
//
// int8: y[t, n] = a_scale[t] * w_scale[n] * (acc - 128 * a_sum[t]); acc is exact in int32.
// int4: K falls into groups of 32 with a scale and a minimum of their own (stored as half floats
//       behind the group's codes): y[t, n] = a_scale[t] * sum over groups g of
//       (scale[g, n] * acc[g] - minimum[g, n] * a_sum[t, g]), added in order of g.
//
// Neither depends on how many rows are computed together, so a request's result does not depend on
// its neighbours.
#pragma once

#include "layout.h"
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

constexpr int PREFETCH_BYTES = 2048;

template <int M>
void tile_int8(const MatmulArgs& args, int panel, size_t row) {
    const Weights& w = *args.weights;
    const int quads = w.columns / 4;
    const uint8_t* from = w.data + size_t(panel) * w.panel_bytes;
    const int8_t* a[M];
    for (int m = 0; m < M; m++) a[m] = args.activations + (row + m) * args.activation_stride;
    I32 acc[M][2] = {};
    for (int k = 0; k < quads; k++) {
        const U8x64 w0 = load<U8x64>(from + k * 128);
        const U8x64 w1 = load<U8x64>(from + k * 128 + 64);
        if (M <= 8) {
            __builtin_prefetch(from + k * 128 + PREFETCH_BYTES, 0, 3);
            __builtin_prefetch(from + k * 128 + PREFETCH_BYTES + 64, 0, 3);
        }
#pragma GCC unroll 12
        for (int m = 0; m < M; m++) {
            int32_t quad;
            std::memcpy(&quad, a[m] + k * 4, 4);
            acc[m][0] = dot_u8s8(acc[m][0], w0, quad);
            acc[m][1] = dot_u8s8(acc[m][1], w1, quad);
        }
    }
    const F32 s0 = load<F32>(w.scale + panel * PANEL), s1 = load<F32>(w.scale + panel * PANEL + LANES);
    for (int m = 0; m < M; m++) {
        const I32 shift = splat(128 * args.activation_sum[row + m]);
        const F32 scale = splat(args.activation_scale[row + m]);
        finish_tile(args, panel, row + m, to_float(acc[m][0] - shift) * (scale * s0),
                    to_float(acc[m][1] - shift) * (scale * s1));
    }
}

template <int M>
void tile_int4(const MatmulArgs& args, int panel, size_t row) {
    const Weights& w = *args.weights;
    const int groups = w.columns / GROUP;
    const uint8_t* from = w.data + size_t(panel) * w.panel_bytes;
    const int8_t* a[M];
    const float* sums[M];
    for (int m = 0; m < M; m++) {
        a[m] = args.activations + (row + m) * args.activation_stride;
        sums[m] = args.group_sum + (row + m) * args.group_stride;
    }
    F32 total[M][2] = {};
    const U8x64 low_bits = U8x64{} + uint8_t(15);
    for (int g = 0; g < groups; g++, from += INT4_GROUP_BYTES) {
        I32 acc[M][2] = {};
        for (int line = 0; line < INT4_GROUP_BYTES; line += 64)
            __builtin_prefetch(from + line + PREFETCH_BYTES, 0, 3);
#pragma GCC unroll 4
        for (int pair = 0; pair < 4; pair++) {
            const U8x64 c0 = load<U8x64>(from + pair * 128), c1 = load<U8x64>(from + pair * 128 + 64);
            const U8x64 w00 = c0 & low_bits, w10 = c1 & low_bits;
            const U8x64 w01 = (U8x64)((U32)c0 >> 4) & low_bits, w11 = (U8x64)((U32)c1 >> 4) & low_bits;
#pragma GCC unroll 8
            for (int m = 0; m < M; m++) {
                int32_t quad[2];
                std::memcpy(quad, a[m] + g * GROUP + pair * 8, 8);
                acc[m][0] = dot_u8s8(acc[m][0], w00, quad[0]);
                acc[m][1] = dot_u8s8(acc[m][1], w10, quad[0]);
                acc[m][0] = dot_u8s8(acc[m][0], w01, quad[1]);
                acc[m][1] = dot_u8s8(acc[m][1], w11, quad[1]);
            }
        }
        const uint16_t* halves = reinterpret_cast<const uint16_t*>(from + 512);
        const F32 s0 = load_f16(halves), s1 = load_f16(halves + 16);
        const F32 m0 = load_f16(halves + 32), m1 = load_f16(halves + 48);
#pragma GCC unroll 8
        for (int m = 0; m < M; m++) {
            const F32 sum = splat(sums[m][g]);
            total[m][0] += s0 * to_float(acc[m][0]) - m0 * sum;
            total[m][1] += s1 * to_float(acc[m][1]) - m1 * sum;
        }
    }
    for (int m = 0; m < M; m++) {
        const F32 scale = splat(args.activation_scale[row + m]);
        finish_tile(args, panel, row + m, total[m][0] * scale, total[m][1] * scale);
    }
}

template <int M>
inline void tile(const MatmulArgs& args, int panel, size_t row) {
    if (args.weights->bits == 8)
        tile_int8<M>(args, panel, row);
    else
        tile_int4<M>(args, panel, row);
}

// All rows of one panel.
inline void matmul_panel(const MatmulArgs& args, int panel) {
    const size_t most = args.weights->bits == 8 ? 12 : 6;
    const size_t tiles = (args.tokens + most - 1) / most;
    for (size_t i = 0; i < tiles; i++) {
        // Tiles of nearly equal height.
        const size_t row = args.tokens * i / tiles, rows = args.tokens * (i + 1) / tiles - row;
        switch (rows) {
            case 1: tile<1>(args, panel, row); break;
            case 2: tile<2>(args, panel, row); break;
            case 3: tile<3>(args, panel, row); break;
            case 4: tile<4>(args, panel, row); break;
            case 5: tile<5>(args, panel, row); break;
            case 6: tile<6>(args, panel, row); break;
            case 7: tile_int8<7>(args, panel, row); break;
            case 8: tile_int8<8>(args, panel, row); break;
            case 9: tile_int8<9>(args, panel, row); break;
            case 10: tile_int8<10>(args, panel, row); break;
            case 11: tile_int8<11>(args, panel, row); break;
            default: tile_int8<12>(args, panel, row); break;
        }
    }
}

}  // namespace tokenpath::ISA
