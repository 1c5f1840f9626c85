// The steps between products, one row (token) at a time: norms, quantization, rotary embedding.
//
// Activations between products are float32. A row's result depends on that row alone.
#pragma once

#include <cmath>

#include "layout.h"
#include "vec.h"

namespace tokenpath::ISA {

inline float inverse_rms(const float* x, int columns, float eps) {
    F32 squares{};
    for (int k = 0; k < columns; k += LANES) {
        const F32 v = load<F32>(x + k);
        squares += v * v;
    }
    return 1.0f / std::sqrt(sum(squares) / float(columns) + eps);
}

// x, or x normed; columns from k on.
inline F32 normed(const float* x, const float* weight, F32 factor, int k) {
    const F32 v = load<F32>(x + k);
    return weight == nullptr ? v : v * factor * load<F32>(weight + k);
}

// The largest magnitude among values, with NaN if any of them is NaN or infinite, so that it is
// noticed where tokens are chosen. (A comparison with NaN is false, so a maximum does not show one.)
struct Largest {
    F32 most{}, poison{};

    void see(F32 v) {
        most = vmax(most, vabs(v));
        poison += v * splat(0.0f);
    }
    float scale() const { return max(most) / 127.0f + sum(poison); }
    float inverse() const {
        const float largest = max(most);
        return largest > 0.0f ? 127.0f / largest : 0.0f;
    }
};

// Symmetric int8: x ~ scale * q with |q| <= 127. The first half of rounding: what takes all of a row.
inline void scale_row(const QuantizeArgs& args, size_t row) {
    const Quantized& to = args.to;
    const float* x = args.x + row * args.stride;
    const float factor = args.weight == nullptr ? 1.0f : inverse_rms(x, to.columns, args.eps);
    to.factor[row] = factor;
    if (args.by_run) return;
    Largest largest;
    for (int k = 0; k < to.columns; k += LANES) largest.see(normed(x, args.weight, splat(factor), k));
    to.scale[row] = largest.scale();
    to.inverse[row] = largest.inverse();
}

// The second half: some columns of all rows of a tile, whose values lie next to each other. (Were
// rows shared out among threads instead, they would write to the same cache lines.)
inline void quantize_tile(const QuantizeArgs& args, size_t tile, int begin) {
    const Quantized& to = args.to;
    const size_t first = to.tiling.begin(tile), height = to.tiling.begin(tile + 1) - first;
    const int end = begin + QUANTIZE_COLUMNS < to.columns ? begin + QUANTIZE_COLUMNS : to.columns;
    for (size_t m = 0; m < height; m++) {
        const float* x = args.x + (first + m) * args.stride;
        const F32 factor = splat(to.factor[first + m]);
        int8_t* q = to.values + first * to.columns + (begin / 4 * height + m) * 4;
        for (int run = begin; run < end; run += RUN) {
            const int stop = run + RUN < end ? run + RUN : end;
            const size_t place = first * to.runs() + size_t(run / RUN) * height + m;
            F32 inverse;
            if (args.by_run) {
                Largest largest;
                for (int k = run; k < stop; k += LANES) largest.see(normed(x, args.weight, factor, k));
                to.run_scale[place] = largest.scale();
                inverse = splat(largest.inverse());
            } else {
                inverse = splat(to.inverse[first + m]);
            }
            int32_t total = 0;
            for (int k = run; k < stop; k += GROUP) {
                const I32 a = round_to_int(normed(x, args.weight, factor, k) * inverse);
                const I32 b = round_to_int(normed(x, args.weight, factor, k + LANES) * inverse);
                typedef int8_t I8x16 __attribute__((vector_size(16)));
                int32_t quads[GROUP / 4];
                store(quads, __builtin_convertvector(a, I8x16));
                store(quads + LANES / 4, __builtin_convertvector(b, I8x16));
                for (int i = 0; i < GROUP / 4; i++, q += height * 4) std::memcpy(q, quads + i, 4);
                const int32_t group = sum(a + b);
                const size_t g = size_t(k / GROUP);
                int16_t* sums = to.group_sum + (first * to.pairs() + g / 2 * height + m) * 2;
                sums[g % 2] = int16_t(group);
                if (g % 2 == 0 && k + GROUP == to.columns) sums[1] = 0;
                total += group;
            }
            if (args.by_run) to.run_shift[place] = -128 * total;
        }
    }
}

// to = x / rms(x) * weight, or to += that; they may be the same row.
inline void norm_row(const float* x, const float* weight, float eps, int columns, float* to,
                     bool add) {
    const F32 factor = splat(inverse_rms(x, columns, eps));
    for (int k = 0; k < columns; k += LANES) {
        const F32 y = load<F32>(x + k) * factor * load<F32>(weight + k);
        store(to + k, add ? load<F32>(to + k) + y : y);
    }
}

// Rotates one head in place. cos and sin have one value per plane; the planes are the pairs
// (i, i + head_dim / 2). head_dim is a multiple of 32.
inline void rotate_head(float* x, const float* cos, const float* sin, int head_dim) {
    const int half = head_dim / 2;
    for (int i = 0; i < half; i += LANES) {
        const F32 a = load<F32>(x + i), b = load<F32>(x + half + i);
        const F32 c = load<F32>(cos + i), s = load<F32>(sin + i);
        store(x + i, a * c - b * s);
        store(x + half + i, b * c + a * s);
    }
}

// One row of the fused q, k, v projection: norms of the heads, rotation, queries scaled and rounded
// to bfloat16 for the attention, keys and values written into the pool.
inline void split_row(const SplitArgs& args, size_t token) {
    const AttentionShape& shape = *args.shape;
    const int d = shape.head_dim;
    float* row = args.projected + token * args.stride;
    const float* cos = args.cos + token * (d / 2);
    const float* sin = args.sin + token * (d / 2);
    for (int head = 0; head < shape.heads + shape.kv_heads; head++) {
        float* x = row + head * d;
        if (args.norm != nullptr) norm_row(x, args.norm + head * d, args.eps, d, x, false);
        rotate_head(x, cos, sin, d);
    }
    uint16_t* q = args.queries + token * size_t(shape.heads * d);
    for (int i = 0; i < shape.heads * d; i += LANES) {
        typedef uint16_t U16x16 __attribute__((vector_size(32)));
        const U32 bits = to_bf16(load<F32>(row + i) * splat(shape.scale));
        store(q + i, __builtin_convertvector(bits, U16x16));
    }
    const int64_t slot = args.slots[token];
    const int64_t block = slot / args.pool.block_tokens;
    const int offset = int(slot % args.pool.block_tokens);
    for (int head = 0; head < shape.kv_heads; head++) {
        const float* key = row + (shape.heads + head) * d;
        const float* value = key + shape.kv_heads * d;
        const size_t base = args.pool.base(block, head, shape);
        uint16_t* k = args.pool.keys + base + size_t(offset / LANES) * d * LANES + offset % LANES * 2;
        for (int i = 0; i < d; i += 2) {
            k[i * LANES] = to_bf16(key[i]);
            k[i * LANES + 1] = to_bf16(key[i + 1]);
        }
        uint16_t* v = args.pool.values + base + size_t(offset / 2) * d * 2 + offset % 2;
        for (int i = 0; i < d; i++) v[2 * i] = to_bf16(value[i]);
    }
}

}  // namespace tokenpath::ISA
