// x W^T + b in bfloat16, summed in float32, for CPUs with AMX or AVX512-BF16. Plain C interface; keeps no state.
//
// The promise is that a row's bits do not depend on how many rows there are, nor on threads: every element of the result
// has an accumulator of its own, to which pairs of inputs are added in rising order. A weight lies in panels of WIDE
// outputs, which threads share out; few rows read each panel once, at the speed of memory. With AMX 16 pairs of 16 of a
// panel's outputs are a tile as they lie.

#include <algorithm>

#include "vectors.h"

#ifdef __AMX_BF16__
#include <sys/syscall.h>
#include <unistd.h>
#endif

#ifdef __AVX512BF16__

namespace {

constexpr int VECTORS = 4;
constexpr int WIDE = VECTORS * LANES;   // outputs of a panel
constexpr int64_t ROWS_OF_A_TASK = 96;  // that share one reading of a panel's part

struct Product {
    const uint16_t* x;       // [rows, in]
    const uint16_t* panels;  // [panel][in / 2][WIDE][2]
    const uint16_t* bias;    // [out] or null
    uint16_t* to;            // [rows, out]
    int64_t rows, in, out;
};

inline void finish(const Product& product, int64_t row, int64_t first, Vec sums) {
    const int64_t count = std::min<int64_t>(LANES, product.out - first);
    if (count <= 0) return;
    uint16_t* to = product.to + row * product.out + first;
    if (product.bias)
        sums = sums + (count == LANES ? read(product.bias + first) : read_some(product.bias + first, count));
    count == LANES ? write(to, sums) : write_some(to, sums, count);
}

#ifdef __AMX_BF16__

constexpr int TILE = 16;                   // rows of a tile; outputs, or pairs of inputs, side by side in it
constexpr int64_t INPUTS = 2 * TILE;       // that one instruction multiplies
constexpr int REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;  // arch_prctl's, of Linux

struct alignas(64) TileShapes {  // LDTILECFG's: tiles 0 to 3 are sums, 4 and 5 inputs, 6 and 7 weights
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {};
};

inline void shape_tiles(int64_t upper, int64_t lower) {
    TileShapes shapes;
    const int64_t rows[] = {upper, upper, lower, lower, upper, lower, TILE, TILE};
    std::copy(rows, rows + 8, shapes.rows);
    _tile_loadconfig(&shapes);
}

// The intrinsics are macros whose tile is a literal: no loops over them.
#define ZERO_SUMS      \
    do {               \
        _tile_zero(0); \
        _tile_zero(1); \
        _tile_zero(2); \
        _tile_zero(3); \
    } while (0)
#define STORE_SUMS(to)              \
    do {                            \
        _tile_stored(0, to[0], 64); \
        _tile_stored(1, to[1], 64); \
        _tile_stored(2, to[2], 64); \
        _tile_stored(3, to[3], 64); \
    } while (0)

// At most 16 rows, all of a panel's outputs: the panel is read once, from end to end.
void add_few(const Product& product, int64_t row, int64_t rows, int64_t panel) {
    const int64_t stride = WIDE * 4;
    const uint16_t *x = product.x + row * product.in, *w = product.panels + panel * product.in * WIDE;
    alignas(64) float sums[VECTORS][TILE][LANES];
    shape_tiles(rows, rows);
    ZERO_SUMS;
    for (int64_t k = 0; k < product.in; k += INPUTS, x += INPUTS, w += INPUTS * WIDE) {
        _tile_loadd(4, x, product.in * 2);
        _tile_loadd(6, w, stride);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, w + 2 * TILE, stride);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(6, w + 4 * TILE, stride);
        _tile_dpbf16ps(2, 4, 6);
        _tile_loadd(7, w + 6 * TILE, stride);
        _tile_dpbf16ps(3, 4, 7);
    }
    STORE_SUMS(sums);
    for (int64_t r = 0; r < rows; r++)
        for (int v = 0; v < VECTORS; v++) finish(product, row + r, panel * WIDE + v * LANES, read(sums[v][r]));
}

// 17 to 32 rows, half of a panel's outputs.
void add_many(const Product& product, int64_t row, int64_t rows, int64_t panel, int half) {
    const int64_t stride = WIDE * 4;
    const uint16_t *x = product.x + row * product.in, *below = x + TILE * product.in;
    const uint16_t* w = product.panels + panel * product.in * WIDE + half * 4 * TILE;
    alignas(64) float sums[4][TILE][LANES];
    ZERO_SUMS;
    for (int64_t k = 0; k < product.in; k += INPUTS, w += INPUTS * WIDE) {
        _tile_loadd(4, x + k, product.in * 2);
        _tile_loadd(6, w, stride);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, w + 2 * TILE, stride);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(5, below + k, product.in * 2);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    STORE_SUMS(sums);
    const int64_t first = panel * WIDE + half * 2 * LANES;
    for (int64_t r = 0; r < rows; r++)
        for (int v = 0; v < 2; v++)
            finish(product, row + r, first + v * LANES, read(sums[r / TILE * 2 + v][r % TILE]));
}

void task(const Product& product, int64_t panel, int64_t first_row) {
    const int64_t last_row = std::min(product.rows, first_row + ROWS_OF_A_TASK);
    for (int64_t row = first_row; row < last_row; row += 2 * TILE) {
        const int64_t rows = std::min<int64_t>(2 * TILE, last_row - row);
        if (rows <= TILE) {
            add_few(product, row, rows, panel);
            continue;
        }
        shape_tiles(TILE, rows - TILE);
        for (int half = 0; half < 2; half++) add_many(product, row, rows, panel, half);
    }
}

inline void leave_tiles() { _tile_release(); }

bool may_multiply() { return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0; }

#else

constexpr int ROWS_AT_ONCE = 6;            // of the micro-kernel: 6 x 4 accumulators
constexpr int64_t PAIRS_OF_A_PART = 1024;  // of a panel: 256 KB, which a core's cache holds
constexpr int64_t INPUTS = 2;              // that one instruction multiplies

// `sums`: [ROWS][WIDE], of the parts before; the first part reads none, and the last writes none.
template <int ROWS>
inline void add_part(const Product& product, int64_t row, int64_t panel, int64_t begin, int64_t end, float* sums) {
    const int64_t pairs = product.in / 2;
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
            finish(product, row + r, panel * WIDE + v * LANES, (Vec)sum[r][v]);
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

inline void leave_tiles() {}

bool may_multiply() { return true; }

#endif

}  // namespace

extern "C" {

int32_t kvrelay_product_width() { return may_multiply() ? WIDE : 0; }

int32_t kvrelay_product_inputs() { return INPUTS; }  // whose multiples a product's rows are long

void kvrelay_product(const void* x, const void* panels, const void* bias, void* to, int64_t rows, int64_t in,
                     int64_t out, int32_t threads) {
    const Product product{(const uint16_t*)x, (const uint16_t*)panels, (const uint16_t*)bias, (uint16_t*)to, rows, in,
                          out};
    const int64_t blocks = (rows + ROWS_OF_A_TASK - 1) / ROWS_OF_A_TASK, tasks = (out + WIDE - 1) / WIDE * blocks;
#pragma omp parallel num_threads(threads) if (threads > 1 && tasks > 1)
    {
#pragma omp for schedule(static)
        for (int64_t i = 0; i < tasks; i++) task(product, i / blocks, i % blocks * ROWS_OF_A_TASK);
        leave_tiles();
    }
}

}  // extern "C"

#else

extern "C" {

int32_t kvrelay_product_width() { return 0; }  // there are none

int32_t kvrelay_product_inputs() { return 1; }

void kvrelay_product(const void*, const void*, const void*, void*, int64_t, int64_t, int64_t, int32_t) {}

}  // extern "C"

#endif
