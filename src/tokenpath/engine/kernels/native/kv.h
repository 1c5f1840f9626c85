// Attention's plain data: where keys and values lie, and what a step asks of them.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tokenpath {

constexpr int MAX_HEAD_DIM = 256;

// What one kind of attention layer computes; the fields of Python's AttentionSpec.
struct AttentionShape {
    int heads;
    int kv_heads;
    int head_dim;  // a multiple of 32, at most MAX_HEAD_DIM
    float scale;
    int window;     // 0: none
    float softcap;  // 0: none
};

// One layer's keys and values in blocks of block_tokens (a multiple of 16) tokens: bfloat16, or int8
// codes with a float32 scale for each token and KV head, x = code * scale.
//
// Keys lie as [block][kv head][16 tokens][pair of dimensions][token][2], so that 16 products of one
// query with 16 keys come out of one register without adding across it; values as
// [block][kv head][pair of tokens][dimension][2], for the same reason; scales as
// [block][kv head][token].
struct KvPool {
    void* keys;
    void* values;
    float* key_scales;  // null: bfloat16
    float* value_scales;
    int block_tokens;

    bool int8() const { return key_scales != nullptr; }
    // Of the first token of a block, in tokens: times head_dim it is a place among keys or values.
    size_t base(int64_t block, int kv_head, const AttentionShape& shape) const {
        return (size_t(block) * shape.kv_heads + kv_head) * block_tokens;
    }
};

struct SplitArgs {
    const AttentionShape* shape;
    KvPool pool;
    float* projected;  // [tokens, stride]: q, k and v heads; norms and rotation happen in place
    size_t stride;
    const float* norm;  // [heads + kv_heads, head_dim], or null
    float eps;
    const float* balance;  // [heads + kv_heads, head_dim], factors after the rotation; or null
    const float* cos;  // [tokens, head_dim / 2]
    const float* sin;
    const int64_t* slots;  // [tokens]
    uint16_t* queries;     // [tokens, heads, head_dim], bfloat16; or int16 codes where KV is int8
    float* query_scales;   // [tokens, heads], of the codes
};

// A step's sequences, as batch.py lays them out.
struct Ragged {
    size_t chunks;
    const int64_t* row_starts;      // [chunks + 1]
    const int64_t* context_tokens;  // [chunks]
    const int64_t* block_tables;    // [chunks, table_stride]
    size_t table_stride;
};

struct AttendArgs {
    const AttentionShape* shape;
    KvPool pool;
    Ragged batch;
    const uint16_t* queries;
    const float* query_scales;
    float* out;       // [tokens, heads * head_dim]
    float* partials;  // what units that are cut leave for merge_unit
};

// Keys whose part of the softmax is summed by itself. Parts begin at multiples of it from the
// sequence's start and are merged in their order, whoever computes them.
constexpr int64_t PART = 256;

// A few queries of one chunk and all heads that share a KV head: rows of one small matrix, and the
// parts that they see. Of a unit that is cut along its keys, each piece has a range of the parts.
struct AttendUnit {
    int chunk;
    int kv_head;
    int64_t first_row;  // of the step
    int queries;
    int64_t begin, end;  // parts to compute
    int64_t first, last;  // parts that the whole unit sees, last excluded
    size_t partial;  // of a unit that is cut: its first place among the partials, in (part, row)s

    bool whole() const { return begin == first && end == last; }
};

// Floats of a (part, row) among the partials: its weighted values, its maximum and its sum.
inline size_t partial_floats(int head_dim) { return size_t(head_dim) + 16; }

}  // namespace tokenpath
