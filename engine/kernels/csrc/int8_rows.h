// A head's row of K or V in int8: `n` whole numbers up to 127, then the float32 that each of them is times.

#pragma once

#include "vectors.h"

#include <cmath>
#include <cstring>
#include <limits>

namespace {

constexpr int64_t SCALE_BYTES = 4;

// What a row takes in a page whose elements are these
template <class Kept>
inline int64_t kept_width(int64_t n) { return sizeof(Kept) == 1 ? n + SCALE_BYTES : n; }

inline float scale_of(const int8_t* row, int64_t n) {
    float scale;
    std::memcpy(&scale, row + n, sizeof scale);
    return scale;
}

// The row's numbers, which bfloat16 holds as they are
template <class Element>
inline void numbers(const int8_t* row, int64_t n, Element* to) {
    int64_t i = 0;
#ifdef __AVX512BF16__
    if constexpr (sizeof(Element) == 2)
        for (; i + 2 * LANES <= n; i += 2 * LANES) {
            const __m512bh both = _mm512_cvtne2ps_pbh((__m512)read(row + i + LANES), (__m512)read(row + i));
            std::memcpy(to + i, &both, sizeof both);
        }
#endif
    for (; i + LANES <= n; i += LANES) write(to + i, read(row + i));
    if (const int64_t rest = n - i) write_some(to + i, read_some(row + i, rest), rest);
}

// Those of two rows in turns, as bfloat16: one 32-bit unit for each place, the first row's in its low half
inline void numbers_of_two(const int8_t* first, const int8_t* second, int64_t n, uint32_t* to) {
    auto unit = [](Vec one, Vec other) {
        UVec low, high;
        std::memcpy(&low, &one, sizeof low);
        std::memcpy(&high, &other, sizeof high);
        return low >> 16 | (high & 0xffff0000u);
    };
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        const UVec units = unit(read(first + i), read(second + i));
        std::memcpy(to + i, &units, sizeof units);
    }
    if (const int64_t rest = n - i) {
        const UVec units = unit(read_some(first + i, rest), read_some(second + i, rest));
        std::memcpy(to + i, &units, rest * sizeof *to);
    }
}

// As engine/pages/int8_rows.py has it, to the bit
template <class Element>
inline void to_int8(const Element* x, int64_t n, int8_t* row) {
    float largest = 0.0f;
    Vec spoiled = Vec{};  // not 0 where something is infinite, or no number
    for (int64_t i = 0; i < n; i += LANES) {
        const Vec v = n - i < LANES ? read_some(x + i, n - i) : read(x + i);
        largest = std::fmax(largest, max_lanes(v < Vec{} ? -v : v));
        spoiled = spoiled + v * splat(0.0f);
    }
    const float scale = sum_lanes(spoiled) == 0.0f ? largest / 127.0f : std::numeric_limits<float>::quiet_NaN();
    if (!(scale >= std::numeric_limits<float>::min())) {  // so small that one over it is no float, or no number
        std::memset(row, 0, n);
        std::memcpy(row + n, &scale, sizeof scale);
        return;
    }
    const float inverse = 1.0f / scale;
    for (int64_t i = 0; i < n; i += LANES) {
        const int64_t count = n - i < LANES ? n - i : LANES;
        const Vec v = (count < LANES ? read_some(x + i, count) : read(x + i)) * splat(inverse);
        for (int64_t j = 0; j < count; j++) row[i + j] = int8_t(std::nearbyint(v[j]));
    }
    std::memcpy(row + n, &scale, sizeof scale);
}

}  // namespace
