// Vectors of as many floats as a register holds, and the few functions on them that the kernels share. Every multiply-add
// is spelled out. What is wider than a register GCC keeps in memory, at a tenth of the speed.

#pragma once

#include <cstdint>
#include <cstring>
#if defined __AVX2__ || defined __FMA__
#include <immintrin.h>
#endif

namespace {

#ifdef __AVX512F__
constexpr int LANES = 16;
#else
constexpr int LANES = 8;
#endif

typedef float Vec __attribute__((vector_size(4 * LANES)));
typedef int32_t IVec __attribute__((vector_size(4 * LANES)));
typedef uint32_t UVec __attribute__((vector_size(4 * LANES)));

inline Vec splat(float x) { return x - Vec{}; }  // to add 0 would take an instruction, for it makes 0 of -0

inline Vec load(const float* p) {
    Vec v;
    std::memcpy(&v, p, sizeof v);
    return v;
}

inline void store(float* p, Vec v) { std::memcpy(p, &v, sizeof v); }

inline Vec fma(Vec a, Vec b, Vec c) {
#ifdef __AVX512F__
    return (Vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined __FMA__
    return (Vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    Vec r;
    for (int i = 0; i < LANES; i++) r[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return r;
#endif
}

inline Vec larger(Vec a, Vec b) { return a > b ? a : b; }

inline IVec numbered() {  // 0, 1, 2 ...
    IVec v;
    for (int i = 0; i < LANES; i++) v[i] = i;
    return v;
}

inline float widen(uint16_t x) {
    uint32_t bits = uint32_t(x) << 16;
    float f;
    std::memcpy(&f, &bits, sizeof f);
    return f;
}

// Bits whose upper halves are v in bfloat16, rounded to nearest, ties to even; NaN stays NaN
inline UVec narrowed(Vec v) {
    const UVec bits = (UVec)v;
    return v == v ? bits + 0x7fffu + (bits >> 16 & 1u) : bits | 0x400000u;
}

// e^x to about 1 ulp for x <= 0 (Cephes' expf: range reduction by ln 2 in two parts, degree 5); 0 below -87.
inline Vec exp_nonpositive(Vec x) {
    const Vec magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to a whole number
    const auto tiny = x < splat(-87.0f);
    x = tiny ? splat(-87.0f) : x;  // NaN stays NaN
    const Vec n = fma(x, splat(1.44269504088896341f), magic) - magic;
    Vec r = fma(n, splat(-0.693359375f), x);
    r = fma(n, splat(2.12194440e-4f), r);
    Vec p = splat(1.9875691500e-4f);
    p = fma(p, r, splat(1.3981999507e-3f));
    p = fma(p, r, splat(8.3334519073e-3f));
    p = fma(p, r, splat(4.1665795894e-2f));
    p = fma(p, r, splat(1.6666665459e-1f));
    p = fma(p, r, splat(5.0000001201e-1f));
    p = fma(p, r * r, r + splat(1.0f));
    const IVec power = (__builtin_convertvector(n, IVec) + 127) << 23;
    Vec scale;
    std::memcpy(&scale, &power, sizeof scale);
    return tiny ? Vec{} : p * scale;
}

// 2^x to about 1 ulp for x <= 0, or a little above; 0 where it is too small for a float, and for -inf, for which scalef
// gives 0 whatever it scales. Degree 5, fitted to the relative error.
inline Vec exp2_nonpositive(Vec x) {
#ifdef __AVX512F__
    const Vec whole = (Vec)_mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
    const Vec magic = splat(12582912.0f);  // as above
    const auto tiny = x < splat(-126.0f);
    x = tiny ? splat(-126.0f) : x;
    const Vec whole = (x + magic) - magic;
#endif
    const Vec r = x - whole;
    Vec p = splat(1.326472715e-3f);
    p = fma(p, r, splat(9.671512674e-3f));
    p = fma(p, r, splat(5.550733744e-2f));
    p = fma(p, r, splat(2.402224208e-1f));
    p = fma(p, r, splat(6.931469776e-1f));
    p = fma(p, r, splat(1.0f));
#ifdef __AVX512F__
    return (Vec)_mm512_scalef_ps((__m512)p, (__m512)whole);
#else
    const IVec power = (__builtin_convertvector(whole, IVec) + 127) << 23;
    Vec scale;
    std::memcpy(&scale, &power, sizeof scale);
    return tiny ? Vec{} : p * scale;
#endif
}

inline Vec tanh_any(Vec x) {
    const auto negative = x < Vec{};
    const Vec size = negative ? -x : x;
    const Vec e = exp_nonpositive(size * splat(-2.0f));
    const Vec t = (splat(1.0f) - e) / (splat(1.0f) + e);
    return negative ? -t : t;
}

// Halves on each other, until one is left: what the loops spell out, the instructions do
inline float sum_lanes(Vec v) {
#ifdef __AVX512F__
    return _mm512_reduce_add_ps((__m512)v);
#endif
    float x[LANES];
    store(x, v);
    for (int width = LANES / 2; width; width /= 2)
        for (int i = 0; i < width; i++) x[i] = x[i] + x[i + width];
    return x[0];
}

inline float max_lanes(Vec v) {
#ifdef __AVX512F__
    return _mm512_reduce_max_ps((__m512)v);
#endif
    float x[LANES];
    store(x, v);
    for (int width = LANES / 2; width; width /= 2)
        for (int i = 0; i < width; i++) x[i] = x[i] > x[i + width] ? x[i] : x[i + width];
    return x[0];
}

// Rows of float32 or bfloat16, read and written as floats, and of int8, read so; n < LANES for a row's last elements

inline Vec read(const float* p) { return load(p); }

inline Vec read(const uint16_t* p) {
    typedef uint16_t Half __attribute__((vector_size(2 * LANES)));
    Half h;
    std::memcpy(&h, p, sizeof h);
    const IVec bits = __builtin_convertvector(h, IVec) << 16;
    Vec v;
    std::memcpy(&v, &bits, sizeof v);
    return v;
}

inline Vec read(const int8_t* p) {
#ifdef __AVX512F__
    return (Vec)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
#elif defined __AVX2__
    return (Vec)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
#else
    typedef int8_t Bytes __attribute__((vector_size(LANES)));
    Bytes bytes;
    std::memcpy(&bytes, p, sizeof bytes);
    return __builtin_convertvector(__builtin_convertvector(bytes, IVec), Vec);
#endif
}

template <class Element>
inline Vec read_some(const Element* p, int64_t n) {
    Element padded[LANES] = {};
    std::memcpy(padded, p, n * sizeof(Element));
    return read(padded);
}

inline void write(float* p, Vec v) { store(p, v); }

inline void write(uint16_t* p, Vec v) {
#ifdef __AVX512BF16__
    const __m256bh half = _mm512_cvtneps_pbh((__m512)v);
    std::memcpy(p, &half, sizeof half);
#else
    typedef uint16_t Half __attribute__((vector_size(2 * LANES)));
    const Half half = __builtin_convertvector(narrowed(v) >> 16, Half);
    std::memcpy(p, &half, sizeof half);
#endif
}

template <class Element>
inline void write_some(Element* p, Vec v, int64_t n) {
    Element padded[LANES];
    write(padded, v);
    std::memcpy(p, padded, n * sizeof(Element));
}

// A row of n elements: body(offset, reader, writer)
template <class Element, class Body>
inline void each_vector(int64_t n, const Body& body) {
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES)
        body(i, [](const Element* p) { return read(p); }, [](Element* p, Vec v) { write(p, v); });
    if (const int64_t rest = n - i)
        body(i, [rest](const Element* p) { return read_some(p, rest); },
             [rest](Element* p, Vec v) { write_some(p, v, rest); });
}

// What storing v as an Element and reading it again gives
inline Vec rounded(Vec v, float) { return v; }

inline Vec rounded(Vec v, uint16_t) {
#ifdef __AVX512BF16__
    uint16_t half[LANES];
    write(half, v);  // whose instruction makes 0 of the smallest
    return read(half);
#else
    return (Vec)(narrowed(v) & 0xffff0000u);
#endif
}

}  // namespace
