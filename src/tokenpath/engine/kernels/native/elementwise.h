// The steps between products, one row (token) at a time: norms and quantization.
//
// Activations between products are float32. A row's result depends on that row alone.
#pragma once

#include <cmath>

#include "layout.h"
#include "matrix_tiles.h"
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
    // Of codes up to `top`; and what to multiply with to get them.
    float scale(float top = 127.0f) const { return max(most) / top + sum(poison); }
    float inverse(float top = 127.0f) const {
        const float largest = max(most);
        return largest > 0.0f ? top / largest : 0.0f;
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
    const bool matrices = in_matrices(args.by_run, to.columns, to.tiling.rows);
    // Values that lie together, and the way from them to the row's next ones.
    const size_t together = matrices ? MATRIX_COLUMNS : 4, step = together * height;
    for (size_t m = 0; m < height; m++) {
        const float* x = args.x + (first + m) * args.stride;
        const F32 factor = splat(to.factor[first + m]);
        int8_t* values = to.values + first * to.columns + m * together;
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
                int8_t* q = values + size_t(k) / together * step + size_t(k) % together;
                if (matrices)
                    std::memcpy(q, quads, GROUP);
                else
                    for (int i = 0; i < GROUP / 4; i++, q += step) std::memcpy(q, quads + i, 4);
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

}  // namespace tokenpath::ISA
