// Weights into the panels that products.cpp reads: of so many outputs each, pairs of inputs [pairs, outputs], what the
// last panel lacks 0. A pair is moved as one number: two of bfloat16, or two of int8. Widths are multiples of TILE.

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace {

constexpr int64_t TILE = 16;  // rows and pairs that are turned at once: as many rows as a CPU fetches ahead of

template <typename Pair>
void turn(const Pair* const* rows, int64_t here, int64_t start, int64_t end, Pair* to, int64_t width) {
    Pair tile[TILE][TILE] = {};
    for (int64_t i = 0; i < here; ++i) std::memcpy(tile[i], rows[i] + start, (end - start) * sizeof(Pair));
    for (int64_t pair = start; pair < end; ++pair)
        for (int64_t i = 0; i < TILE; ++i) to[pair * width + i] = tile[i][pair - start];
}

template <typename Pair>
void fill(const Pair* const* parts, const int64_t* ends, int64_t count, Pair* panels, int64_t pairs, int64_t width,
          int threads) {
    const int64_t outputs = ends[count - 1], tiles = (outputs + width - 1) / width * width / TILE;
#pragma omp parallel for schedule(dynamic, 4) num_threads(threads) if (threads > 1)
    for (int64_t tile = 0; tile < tiles; ++tile) {
        const Pair* rows[TILE];
        const int64_t first = tile * TILE, here = std::clamp<int64_t>(outputs - first, 0, TILE);
        for (int64_t i = 0; i < here; ++i) {
            const int64_t part = std::upper_bound(ends, ends + count, first + i) - ends;
            rows[i] = parts[part] + (first + i - (part ? ends[part - 1] : 0)) * pairs;
        }
        Pair* to = panels + first / width * width * pairs + first % width;
        for (int64_t start = 0; start < pairs; start += TILE)
            turn(rows, here, start, std::min(start + TILE, pairs), to, width);
    }
}

}  // namespace

extern "C" {

// `parts`: weights whose rows stand one behind the other, each of `pairs` pairs; `ends`: where each one's outputs end
void kvrelay_fill_panels(const void* const* parts, const int64_t* ends, int64_t count, void* panels, int64_t pairs,
                         int64_t width, int32_t pair_bytes, int32_t threads) {
    if (pair_bytes == 4)
        fill(reinterpret_cast<const uint32_t* const*>(parts), ends, count, static_cast<uint32_t*>(panels), pairs, width,
             threads);
    else
        fill(reinterpret_cast<const uint16_t* const*>(parts), ends, count, static_cast<uint16_t*>(panels), pairs, width,
             threads);
}

}  // extern "C"
