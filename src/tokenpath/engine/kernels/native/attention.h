// Attention over paged keys and values, for prefill chunks and decodes alike.
//
// A unit is a few consecutive queries of one sequence and the query heads that share one KV head:
// rows of one small matrix. It walks along the keys in spans of 64, whose borders are at multiples
// of 64 from the sequence's beginning, with the usual running maximum and sum of the softmax. At
// every multiple of PART the sums begin anew, and what the parts gave is merged in their order, so
// that the parts of one long sequence can be shared among threads. A row passes the same spans and
// parts in the same order and rounds in the same way whatever the chunk or the unit that it is in:
// what is hidden from it adds an exact zero. That makes the result independent of how the tokens
// were scheduled, and of the number of threads.
#pragma once

#include <cmath>
#include <limits>

#include "attention_products.h"

namespace tokenpath::ISA {

constexpr float NONE = -std::numeric_limits<float>::infinity();

// A row's weights of a span from its exponentials, as the second product takes them.
inline void round_weights(AttendScratch& s, int r, const F32* w, F32&, const Span<uint16_t>&, I32,
                          I32) {
    typedef uint16_t U16x16 __attribute__((vector_size(32)));
    uint16_t* to = reinterpret_cast<uint16_t*>(s.weights[r]);
    for (int i = 0; i < 4; i++)
        store(to + i * LANES, __builtin_convertvector(tokenpath::ISA::to_bf16(w[i]), U16x16));
}

// With the values' scales in them. A hidden token's scale may be another's leftover, even NaN; a NaN
// among those seen gets into the row's sum.
inline void round_weights(AttendScratch& s, int r, const F32* w, F32& added,
                          const Span<int8_t>& values, I32 begin, I32 end) {
    typedef int16_t I16x16 __attribute__((vector_size(32)));
    const I32 lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    F32 scaled[4], most{};
    for (int i = 0; i < 4; i++) {
        const I32 place = lane + i * LANES;
        const F32 scale = (F32)(load<I32>(values.scale[i]) & (place >= begin) & (place < end));
        scaled[i] = w[i] * scale;
        most = vmax(scaled[i], most);
        added += scaled[i] * splat(0.0f);
    }
    // Below this the inverse would overflow, and nothing is lost.
    const float largest = max(most) > 1e-30f ? max(most) : 0.0f;
    const F32 inverse = splat(largest > 0.0f ? 32767.0f / largest : 0.0f);
    s.weight_scale[r] = largest / 32767.0f;
    uint16_t* to = reinterpret_cast<uint16_t*>(s.weights[r]);
    for (int i = 0; i < 4; i++)
        store(to + i * LANES, __builtin_convertvector(round_to_int(scaled[i] * inverse), I16x16));
}

// Masks a row's scores, moves its running maximum, and leaves its weights.
template <class E>
inline void soften_row(AttendScratch& s, int r, int64_t span, const Span<E>& values, float softcap,
                       int head_dim) {
    const I32 lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const auto clip = [&](int64_t at) {
        const int64_t distance = at - span;
        return int32_t(distance < 0 ? 0 : distance > SPAN ? SPAN : distance);
    };
    const I32 begin = splat(clip(s.first[r])), end = splat(clip(s.limit[r]));
    F32 x[4], highest = splat(NONE);
    for (int i = 0; i < 4; i++) {
        x[i] = load<F32>(&s.scores[r][i * LANES]);
        if (softcap > 0.0f) x[i] = vtanh(x[i] / splat(softcap)) * splat(softcap);
        const I32 place = lane + i * LANES;
        x[i] = tokenpath::ISA::select((place >= begin) & (place < end), x[i], splat(NONE));
        highest = vmax(x[i], highest);
    }
    const float before = s.most[r], here = max(highest);
    const float now = here > before ? here : before;
    if (now == NONE) {  // nothing seen so far
        std::memset(s.weights[r], 0, sizeof s.weights[r]);
        s.weight_scale[r] = 0.0f;
        return;
    }
    F32 total = load<F32>(s.total[r]);
    if (now != before) {
        const F32 shrink = before == NONE ? F32{} : splat(vexp(splat(before - now))[0]);
        total *= shrink;
        for (int d = 0; d < head_dim; d += LANES)
            store(&s.out[r][d], load<F32>(&s.out[r][d]) * shrink);
        s.most[r] = now;
    }
    F32 added{};
    for (int i = 0; i < 4; i++) {
        x[i] = vexp(x[i] - splat(now));  // an exact 0 of what is hidden
        added += x[i];
    }
    round_weights(s, r, x, added, values, begin, end);
    store(s.total[r], total + added);
}

inline void begin_part(AttendScratch& s, int rows, int head_dim) {
    for (int r = 0; r < rows; r++) {
        s.most[r] = NONE;
        store(s.total[r], F32{});
        std::memset(s.out[r], 0, sizeof(float) * head_dim);
    }
}

// Adds a part of row r to those before it. Of the first one that has anything to add the sums are
// taken as they are.
inline void merge_part(AttendScratch& s, int r, float most, float total, const float* out,
                       int head_dim) {
    if (most == NONE) return;
    const float before = s.merged_most[r], now = most > before ? most : before;
    const float keep = before == NONE ? 0.0f : vexp(splat(before - now))[0];
    const float add = vexp(splat(most - now))[0];
    for (int d = 0; d < head_dim; d += LANES) {
        const F32 kept = load<F32>(&s.merged[r][d]) * splat(keep);
        store(&s.merged[r][d], kept + load<F32>(out + d) * splat(add));
    }
    s.merged_total[r] = s.merged_total[r] * keep + total * add;
    s.merged_most[r] = now;
}

inline void begin_merge(AttendScratch& s, int rows, int head_dim) {
    for (int r = 0; r < rows; r++) {
        s.merged_most[r] = NONE;
        s.merged_total[r] = 0.0f;
        std::memset(s.merged[r], 0, sizeof(float) * head_dim);
    }
}

inline void write_rows(const AttendArgs& args, const AttendUnit& unit, const AttendScratch& s) {
    const AttentionShape& shape = *args.shape;
    const int d = shape.head_dim, per_kv = shape.heads / shape.kv_heads;
    for (int r = 0; r < unit.queries * per_kv; r++) {
        const size_t row = size_t(unit.first_row) + r / per_kv;
        float* out = args.out + (row * shape.heads + unit.kv_head * per_kv + r % per_kv) * d;
        const F32 inverse = splat(1.0f / s.merged_total[r]);
        for (int i = 0; i < d; i += LANES) store(out + i, load<F32>(&s.merged[r][i]) * inverse);
    }
}

template <class E>
inline void attend_unit(const AttendArgs& args, const AttendUnit& unit, AttendScratch& s) {
    const AttentionShape& shape = *args.shape;
    const int d = shape.head_dim, per_kv = shape.heads / shape.kv_heads;
    const int rows = unit.queries * per_kv;
    const int64_t end_row = args.batch.row_starts[unit.chunk + 1];
    const int64_t context = args.batch.context_tokens[unit.chunk];
    const int64_t position = context - (end_row - unit.first_row);  // of the first query
    for (int r = 0; r < rows; r++) {
        const int64_t row = unit.first_row + r / per_kv, at = position + r / per_kv;
        const size_t head = size_t(row) * shape.heads + unit.kv_head * per_kv + r % per_kv;
        s.query[r] = args.queries + head * d;
        if (is_int8<E>) s.query_scale[r] = args.query_scales[head];
        s.limit[r] = at + 1;
        s.first[r] = shape.window > 0 && at + 1 > shape.window ? at + 1 - shape.window : 0;
    }
    const int64_t* table = args.batch.block_tables + unit.chunk * args.batch.table_stride;
    const int64_t stop = position + unit.queries;
    const auto spans = [&](int64_t span, const void* pool, const float* scales) {
        Span<E> found;
        for (int i = 0; i < 4; i++) {
            // Past the last key the last group is read again, and hidden.
            int64_t token = span + i * LANES;
            if (token >= stop) token = (stop - 1) / LANES * LANES;
            const int64_t block = table[token / args.pool.block_tokens];
            const size_t at = args.pool.base(block, unit.kv_head, shape) +
                              size_t(token % args.pool.block_tokens);
            found.group[i] = static_cast<const E*>(pool) + at * d;
            found.scale[i] = scales + at;
        }
        return found;
    };
    const auto keys_at = [&](int64_t at) { return spans(at, args.pool.keys, args.pool.key_scales); };
    const auto values_at = [&](int64_t at) {
        return spans(at, args.pool.values, args.pool.value_scales);
    };
    begin_merge(s, rows, d);
    const int64_t begin = s.first[0] / SPAN * SPAN;
    int64_t span = begin > unit.begin * PART ? begin : unit.begin * PART;
    Span<E> keys = keys_at(span), values = values_at(span);
    for (int64_t part = unit.begin; part < unit.end; part++) {
        begin_part(s, rows, d);
        const int64_t part_stop = stop < (part + 1) * PART ? stop : (part + 1) * PART;
        for (; span < part_stop; span += SPAN) {
            const Span<E> next_keys = keys_at(span + SPAN), next_values = values_at(span + SPAN);
            const int count = int(stop - span < SPAN ? stop - span : SPAN);
            int r = 0;
            for (; r + 6 <= rows; r += 6) score_rows<6>(s, r, keys, next_keys, d);
            for (; r + 2 <= rows; r += 2) score_rows<2>(s, r, keys, next_keys, d);
            for (; r < rows; r++) score_rows<1>(s, r, keys, next_keys, d);
            for (r = 0; r < rows; r++) soften_row(s, r, span, values, shape.softcap, d);
            r = 0;
            for (; r + 6 <= rows; r += 6) weigh_all<6>(s, r, values, next_values, count, d);
            for (; r + 2 <= rows; r += 2) weigh_all<2>(s, r, values, next_values, count, d);
            for (; r < rows; r++) weigh_all<1>(s, r, values, next_values, count, d);
            keys = next_keys;
            values = next_values;
        }
        for (int r = 0; r < rows; r++) {
            const float total = sum(load<F32>(s.total[r]));
            if (unit.whole()) {
                merge_part(s, r, s.most[r], total, s.out[r], d);
                continue;
            }
            const size_t place = unit.partial + size_t(part - unit.first) * rows + r;
            float* to = args.partials + place * partial_floats(d);
            std::memcpy(to, s.out[r], sizeof(float) * d);
            to[d] = s.most[r];
            to[d + 1] = total;
        }
    }
    if (unit.whole()) write_rows(args, unit, s);
}

// Attends for a unit, or for a piece of one.
inline void attend_unit(const AttendArgs& args, const AttendUnit& unit, AttendScratch& s) {
    if (args.pool.int8())
        attend_unit<int8_t>(args, unit, s);
    else
        attend_unit<uint16_t>(args, unit, s);
}

// Puts together what the pieces of a unit have left.
inline void merge_unit(const AttendArgs& args, const AttendUnit& unit, AttendScratch& s) {
    const int d = args.shape->head_dim;
    const int rows = unit.queries * (args.shape->heads / args.shape->kv_heads);
    begin_merge(s, rows, d);
    const float* from = args.partials + unit.partial * partial_floats(d);
    for (int64_t part = unit.first; part < unit.last; part++)
        for (int r = 0; r < rows; r++, from += partial_floats(d))
            merge_part(s, r, from[d], from[d + 1], from, d);
    write_rows(args, unit, s);
}

}  // namespace tokenpath::ISA
