// x W^T + b in bfloat16, summed in float32, for CPUs with AVX512-BF16. Plain C interface; keeps no state.
//
// The promise is that a row's bits do not depend on how many rows there are, nor on threads: every element of the result
// has an accumulator of its own, to which pairs of inputs are added in rising order. A weight lies in panels of WIDE
// outputs, which threads share out; few rows read each panel once, at the speed of memory.

#include <algorithm>

#include "vectors.h"

#ifdef __AVX512BF16__

namespace {

constexpr int VECTORS = 4;
constexpr int WIDE = VECTORS * LANES;      // outputs of a panel
constexpr int ROWS_AT_ONCE = 6;            // of the micro-kernel: 6 x 4 accumulators
constexpr int64_t ROWS_OF_A_TASK = 96;     // that share one reading of a panel's part
constexpr int64_t PAIRS_OF_A_PART = 1024;  // of a panel: 256 KB, which a core's cache holds

struct Product {
    const uint16_t* x;       // [rows, in]
    const uint16_t* panels;  // [panel][in / 2][WIDE][2]
    const uint16_t* bias;    // [out] or null
    uint16_t* to;            // [rows, out]
    int64_t rows, in, out;
};

// `sums`: [ROWS][WIDE], of the parts before; the first part reads none, and the last writes none.
template <int ROWS>
inline void add_part(const Product& product, int64_t row, int64_t panel, int64_t begin, int64_t end, float* sums) {
    const int64_t pairs = product.in / 2, column = panel * WIDE;
    const uint16_t *x = product.x + row * product.in, *w = product.panels + panel * pairs * 2 * WIDE;
    __m512 sum[ROWS][VECTORS];
#pragma GCC unroll 6
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++)
            sum[r][v] = begin ? _mm512_loadu_ps(sums + r * WIDE + v * LANES) : _mm512_setzero_ps();
    for (int64_t pair = begin; pair < end; pair++) {
        __m512bh weights[VECTORS];
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++)
            weights[v] = (__m512bh)_mm512_loadu_si512(w + (pair * WIDE + v * LANES) * 2);
#pragma GCC unroll 6
        for (int r = 0; r < ROWS; r++) {
            int32_t inputs;
            std::memcpy(&inputs, x + r * product.in + 2 * pair, sizeof inputs);
            const __m512bh both = (__m512bh)_mm512_set1_epi32(inputs);
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++) sum[r][v] = _mm512_dpbf16_ps(sum[r][v], both, weights[v]);
        }
    }
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < VECTORS; v++) {
            if (end < pairs) {
                _mm512_storeu_ps(sums + r * WIDE + v * LANES, sum[r][v]);
                continue;
            }
            const int64_t first = column + v * LANES, count = std::min<int64_t>(LANES, product.out - first);
            if (count <= 0) break;
            Vec whole = (Vec)sum[r][v];
            uint16_t* to = product.to + (row + r) * product.out + first;
            if (product.bias)
                whole = whole + (count == LANES ? read(product.bias + first) : read_some(product.bias + first, count));
            count == LANES ? write(to, whole) : write_some(to, whole, count);
        }
}

template <int ROWS>
inline void add_rest(const Product& product, int64_t rows, int64_t row, int64_t panel, int64_t begin, int64_t end,
                     float* sums) {
    if (rows == ROWS) return add_part<ROWS>(product, row, panel, begin, end, sums);
    if constexpr (ROWS > 1) add_rest<ROWS - 1>(product, rows, row, panel, begin, end, sums);
}

void task(const Product& product, int64_t panel, int64_t first_row) {
    const int64_t pairs = product.in / 2, last_row = std::min(product.rows, first_row + ROWS_OF_A_TASK);
    alignas(64) float sums[ROWS_OF_A_TASK * WIDE];
    for (int64_t begin = 0; begin < pairs; begin += PAIRS_OF_A_PART) {
        const int64_t end = std::min(pairs, begin + PAIRS_OF_A_PART);
        for (int64_t row = first_row; row < last_row; row += ROWS_AT_ONCE)
            add_rest<ROWS_AT_ONCE>(product, std::min<int64_t>(ROWS_AT_ONCE, last_row - row), row, panel, begin, end,
                                   sums + (row - first_row) * WIDE);
    }
}

}  // namespace

extern "C" {

int32_t kvrelay_product_width() { return WIDE; }

void kvrelay_product(const void* x, const void* panels, const void* bias, void* to, int64_t rows, int64_t in,
                     int64_t out, int32_t threads) {
    const Product product{(const uint16_t*)x, (const uint16_t*)panels, (const uint16_t*)bias, (uint16_t*)to, rows, in,
                          out};
    const int64_t blocks = (rows + ROWS_OF_A_TASK - 1) / ROWS_OF_A_TASK, tasks = (out + WIDE - 1) / WIDE * blocks;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1 && tasks > 1)
    for (int64_t i = 0; i < tasks; i++) task(product, i / blocks, i % blocks * ROWS_OF_A_TASK);
}

}  // extern "C"

#else

extern "C" {

int32_t kvrelay_product_width() { return 0; }  // there are none

void kvrelay_product(const void*, const void*, const void*, void*, int64_t, int64_t, int64_t, int32_t) {}

}  // extern "C"

#endif
