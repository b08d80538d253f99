// What LoRA adapters add to a product: y += (x A) B * scale, for each row by its own adapter, so that one step holds many.
// Each row is computed alone, in a fixed order: its bits are the same whatever rows stand beside it.

#include <algorithm>

#include "kernels.h"
#include "vectors.h"

namespace {

constexpr int MAX_ROWS = 16;    // of a block
constexpr int MAX_RANK = 512;

// a [rank, in] lies in groups of GROUP of the rank, and of those WIDTH inputs of each beside each other; what a last group
// lacks of GROUP it has not. b [rank, out] lies in panels of PANEL outputs, of which the last may have fewer.
constexpr int GROUP = 4, WIDTH = 16, PANEL = 64;
#ifdef __AVX512F__
constexpr int VECTORS_AT_ONCE = 4;  // of a panel: of four rows there are registers for as many sums
#else
constexpr int VECTORS_AT_ONCE = 2;
#endif

// to[row][i] = scale * the sum over n of x[row][n] * a[i][n], for R rows and a group of I of the rank
template <int R, int I, class Element>
inline void shrink(const Element* x, const Element* a, int64_t in, float scale, float (*to)[MAX_RANK], int64_t at) {
    Vec sums[R][I] = {};
    const auto add = [&](const Element* x, const Element* a, int64_t width, auto get) {
        Vec rows[R];
        for (int r = 0; r < R; r++) rows[r] = get(x + r * in);
        for (int i = 0; i < I; i++) {
            const Vec weights = get(a + i * width);
            for (int r = 0; r < R; r++) sums[r][i] = fma(rows[r], weights, sums[r][i]);
        }
    };
    for (int64_t n = 0; n < in; n += WIDTH) {
        const int64_t width = std::min<int64_t>(WIDTH, in - n);
        int64_t at = 0;
        for (; at + LANES <= width; at += LANES)
            add(x + n + at, a + n * I + at, width, [](const Element* p) { return read(p); });
        if (const int64_t rest = width - at)
            add(x + n + at, a + n * I + at, width, [rest](const Element* p) { return read_some(p, rest); });
    }
    for (int r = 0; r < R; r++)
        for (int i = 0; i < I; i++) to[r][at + i] = scale * sum_lanes(sums[r][i]);
}

template <int R, class Element>
inline void shrink_rows(const Element* x, const KvrelayPart& part, int64_t in, float (*to)[MAX_RANK]) {
    const Element* a = (const Element*)part.a;
    int64_t i = 0;
    for (; i + GROUP <= part.rank; i += GROUP) shrink<R, GROUP>(x, a + i * in, in, part.scale, to, i);
    switch (part.rank - i) {
        case 3: return shrink<R, 3>(x, a + i * in, in, part.scale, to, i);
        case 2: return shrink<R, 2>(x, a + i * in, in, part.scale, to, i);
        case 1: return shrink<R, 1>(x, a + i * in, in, part.scale, to, i);
    }
}

// y[row][n] += the sum over i of t[row][i] * b[i][n], for R rows and V vectors of a panel of so many outputs
template <int R, int V, class Element, class Get, class Put>
inline void expand(const float (*t)[MAX_RANK], const Element* b, int64_t rank, int64_t outputs, Element* y,
                   int64_t stride, Get get, Put put) {
    Vec sums[R][V];
    for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++) sums[r][v] = get(y + r * stride + v * LANES);
    for (int64_t i = 0; i < rank; i++)
        for (int v = 0; v < V; v++) {
            const Vec weights = get(b + i * outputs + v * LANES);
            for (int r = 0; r < R; r++) sums[r][v] = fma(splat(t[r][i]), weights, sums[r][v]);
        }
    for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++) put(y + r * stride + v * LANES, sums[r][v]);
}

template <int R, class Element>
inline void expand_rows(const float (*t)[MAX_RANK], const KvrelayPart& part, int64_t width, Element* y, int64_t stride) {
    const auto get = [](const Element* p) { return read(p); };
    const auto put = [](Element* p, Vec v) { write(p, v); };
    const Element* b = (const Element*)part.b;
    const int64_t whole = width / PANEL * PANEL, last = width - whole;
    for (int64_t n = 0; n < whole; n += PANEL)
        for (int v = 0; v < PANEL; v += VECTORS_AT_ONCE * LANES)
            expand<R, VECTORS_AT_ONCE>(t, b + n * part.rank + v, part.rank, PANEL, y + n + v, stride, get, put);
    const Element* panel = b + whole * part.rank;
    int64_t n = 0;
    for (; n + LANES <= last; n += LANES)
        expand<R, 1>(t, panel + n, part.rank, last, y + whole + n, stride, get, put);
    if (const int64_t rest = last - n)
        expand<R, 1>(t, panel + n, part.rank, last, y + whole + n, stride,
                     [rest](const Element* p) { return read_some(p, rest); },
                     [rest](Element* p, Vec v) { write_some(p, v, rest); });
}

template <int R, class Element>
inline void adapt_rows(const Element* x, Element* y, int64_t in, int64_t out, const KvrelaySite& site,
                       const KvrelayPart* parts) {
    float t[R][MAX_RANK];
    for (int64_t p = 0; p < site.count; p++) {
        const KvrelayPart& part = parts[site.numbers[p]];
        if (!part.rank) continue;
        const int64_t begin = p ? site.ends[p - 1] : 0;
        shrink_rows<R>(x, part, in, t);
        expand_rows<R>(t, part, site.ends[p] - begin, y + begin, out);
    }
}

template <class Element>
void adapt(const Element* x, Element* y, int64_t in, int64_t out, const KvrelaySite& site, const KvrelayAdapters& step,
           int32_t threads) {
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (threads > 1 && step.blocks > 1)
    for (int64_t block = 0; block < step.blocks; block++) {
        const KvrelayPart* parts = step.parts[block];
        int64_t row = step.starts[block];
        const int64_t end = row + step.rows[block];
        for (; row + 4 <= end; row += 4) adapt_rows<4>(x + row * in, y + row * out, in, out, site, parts);
        for (; row < end; row++) adapt_rows<1>(x + row * in, y + row * out, in, out, site, parts);
    }
}

}  // namespace

extern "C" {

int32_t kvrelay_most_rank() { return MAX_RANK; }
int32_t kvrelay_block_rows() { return MAX_ROWS; }

// y [.., out] += what the step's adapters make of x [.., in]; element code as everywhere
void kvrelay_adapt(const void* x, void* y, int64_t in, int64_t out, const KvrelaySite* site,
                   const KvrelayAdapters* step, int32_t dtype, int32_t threads) {
    if (dtype)
        adapt((const uint16_t*)x, (uint16_t*)y, in, out, *site, *step, threads);
    else
        adapt((const float*)x, (float*)y, in, out, *site, *step, threads);
}
}
