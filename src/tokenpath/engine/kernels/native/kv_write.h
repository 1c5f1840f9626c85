// From the fused q, k, v projection to attention: norms of the heads, rotation, and how queries, keys
// and values are rounded and laid out.
//
// Where KV is int8, a head's keys or values have one scale; queries then become 16-bit codes, so that
// their products with 8-bit keys are exact in 32 bits (256 * 127 * 32767 < 2^31).
#pragma once

#include "elementwise.h"
#include "kv.h"

namespace tokenpath::ISA {

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

// A head, scaled, as bfloat16.
inline void round_head(const float* x, float scale, int head_dim, uint16_t* to) {
    typedef uint16_t U16x16 __attribute__((vector_size(32)));
    for (int i = 0; i < head_dim; i += LANES) {
        const U32 bits = to_bf16(load<F32>(x + i) * splat(scale));
        store(to + i, __builtin_convertvector(bits, U16x16));
    }
}

// A query's head, scaled, as 16-bit codes; returns their scale.
inline float quantize_query(const float* x, float scale, int head_dim, uint16_t* to) {
    typedef int16_t I16x16 __attribute__((vector_size(32)));
    Largest largest;
    for (int i = 0; i < head_dim; i += LANES) largest.see(load<F32>(x + i) * splat(scale));
    const F32 inverse = splat(largest.inverse(32767.0f));
    for (int i = 0; i < head_dim; i += LANES) {
        const I32 codes = round_to_int(load<F32>(x + i) * splat(scale) * inverse);
        store(to + i, __builtin_convertvector(codes, I16x16));
    }
    return largest.scale(32767.0f);
}

// A key's or value's head as 8-bit codes; returns their scale.
inline float quantize_head(const float* x, int head_dim, int8_t* to) {
    typedef int8_t I8x16 __attribute__((vector_size(16)));
    Largest largest;
    for (int i = 0; i < head_dim; i += LANES) largest.see(load<F32>(x + i));
    const F32 inverse = splat(largest.inverse());
    for (int i = 0; i < head_dim; i += LANES) {
        const I32 codes = round_to_int(load<F32>(x + i) * inverse);
        store(to + i, __builtin_convertvector(codes, I8x16));
    }
    return largest.scale();
}

// One token's key and value of one KV head into their places in the pool; E is the pool's element.
template <class E>
inline void place_head(const E* key, const E* value, const KvPool& pool, size_t base, int offset,
                       int head_dim) {
    E* k = static_cast<E*>(pool.keys) + (base + offset / LANES * LANES) * head_dim + offset % LANES * 2;
    for (int i = 0; i < head_dim; i += 2) {
        k[i * LANES] = key[i];
        k[i * LANES + 1] = key[i + 1];
    }
    E* v = static_cast<E*>(pool.values) + (base + offset / 2 * 2) * head_dim + offset % 2;
    for (int i = 0; i < head_dim; i++) v[2 * i] = value[i];
}

// One row of the projection. head_dim is at most MAX_HEAD_DIM.
inline void split_row(const SplitArgs& args, size_t token) {
    const AttentionShape& shape = *args.shape;
    const KvPool& pool = args.pool;
    const int d = shape.head_dim;
    float* row = args.projected + token * args.stride;
    const float* cos = args.cos + token * (d / 2);
    const float* sin = args.sin + token * (d / 2);
    for (int head = 0; head < shape.heads + shape.kv_heads; head++) {
        float* x = row + head * d;
        if (args.norm != nullptr) norm_row(x, args.norm + head * d, args.eps, d, x, false);
        rotate_head(x, cos, sin, d);
        if (args.balance != nullptr)
            for (int i = 0; i < d; i += LANES)
                store(x + i, load<F32>(x + i) * load<F32>(args.balance + head * d + i));
    }
    for (int head = 0; head < shape.heads; head++) {
        const size_t at = token * shape.heads + head;
        if (pool.int8())
            args.query_scales[at] =
                quantize_query(row + head * d, shape.scale, d, args.queries + at * d);
        else
            round_head(row + head * d, shape.scale, d, args.queries + at * d);
    }
    const int64_t slot = args.slots[token];
    const int64_t block = slot / pool.block_tokens;
    const int offset = int(slot % pool.block_tokens);
    for (int head = 0; head < shape.kv_heads; head++) {
        const float* key = row + (shape.heads + head) * d;
        const float* value = key + shape.kv_heads * d;
        const size_t base = pool.base(block, head, shape);
        if (pool.int8()) {
            int8_t codes[2][MAX_HEAD_DIM];
            pool.key_scales[base + offset] = quantize_head(key, d, codes[0]);
            pool.value_scales[base + offset] = quantize_head(value, d, codes[1]);
            place_head(codes[0], codes[1], pool, base, offset, d);
        } else {
            uint16_t halves[2][MAX_HEAD_DIM];
            round_head(key, 1.0f, d, halves[0]);
            round_head(value, 1.0f, d, halves[1]);
            place_head(halves[0], halves[1], pool, base, offset, d);
        }
    }
}

}  // namespace tokenpath::ISA
