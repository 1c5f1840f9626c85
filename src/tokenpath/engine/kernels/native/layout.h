// The plain data that the kernels of every instruction set agree on.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tokenpath {

// Raise it whenever pack.cpp or convert.cpp gives other bytes for the same weights than before: what
// was packed by an older version is then packed anew instead of being misread.
constexpr int PACKED_LAYOUT = 2;

constexpr int PANEL = 32;             // output channels that are packed together
constexpr int GROUP = 32;             // int4: places of K that share a scale and a minimum
constexpr int RUN = 128;              // int8: activations of a row that share a scale
constexpr int CHUNK = 128;            // of a vocabulary: logits that the sampler looks at together
constexpr int BLOCK = 8;              // int4: groups whose scales and minima share a unit
constexpr int INT4_HEAD_BYTES = 640;  // of a block: units, scales and minima; see matmul.h
constexpr int INT4_GROUP_BYTES = 512;  // 32 * 32 codes of 4 bits

enum class Activation { silu, gelu_tanh };
enum class Output { store, add, gated };

// A packed matrix; see matmul.h. Every pointer is to memory of the Python side.
struct Weights {
    int bits;             // 8 or 4
    int rows;             // N, output channels; the last panel is filled up with zeros
    int columns;          // K; a multiple of 4 (int8) or 32 (int4)
    size_t panel_bytes;
    const uint8_t* data;
    const float* scale;   // [N in whole panels], int8 only
    const float* bias;    // [N in whole panels], or null
};

// How the rows of a step are cut into the tiles that a product works on: of nearly equal height.
struct Tiling {
    size_t rows;
    size_t most;  // rows of a tile

    size_t count() const { return (rows + most - 1) / most; }
    size_t begin(size_t tile) const { return rows * tile / count(); }
    size_t of(size_t row) const { return ((row + 1) * count() - 1) / rows; }
};

// Activations as a product eats them, tile after tile. A tile of h rows that begins with row r is
//   values       [K / 4][h][4] from values + r * K on; [K / 64][h][64] where a product is computed
//                in matrices (matrix_tiles.h),
//   run_scale, run_shift   [runs][h] from + r * runs on,
//   group_sum    [pairs of groups][h][2] from + r * 2 * (pairs of groups) on:
// what one instruction multiplies lies together, and a tile is a single stream of memory.
//
// For an int8 product every RUN of values has a scale of its own (the last one may be shorter), so
// that an outlier spoils only its neighbours. For int4, whose weights have scales and minima by
// group, a row has one.
struct Quantized {
    Tiling tiling;
    int columns;  // K
    int8_t* values;
    float* factor;         // [rows], of the norm that comes before rounding; 1 without one
    // For int8:
    float* run_scale;
    int32_t* run_shift;    // -128 * the run's sum: what storing weights as w + 128 has added
    // For int4:
    float* scale;          // [rows]
    float* inverse;        // [rows], of the scale
    int16_t* group_sum;    // an odd group has a zero beside it

    size_t runs() const { return size_t(columns + RUN - 1) / RUN; }
    size_t pairs() const { return size_t(columns / GROUP + 1) / 2; }
};

// Rows to be rounded: x, or x / rms(x) * weight.
struct QuantizeArgs {
    const float* x;
    size_t stride;
    const float* weight;  // null: no norm
    float eps;
    bool by_run;  // for an int8 product
    Quantized to;
};
constexpr int QUANTIZE_COLUMNS = 4 * RUN;  // of a tile, that one thread rounds at a time

struct MatmulArgs {
    const Weights* weights;
    Quantized activations;
    float* out;  // [tokens, N], or [tokens, N / 2] when gated
    size_t out_stride;
    Output output;
    Activation activation;
};

}  // namespace tokenpath
