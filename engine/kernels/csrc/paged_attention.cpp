// Paged attention on CPUs: writes rows into KV pages, and attends over pages. Plain C interface; keeps no state.
//
// The promise is that a query row's bits depend on its own request only: not on the batch, the chunking, the tile it
// fell into or the number of threads. What it rests on:
//   - keys are visited in blocks of KEYS, aligned to absolute positions, in rising order, for prefill and decode alike;
//   - every (row, key) score and every (row, value column) sum has an accumulator of its own, filled in one fixed order,
//     with every multiply-add spelled out (compiled with -ffp-contract=off, so the compiler adds none);
//   - a hidden key weighs exactly 0, and a block that is hidden from a whole row leaves its state as it was, so that
//     skipping such blocks changes nothing;
//   - keys past a request's end are read as zeros: the page may hold another request's bytes, even NaN.
//
// Two ways to multiply. Exact: everything in float32. Pairs: where both K and V are bfloat16 and the CPU has
// AVX512-BF16, products of bfloat16 pairs summed in float32 (weights are rounded to bfloat16 before they meet V, as
// models do in their own bfloat16 attention); by AMX's tiles where it has them and 32 divides K's width. The choice
// depends on dtype, shape and CPU only.

#include "int8_rows.h"
#include "kernels.h"
#include "tiles.h"
#include "vectors.h"

#include <algorithm>
#include <cstdlib>
#include <limits>
#include <new>
#include <type_traits>
#include <vector>

namespace {

constexpr int KEYS = 64;          // of one block
constexpr int GROUPS = KEYS / LANES;
constexpr int TILE_ROWS = 128;    // query rows that share one packing of K and V, where there are few
constexpr int MOST_ROWS = 1024;   // that do, where there are many
constexpr int STEP_ROWS = 128;    // of a tile, that go through a packed block at once
constexpr int TILES_OF_A_THREAD = 6;  // at least, before tiles grow
#ifdef __AVX512F__
constexpr int ROWS_AT_ONCE = 4, VECTORS_AT_ONCE = 4;  // of the micro-kernel: as many accumulators as there are registers
#else
constexpr int ROWS_AT_ONCE = 6, VECTORS_AT_ONCE = 2;
#endif
constexpr int FEW_ROWS = 16;      // tiles with at most so many rows of a head wait for memory, not for arithmetic
constexpr int LINE = 64;          // bytes
constexpr int FETCHES = KEYS / LANES + KEYS / 2;  // in the course of a block
constexpr float NEG_INF = -std::numeric_limits<float>::infinity();
constexpr float LOG2_E = 1.44269504088896341f;

// ---- the micro-kernel: C[rows][16 * NV] (+)= A[rows][n] . B[n][16 * NV], A and B in 32-bit units ----
// `read_b(k, vectors)` reads B's row k.

struct Exact {
    static constexpr bool PAIRS = false;
    static inline Vec mac(Vec acc, const uint32_t* a, Vec b) {
        float x;
        std::memcpy(&x, a, sizeof x);
        return fma(splat(x), b, acc);
    }
};

struct Pairs {
    static constexpr bool PAIRS = true;
    static inline Vec mac(Vec acc, const uint32_t* a, Vec b) {
#ifdef __AVX512BF16__
        return (Vec)_mm512_dpbf16_ps((__m512)acc, (__m512bh)_mm512_set1_epi32(int(*a)), (__m512bh)b);
#else
        (void)a;
        (void)b;
        return acc;  // never chosen without AVX512-BF16
#endif
    }
};

template <class Dot, int MR, int NV, class ReadB>
inline void micro(const uint32_t* a, int64_t lda, const ReadB& read_b, int64_t n, float* c, int64_t ldc,
                  const float* scale) {  // scale: of the old C, for each row; null: C starts from 0
    Vec acc[MR][NV];
#pragma GCC unroll 8
    for (int i = 0; i < MR; i++)
#pragma GCC unroll 8
        for (int j = 0; j < NV; j++) acc[i][j] = scale ? load(c + i * ldc + j * LANES) * splat(scale[i]) : Vec{};
    for (int64_t k = 0; k < n; k++) {
        Vec bv[NV];
        read_b(k, bv);
#pragma GCC unroll 8
        for (int i = 0; i < MR; i++)
#pragma GCC unroll 8
            for (int j = 0; j < NV; j++) acc[i][j] = Dot::mac(acc[i][j], a + i * lda + k, bv[j]);
    }
#pragma GCC unroll 8
    for (int i = 0; i < MR; i++)
#pragma GCC unroll 8
        for (int j = 0; j < NV; j++) store(c + i * ldc + j * LANES, acc[i][j]);
}

template <class Dot, int MR, int NV>
inline void micro(const uint32_t* a, int64_t lda, const uint32_t* b, int64_t ldb, int64_t n, float* c, int64_t ldc,
                  const float* scale) {
    const auto read_b = [b, ldb](int64_t k, Vec (&bv)[NV]) {
#pragma GCC unroll 8
        for (int j = 0; j < NV; j++) bv[j] = load((const float*)(b + k * ldb) + j * LANES);
    };
    micro<Dot, MR, NV>(a, lda, read_b, n, c, ldc, scale);
}

// A block's rows, MR at a time, with as many columns at once as there are registers for; then those that are left over.
template <class Dot, int MR>
void product_rows(int64_t rows, int64_t columns, const uint32_t* a, int64_t lda, const uint32_t* b, int64_t ldb, int64_t n,
                  float* c, int64_t ldc, const float* scale) {
    constexpr int NV = std::min(ROWS_AT_ONCE * VECTORS_AT_ONCE / MR, 64 / LANES);
    const int64_t whole = rows / MR * MR;
    for (int64_t j = 0; whole && j < columns;) {
        const bool wide = j + NV * LANES <= columns;
        for (int64_t i = 0; i < whole; i += MR) {
            const float* old = scale ? scale + i : nullptr;
            if (wide)
                micro<Dot, MR, NV>(a + i * lda, lda, b + j, ldb, n, c + i * ldc + j, ldc, old);
            else
                micro<Dot, MR, 1>(a + i * lda, lda, b + j, ldb, n, c + i * ldc + j, ldc, old);
        }
        j += (wide ? NV : 1) * LANES;
    }
    if constexpr (MR > 1)
        if (rows > whole)
            product_rows<Dot, MR - 1>(rows - whole, columns, a + whole * lda, lda, b, ldb, n, c + whole * ldc, ldc,
                                      scale ? scale + whole : nullptr);
}

template <class Dot>
struct VectorProduct {
    static constexpr bool PAIRS = Dot::PAIRS;
    void operator()(int64_t rows, int64_t columns, const uint32_t* a, int64_t lda, const uint32_t* b, int64_t ldb, int64_t n,
                    float* c, int64_t ldc, const float* scale) {
        product_rows<Dot, ROWS_AT_ONCE>(rows, columns, a, lda, b, ldb, n, c, ldc, scale);
    }
};

#ifdef __AMX_BF16__

// The same of all rows by tiles: a product of pairs, with n a multiple of 16.
inline void tiles_of_four(const uint32_t* a, int64_t lda, const uint32_t* b, int64_t ldb, int64_t n, float* c, int64_t ldc,
                          bool adds) {
    if (adds) {
        _tile_loadd(0, c, ldc * 4);
        _tile_loadd(1, c + TILE, ldc * 4);
        _tile_loadd(2, c + 2 * TILE, ldc * 4);
        _tile_loadd(3, c + 3 * TILE, ldc * 4);
    } else {
        ZERO_SUMS;
    }
    for (int64_t k = 0; k < n; k += TILE, b += TILE * ldb) {
        _tile_loadd(4, a + k, lda * 4);
        _tile_loadd(6, b, ldb * 4);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, b + TILE, ldb * 4);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(6, b + 2 * TILE, ldb * 4);
        _tile_dpbf16ps(2, 4, 6);
        _tile_loadd(7, b + 3 * TILE, ldb * 4);
        _tile_dpbf16ps(3, 4, 7);
    }
    _tile_stored(0, c, ldc * 4);
    _tile_stored(1, c + TILE, ldc * 4);
    _tile_stored(2, c + 2 * TILE, ldc * 4);
    _tile_stored(3, c + 3 * TILE, ldc * 4);
}

inline void tiles_of_one(const uint32_t* a, int64_t lda, const uint32_t* b, int64_t ldb, int64_t n, float* c, int64_t ldc,
                         bool adds) {
    if (adds)
        _tile_loadd(0, c, ldc * 4);
    else
        _tile_zero(0);
    for (int64_t k = 0; k < n; k += TILE, b += TILE * ldb) {
        _tile_loadd(4, a + k, lda * 4);
        _tile_loadd(6, b, ldb * 4);
        _tile_dpbf16ps(0, 4, 6);
    }
    _tile_stored(0, c, ldc * 4);
}

class TileProduct {
    int64_t shaped = 0;  // rows that the tiles have now

   public:
    static constexpr bool PAIRS = true;
    void operator()(int64_t rows, int64_t columns, const uint32_t* a, int64_t lda, const uint32_t* b, int64_t ldb,
                    int64_t n, float* c, int64_t ldc, const float* scale) {
        for (int64_t i = 0; scale && i < rows; i++) {
            if (scale[i] == 1.0f) continue;
            for (int64_t j = 0; j < columns; j += LANES) store(c + i * ldc + j, load(c + i * ldc + j) * splat(scale[i]));
        }
        settle(a);
        settle(b);
        settle(c);
        for (int64_t i = 0; i < rows; i += TILE, a += TILE * lda, c += TILE * ldc) {
            const int64_t count = std::min<int64_t>(TILE, rows - i);
            if (count != shaped) shape_tiles(shaped = count, count);
            int64_t j = 0;
            for (; j + 4 * TILE <= columns; j += 4 * TILE) tiles_of_four(a, lda, b + j, ldb, n, c + j, ldc, scale);
            for (; j < columns; j += TILE) tiles_of_one(a, lda, b + j, ldb, n, c + j, ldc, scale);
        }
    }
    ~TileProduct() {
        if (shaped) _tile_release();
    }
};

#endif

// ---- packing ----

// LANES rows of `columns` 32-bit units -> out[column][LANES], rows `ldo` units apart
void transpose(const uint32_t* const rows[LANES], int64_t columns, uint32_t* out, int64_t ldo) {
    int64_t c = 0;
#ifdef __AVX512F__
    for (; c + LANES <= columns; c += LANES) {
        __m512i r[LANES], t[LANES];
        for (int i = 0; i < LANES; i++) r[i] = _mm512_loadu_si512(rows[i] + c);
        for (int i = 0; i < LANES; i += 2) {
            t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
            t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
        }
        for (int i = 0; i < LANES; i += 4) {
            r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
            r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
            r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
            r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
        }
        for (int i = 0; i < 4; i++) {
            t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
            t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
            t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
            t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
        }
        for (int i = 0; i < 4; i++) {
            uint32_t* o = out + (c + i) * ldo;
            _mm512_storeu_si512(o, _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88));
            _mm512_storeu_si512(o + 4 * ldo, _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88));
            _mm512_storeu_si512(o + 8 * ldo, _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd));
            _mm512_storeu_si512(o + 12 * ldo, _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd));
        }
    }
#elif defined __AVX2__
    for (; c + LANES <= columns; c += LANES) {
        __m256 r[LANES], t[LANES];
        for (int i = 0; i < LANES; i++) r[i] = _mm256_loadu_ps((const float*)(rows[i] + c));
        for (int i = 0; i < LANES; i += 2) {
            t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
            t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
        }
        for (int i = 0; i < LANES; i += 4) {
            r[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
            r[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xee);
            r[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
            r[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xee);
        }
        for (int i = 0; i < 4; i++) {
            float* o = (float*)(out + (c + i) * ldo);
            _mm256_storeu_ps(o, _mm256_permute2f128_ps(r[i], r[i + 4], 0x20));
            _mm256_storeu_ps(o + 4 * ldo, _mm256_permute2f128_ps(r[i], r[i + 4], 0x31));
        }
    }
#endif
    for (; c < columns; c++)
        for (int i = 0; i < LANES; i++) std::memcpy(out + c * ldo + i, rows[i] + c, sizeof(uint32_t));
}

void widen_row(const uint16_t* from, int64_t n, float* to) {
    for (int64_t i = 0; i < n; i++) to[i] = widen(from[i]);
}

// Of a block's vectors, each two neighbours to one, until one is left
template <class Both>
inline Vec folded(const Vec (&x)[GROUPS], const Both& both) {
    Vec y[GROUPS];
    std::memcpy(y, x, sizeof y);
    for (int n = GROUPS / 2; n; n /= 2)
        for (int i = 0; i < n; i++) y[i] = both(y[2 * i], y[2 * i + 1]);
    return y[0];
}

#ifdef __AVX512BF16__
struct Turns {
    alignas(64) uint16_t left[2 * LANES], right[2 * LANES];
    constexpr Turns() : left(), right() {
        for (int i = 0; i < 2 * LANES; i++) left[i] = uint16_t(i / 2 + i % 2 * 2 * LANES), right[i] = left[i] + LANES;
    }
};
constexpr Turns TURNS;

// Of two rows of bfloat16 a vector each -> two vectors of 32-bit units (low half: first row)
inline void interleave_two(const uint16_t* first, const uint16_t* second, Vec& left, Vec& right) {
    const __m512i a = _mm512_loadu_si512(first), b = _mm512_loadu_si512(second);
    left = (Vec)_mm512_permutex2var_epi16(a, _mm512_load_si512(TURNS.left), b);
    right = (Vec)_mm512_permutex2var_epi16(a, _mm512_load_si512(TURNS.right), b);
}
#endif

// Two rows of bfloat16 -> one row of 32-bit units (low half: first row), zeros up to `padded`
void interleave(const uint16_t* first, const uint16_t* second, int64_t n, int64_t padded, uint32_t* to) {
    int64_t i = 0;
#ifdef __AVX512BF16__
    for (; i + 2 * LANES <= n; i += 2 * LANES) {
        Vec left, right;
        interleave_two(first + i, second + i, left, right);
        store((float*)to + i, left);
        store((float*)to + i + LANES, right);
    }
#endif
    for (; i < n; i++) to[i] = uint32_t(first[i]) | uint32_t(second[i]) << 16;
    for (; i < padded; i++) to[i] = 0;
}

struct Tile {
    int64_t sequence, first_head, heads;  // KV heads first_head .. first_head + heads - 1
    int64_t first, count;                 // tokens, from the first-th of this step's
};

struct Scratch {
    char* memory = nullptr;
    size_t size = 0;
    char* reserve(size_t wanted) {
        if (wanted > size) {
            std::free(memory);
            size = (wanted + 4095) / 4096 * 4096;
            memory = static_cast<char*>(std::aligned_alloc(4096, size));
            if (!memory) {
                size = 0;
                throw std::bad_alloc();
            }
        }
        return memory;
    }
    ~Scratch() { std::free(memory); }
};

inline int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// Queries and outputs are Elements; pages hold the same, or int8.
template <class Element, class Product, class Kept>
class Attention {
    static constexpr bool PAIRS = Product::PAIRS;
    static constexpr bool WIDENS = !PAIRS && sizeof(Element) == 2;
    static constexpr bool INT8 = sizeof(Kept) == 1;
    static constexpr bool STRAIGHT = std::is_same_v<Product, VectorProduct<Pairs>> && !INT8;  // pages as vectors take them
    using Factor = std::conditional_t<PAIRS, uint16_t, float>;  // what is multiplied

    struct Rows {
        const Kept *k[KEYS], *v[KEYS];  // of KV head 0
    };

    // A head's share of what a tile reads of a block, to be there when it is computed: touched at once, by plain loads in the
    // order of addresses, which set the CPU's own prefetcher going; or fetched bit by bit while the block before it is
    // computed, into the second cache, for the first holds what is computed. The latter is the faster by far for STRAIGHT
    // pages, and for others now faster, now slower (Zen 4).
    class Ahead {
        const Rows* rows = nullptr;
        int64_t row = 0, end = 0, at = 0, k_first = 0, v_first = 0, k_bytes = 0, bytes = 0, lines = 0;

       public:
        Ahead() = default;  // nothing
        Ahead(const Attention& of, const Tile& tile, const Rows& rows, int64_t head)
            : rows(&rows),
              row(head * KEYS / tile.heads),
              end((head + 1) * KEYS / tile.heads),
              k_first(tile.first_head * of.k_width),
              v_first(tile.first_head * of.v_width),
              k_bytes(tile.heads * of.k_width * sizeof(Kept)),
              bytes(k_bytes + tile.heads * of.v_width * sizeof(Kept)),
              lines((end - row) * (bytes / LINE + 2) / FETCHES + 1) {}

        void touch() {
            for (; row < end; row++) {
                const auto *k = (const volatile char*)(rows->k[row] + k_first), *v = (const volatile char*)(rows->v[row] + v_first);
                for (int64_t i = 0; i < k_bytes; i += LINE) (void)k[i];
                for (int64_t i = 0; i < bytes - k_bytes; i += LINE) (void)v[i];
            }
        }

        void fetch() {  // one of FETCHES parts
            for (int64_t i = 0; i < lines && row < end; i++) {
                const bool is_key = at < k_bytes;
                const Kept* from = is_key ? rows->k[row] + k_first : rows->v[row] + v_first;
                __builtin_prefetch((const char*)from + (is_key ? at : at - k_bytes), 0, 2);
                at = is_key ? std::min(at + LINE, k_bytes) : at + LINE;
                if (at >= bytes) at = 0, row++;
            }
        }
    };

    const KvrelayAttention& a;
    const int64_t group, tile_rows, q_units, v_padded, k_width, v_width;
    const float to_exponent;  // from a product of q and k to the power of 2 that it weighs, or to tanh's argument
    uint32_t *q_tile, *k_block, *v_block, *weights;
    float *scores, *out_tile, *row_max, *row_sum, *row_scale, *wide;
    Kept* zeros;
    float k_scales[INT8 ? KEYS : 1], v_scales[INT8 ? KEYS : 1];
    Product product;

   public:
    Attention(const KvrelayAttention& args, int64_t rows_of_tile, Scratch& scratch)
        : a(args),
          group(args.heads / args.kv_heads),
          tile_rows(std::max<int64_t>(group, rows_of_tile)),
          q_units(PAIRS ? args.k_dim / 2 : args.k_dim),
          v_padded(round_up(args.v_dim, LANES)),
          k_width(kept_width<Kept>(args.k_dim)),
          v_width(kept_width<Kept>(args.v_dim)),
          to_exponent(args.softcap == 0.0f ? args.scaling * LOG2_E : args.scaling / args.softcap) {
        const int64_t widest = a.kv_heads * std::max(k_width, v_width);
        for (int pass = 0; pass < 2; pass++) {
            size_t at = 0;
            char* base = pass ? scratch.reserve(0) : nullptr;
            auto take = [&](int64_t units) {
                char* p = base ? base + at : nullptr;
                at += round_up(units * 4, 64);
                return p;
            };
            q_tile = (uint32_t*)take(tile_rows * q_units);
            k_block = (uint32_t*)take(q_units * KEYS);
            v_block = (uint32_t*)take(KEYS * v_padded);
            weights = (uint32_t*)take(STEP_ROWS * KEYS);
            scores = (float*)take(STEP_ROWS * KEYS);
            out_tile = (float*)take(tile_rows * v_padded);
            row_max = (float*)take(tile_rows);
            row_sum = (float*)take(tile_rows);
            row_scale = (float*)take(tile_rows);
            wide = (float*)take(WIDENS || INT8 ? LANES * a.k_dim : 0);
            zeros = (Kept*)take(widest + LANES);
            if (!pass) scratch.reserve(at);
        }
        std::memset(zeros, 0, sizeof(Kept) * widest);
    }

    // Rows of a tile: heads, in each the tokens, in each the query heads of the group.
    void run(const Tile& tile) {
        const int64_t start = a.starts[tile.sequence] + tile.first;  // position of the tile's first token
        const int64_t end = start + tile.count;                      // keys this tile may read: [low, end)
        const int64_t low = std::max<int64_t>(0, a.oldest(start));
        const int64_t rows = tile.count * group;                     // of one head
        begin(tile);
        Rows ring[2];
        Ahead ahead;
        const int64_t first_block = low / KEYS * KEYS;
        locate(tile, first_block, end, ring[0]);
        for (int64_t h = 0; rows <= FEW_ROWS && h < tile.heads; h++) Ahead(*this, tile, ring[0], h).touch();
        for (int64_t block = first_block; block < end; block += KEYS) {
            const int64_t turn = (block - first_block) / KEYS & 1;
            Rows &here = ring[turn], &next = ring[1 - turn];
            const bool more = block + KEYS < end;
            if (more) locate(tile, block + KEYS, end, next);
            for (int64_t h = 0; h < tile.heads; h++) {
                const int64_t head = tile.first_head + h;
                if (more && rows <= FEW_ROWS) ahead = Ahead(*this, tile, next, h);
                if (!STRAIGHT) ahead.touch();
                for (int i = 0; i < KEYS; i += LANES) {
                    ahead.fetch();
                    pack_keys(here.k + i, head * k_width, k_block + i, k_scales + (INT8 ? i : 0));
                }
                if (!takes_values_as_they_lie(rows)) pack_values(here.v, head * v_width, ahead);
                // rows that see nothing of this block are left out, as whole steps of the products
                for (int64_t from = std::max<int64_t>(0, block - start) * group / LANES * LANES; from < rows; from += STEP_ROWS)
                    step(h * rows + from, std::min<int64_t>(STEP_ROWS, rows - from), start + from / group, from % group, block,
                         head, here, ahead);
            }
        }
        finish(tile);
    }

   private:
    int64_t first_row(const Tile& tile) const { return a.query_starts[tile.sequence] + tile.first; }

    void begin(const Tile& tile) {
        const Element* q = (const Element*)a.q + first_row(tile) * a.q_row_stride;
        int64_t row = 0;
        for (int64_t h = tile.first_head; h < tile.first_head + tile.heads; h++)
            for (int64_t t = 0; t < tile.count; t++)
                for (int64_t head = h * group; head < (h + 1) * group; head++, row++) {
                    const Element* from = q + t * a.q_row_stride + head * a.q_head_stride;
                    uint32_t* to = q_tile + row * q_units;
                    if constexpr (WIDENS)
                        widen_row((const uint16_t*)from, a.k_dim, (float*)to);
                    else
                        std::memcpy(to, from, a.k_dim * sizeof(Element));
                    row_max[row] = a.sinks ? a.sinks[head] * LOG2_E : NEG_INF;
                    row_sum[row] = a.sinks ? 1.0f : 0.0f;
                }
        std::memset(out_tile, 0, sizeof(float) * row * v_padded);
    }

    // Where the keys at positions block .. block + KEYS - 1 stand; zeros from `end` on
    void locate(const Tile& tile, int64_t block, int64_t end, Rows& found) const {
        const int32_t* table = a.block_tables + tile.sequence * a.table_stride;
        int64_t page = -1, slot = 0;
        for (int i = 0; i < KEYS; i++) {
            const int64_t position = block + i;
            if (position >= end) {
                found.k[i] = found.v[i] = zeros;
                continue;
            }
            if (page < 0 || slot + 1 == a.page_size) {
                page = table[position / a.page_size];
                slot = position % a.page_size;
            } else {
                slot++;
            }
            const int64_t token = page * a.page_size + slot;
            found.k[i] = (const Kept*)a.k_pages + token * a.k_token_stride;
            found.v[i] = (const Kept*)a.v_pages + token * a.v_token_stride;
        }
    }

    void pack_keys(const Kept* const* keys, int64_t offset, uint32_t* to, float* scales) {
        const uint32_t* rows[LANES];
        for (int i = 0; i < LANES; i++) {
            if constexpr (INT8) {
                Factor* row = (Factor*)wide + i * a.k_dim;
                numbers(keys[i] + offset, a.k_dim, row);
                scales[i] = scale_of(keys[i] + offset, a.k_dim);
                rows[i] = (const uint32_t*)row;
            } else if constexpr (WIDENS) {
                widen_row((const uint16_t*)(keys[i] + offset), a.k_dim, wide + i * a.k_dim);
                rows[i] = (const uint32_t*)(wide + i * a.k_dim);
            } else {
                rows[i] = (const uint32_t*)(keys[i] + offset);
            }
        }
        transpose(rows, q_units, to, KEYS);
    }

    void pack_values(const Kept* const* values, int64_t offset, Ahead& ahead) {
        if constexpr (INT8)
            for (int i = 0; i < KEYS; i++) v_scales[i] = scale_of(values[i] + offset, a.v_dim);
        if constexpr (PAIRS) {
            for (int i = 0; i < KEYS; i += 2) {
                ahead.fetch();
                uint32_t* to = v_block + i / 2 * v_padded;
                if constexpr (INT8) {
                    numbers_of_two(values[i] + offset, values[i + 1] + offset, a.v_dim, to);
                    for (int64_t j = a.v_dim; j < v_padded; j++) to[j] = 0;
                } else {
                    interleave((const uint16_t*)(values[i] + offset), (const uint16_t*)(values[i + 1] + offset), a.v_dim,
                               v_padded, to);
                }
            }
        } else {
            for (int i = 0; i < KEYS; i++) {
                float* to = (float*)v_block + i * v_padded;
                if constexpr (INT8)
                    numbers(values[i] + offset, a.v_dim, to);
                else if constexpr (WIDENS)
                    widen_row((const uint16_t*)(values[i] + offset), a.v_dim, to);
                else
                    std::memcpy(to, values[i] + offset, a.v_dim * sizeof(float));
                for (int64_t j = a.v_dim; j < v_padded; j++) to[j] = 0.0f;
            }
        }
    }

    // Rows of one head, of which the first stands at `position` as its `member`-th query head, over one packed block
    void step(int64_t first, int64_t rows, int64_t position, int64_t member, int64_t block, int64_t head, const Rows& here,
              Ahead& ahead) {
        constexpr int64_t units = PAIRS ? KEYS / 2 : KEYS;
        product(rows, KEYS, q_tile + first * q_units, q_units, k_block, KEYS, q_units, scores, KEYS, nullptr);
        for (int64_t row = 0; row < rows; row++) {
            weigh(first + row, row, position, block, head * group + member);
            if (++member == group) position++, member = 0;
        }
        if constexpr (STRAIGHT)
            if (takes_values_as_they_lie(rows))
                return add_values<ROWS_AT_ONCE>(rows, first, here.v, head * v_width, ahead);
        product(rows, v_padded, weights, units, v_block, v_padded, units, out_tile + first * v_padded, v_padded,
                row_scale + first);
    }

    // Few rows' sums stay in registers, and values are paired on their way from memory, in the order of `product`.
    bool takes_values_as_they_lie(int64_t rows) const {
        return STRAIGHT && rows <= ROWS_AT_ONCE && a.v_dim % (VECTORS_AT_ONCE * LANES) == 0;
    }

    template <int ROWS>
    void add_values(int64_t rows, int64_t first, const Kept* const* values, int64_t offset, Ahead& ahead) {
        if (rows < ROWS) {
            if constexpr (ROWS > 1) add_values<ROWS - 1>(rows, first, values, offset, ahead);
            return;
        }
        constexpr int64_t units = KEYS / 2;
        for (int64_t column = 0; column < a.v_dim; column += VECTORS_AT_ONCE * LANES) {
            const auto read_pair = [&](int64_t pair, Vec (&both)[VECTORS_AT_ONCE]) {
                if (column == 0) ahead.fetch();
                const Kept *one = values[2 * pair] + offset + column, *other = values[2 * pair + 1] + offset + column;
#pragma GCC unroll 4
                for (int v = 0; v < VECTORS_AT_ONCE; v += 2)
                    interleave_two(one + v * LANES, other + v * LANES, both[v], both[v + 1]);
            };
            micro<Pairs, ROWS, VECTORS_AT_ONCE>(weights, units, read_pair, units, out_tile + first * v_padded + column,
                                                v_padded, row_scale + first);
        }
    }

    // Online softmax (Milakov and Gimelshein, 2018) of one row over one block of scores
    void weigh(int64_t row, int64_t of_step, int64_t position, int64_t block, int64_t head) {
        float* s = scores + of_step * KEYS;
        const int64_t oldest = a.oldest(position);
        const int32_t last = position - block >= KEYS ? KEYS : int32_t(position - block);
        const int32_t first = oldest <= block ? 0 : oldest - block >= KEYS ? KEYS : int32_t(oldest - block);
        if (last < 0 || first >= KEYS) {  // nothing to see: weights of 0, state as it was
            std::memset(weights + of_step * (PAIRS ? KEYS / 2 : KEYS), 0, PAIRS ? KEYS * 2 : KEYS * 4);
            row_scale[row] = 1.0f;
            return;
        }
        Vec x[GROUPS];
        for (int g = 0; g < GROUPS; g++) {
            x[g] = load(s + g * LANES) * splat(to_exponent);
            if constexpr (INT8) x[g] = x[g] * load(k_scales + g * LANES);
        }
        if (a.softcap != 0.0f)
            for (int g = 0; g < GROUPS; g++) x[g] = tanh_any(x[g]) * splat(a.softcap * LOG2_E);
        const IVec lane = numbered();
        if (a.slopes) {
            const Vec slope = splat(a.slopes[head] * LOG2_E), behind = splat(float(block - position));
            for (int g = 0; g < GROUPS; g++)
                x[g] = fma(slope, __builtin_convertvector(lane + g * LANES, Vec) + behind, x[g]);
        }
        if (last < KEYS - 1 || first > 0) {
            for (int g = 0; g < GROUPS; g++) {
                const IVec key = lane + g * LANES;
                x[g] = (key <= last) & (key >= first) ? x[g] : splat(NEG_INF);
            }
        }
        const float block_max = max_lanes(folded(x, larger));
        const float new_max = row_max[row] > block_max ? row_max[row] : block_max;
        for (int g = 0; g < GROUPS; g++) x[g] = exp2_nonpositive(x[g] - splat(new_max));
        const float sum = sum_lanes(folded(x, [](Vec a, Vec b) { return a + b; }));
        const float scale = row_max[row] == new_max ? 1.0f : exp2_nonpositive(splat(row_max[row] - new_max))[0];
        row_sum[row] = __builtin_fmaf(row_sum[row], scale, sum);
        row_max[row] = new_max;
        row_scale[row] = scale;
        store_weights(of_step, x);
    }

    void store_weights(int64_t row, Vec* x) {
        if constexpr (INT8)  // the products are of whole numbers: what they are times is left to scores and weights
            for (int g = 0; g < GROUPS; g++) x[g] = x[g] * load(v_scales + g * LANES);
        if constexpr (PAIRS) {
            uint16_t* w = (uint16_t*)(weights + row * (KEYS / 2));
            for (int g = 0; g < GROUPS; g++) write(w + g * LANES, x[g]);
        } else {
            for (int g = 0; g < GROUPS; g++) store((float*)weights + row * KEYS + g * LANES, x[g]);
        }
    }

    void finish(const Tile& tile) {
        Element* out = (Element*)a.out + first_row(tile) * a.heads * a.v_dim;
        int64_t row = 0;
        for (int64_t h = tile.first_head; h < tile.first_head + tile.heads; h++)
            for (int64_t t = 0; t < tile.count; t++)
                for (int64_t head = h * group; head < (h + 1) * group; head++, row++)
                    write_row(out_tile + row * v_padded, 1.0f / row_sum[row], out + (t * a.heads + head) * a.v_dim);
    }

    void write_row(const float* from, float inverse, Element* to) const {
        each_vector<Element>(a.v_dim, [&](int64_t i, auto, auto put) { put(to + i, load(from + i) * splat(inverse)); });
    }
};

// Query rows of a tile: as many as leave every thread some tiles
int64_t tile_rows_of(const KvrelayAttention& args) {
    const int64_t rows = int64_t(args.query_starts[args.sequences]) * args.heads;  // of all heads
    int64_t tile = MOST_ROWS;
    while (tile > TILE_ROWS && rows < TILES_OF_A_THREAD * args.threads * tile) tile /= 2;
    return tile;
}

// A tile is many tokens of one KV head, whose K and V are then packed once for all of them; or few tokens of many heads,
// so that memory is read in order. With too few sequences to keep the threads busy, the heads are dealt out instead.
void cut(const KvrelayAttention& args, int64_t rows_of_tile, std::vector<Tile>& tiles) {
    const int64_t group = args.heads / args.kv_heads;
    const int64_t tokens = std::max<int64_t>(1, rows_of_tile / group);
    for (int64_t s = 0; s < args.sequences; s++) {
        const int64_t length = args.query_starts[s + 1] - args.query_starts[s];
        const bool few = length * group <= FEW_ROWS;
        const int64_t fitting = few ? TILE_ROWS / (length * group) : 1;
        const int64_t fair = (args.kv_heads * args.sequences + 2 * args.threads - 1) / (2 * args.threads);
        int64_t heads = args.threads == 1 || fitting < fair ? fitting : fair;
        heads = heads < args.kv_heads ? heads : args.kv_heads;
        for (int64_t first = (length - 1) / tokens * tokens; first >= 0; first -= tokens)
            for (int64_t head = 0; head < args.kv_heads; head += heads)
                tiles.push_back({s, head, args.kv_heads - head < heads ? args.kv_heads - head : heads, first,
                                 length - first < tokens ? length - first : tokens});
    }
}

// Tiles are dealt out one at a time, a sequence's last (and longest) first: who computes one changes no bit.
template <class Element, class Product, class Kept>
int attend_kept(const KvrelayAttention& args) {
    std::vector<Tile> tiles;
    const int64_t rows_of_tile = tile_rows_of(args);
    try {
        cut(args, rows_of_tile, tiles);
    } catch (const std::bad_alloc&) {
        return 1;
    }
    const int64_t count = int64_t(tiles.size());
    int failed = 0;
#pragma omp parallel for schedule(dynamic, 1) num_threads(args.threads) if (count > 1 && args.threads > 1)
    for (int64_t i = 0; i < count; i++) {
        static thread_local Scratch scratch;
        try {
            Attention<Element, Product, Kept>(args, rows_of_tile, scratch).run(tiles[i]);
        } catch (const std::bad_alloc&) {
#pragma omp atomic write
            failed = 1;
        }
    }
    return failed;
}

template <class Element, class Product>
int attend(const KvrelayAttention& args) {
    return args.int8 ? attend_kept<Element, Product, int8_t>(args) : attend_kept<Element, Product, Element>(args);
}

}  // namespace

extern "C" {

// Attends; `out` rows outside every sequence are not touched. 0, or 1 when memory ran out.
int kvrelay_attend(const KvrelayAttention* args) {
    if (args->dtype == 0) return attend<float, VectorProduct<Exact>>(*args);
#ifdef __AMX_BF16__
    if (args->k_dim % (2 * TILE) == 0 && may_use_tiles()) return attend<uint16_t, TileProduct>(*args);
#endif
#ifdef __AVX512BF16__
    if (args->k_dim % 2 == 0) return attend<uint16_t, VectorProduct<Pairs>>(*args);
#endif
    return attend<uint16_t, VectorProduct<Exact>>(*args);
}

// Copies rows [rows, heads, dim] with the given strides, in bytes, into pages at slots: [slots, heads, dim], slots
// token_stride bytes apart.
void kvrelay_write(const char* from, int64_t row_stride, int64_t head_stride, char* pages, const int64_t* slots,
                   int64_t rows, int64_t heads, int64_t dim_bytes, int64_t token_stride) {
    for (int64_t row = 0; row < rows; row++) {
        char* to = pages + slots[row] * token_stride;
        const char* source = from + row * row_stride;
        if (head_stride == dim_bytes) {
            std::memcpy(to, source, heads * dim_bytes);
            continue;
        }
        for (int64_t head = 0; head < heads; head++) std::memcpy(to + head * dim_bytes, source + head * head_stride, dim_bytes);
    }
}
}
