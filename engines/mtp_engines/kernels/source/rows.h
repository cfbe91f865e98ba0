// Rows of activations, turned by Hadamard matrices and rounded to integers.
#pragma once

#include <cstdint>
#include <type_traits>
#include <vector>

#include "processor.h"

namespace mtp {

constexpr int kBlock = 64;  // Integers of a block of 4 bits,
constexpr int kUsed = 63;   // and the columns that they stand for.

// Rows are multiplied in tiles, then those that are left. What a step reads of the rows of a tile lies together: a few
// values of its first row, as many of its second, and so on.
constexpr int kTile = 4;
constexpr int kWideTile = 8;  // With VNNI there are registers for so many.

constexpr int tile_of(Instructions used) { return used == Instructions::vnni ? kWideTile : kTile; }

// Calls `work(std::integral_constant<int, M>(), row)` for each tile of M rows from `row` on.
template <int most, class Work>
void in_tiles(int rows, Work work) {
    int row = 0;
    for (; row + most <= rows; row += most) work(std::integral_constant<int, most>(), row);
    if constexpr (most > kTile)
        switch (rows - row) {
            case 7: return work(std::integral_constant<int, 7>(), row);
            case 6: return work(std::integral_constant<int, 6>(), row);
            case 5: return work(std::integral_constant<int, 5>(), row);
            case 4: return work(std::integral_constant<int, 4>(), row);
            default: break;
        }
    switch (rows - row) {
        case 3: return work(std::integral_constant<int, 3>(), row);
        case 2: return work(std::integral_constant<int, 2>(), row);
        case 1: return work(std::integral_constant<int, 1>(), row);
        default: return;
    }
}

// Where a tile begins, how many rows it has, and which of them a row is.
struct Place {
    int first, count, within;

    Place(int row, int rows, int most) {
        first = row / most * most;
        count = rows - first < most ? rows - first : most;
        within = row - first;
    }
};

// Rows for a matrix of 4-bit blocks: 64 integers for 63 columns, and a scale for each block.
struct BlockInput {
    int rows = 0, blocks = 0, tile = kTile;
    std::vector<int8_t> values;    // of each tile [blocks, 16, rows, 4]
    std::vector<float> scales;     // of each tile [blocks, rows]
    std::vector<int32_t> offsets;  // the same, -8 times the sum of a block: stored integers are 8 too large

    void resize(int row_count, int block_count, Instructions used);
    // float32[columns] to row `row`.
    void set(int row, const float* x, int columns);
};

// Rows for a matrix of 8-bit integers with one scale a row: integers of 11 to 16 bits.
struct RotatedInput {
    int rows = 0, columns = 0, tile = kTile;
    std::vector<int16_t> values;  // of each tile [columns / 2, rows, 2], the columns even
    std::vector<float> scales;    // [rows]

    void resize(int row_count, int column_count, Instructions used);
    // float32[stored_columns], turned in runs of `run` columns, to row `row`.
    void set(int row, const float* x, int stored_columns, int run);
};

}  // namespace mtp
