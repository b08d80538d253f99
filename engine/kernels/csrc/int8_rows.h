// A head's row of K or V in int8: `n` whole numbers up to 127, then the float32 that each of them is times.

#pragma once

#include "vectors.h"

#include <cmath>
#include <cstring>

namespace {

constexpr int64_t SCALE_BYTES = 4;

// What a row takes in a page whose elements are these
template <class Kept>
inline int64_t kept_width(int64_t n) { return sizeof(Kept) == 1 ? n + SCALE_BYTES : n; }

template <class Element>
inline void from_int8(const int8_t* row, int64_t n, Element* to) {
    float scale;
    std::memcpy(&scale, row + n, sizeof scale);
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) write(to + i, read(row + i) * splat(scale));
    if (const int64_t rest = n - i) write_some(to + i, read_some(row + i, rest) * splat(scale), rest);
}

// As engine/pages/int8_rows.py has it, to the bit
template <class Element>
inline void to_int8(const Element* x, int64_t n, int8_t* row) {
    float largest = 0.0f;
    for (int64_t i = 0; i < n; i += LANES) {
        const Vec v = n - i < LANES ? read_some(x + i, n - i) : read(x + i);
        largest = std::fmax(largest, max_lanes(v < Vec{} ? -v : v));
    }
    const float scale = largest / 127.0f, inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
    for (int64_t i = 0; i < n; i += LANES) {
        const int64_t count = n - i < LANES ? n - i : LANES;
        const Vec v = (count < LANES ? read_some(x + i, count) : read(x + i)) * splat(inverse);
        for (int64_t j = 0; j < count; j++) row[i + j] = int8_t(std::nearbyint(v[j]));
    }
    std::memcpy(row + n, &scale, sizeof scale);
}

}  // namespace
