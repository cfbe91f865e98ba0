// Causal attention of a few query rows over one head of a cache.
//
// The cache is taken in chunks that begin at fixed positions. What a row gives depends on its own position alone: on how
// many rows are computed together, or by whom, it does not.
#pragma once

namespace mtp {

constexpr int kChunk = 128;     // Positions of a chunk: keys and values of 256 numbers fill a second cache of 512 KB.
constexpr int kQueryTile = 4;   // Query rows that share one reading of a chunk.

// Softmax over the chunks so far, of one query row: the greatest score, the sum of exp(score - greatest), and the values
// weighted with these, float32[width].
struct Partial {
    float greatest, sum;
    float* values;
};

// What is brought into the cache while a chunk is worked off, since memory would idle meanwhile: the chunk's own values
// during the scores, then the keys of the next one. nullptr where it is there already, or where none follows.
struct Ahead {
    const float *values, *next_keys;
};

// One chunk: `visible[i]` of its positions are seen by query i, by a later one never fewer, by the last one at least one.
//
// Args:
//     queries: float32[count, width], scaled; the width a multiple of 8.
//     keys, values: the chunk's first row, float32[positions, width].
//     found: where to write, for each query.
void attend_chunk(const float* queries, int count, const int* visible, const float* keys, const float* values, int width,
                  Partial* const* found, const Ahead& ahead);

// Adds the next chunk to what was before it.
void fold(Partial& before, const Partial& next, int width);

}  // namespace mtp
