// Sixteen lanes at a time, on any machine.
//
// GCC's and Clang's vector extensions turn these types into whatever the target has: one AVX-512
// register, two of AVX2, four of NEON. Only the products of 8-bit and bfloat16 values, for which no
// portable spelling exists, are written per instruction set. Every file that includes this one is
// compiled once per instruction set, inside the namespace ISA.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace tokenpath::ISA {

constexpr int LANES = 16;

// Rows that a product computes at once: their sums fill the registers.
#if defined(__AVX512F__)
constexpr int TILE_ROWS = 12;
#else
constexpr int TILE_ROWS = 3;
#endif

typedef float F32 __attribute__((vector_size(64)));
typedef int32_t I32 __attribute__((vector_size(64)));
typedef uint32_t U32 __attribute__((vector_size(64)));
typedef int16_t I16x32 __attribute__((vector_size(64)));
typedef uint8_t U8x64 __attribute__((vector_size(64)));

inline F32 splat(float value) { return F32{} + value; }
inline I32 splat(int32_t value) { return I32{} + value; }

template <class V>
inline V load(const void* from) {
    V value;
    std::memcpy(&value, from, sizeof value);
    return value;
}

template <class V>
inline void store(void* to, V value) {
    std::memcpy(to, &value, sizeof value);
}

inline F32 to_float(I32 x) { return __builtin_convertvector(x, F32); }

// a * b + c, rounded once where the machine can; everywhere the same for every call.
inline F32 fused(F32 a, F32 b, F32 c) {
#if defined(__AVX512F__)
    return (F32)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    __m256 x[2], y[2], z[2];
    std::memcpy(x, &a, 64);
    std::memcpy(y, &b, 64);
    std::memcpy(z, &c, 64);
    for (int i = 0; i < 2; i++) z[i] = _mm256_fmadd_ps(x[i], y[i], z[i]);
    return load<F32>(z);
#else
    return a * b + c;
#endif
}

inline F32 select(I32 mask, F32 yes, F32 no) {
    return (F32)(((I32)yes & mask) | ((I32)no & ~mask));
}
// The second of the two where either is NaN.
inline F32 vmax(F32 a, F32 b) {
#if defined(__AVX512F__)
    return (F32)_mm512_max_ps((__m512)a, (__m512)b);
#else
    return select(a > b, a, b);
#endif
}
inline F32 vabs(F32 x) { return (F32)((I32)x & 0x7fffffff); }

// The order in which lanes are added is fixed, so that sums do not depend on the compiler's mood.
inline float sum(F32 x) {
    float lane[LANES];
    store(lane, x);
    for (int width = LANES / 2; width > 0; width /= 2)
        for (int i = 0; i < width; i++) lane[i] += lane[i + width];
    return lane[0];
}
#if defined(__clang__)
#define TOKENPATH_SHUFFLE(x, ...) __builtin_shufflevector(x, x, __VA_ARGS__)
#else
#define TOKENPATH_SHUFFLE(x, ...) __builtin_shuffle(x, I32{__VA_ARGS__})
#endif
inline int32_t sum(I32 x) {
    x += TOKENPATH_SHUFFLE(x, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
    x += TOKENPATH_SHUFFLE(x, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11);
    x += TOKENPATH_SHUFFLE(x, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13);
    return x[0] + x[1];
}
inline float max(F32 x) {
    x = vmax(x, (F32)TOKENPATH_SHUFFLE((I32)x, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7));
    x = vmax(x, (F32)TOKENPATH_SHUFFLE((I32)x, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11));
    x = vmax(x, (F32)TOKENPATH_SHUFFLE((I32)x, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13));
    return x[0] > x[1] ? x[0] : x[1];
}

// Nearest integer, ties to even: adding and taking away 1.5 * 2^23 leaves no room for a fraction.
inline I32 round_to_int(F32 x) {
#if defined(__AVX512F__)
    return (I32)_mm512_cvtps_epi32((__m512)x);
#else
    const F32 magic = splat(12582912.0f);
    return (I32)(x + magic) - (I32)magic;
#endif
}

// bfloat16, rounded to nearest even; NaN stays NaN.
inline uint16_t to_bf16(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    if ((bits & 0x7fffffff) > 0x7f800000) return uint16_t(bits >> 16 | 0x40);
    return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
inline float from_bf16(uint16_t half) {
    uint32_t bits = uint32_t(half) << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}
// Sixteen of them, in the low halves of the lanes.
inline U32 to_bf16(F32 x) {
    U32 bits = (U32)x;
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

// exp(x) for x <= 88, within 2 ulp: 2^n times a polynomial on [-ln 2 / 2, ln 2 / 2] with Remez
// coefficients. Below -87 the result is 0, exactly, so that what is masked adds nothing.
inline F32 vexp(F32 x) {
    const I32 tiny = x < splat(-87.0f);
    const F32 clamped = select(tiny, splat(-87.0f), x);
    const I32 n = round_to_int(clamped * splat(1.44269504088896341f));
    const F32 whole = to_float(n);
    const F32 r = clamped - whole * splat(0.693359375f) + whole * splat(2.12194440e-4f);
    F32 p = splat(1.9875691500e-4f);
    p = p * r + splat(1.3981999507e-3f);
    p = p * r + splat(8.3334519073e-3f);
    p = p * r + splat(4.1665795894e-2f);
    p = p * r + splat(1.6666665459e-1f);
    p = p * r + splat(5.0000001201e-1f);
    p = p * (r * r) + r + splat(1.0f);
    const F32 result = (F32)((I32)p + (n << 23));
    return select(tiny, F32{}, result);
}

// tanh through exp: exact at the ends, within 1e-6 between.
inline F32 vtanh(F32 x) {
    const F32 magnitude = vabs(x);
    const F32 e = vexp(splat(-2.0f) * magnitude);
    const F32 t = (splat(1.0f) - e) / (splat(1.0f) + e);
    return (F32)(((I32)x & int32_t(0x80000000)) | (I32)t);
}

// acc[lane] += w[4 lane + i] * a[i] for i < 4; w is unsigned, a is signed.
inline I32 dot_u8s8(I32 acc, U8x64 w, int32_t a) {
#if defined(__AVX512VNNI__)
    return (I32)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)w, _mm512_set1_epi32(a));
#elif defined(__AVX2__)
    const __m256i even = _mm256_set1_epi16(0x00ff);
    const __m256i both = _mm256_set1_epi32(a);
    // (a0, a2) and (a1, a3) as 16-bit pairs; the pairs' products fit in 32 bits.
    const __m256i a_even = _mm256_srai_epi16(_mm256_slli_epi16(both, 8), 8);
    const __m256i a_odd = _mm256_srai_epi16(both, 8);
    __m256i half[2], sums[2];
    std::memcpy(half, &w, 64);
    std::memcpy(sums, &acc, 64);
    for (int i = 0; i < 2; i++) {
        const __m256i low = _mm256_madd_epi16(_mm256_and_si256(half[i], even), a_even);
        const __m256i high = _mm256_madd_epi16(_mm256_srli_epi16(half[i], 8), a_odd);
        sums[i] = _mm256_add_epi32(sums[i], _mm256_add_epi32(low, high));
    }
    std::memcpy(&acc, sums, 64);
    return acc;
#else
    int8_t part[4];
    std::memcpy(part, &a, 4);
    const I32 lanes = (I32)w;
    for (int i = 0; i < 4; i++) acc += (lanes >> (8 * i) & 255) * int32_t(part[i]);
    return acc;
#endif
}

// acc[lane] += x[2 lane] * y[0] + x[2 lane + 1] * y[1]; x are 32 unsigned bytes, y is two 16-bit
// integers in 32 bits.
inline I32 dot_u8s16(I32 acc, const uint8_t* x, int32_t y) {
#if defined(__AVX512VNNI__)
    const __m512i wide = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i*)x));
    return (I32)_mm512_dpwssd_epi32((__m512i)acc, wide, _mm512_set1_epi32(y));
#elif defined(__AVX2__)
    __m256i sums[2];
    std::memcpy(sums, &acc, 64);
    for (int i = 0; i < 2; i++) {
        const __m256i wide = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)(x + 16 * i)));
        sums[i] = _mm256_add_epi32(sums[i], _mm256_madd_epi16(wide, _mm256_set1_epi32(y)));
    }
    return load<I32>(sums);
#else
    const int32_t low = int16_t(y & 0xffff), high = y >> 16;
    for (int i = 0; i < LANES; i++) acc[i] += x[2 * i] * low + x[2 * i + 1] * high;
    return acc;
#endif
}

// acc[lane] += x[2 lane] * y[0] + x[2 lane + 1] * y[1]; x are 32 16-bit integers, y is two of them.
inline I32 dot_s16(I32 acc, I16x32 x, int32_t y) {
#if defined(__AVX512VNNI__)
    return (I32)_mm512_dpwssd_epi32((__m512i)acc, (__m512i)x, _mm512_set1_epi32(y));
#elif defined(__AVX2__)
    __m256i sums[2], half[2];
    std::memcpy(sums, &acc, 64);
    std::memcpy(half, &x, 64);
    for (int i = 0; i < 2; i++)
        sums[i] = _mm256_add_epi32(sums[i], _mm256_madd_epi16(half[i], _mm256_set1_epi32(y)));
    return load<I32>(sums);
#else
    const I32 both = (I32)x;
    return acc + (both << 16 >> 16) * int32_t(int16_t(y & 0xffff)) + (both >> 16) * (y >> 16);
#endif
}

// Thirty-two signed bytes.
inline I16x32 load_s8(const int8_t* from) {
#if defined(__AVX512BW__)
    return (I16x32)_mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)from));
#else
    typedef int8_t I8x32 __attribute__((vector_size(32)));
    return __builtin_convertvector(load<I8x32>(from), I16x32);
#endif
}

// Sixteen unsigned bytes.
inline F32 load_u8(const uint8_t* from) {
    typedef uint8_t U8x16 __attribute__((vector_size(16)));
    return __builtin_convertvector(__builtin_convertvector(load<U8x16>(from), I32), F32);
}

// acc[lane] += x[2 lane] * y[0] + x[2 lane + 1] * y[1], all bfloat16; y is two of them in 32 bits.
inline F32 dot_bf16(F32 acc, U32 x, uint32_t y) {
#if defined(__AVX512BF16__)
    return (F32)_mm512_dpbf16_ps((__m512)acc, (__m512bh)x, (__m512bh)_mm512_set1_epi32(int(y)));
#else
    float low, high;
    const uint32_t low_bits = y << 16, high_bits = y & 0xffff0000;
    std::memcpy(&low, &low_bits, 4);
    std::memcpy(&high, &high_bits, 4);
    acc += (F32)(x << 16) * splat(low);
    return acc + (F32)(x & 0xffff0000) * splat(high);
#endif
}

// Sixteen half-precision floats.
inline F32 load_f16(const uint16_t* from) {
#if defined(__AVX512F__)
    return (F32)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from));
#elif defined(__F16C__)
    __m256 half[2] = {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)from)),
                      _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(from + 8)))};
    return load<F32>(half);
#else
    // Shifted into place the exponent's bias is 112 too small, which a factor mends; the format's
    // infinities and NaNs do not occur in scales.
    F32 result{};
    for (int i = 0; i < LANES; i++) {
        const uint32_t bits = uint32_t(from[i] & 0x8000) << 16 | uint32_t(from[i] & 0x7fff) << 13;
        float value;
        std::memcpy(&value, &bits, 4);
        result[i] = value * 0x1p112f;
    }
    return result;
#endif
}

}  // namespace tokenpath::ISA
