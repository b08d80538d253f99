// What LoRA adapters add to a product: y += (x A) B * scale, for each row by its own adapter, so that one step holds many.
// Each row is computed alone, in a fixed order: its bits are the same whatever rows stand beside it.

#include <algorithm>

#include "kernels.h"
#include "vectors.h"

namespace {

constexpr int MAX_ROWS = 16;    // of a block
constexpr int MAX_RANK = 512;

// to[row][i] = scale * the sum over n of x[row][n] * a[i][n], for R rows and I of the rank at once
template <int R, int I, class Element>
inline void shrink(const Element* x, const Element* a, int64_t in, float scale, float (*to)[MAX_RANK], int64_t at) {
    Vec sums[R][I] = {};
    int64_t n = 0;
    const auto add = [&](auto get) {
        Vec rows[R];
        for (int r = 0; r < R; r++) rows[r] = get(x + r * in + n);
        for (int i = 0; i < I; i++) {
            const Vec weights = get(a + (at + i) * in + n);
            for (int r = 0; r < R; r++) sums[r][i] = fma(rows[r], weights, sums[r][i]);
        }
    };
    for (; n + LANES <= in; n += LANES) add([](const Element* p) { return read(p); });
    if (const int64_t rest = in - n) add([rest](const Element* p) { return read_some(p, rest); });
    for (int r = 0; r < R; r++)
        for (int i = 0; i < I; i++) to[r][at + i] = scale * sum_lanes(sums[r][i]);
}

template <int R, class Element>
inline void shrink_rows(const Element* x, const KvrelayPart& part, int64_t in, float (*to)[MAX_RANK]) {
    const Element* a = (const Element*)part.a;
    int64_t i = 0;
    for (; i + 4 <= part.rank; i += 4) shrink<R, 4>(x, a, in, part.scale, to, i);
    for (; i < part.rank; i++) shrink<R, 1>(x, a, in, part.scale, to, i);
}

// y[row][n] += the sum over i of t[row][i] * b[i][n], for R rows and V vectors at once
template <int R, int V, class Element, class Get, class Put>
inline void expand(const float (*t)[MAX_RANK], const KvrelayPart& part, int64_t width, Element* y, int64_t stride,
                   int64_t n, Get get, Put put) {
    const Element* b = (const Element*)part.b + n;
    Vec sums[R][V];
    for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++) sums[r][v] = get(y + r * stride + n + v * LANES);
    for (int64_t i = 0; i < part.rank; i++)
        for (int v = 0; v < V; v++) {
            const Vec weights = get(b + i * width + v * LANES);
            for (int r = 0; r < R; r++) sums[r][v] = fma(splat(t[r][i]), weights, sums[r][v]);
        }
    for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++) put(y + r * stride + n + v * LANES, sums[r][v]);
}

template <int R, class Element>
inline void expand_rows(const float (*t)[MAX_RANK], const KvrelayPart& part, int64_t width, Element* y, int64_t stride) {
    const auto get = [](const Element* p) { return read(p); };
    const auto put = [](Element* p, Vec v) { write(p, v); };
    int64_t n = 0;
    for (; n + 4 * LANES <= width; n += 4 * LANES) expand<R, 4>(t, part, width, y, stride, n, get, put);
    for (; n + LANES <= width; n += LANES) expand<R, 1>(t, part, width, y, stride, n, get, put);
    if (const int64_t rest = width - n)
        expand<R, 1>(t, part, width, y, stride, n, [rest](const Element* p) { return read_some(p, rest); },
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
