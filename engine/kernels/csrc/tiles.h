// AMX's tiles, where the compiler knows them: 16 rows of 64 bytes. A product's sums are tiles 0 to 3, its inputs 4 and 5,
// its weights 6 and 7; 16 pairs of 16 outputs are a tile of weights as they lie.

#pragma once

#ifdef __AMX_BF16__

#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>

namespace {

constexpr int TILE = 16;  // rows of a tile; outputs, or pairs of inputs, side by side in it
constexpr int REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;  // arch_prctl's, of Linux

struct alignas(64) TileShapes {  // LDTILECFG's
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {};
};

// GCC's intrinsics do not say all that they read: what was written to `memory` is there after this.
inline void settle(const void* memory) { asm volatile("" ::"r"(memory) : "memory"); }

// Rows of the upper sums and inputs (tiles 0, 1, 4) and of the lower ones (2, 3, 5)
inline void shape_tiles(int64_t upper, int64_t lower) {
    TileShapes shapes;
    const int64_t rows[] = {upper, upper, lower, lower, upper, lower, TILE, TILE};
    std::copy(rows, rows + 8, shapes.rows);
    settle(&shapes);
    _tile_loadconfig(&shapes);
}

inline bool may_use_tiles() {
    static const bool may = syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
    return may;
}

}  // namespace

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

#endif
