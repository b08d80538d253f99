// x W^T + b in bfloat16, summed in float32. Plain C interface; keeps no state.
//
// Weights of one byte, each output's times a scale of its own, are widened panel by panel on their way from memory: to
// bfloat16, which holds all of them, so that a sum is that of the same weights in bfloat16, and is scaled at its end.
//
// The promise is that a row's bits do not depend on how many rows there are, nor on threads: every element of the result
// has an accumulator of its own, to which pairs of inputs are added in rising order. A weight lies in panels of WIDE
// outputs, which threads share out; few rows read each panel once, at the speed of memory. With AMX 16 pairs of 16 of a
// panel's outputs are a tile as they lie. CPUs without instructions for bfloat16 widen both and multiply in float32.

#include <algorithm>
#include <atomic>
#include <type_traits>
#include <vector>

#include <omp.h>

#include "kernels.h"
#include "tiles.h"
#include "vectors.h"

namespace {

constexpr int WIDE = 64;  // outputs of a panel
constexpr int VECTORS = WIDE / LANES;
constexpr int64_t ROWS_OF_A_TASK = 96;  // that share one reading of a panel's part
constexpr int64_t BLOCKS_AT_ONCE = 7;   // of so many rows, that go through all panels before others do: results of more
                                        // rows lie in more pages than a core's table of addresses holds

struct Product {
    const uint16_t* x;       // [rows, in]
    const void* panels;      // [panel][in / 2][WIDE][2], of bfloat16, or of int8 where there are scales
    const float* scales;     // [out] or null
    const uint16_t* bias;    // [out] or null
    uint16_t* to;            // [rows, out]
    int64_t rows, in, out;

    int64_t panel_bytes() const { return in * WIDE * (scales ? 1 : 2); }
    const void* panel(int64_t i) const { return (const char*)panels + i * panel_bytes(); }
};

#if defined __AVX512BF16__ && defined __AVX512VBMI__
// Weights of int8 are looked up: of each absolute value the bytes of its bfloat16. They come out as they are wanted where
// 8 of the one and 8 of the other vector's lie by turns (panels.py).
#define LOOKS_UP

struct Lookup {
    alignas(64) uint8_t low[128], high[128];
    constexpr Lookup() : low(), high() {
        for (int i = 1; i < 128; i++) {
            int power = 0;
            while (i >> (power + 1)) power++;
            const int bits = (127 + power) << 7 | ((i << (7 - power)) & 127);
            low[i] = uint8_t(bits), high[i] = uint8_t(bits >> 8);
        }
    }
};
constexpr Lookup LOOKUP;

inline void widen_two(const int8_t* from, __m512bh& first, __m512bh& second) {
    const __m512i narrow = _mm512_loadu_si512(from), size = _mm512_abs_epi8(narrow);
    const auto find = [&](const uint8_t* bytes) {
        return _mm512_permutex2var_epi8(_mm512_load_si512(bytes), size, _mm512_load_si512(bytes + 64));
    };
    const __m512i low = find(LOOKUP.low), sign = _mm512_set1_epi8(char(0x80));
    const __m512i high = _mm512_ternarylogic_epi64(find(LOOKUP.high), narrow, sign, 0xf8);  // its sign, too
    first = (__m512bh)_mm512_unpacklo_epi8(low, high), second = (__m512bh)_mm512_unpackhi_epi8(low, high);
}
#elif defined __AVX512BF16__
inline __m512bh widened(const int8_t* from) {
    const __m256i both = _mm256_loadu_si256((const __m256i*)from);
    const __m512 low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_castsi256_si128(both)));
    const __m512 high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_extracti128_si256(both, 1)));
    return _mm512_cvtne2ps_pbh(high, low);
}

inline void widen_two(const int8_t* from, __m512bh& first, __m512bh& second) {
    first = widened(from), second = widened(from + 2 * LANES);
}
#endif

#ifdef __AVX512BF16__
// To bfloat16, which holds whole numbers up to 256; `count` fills vectors.
inline void widen_weights(const int8_t* from, int64_t count, uint16_t* to) {
    for (int64_t i = 0; i < count; i += 4 * LANES) {
        __m512bh first, second;
        widen_two(from + i, first, second);
        std::memcpy(to + i, &first, sizeof first);
        std::memcpy(to + i + 2 * LANES, &second, sizeof second);
    }
}
#endif

// A task: a block of rows with a panel
struct Place {
    int64_t panel, block, blocks;  // the block is the block-th of so many that go through the panel one after another
    int64_t first_row, last_row;
    bool is_last_panel;
};

class Tasks {
    int64_t rows, panels, blocks;

   public:
    explicit Tasks(const Product& product)
        : rows(product.rows),
          panels((product.out + WIDE - 1) / WIDE),
          blocks((rows + ROWS_OF_A_TASK - 1) / ROWS_OF_A_TASK) {}
    int64_t count() const { return panels * blocks; }
    Place operator[](int64_t i) const {
        const int64_t first = i / (panels * BLOCKS_AT_ONCE) * BLOCKS_AT_ONCE;
        const int64_t together = std::min(BLOCKS_AT_ONCE, blocks - first), rest = i - first * panels;
        const int64_t row = (first + rest % together) * ROWS_OF_A_TASK, panel = rest / together;
        return {panel, rest % together, together, row, std::min(rows, row + ROWS_OF_A_TASK), panel + 1 == panels};
    }
};

// Tasks that are left to one thread: it takes them in their order, and who has none left takes its last ones, so that all
// wait little for a thread that other work has kept from its core.
class alignas(64) Share {
    std::atomic<uint64_t> ends;  // of [first, end): two halves

   public:
    void give(int64_t first, int64_t end) { ends.store(uint64_t(first) << 32 | uint64_t(end)); }

    bool take(int64_t& task, bool is_last) {
        uint64_t seen = ends.load(std::memory_order_relaxed);
        for (;;) {
            const uint32_t first = uint32_t(seen >> 32), end = uint32_t(seen);
            if (first == end) return false;
            task = is_last ? end - 1 : first;
            if (ends.compare_exchange_weak(seen, is_last ? seen - 1 : seen + (1ull << 32), std::memory_order_relaxed))
                return true;
        }
    }
};

inline void finish(const Product& product, int64_t row, int64_t first, Vec sums) {
    const int64_t count = std::min<int64_t>(LANES, product.out - first);
    if (count <= 0) return;
    uint16_t* to = product.to + row * product.out + first;
    if (product.scales)
        sums = sums * (count == LANES ? read(product.scales + first) : read_some(product.scales + first, count));
    if (product.bias)
        sums = sums + (count == LANES ? read(product.bias + first) : read_some(product.bias + first, count));
    count == LANES ? write(to, sums) : write_some(to, sums, count);
}

#ifdef __AMX_BF16__

constexpr int64_t INPUTS = 2 * TILE;  // that one instruction multiplies
constexpr int LINES_AT_ONCE = 8;      // of 64 bytes, that are fetched ahead

// The next panel, fetched bit by bit into the core's cache while this one is multiplied
class Ahead {
    const char *at = nullptr, *end = nullptr;

   public:
    void aim(const void* from, int64_t bytes) { at = (const char*)from, end = at + bytes; }
    void fetch() {
        for (int i = 0; i < LINES_AT_ONCE && at < end; i++, at += 64) _mm_prefetch(at, _MM_HINT_T1);
    }
};

// Sums of `rows` rows and of two vectors of outputs; most lie in the result as one line.
void finish_rows(const Product& product, int64_t row, int64_t rows, int64_t first, const float* left, const float* right) {
    if (first + 2 * LANES > product.out) {
        for (int64_t r = 0; r < rows; r++) {
            finish(product, row + r, first, read(left + r * LANES));
            finish(product, row + r, first + LANES, read(right + r * LANES));
        }
        return;
    }
    const Vec left_bias = product.bias ? read(product.bias + first) : Vec{};
    const Vec right_bias = product.bias ? read(product.bias + first + LANES) : Vec{};
    const Vec left_scale = product.scales ? read(product.scales + first) : Vec{};
    const Vec right_scale = product.scales ? read(product.scales + first + LANES) : Vec{};
    uint16_t* to = product.to + row * product.out + first;
    for (int64_t r = 0; r < rows; r++, to += product.out, left += LANES, right += LANES) {
        Vec a = read(left), b = read(right);
        if (product.scales) a = a * left_scale, b = b * right_scale;
        if (product.bias) a = a + left_bias, b = b + right_bias;
        const __m512bh line = _mm512_cvtne2ps_pbh((__m512)b, (__m512)a);
        std::memcpy(to, &line, sizeof line);
    }
}

// What one thread does of a product. A block's sums are written while the next block's are multiplied: to read a tile's
// memory at once is to wait until all before it is done.
class Worker {
    const Product& product;
    alignas(64) float sums[2][4][TILE][LANES];
    int turn = 0;
    int64_t done_row, done_rows = 0, done_first;  // the block that waits to be written: sums[1 - turn]
    bool done_few;
    int64_t upper = 0, lower = 0;  // rows that the tiles have now
    int64_t widened = -1;          // the panel that lies in wide()

    // Kept from product to product: to be given memory anew takes longer than to fill it.
    static std::vector<uint16_t>& wide() {
        static thread_local std::vector<uint16_t> place;
        return place;
    }

    const uint16_t* weights(int64_t panel) {
        if (!product.scales) return (const uint16_t*)product.panel(panel);
        const int64_t count = product.in * WIDE;
        if (widened != panel) {
            if (int64_t(wide().size()) < count) wide().resize(count);
            widen_weights((const int8_t*)product.panel(panel), count, wide().data());
            settle(wide().data());
            widened = panel;
        }
        return wide().data();
    }

    void shape(int64_t above, int64_t below) {
        if (above != upper || below != lower) shape_tiles(upper = above, lower = below);
    }

    void write_done() {
        const auto& of = sums[1 - turn];
        if (done_few) {
            for (int v = 0; v < VECTORS; v += 2)
                finish_rows(product, done_row, done_rows, done_first + v * LANES, of[v][0], of[v + 1][0]);
        } else {
            finish_rows(product, done_row, TILE, done_first, of[0][0], of[1][0]);
            finish_rows(product, done_row + TILE, done_rows - TILE, done_first, of[2][0], of[3][0]);
        }
    }

    void keep(int64_t row, int64_t rows, int64_t first, bool few) {
        if (done_rows) write_done();
        STORE_SUMS(sums[turn]);
        turn = 1 - turn;
        done_row = row, done_rows = rows, done_first = first, done_few = few;
    }

    // At most 16 rows, all of a panel's outputs: the panel is read once, from end to end.
    void add_few(int64_t row, int64_t rows, int64_t panel, Ahead& ahead) {
        const int64_t stride = WIDE * 4;
        const uint16_t *x = product.x + row * product.in, *w = weights(panel);
        shape(rows, rows);
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
            ahead.fetch();
        }
        keep(row, rows, panel * WIDE, true);
    }

    // 17 to 32 rows, half of a panel's outputs
    void add_many(int64_t row, int64_t rows, int64_t panel, int half, Ahead& ahead) {
        const int64_t stride = WIDE * 4;
        const uint16_t *x = product.x + row * product.in, *below = x + TILE * product.in;
        const uint16_t* w = weights(panel) + half * 4 * TILE;
        shape(TILE, rows - TILE);
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
            ahead.fetch();
        }
        keep(row, rows, panel * WIDE + half * 2 * LANES, false);
    }

   public:
    explicit Worker(const Product& product) : product(product) {}

    // The first rows of a panel by the kernel that reads it from end to end; each task fetches its share of the next.
    void operator()(const Place& at) {
        Ahead nothing, ahead;
        if (!at.is_last_panel) {
            const int64_t share = product.panel_bytes() / at.blocks;
            ahead.aim((const char*)product.panel(at.panel + 1) + at.block * share, share);
        }
        bool is_new = at.block == 0;
        for (int64_t row = at.first_row; row < at.last_row; is_new = false) {
            const int64_t rows = std::min<int64_t>(is_new ? TILE : 2 * TILE, at.last_row - row);
            if (rows <= TILE)
                add_few(row, rows, at.panel, is_new ? nothing : ahead);
            else
                for (int half = 0; half < 2; half++) add_many(row, rows, at.panel, half, ahead);
            row += rows;
        }
    }

    ~Worker() {
        if (done_rows) write_done();
        if (upper) _tile_release();
    }
};

bool may_multiply() { return may_use_tiles(); }
constexpr char INSTRUCTIONS[] = "AMX";

#else

#ifdef __AVX512BF16__
constexpr int ROWS_AT_ONCE = 6, OUTPUTS_AT_ONCE = WIDE;  // of the micro-kernel: as many sums as there are registers
constexpr char INSTRUCTIONS[] = "AVX512-BF16";
#elif defined __AVX512F__
constexpr int ROWS_AT_ONCE = 6, OUTPUTS_AT_ONCE = WIDE;
constexpr char INSTRUCTIONS[] = "AVX512";

inline Vec multiply_add(Vec x, Vec w, Vec sums) { return fma(x, w, sums); }
inline Vec spread(const float* x) { return (Vec)_mm512_set1_ps(*x); }
#else
constexpr int ROWS_AT_ONCE = 6, OUTPUTS_AT_ONCE = 16;
constexpr char INSTRUCTIONS[] = "vectors of 8";

inline Vec multiply_add(Vec x, Vec w, Vec sums) {
#ifdef __FMA__
    asm("vfmadd231ps %2, %1, %0" : "+x"(sums) : "x"(x), "x"(w));  // in its place, lest sums have no registers left
    return sums;
#else
    return fma(x, w, sums);
#endif
}

inline Vec spread(const float* x) {
#ifdef __AVX2__
    Vec to;  // one after another: GCC else holds those of many rows at once, and sums have no registers left
    asm volatile("vbroadcastss %1, %0" : "=x"(to) : "m"(*x));
    return to;
#else
    return splat(*x);
#endif
}
#endif

constexpr int64_t INPUTS = 2;           // that are multiplied at once
constexpr int64_t PAIRS_WIDENED = 128;  // of a panel, for more rows: 32 KB of bfloat16, which the smallest cache holds
constexpr int64_t FLOATS_WIDENED = 32;  // likewise, of pairs of floats: up to so many rows, for which the next cache is far
constexpr int64_t ROWS_FLOATS = 48;

// ROWS rows' inputs of a part, as the micro-kernel takes them
#ifdef __AVX512BF16__
typedef uint16_t Widened;
constexpr bool WIDENS_ALL = false;         // but int8 only
constexpr int64_t PAIRS_OF_A_PART = 1024;  // of a panel: 256 KB, which a core's cache holds

struct Rows {
    const uint16_t* x;
    int64_t stride;

    template <int ROWS>
    void read(const Product& product, int64_t row, int64_t begin, int64_t) {
        x = product.x + row * product.in + 2 * begin, stride = product.in;
    }
};

inline void widen_two(const uint16_t* from, __m512bh& first, __m512bh& second) {
    first = (__m512bh)_mm512_loadu_si512(from), second = (__m512bh)_mm512_loadu_si512(from + 2 * LANES);
}

inline void widen_part(const int8_t* from, int64_t pairs, Widened* to, Rows&) { widen_weights(from, pairs * WIDE * 2, to); }

template <int ROWS, int COUNT, class Weight>
inline void add_pairs(const Rows& rows, const Weight* w, int output, int64_t pairs, Vec (&sum)[ROWS][COUNT]) {
    w += output * 2;
    for (int64_t pair = 0; pair < pairs; pair++, w += WIDE * 2) {
        __m512bh weights[COUNT];
#pragma GCC unroll 8
        for (int v = 0; v < COUNT; v += 2) widen_two(w + v * LANES * 2, weights[v], weights[v + 1]);
#pragma GCC unroll 6
        for (int r = 0; r < ROWS; r++) {
            int32_t both;
            std::memcpy(&both, rows.x + r * rows.stride + 2 * pair, sizeof both);
            const __m512bh inputs = (__m512bh)_mm512_set1_epi32(both);
#pragma GCC unroll 8
            for (int v = 0; v < COUNT; v++) sum[r][v] = (Vec)_mm512_dpbf16_ps((__m512)sum[r][v], inputs, weights[v]);
        }
    }
}

template <class Weight>
constexpr bool in_strips = false;
#else
typedef float Widened;
constexpr bool WIDENS_ALL = OUTPUTS_AT_ONCE < WIDE;  // few outputs at once are far between as they lie, and slow to read
constexpr int64_t PAIRS_AHEAD = 16;       // that are fetched while one is multiplied
constexpr int64_t PAIRS_OF_A_PART = 512;  // half as many, for widened rows are to stay in the smallest cache

class Rows {  // widened once for all outputs of a panel
    alignas(64) float x[ROWS_AT_ONCE][2 * PAIRS_OF_A_PART + LANES];  // no two rows in the same lines of the cache

   public:
    const char* next = nullptr;  // part of a panel, which is fetched while this one's widened weights are multiplied

    const float* operator[](int r) const { return x[r]; }

    template <int ROWS>
    void read(const Product& product, int64_t row, int64_t begin, int64_t end) {
        for (int r = 0; r < ROWS; r++) {
            const uint16_t* from = product.x + (row + r) * product.in + 2 * begin;
            for (int64_t k = 0; k < 2 * (end - begin); k++) x[r][k] = widen(from[k]);
        }
    }
};

// Weights of a pair of inputs, for as many outputs as a register holds
inline IVec both_of(const uint16_t* from) {
    IVec both;
    std::memcpy(&both, from, sizeof both);
    return both;
}
inline IVec both_of(const int8_t* from) {
    typedef int16_t Halves __attribute__((vector_size(sizeof(IVec) / 2)));
    Halves both;
    std::memcpy(&both, from, sizeof both);
    return __builtin_convertvector(both, IVec);
}
inline Vec first_of(IVec both, const uint16_t*) { return (Vec)(both << 16); }
inline Vec second_of(IVec both, const uint16_t*) { return (Vec)(both & int32_t(0xffff0000)); }
inline Vec first_of(IVec both, const int8_t*) { return __builtin_convertvector((both << 24) >> 24, Vec); }
inline Vec second_of(IVec both, const int8_t*) { return __builtin_convertvector(both >> 8, Vec); }

// One input of each row with its weights, as `weight(v)` has them for as many outputs as a register holds; what there is
// less of is held.
template <int ROWS, int COUNT, class Weight>
inline void add_input(const Rows& rows, int64_t input, const Weight& weight, Vec (&sum)[ROWS][COUNT]) {
    if constexpr (ROWS < COUNT) {
        Vec x[ROWS];
#pragma GCC unroll 6
        for (int r = 0; r < ROWS; r++) x[r] = spread(rows[r] + input);
#pragma GCC unroll 8
        for (int v = 0; v < COUNT; v++) {
            const Vec w = weight(v);
#pragma GCC unroll 6
            for (int r = 0; r < ROWS; r++) sum[r][v] = multiply_add(x[r], w, sum[r][v]);
        }
    } else {
        Vec w[COUNT];
#pragma GCC unroll 8
        for (int v = 0; v < COUNT; v++) w[v] = weight(v);
#pragma GCC unroll 6
        for (int r = 0; r < ROWS; r++) {
            const Vec x = spread(rows[r] + input);
#pragma GCC unroll 8
            for (int v = 0; v < COUNT; v++) sum[r][v] = multiply_add(x, w[v], sum[r][v]);
        }
    }
}

template <class Weight>
constexpr bool in_strips = std::is_same_v<Weight, Widened>;

// Weights that were widened: of each input OUTPUTS_AT_ONCE beside each other. Each strip fetches its share of what is next.
template <int ROWS, int COUNT>
inline void add_pairs(const Rows& rows, const Widened* w, int output, int64_t pairs, Vec (&sum)[ROWS][COUNT]) {
    const char* next = rows.next + output * 4 * pairs;
    w += output * 2 * pairs;
    for (int64_t input = 0; input < 2 * pairs; input++, w += OUTPUTS_AT_ONCE, next += 2 * OUTPUTS_AT_ONCE) {
        __builtin_prefetch(next);
        add_input(rows, input, [w](int v) { return load(w + v * LANES); }, sum);
    }
}

// A part of a panel: strips of OUTPUTS_AT_ONCE outputs, one behind the other
template <class Weight>
void widen_part(const Weight* from, int64_t pairs, Widened* to, Rows& rows) {
    rows.next = (const char*)(from + pairs * WIDE * 2);
    for (int64_t pair = 0; pair < pairs; pair++, to += 2 * OUTPUTS_AT_ONCE)
        for (int o = 0; o < WIDE; o += LANES, from += LANES * 2) {
            Widened* place = to + o / OUTPUTS_AT_ONCE * OUTPUTS_AT_ONCE * 2 * pairs + o % OUTPUTS_AT_ONCE;
            store(place, first_of(both_of(from), from));
            store(place + OUTPUTS_AT_ONCE, second_of(both_of(from), from));
        }
}

// A pair's weights are read twice: to keep what was read, which holds both, there are no registers.
template <int ROWS, int COUNT, class Weight>
inline void add_pairs(const Rows& rows, const Weight* w, int output, int64_t pairs, Vec (&sum)[ROWS][COUNT]) {
    w += output * 2;
    const bool is_first = COUNT * LANES < WIDE && output == 0;  // of several that read the part: it fetches all
    for (int64_t pair = 0; pair < pairs; pair++, w += WIDE * 2) {
        if (is_first)
            for (size_t line = 0; line < WIDE * 2 * sizeof *w; line += 64)
                __builtin_prefetch((const char*)(w + PAIRS_AHEAD * WIDE * 2) + line);
        add_input(rows, 2 * pair, [w](int v) { return first_of(both_of(w + v * LANES * 2), w); }, sum);
        const Weight* again = w;
        asm("" : "+r"(again));
        add_input(rows, 2 * pair + 1, [again](int v) { return second_of(both_of(again + v * LANES * 2), again); }, sum);
    }
}
#endif

// Rows up to which weights are widened in registers, again for each ROWS_AT_ONCE; for more once
template <class Weight>
constexpr int64_t ROWS_NARROW = !WIDENS_ALL ? 36 : sizeof(Weight) == 1 ? 6 : 10;

// Adds to `sums` [ROWS][WIDE], which the first part finds empty, for OUTPUTS outputs from `output` on.
template <int ROWS, int OUTPUTS, class Weight>
inline void add_part(const Rows& rows, const Weight* part, int output, int64_t begin, int64_t end, float* sums) {
    constexpr int COUNT = OUTPUTS / LANES;
    Vec sum[ROWS][COUNT];
    sums += output;
#pragma GCC unroll 6
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 8
        for (int v = 0; v < COUNT; v++) {
            sum[r][v] = begin ? load(sums + r * WIDE + v * LANES) : Vec{};
        }
    add_pairs<ROWS, COUNT>(rows, part, output, end - begin, sum);
#pragma GCC unroll 6
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 8
        for (int v = 0; v < COUNT; v++) store(sums + r * WIDE + v * LANES, sum[r][v]);
}

// A single row takes the whole panel as it comes; few take as much of it as there are registers for.
template <int ROWS, class Weight>
inline void add_rest(const Product& product, Rows& rows, int64_t count, int64_t row, const Weight* part, int64_t begin,
                     int64_t end, float* sums) {
    constexpr int OUTPUTS = in_strips<Weight> || ROWS > (WIDENS_ALL ? 2 : 3) ? OUTPUTS_AT_ONCE
                            : ROWS == 1                   ? WIDE
                                                          : std::max(WIDE / 2, OUTPUTS_AT_ONCE);
    if (count == ROWS) {
        rows.template read<ROWS>(product, row, begin, end);
        for (int o = 0; o < WIDE; o += OUTPUTS) add_part<ROWS, OUTPUTS>(rows, part, o, begin, end, sums);
        return;
    }
    if constexpr (ROWS > 1) add_rest<ROWS - 1>(product, rows, count, row, part, begin, end, sums);
}

class Worker {
    const Product& product;
    Rows rows;
    alignas(64) float sums[ROWS_OF_A_TASK * WIDE];
    alignas(64) Widened wide[PAIRS_WIDENED * WIDE * 2];

    template <class Weight>
    void add(const Place& at, const Weight* weights, int64_t begin, int64_t end) {
        int64_t blocks = (at.last_row - at.first_row + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE;  // alike: one of few rows is slow
        for (int64_t row = at.first_row; row < at.last_row; blocks--) {
            const int64_t count = (at.last_row - row + blocks - 1) / blocks;
            add_rest<ROWS_AT_ONCE>(product, rows, count, row, weights, begin, end, sums + (row - at.first_row) * WIDE);
            row += count;
        }
    }

    template <class Weight>
    void add_panel(const Place& at) {
        constexpr bool WIDENS = WIDENS_ALL || sizeof(Weight) == 1;
        const bool is_widened_once = WIDENS && at.last_row - at.first_row > ROWS_NARROW<Weight>;
        const bool holds_few = WIDENS_ALL && at.last_row - at.first_row <= ROWS_FLOATS;
        const int64_t pairs = product.in / 2;
        const int64_t at_once = !is_widened_once ? PAIRS_OF_A_PART : holds_few ? FLOATS_WIDENED : PAIRS_WIDENED;
        const Weight* panel = (const Weight*)product.panel(at.panel);
        for (int64_t begin = 0; begin < pairs; begin += at_once) {
            const int64_t end = std::min(pairs, begin + at_once);
            const Weight* weights = panel + begin * WIDE * 2;
            if constexpr (WIDENS)
                if (is_widened_once) {
                    widen_part(weights, end - begin, wide, rows);
                    add(at, wide, begin, end);
                    continue;
                }
            add(at, weights, begin, end);
        }
    }

   public:
    explicit Worker(const Product& product) : product(product) {}

    void operator()(const Place& at) {
        product.scales ? add_panel<int8_t>(at) : add_panel<uint16_t>(at);
        for (int64_t row = at.first_row; row < at.last_row; row++)
            for (int v = 0; v < VECTORS; v++)
                finish(product, row, at.panel * WIDE + v * LANES, load(sums + (row - at.first_row) * WIDE + v * LANES));
    }
};

bool may_multiply() { return true; }

#endif

}  // namespace

extern "C" {

int32_t kvrelay_product_width() { return may_multiply() ? WIDE : 0; }

const char* kvrelay_product_instructions() { return INSTRUCTIONS; }

// Whether in panels of int8 each 8 pairs' bytes of two vectors lie by turns
int32_t kvrelay_product_turns() {
#ifdef LOOKS_UP
    return 1;
#else
    return 0;
#endif
}

int32_t kvrelay_product_inputs() { return INPUTS; }  // whose multiples a product's rows are long

void kvrelay_product(const void* x, const void* panels, const float* scales, const void* bias, void* to, int64_t rows,
                     int64_t in, int64_t out, int32_t threads) {
    const Product product{(const uint16_t*)x, panels, scales, (const uint16_t*)bias, (uint16_t*)to, rows, in, out};
    const Tasks tasks(product);
    const int64_t count = tasks.count();
    std::vector<Share> shares(threads);
    for (int t = 0; t < threads; t++) shares[t].give(count * t / threads, count * (t + 1) / threads);
#pragma omp parallel num_threads(threads) if (threads > 1 && count > 1)
    {
        const int own = omp_get_thread_num();
        Worker work(product);
        int64_t task;
        for (int t = 0; t < threads; t++)
            while (shares[(own + t) % threads].take(task, t > 0)) work(tasks[task]);
    }
}

}  // extern "C"
