// Attention over paged keys and values, for prefill chunks and decodes alike.
//
// A unit is a few consecutive queries of one sequence and the query heads that share one KV head:
// rows of one small matrix. It walks along the keys in spans of 64, whose borders are at multiples
// of 64 from the sequence's beginning, with the usual running maximum and sum of the softmax. A row
// passes the same spans in the same order and rounds in the same way whatever the chunk or the
// unit that it is in: what is hidden from it adds an exact zero. That makes the result independent
// of how the tokens were scheduled.
#pragma once

#include <cmath>
#include <limits>

#include "layout.h"
#include "vec.h"

namespace tokenpath::ISA {

constexpr int SPAN = 64;
constexpr int UNIT_ROWS = 48;
constexpr int MAX_HEAD_DIM = 256;

struct AttendScratch {
    alignas(64) float scores[UNIT_ROWS][SPAN];
    alignas(64) uint32_t weights[UNIT_ROWS][SPAN / 2];  // pairs of bfloat16
    alignas(64) float out[UNIT_ROWS][MAX_HEAD_DIM];
    float most[UNIT_ROWS];
    float total[UNIT_ROWS];
    const uint16_t* query[UNIT_ROWS];
    int64_t limit[UNIT_ROWS];  // the row sees the keys before this one
    int64_t first[UNIT_ROWS];  // and none before this
};

// Where a span's four groups of 16 keys or values lie; blocks may be anywhere in the pool.
struct Span {
    const uint16_t* group[4];
};

// scores[r][0..64) of R rows from r on. Meanwhile the next span's keys are asked for: their groups
// are too short for the processor to guess them.
template <int R>
inline void score_rows(AttendScratch& s, int r, const Span& keys, const Span& next, int head_dim) {
    F32 acc[R][4];
#pragma GCC unroll 6
    for (int m = 0; m < R; m++)
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) acc[m][i] = F32{};
    for (int pair = 0; pair < head_dim / 2; pair++) {
        U32 k[4];
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) k[i] = load<U32>(keys.group[i] + pair * 2 * LANES);
        if (r == 0)
            for (int i = 0; i < 4; i++) __builtin_prefetch(next.group[i] + pair * 2 * LANES, 0, 2);
#pragma GCC unroll 6
        for (int m = 0; m < R; m++) {
            uint32_t q;
            std::memcpy(&q, s.query[r + m] + pair * 2, 4);
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++) acc[m][i] = dot_bf16(acc[m][i], k[i], q);
        }
    }
#pragma GCC unroll 6
    for (int m = 0; m < R; m++)
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) store(&s.scores[r + m][i * LANES], acc[m][i]);
}

// out[r][V * 16 dims from dim) += weights[r] x values, for R rows.
template <int R, int V>
inline void weigh_rows(AttendScratch& s, int r, const Span& values, const Span& next, int count,
                       int dim, int head_dim) {
    F32 acc[R][V];
#pragma GCC unroll 6
    for (int m = 0; m < R; m++)
#pragma GCC unroll 4
        for (int i = 0; i < V; i++) acc[m][i] = load<F32>(&s.out[r + m][dim + i * LANES]);
    const int pairs = (count + 1) / 2;
    for (int pair = 0; pair < pairs; pair++) {
        const size_t at = size_t(pair % 8) * head_dim * 2 + dim * 2;
        const uint16_t* v = values.group[pair / 8] + at;
        U32 lanes[V];
#pragma GCC unroll 4
        for (int i = 0; i < V; i++) lanes[i] = load<U32>(v + i * 2 * LANES);
        if (r == 0)
            for (int i = 0; i < V; i++)
                __builtin_prefetch(next.group[pair / 8] + at + i * 2 * LANES, 0, 2);
        // The odd token out of the last pair may be another's leftover: it must not even be
        // multiplied by zero, for it may be NaN.
        if (count % 2 != 0 && pair == pairs - 1)
#pragma GCC unroll 4
            for (int i = 0; i < V; i++) lanes[i] &= 0xffff;
#pragma GCC unroll 6
        for (int m = 0; m < R; m++)
#pragma GCC unroll 4
            for (int i = 0; i < V; i++) acc[m][i] = dot_bf16(acc[m][i], lanes[i], s.weights[r + m][pair]);
    }
#pragma GCC unroll 6
    for (int m = 0; m < R; m++)
#pragma GCC unroll 4
        for (int i = 0; i < V; i++) store(&s.out[r + m][dim + i * LANES], acc[m][i]);
}

template <int R>
inline void weigh_all(AttendScratch& s, int r, const Span& values, const Span& next, int count,
                      int head_dim) {
    int dim = 0;
    for (; dim + 4 * LANES <= head_dim; dim += 4 * LANES)
        weigh_rows<R, 4>(s, r, values, next, count, dim, head_dim);
    if (dim < head_dim) weigh_rows<R, 2>(s, r, values, next, count, dim, head_dim);
}

// Masks a row's scores, moves its running maximum, and leaves its weights as bfloat16.
inline void soften_row(AttendScratch& s, int r, int64_t span, float softcap, int head_dim) {
    const float none = -std::numeric_limits<float>::infinity();
    const I32 lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const auto clip = [&](int64_t at) {
        const int64_t distance = at - span;
        return int32_t(distance < 0 ? 0 : distance > SPAN ? SPAN : distance);
    };
    const int32_t begin = clip(s.first[r]), end = clip(s.limit[r]);
    F32 x[4], most = splat(none);
    for (int i = 0; i < 4; i++) {
        x[i] = load<F32>(&s.scores[r][i * LANES]);
        if (softcap > 0.0f) x[i] = vtanh(x[i] / splat(softcap)) * splat(softcap);
        const I32 place = lane + i * LANES;
        x[i] = tokenpath::ISA::select((place >= begin) & (place < end), x[i], splat(none));
        most = vmax(x[i], most);
    }
    const float before = s.most[r];
    const float highest = max(most);
    const float now = highest > before ? highest : before;
    if (now == none) {  // nothing seen so far
        std::memset(s.weights[r], 0, sizeof s.weights[r]);
        return;
    }
    if (now != before) {
        const float shrink = before == none ? 0.0f : vexp(splat(before - now))[0];
        s.total[r] *= shrink;
        for (int d = 0; d < head_dim; d += LANES)
            store(&s.out[r][d], load<F32>(&s.out[r][d]) * splat(shrink));
        s.most[r] = now;
    }
    F32 added{};
    typedef uint16_t U16x16 __attribute__((vector_size(32)));
    uint16_t* to = reinterpret_cast<uint16_t*>(s.weights[r]);
    for (int i = 0; i < 4; i++) {
        const F32 hidden = (F32)(x[i] == splat(none));
        const F32 w = (F32)((I32)vexp(x[i] - splat(now)) & ~(I32)hidden);
        added += w;
        store(to + i * LANES, __builtin_convertvector(tokenpath::ISA::to_bf16(w), U16x16));
    }
    s.total[r] += sum(added);
}

inline void attend_unit(const AttendArgs& args, const AttendUnit& unit, AttendScratch& s) {
    const AttentionShape& shape = *args.shape;
    const int d = shape.head_dim, per_kv = shape.heads / shape.kv_heads;
    const int rows = unit.queries * per_kv;
    const int64_t end_row = args.batch.row_starts[unit.chunk + 1];
    const int64_t context = args.batch.context_tokens[unit.chunk];
    const int64_t position = context - (end_row - unit.first_row);  // of the first query
    for (int r = 0; r < rows; r++) {
        const int64_t row = unit.first_row + r / per_kv, at = position + r / per_kv;
        s.query[r] = args.queries + (size_t(row) * shape.heads + unit.kv_head * per_kv + r % per_kv) * d;
        s.limit[r] = at + 1;
        s.first[r] = shape.window > 0 && at + 1 > shape.window ? at + 1 - shape.window : 0;
        s.most[r] = -std::numeric_limits<float>::infinity();
        s.total[r] = 0.0f;
        std::memset(s.out[r], 0, sizeof(float) * d);
    }
    const int64_t* table = args.batch.block_tables + unit.chunk * args.batch.table_stride;
    const int64_t stop = position + unit.queries;
    const auto spans = [&](int64_t span, const uint16_t* pool) {
        Span found;
        for (int i = 0; i < 4; i++) {
            // Past the last key the last group is read again, and hidden.
            int64_t token = span + i * LANES;
            if (token >= stop) token = (stop - 1) / LANES * LANES;
            const int64_t block = table[token / args.pool.block_tokens];
            found.group[i] = pool + args.pool.base(block, unit.kv_head, shape) +
                             size_t(token % args.pool.block_tokens) * d;
        }
        return found;
    };
    const int64_t begin = s.first[0] / SPAN * SPAN;
    Span keys = spans(begin, args.pool.keys), values = spans(begin, args.pool.values);
    for (int64_t span = begin; span < stop; span += SPAN) {
        const Span next_keys = spans(span + SPAN, args.pool.keys);
        const Span next_values = spans(span + SPAN, args.pool.values);
        const int count = int(stop - span < SPAN ? stop - span : SPAN);
        int r = 0;
        for (; r + 6 <= rows; r += 6) score_rows<6>(s, r, keys, next_keys, d);
        for (; r + 2 <= rows; r += 2) score_rows<2>(s, r, keys, next_keys, d);
        for (; r < rows; r++) score_rows<1>(s, r, keys, next_keys, d);
        for (r = 0; r < rows; r++) soften_row(s, r, span, shape.softcap, d);
        r = 0;
        for (; r + 6 <= rows; r += 6) weigh_all<6>(s, r, values, next_values, count, d);
        for (; r + 2 <= rows; r += 2) weigh_all<2>(s, r, values, next_values, count, d);
        for (; r < rows; r++) weigh_all<1>(s, r, values, next_values, count, d);
        keys = next_keys;
        values = next_values;
    }
    for (int r = 0; r < rows; r++) {
        const size_t row = size_t(unit.first_row) + r / per_kv;
        float* out = args.out + (row * shape.heads + unit.kv_head * per_kv + r % per_kv) * d;
        const F32 inverse = splat(1.0f / s.total[r]);
        for (int i = 0; i < d; i += LANES) store(out + i, load<F32>(&s.out[r][i]) * inverse);
    }
}

}  // namespace tokenpath::ISA
