// Attention's two products over a span of 64 keys, for bfloat16 and for int8 keys and values.
//
// Both read 32 elements at a time, pairs that one instruction multiplies and adds. Bfloat16 sums in
// float32; int8, against 16-bit queries and weights, exactly in int32, with the scales outside.
#pragma once

#include "kv.h"
#include "vec.h"

namespace tokenpath::ISA {

constexpr int SPAN = 64;
constexpr int UNIT_ROWS = 48;

struct AttendScratch {
    alignas(64) float scores[UNIT_ROWS][SPAN];
    alignas(64) uint32_t weights[UNIT_ROWS][SPAN / 2];  // pairs of bfloat16, or of 16-bit codes
    alignas(64) float out[UNIT_ROWS][MAX_HEAD_DIM];     // of the part at hand
    alignas(64) float total[UNIT_ROWS][LANES];          // lane by lane, added up at the part's end
    float most[UNIT_ROWS];
    float weight_scale[UNIT_ROWS];  // of 16-bit codes
    const uint16_t* query[UNIT_ROWS];
    float query_scale[UNIT_ROWS];
    int64_t limit[UNIT_ROWS];  // the row sees the keys before this one
    int64_t first[UNIT_ROWS];  // and none before this
    alignas(64) float merged[UNIT_ROWS][MAX_HEAD_DIM];  // of the parts before
    float merged_most[UNIT_ROWS];
    float merged_total[UNIT_ROWS];
};

// Where a span's four groups of 16 keys or values lie; blocks may be anywhere in the pool.
template <class E>
struct Span {
    const E* group[4];
    const float* scale[4];  // of int8
};

inline F32 dot(F32 acc, U32 x, uint32_t y) { return dot_bf16(acc, x, y); }
inline I32 dot(I32 acc, I16x32 x, uint32_t y) { return dot_s16(acc, x, int32_t(y)); }
inline U32 load_pairs(const uint16_t* from) { return load<U32>(from); }
inline I16x32 load_pairs(const int8_t* from) { return load_s8(from); }

template <class E>
struct Element;
template <>
struct Element<uint16_t> {
    typedef F32 Sum;
    typedef U32 Pairs;
};
template <>
struct Element<int8_t> {
    typedef I32 Sum;
    typedef I16x32 Pairs;
};
template <class E>
constexpr bool is_int8 = sizeof(E) == 1;

// scores[r][0..64) of R rows from r on. Meanwhile the next span's keys are asked for: their groups
// are too short for the processor to guess them.
template <int R, class E>
inline void score_rows(AttendScratch& s, int r, const Span<E>& keys, const Span<E>& next,
                       int head_dim) {
    typedef typename Element<E>::Sum Sum;
    Sum acc[R][4];
#pragma GCC unroll 6
    for (int m = 0; m < R; m++)
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) acc[m][i] = Sum{};
    for (int pair = 0; pair < head_dim / 2; pair++) {
        typename Element<E>::Pairs k[4];
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) k[i] = load_pairs(keys.group[i] + pair * 2 * LANES);
        if (r == 0)
            for (int i = 0; i < 4; i++) __builtin_prefetch(next.group[i] + pair * 2 * LANES, 0, 2);
#pragma GCC unroll 6
        for (int m = 0; m < R; m++) {
            uint32_t q;
            std::memcpy(&q, s.query[r + m] + pair * 2, 4);
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++) acc[m][i] = dot(acc[m][i], k[i], q);
        }
    }
#pragma GCC unroll 6
    for (int m = 0; m < R; m++)
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            if constexpr (is_int8<E>) {
                const F32 scale = load<F32>(keys.scale[i]) * splat(s.query_scale[r + m]);
                store(&s.scores[r + m][i * LANES], to_float(acc[m][i]) * scale);
            } else {
                store(&s.scores[r + m][i * LANES], acc[m][i]);
            }
        }
}

// out[r][V * 16 dims from dim) += weights[r] x values, for R rows.
template <int R, int V, class E>
inline void weigh_rows(AttendScratch& s, int r, const Span<E>& values, const Span<E>& next,
                       int count, int dim, int head_dim) {
    typedef typename Element<E>::Sum Sum;
    Sum acc[R][V];
#pragma GCC unroll 6
    for (int m = 0; m < R; m++)
#pragma GCC unroll 4
        for (int i = 0; i < V; i++) {
            if constexpr (is_int8<E>)
                acc[m][i] = Sum{};
            else
                acc[m][i] = load<F32>(&s.out[r + m][dim + i * LANES]);
        }
    const int pairs = (count + 1) / 2;
    for (int pair = 0; pair < pairs; pair++) {
        const size_t at = size_t(pair % 8) * head_dim * 2 + dim * 2;
        const E* v = values.group[pair / 8] + at;
        typename Element<E>::Pairs lanes[V];
#pragma GCC unroll 4
        for (int i = 0; i < V; i++) lanes[i] = load_pairs(v + i * 2 * LANES);
        if (r == 0)
            for (int i = 0; i < V; i++)
                __builtin_prefetch(next.group[pair / 8] + at + i * 2 * LANES, 0, 2);
        // The odd token out of the last pair may be another's leftover: it must not even be
        // multiplied by zero, for it may be NaN. (A code cannot be.)
        if constexpr (!is_int8<E>)
            if (count % 2 != 0 && pair == pairs - 1)
#pragma GCC unroll 4
                for (int i = 0; i < V; i++) lanes[i] &= 0xffff;
#pragma GCC unroll 6
        for (int m = 0; m < R; m++)
#pragma GCC unroll 4
            for (int i = 0; i < V; i++) acc[m][i] = dot(acc[m][i], lanes[i], s.weights[r + m][pair]);
    }
#pragma GCC unroll 6
    for (int m = 0; m < R; m++)
#pragma GCC unroll 4
        for (int i = 0; i < V; i++) {
            float* out = &s.out[r + m][dim + i * LANES];
            if constexpr (is_int8<E>)
                store(out, load<F32>(out) + to_float(acc[m][i]) * splat(s.weight_scale[r + m]));
            else
                store(out, acc[m][i]);
        }
}

template <int R, class E>
inline void weigh_all(AttendScratch& s, int r, const Span<E>& values, const Span<E>& next, int count,
                      int head_dim) {
    int dim = 0;
    for (; dim + 4 * LANES <= head_dim; dim += 4 * LANES)
        weigh_rows<R, 4>(s, r, values, next, count, dim, head_dim);
    if (dim < head_dim) weigh_rows<R, 2>(s, r, values, next, count, dim, head_dim);
}

}  // namespace tokenpath::ISA
