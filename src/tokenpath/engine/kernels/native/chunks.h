// Passes over logits for the sampler: a vocabulary is cut into chunks of 128, and each chunk gives
// its largest logit, or the sum of its weights. What follows looks into a few chunks only.
#pragma once

#include <limits>

#include "layout.h"
#include "vec.h"

namespace tokenpath::ISA {

// The largest logit of each of `count` chunks; NaN if there is one in the chunk.
inline void chunk_maxima(const float* logits, size_t count, float* maxima) {
    for (size_t chunk = 0; chunk < count; chunk++, logits += CHUNK) {
        F32 most = splat(-std::numeric_limits<float>::infinity());
        I32 nan{};
        for (int i = 0; i < CHUNK; i += LANES) {
            const F32 x = load<F32>(logits + i);
            nan |= x != x;
            most = vmax(x, most);
        }
        const float found = max(most);
        maxima[chunk] = sum(nan) == 0 ? found : std::numeric_limits<float>::quiet_NaN();
    }
}

// The sum of exp((x - best) / temperature) over each of `count` chunks; no x is above `best`.
inline void chunk_sums(const float* logits, size_t count, float best, float temperature, float* sums) {
    for (size_t chunk = 0; chunk < count; chunk++, logits += CHUNK) {
        F32 total{};
        for (int i = 0; i < CHUNK; i += LANES)
            total += vexp((load<F32>(logits + i) - splat(best)) / splat(temperature));
        sums[chunk] = sum(total);
    }
}

}  // namespace tokenpath::ISA
