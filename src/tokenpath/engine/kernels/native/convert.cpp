#include "convert.h"

#include <cmath>
#include <cstring>
#include <limits>

namespace tokenpath {

namespace {

template <class T>
T load(const uint8_t* from) {
    T value;
    std::memcpy(&value, from, sizeof value);
    return value;
}

float half(const uint8_t* from) {
    const uint32_t bits = load<uint16_t>(from);
    const uint32_t sign = (bits & 0x8000) << 16, exponent = bits >> 10 & 31, fraction = bits & 1023;
    if (exponent == 0) {  // zero and subnormals are exact products in float
        const float value = std::ldexp(float(fraction), -24);
        return sign ? -value : value;
    }
    const uint32_t wide = exponent == 31 ? 255 : exponent + 112;
    const uint32_t whole = sign | wide << 23 | fraction << 13;
    float value;
    std::memcpy(&value, &whole, 4);
    return value;
}

// The 6-bit scale and minimum of one of the eight groups of a Q4_K or Q5_K block, from its 12 bytes.
void k_scale(const uint8_t* packed, int group, uint8_t& scale, uint8_t& minimum) {
    if (group < 4) {
        scale = packed[group] & 63;
        minimum = packed[group + 4] & 63;
    } else {
        scale = uint8_t((packed[group + 4] & 15) | (packed[group - 4] >> 6) << 4);
        minimum = uint8_t((packed[group + 4] >> 4) | (packed[group] >> 6) << 4);
    }
}

void q8_0(const uint8_t* from, size_t columns, float* to) {
    for (size_t k = 0; k < columns; k += 32, from += 34) {
        const float d = half(from);
        for (int i = 0; i < 32; i++) to[k + i] = float(int8_t(from[2 + i])) * d;
    }
}

void q4_0(const uint8_t* from, size_t columns, float* to) {
    for (size_t k = 0; k < columns; k += 32, from += 18) {
        const float d = half(from);
        for (int i = 0; i < 16; i++) {
            to[k + i] = d * float(int(from[2 + i] & 15) - 8);
            to[k + 16 + i] = d * float(int(from[2 + i] >> 4) - 8);
        }
    }
}

void q5_0(const uint8_t* from, size_t columns, float* to) {
    for (size_t k = 0; k < columns; k += 32, from += 22) {
        const float d = half(from);
        const uint32_t high = load<uint32_t>(from + 2);
        for (int i = 0; i < 16; i++) {
            const int low = (from[6 + i] & 15) | int(high >> i & 1) << 4;
            const int top = (from[6 + i] >> 4) | int(high >> (16 + i) & 1) << 4;
            to[k + i] = d * float(low - 16);
            to[k + 16 + i] = d * float(top - 16);
        }
    }
}

void q4_k(const uint8_t* from, size_t columns, float* to) {
    for (size_t k = 0; k < columns; k += 256, from += 144, to += 256) {
        const float d = half(from), low = half(from + 2);
        for (int group = 0; group < 8; group++) {
            uint8_t scale, minimum;
            k_scale(from + 4, group, scale, minimum);
            const float step = d * float(scale), floor = low * float(minimum);
            const uint8_t* codes = from + 16 + group / 2 * 32;
            const int shift = group % 2 * 4;
            for (int i = 0; i < 32; i++)
                to[group * 32 + i] = step * float(codes[i] >> shift & 15) - floor;
        }
    }
}

void q5_k(const uint8_t* from, size_t columns, float* to) {
    for (size_t k = 0; k < columns; k += 256, from += 176, to += 256) {
        const float d = half(from), low = half(from + 2);
        const uint8_t* high = from + 16;
        for (int group = 0; group < 8; group++) {
            uint8_t scale, minimum;
            k_scale(from + 4, group, scale, minimum);
            const float step = d * float(scale), floor = low * float(minimum);
            const uint8_t* codes = from + 48 + group / 2 * 32;
            const int shift = group % 2 * 4;
            for (int i = 0; i < 32; i++) {
                const int code = (codes[i] >> shift & 15) | (high[i] >> group & 1) << 4;
                to[group * 32 + i] = step * float(code) - floor;
            }
        }
    }
}

void q6_k(const uint8_t* from, size_t columns, float* to) {
    for (size_t k = 0; k < columns; k += 256, from += 210, to += 256) {
        const float d = half(from + 208);
        for (int part = 0; part < 2; part++) {  // of 128 values
            const uint8_t* low = from + part * 64;
            const uint8_t* high = from + 128 + part * 32;
            for (int quarter = 0; quarter < 4; quarter++) {
                const uint8_t* codes = low + quarter % 2 * 32;
                const int shift = quarter / 2 * 4, high_shift = quarter * 2;
                for (int group = 0; group < 2; group++) {
                    const int at = part * 128 + quarter * 32 + group * 16;
                    const float step = d * float(int8_t(from[192 + at / 16]));
                    for (int i = group * 16; i < group * 16 + 16; i++) {
                        const int code =
                            (codes[i] >> shift & 15) | (high[i] >> high_shift & 3) << 4;
                        to[at + i - group * 16] = step * float(code - 32);
                    }
                }
            }
        }
    }
}

}  // namespace

const GgufType GGUF_TYPES[] = {
    {"Q4_0", 32, 18, q4_0},    {"Q5_0", 32, 22, q5_0},    {"Q8_0", 32, 34, q8_0},
    {"Q4_K", 256, 144, q4_k}, {"Q5_K", 256, 176, q5_k}, {"Q6_K", 256, 210, q6_k},
};
const size_t GGUF_TYPE_COUNT = sizeof GGUF_TYPES / sizeof GGUF_TYPES[0];

float round_int8(const float* row, size_t columns, int8_t* codes) {
    // Magnitudes order as their bits do, and what is not finite is above all that is.
    int32_t largest_bits = 0;
    for (size_t k = 0; k < columns; k++) {
        int32_t bits;
        std::memcpy(&bits, row + k, 4);
        bits &= 0x7fffffff;
        largest_bits = bits > largest_bits ? bits : largest_bits;
    }
    float largest;
    std::memcpy(&largest, &largest_bits, 4);
    const float inverse = 1.0f / largest * 127.0f;  // in two steps, as torch divides a number
    if (!(largest > 0.0f) || !std::isfinite(largest) || !std::isfinite(inverse)) {
        std::memset(codes, 0, columns);
        return std::isfinite(largest) ? largest / 127.0f : std::numeric_limits<float>::quiet_NaN();
    }
    // Adding and taking away 1.5 * 2^23 rounds to the nearest whole number, ties to even.
    const float magic = 12582912.0f;
    for (size_t k = 0; k < columns; k++)
        codes[k] = int8_t(int((row[k] * inverse + magic) - magic));
    return largest / 127.0f;
}

void take_q4_k(const uint8_t* from, size_t columns, uint8_t* codes, uint8_t* scale,
               uint8_t* minimum, uint16_t* unit, uint16_t* low_unit) {
    for (size_t block = 0; block < columns / 256; block++, from += 144, codes += 256) {
        unit[block] = load<uint16_t>(from);
        low_unit[block] = load<uint16_t>(from + 2);
        for (int group = 0; group < 8; group++) {
            k_scale(from + 4, group, scale[block * 8 + group], minimum[block * 8 + group]);
            const uint8_t* packed = from + 16 + group / 2 * 32;
            const int shift = group % 2 * 4;
            for (int i = 0; i < 32; i++) codes[group * 32 + i] = packed[i] >> shift & 15;
        }
    }
}

uint64_t checksum(const uint8_t* bytes, size_t count) {
    // Eight lanes, so that one multiplication need not wait for the last: faster than memory.
    const uint64_t prime = 0x9E3779B97F4A7C15u;
    uint64_t lanes[8], total = count;
    for (int lane = 0; lane < 8; lane++) lanes[lane] = uint64_t(lane + 1) * prime;
    size_t at = 0;
    for (; at + 64 <= count; at += 64)
        for (int lane = 0; lane < 8; lane++)
            lanes[lane] = (lanes[lane] ^ load<uint64_t>(bytes + at + size_t(lane) * 8)) * prime;
    for (; at < count; at++) total = (total ^ bytes[at]) * prime;
    for (int lane = 0; lane < 8; lane++) {
        total = (total ^ lanes[lane]) * prime;
        total ^= total >> 29;
    }
    return total;
}

}  // namespace tokenpath
