// The operator `CachedAttention`: new rows are written into the caches, then attend to all rows up to their own.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>
#include <vector>

#include "attention.h"
#include "operators.h"

namespace mtp {
namespace {

constexpr int kMostShared = 64;  // Query rows of a cache head for which its chunks are shared out among threads.
constexpr size_t kMostNumbers = size_t{16} << 20;  // Of partial results, which a calling thread keeps for the next call.
constexpr int kRowBlock = 8;     // Otherwise each task takes so many rows over the whole cache.

struct Kernel {
    Api api;
    int64_t heads, kv_heads;
};

struct Attention {
    const float *query, *key, *value;
    const int64_t* lengths;
    float *keys, *values, *output;
    int batch, rows, heads, kv_heads, dim, width, capacity;
    float scale;
    // Of the shared form: one partial result for each query row and chunk.
    int chunks = 0;
    std::vector<float>* memory = nullptr;

    int group() const { return heads / kv_heads; }
    int queries() const { return rows * group(); }

    const float* cache(const float* of, int sequence, int head, int position) const {
        return of + ((static_cast<size_t>(sequence) * kv_heads + head) * capacity + position) * width;
    }
    // Query i of a cache head is head i % group of row i / group. Scaled, filled up with zeros.
    void load_query(int sequence, int head, int i, float* to) const {
        const size_t row = static_cast<size_t>(sequence) * rows + i / group();
        const float* from = query + (row * heads + head * group() + i % group()) * dim;
        for (int d = 0; d < dim; ++d) to[d] = from[d] * scale;
        std::fill(to + dim, to + width, 0.f);
    }
    int visible(int sequence, int i, int chunk) const {
        const int64_t seen = lengths[sequence] + i / group() + 1 - static_cast<int64_t>(chunk) * kChunk;
        return static_cast<int>(std::clamp<int64_t>(seen, 0, kChunk));
    }
    int chunks_of(int sequence, int i) const {
        return static_cast<int>((lengths[sequence] + i / group() + kChunk) / kChunk);
    }
    void store(int sequence, int head, int i, const Partial& found) const {
        const size_t row = static_cast<size_t>(sequence) * rows + i / group();
        float* to = output + (row * heads + head * group() + i % group()) * dim;
        const float factor = 1 / found.sum;
        for (int d = 0; d < dim; ++d) to[d] = found.values[d] * factor;
    }
    Partial partial(int sequence, int head, int chunk, int i) const {
        const size_t place = ((static_cast<size_t>(sequence) * kv_heads + head) * chunks + chunk) * queries() + i;
        float* at = memory->data() + place * (width + 2);
        return {at[0], at[1], at + 2};
    }
};

void append(void* data, size_t task) {
    const Attention& a = *static_cast<Attention*>(data);
    const int sequence = static_cast<int>(task) / a.rows, row = static_cast<int>(task) % a.rows;
    for (int head = 0; head < a.kv_heads; ++head) {
        const size_t from = (task * a.kv_heads + head) * a.dim;
        const int position = static_cast<int>(a.lengths[sequence]) + row;
        for (auto [rows, cache] : {std::pair{a.key, a.keys}, std::pair{a.value, a.values}}) {
            float* to = const_cast<float*>(a.cache(cache, sequence, head, position));
            std::memcpy(to, rows + from, a.dim * sizeof(float));
            std::fill(to + a.dim, to + a.width, 0.f);
        }
    }
}

// A chunk of a cache head, for up to four queries from `first` on.
void attend_tile(const Attention& a, int sequence, int head, int chunk, int first, const float* queries,
                 Partial* const* found, bool is_first) {
    const int count = std::min(kQueryTile, a.queries() - first);
    int visible[kQueryTile];
    for (int q = 0; q < count; ++q) visible[q] = a.visible(sequence, first + q, chunk);
    const float* values = a.cache(a.values, sequence, head, chunk * kChunk);
    Ahead ahead{};
    // Later tiles find what the first one has read.
    if (is_first) {
        const bool follows = chunk + 1 < a.chunks_of(sequence, a.queries() - 1);
        ahead = {values, follows ? a.cache(a.keys, sequence, head, (chunk + 1) * kChunk) : nullptr};
    }
    attend_chunk(queries, count, visible, a.cache(a.keys, sequence, head, chunk * kChunk), values, a.width, found, ahead);
}

void shared_chunk(void* data, size_t task) {
    const Attention& a = *static_cast<Attention*>(data);
    const int chunk = static_cast<int>(task) % a.chunks, place = static_cast<int>(task) / a.chunks;
    const int sequence = place / a.kv_heads, head = place % a.kv_heads;
    static thread_local std::vector<float> queries;
    queries.resize(static_cast<size_t>(kQueryTile) * a.width);
    for (int first = 0; first < a.queries(); first += kQueryTile) {
        const int count = std::min(kQueryTile, a.queries() - first);
        // Later rows see more.
        if (a.visible(sequence, first + count - 1, chunk) == 0) continue;
        Partial found[kQueryTile], *pointers[kQueryTile];
        for (int q = 0; q < count; ++q) {
            a.load_query(sequence, head, first + q, queries.data() + q * a.width);
            found[q] = a.partial(sequence, head, chunk, first + q);
            pointers[q] = &found[q];
        }
        attend_tile(a, sequence, head, chunk, first, queries.data(), pointers, first == 0);
        for (int q = 0; q < count; ++q) {
            float* at = found[q].values - 2;
            at[0] = found[q].greatest, at[1] = found[q].sum;
        }
    }
}

void fold_shared(void* data, size_t task) {
    const Attention& a = *static_cast<Attention*>(data);
    const int i = static_cast<int>(task) % a.queries(), place = static_cast<int>(task) / a.queries();
    const int sequence = place / a.kv_heads, head = place % a.kv_heads;
    Partial all = a.partial(sequence, head, 0, i);
    for (int chunk = 1; chunk < a.chunks_of(sequence, i); ++chunk)
        fold(all, a.partial(sequence, head, chunk, i), a.width);
    a.store(sequence, head, i, all);
}

void row_block(void* data, size_t task) {
    const Attention& a = *static_cast<Attention*>(data);
    const int blocks = (a.rows + kRowBlock - 1) / kRowBlock;
    const int block = static_cast<int>(task) % blocks, place = static_cast<int>(task) / blocks;
    const int sequence = place / a.kv_heads, head = place % a.kv_heads;
    const int begin = block * kRowBlock * a.group(), end = std::min(a.queries(), begin + kRowBlock * a.group());
    const int count = end - begin;
    static thread_local std::vector<float> memory;
    memory.resize(static_cast<size_t>(2 * count + kQueryTile) * a.width);
    float *queries = memory.data(), *sums = queries + static_cast<size_t>(count) * a.width;
    float* fresh = sums + static_cast<size_t>(count) * a.width;
    static thread_local std::vector<Partial> all;
    all.resize(count);
    for (int i = 0; i < count; ++i) {
        a.load_query(sequence, head, begin + i, queries + static_cast<size_t>(i) * a.width);
        all[i] = {0, 0, sums + static_cast<size_t>(i) * a.width};
    }
    for (int chunk = 0; chunk < a.chunks_of(sequence, end - 1); ++chunk)
        for (int first = begin; first < end; first += kQueryTile) {
            const int tile = std::min(kQueryTile, end - first);
            if (a.visible(sequence, first + tile - 1, chunk) == 0) continue;
            Partial found[kQueryTile], *pointers[kQueryTile];
            for (int q = 0; q < tile; ++q) {
                found[q] = {0, 0, fresh + static_cast<size_t>(q) * a.width};
                pointers[q] = chunk == 0 ? &all[first - begin + q] : &found[q];
            }
            attend_tile(a, sequence, head, chunk, first, queries + static_cast<size_t>(first - begin) * a.width, pointers,
                        first == begin);
            if (chunk == 0) continue;
            for (int q = 0; q < tile; ++q)
                if (a.visible(sequence, first + q, chunk) > 0) fold(all[first - begin + q], found[q], a.width);
        }
    for (int i = 0; i < count; ++i) a.store(sequence, head, begin + i, all[i]);
}

Status* run(const Kernel& kernel, runtime::Context* context, Attention& a) {
    const size_t rows = static_cast<size_t>(a.batch) * a.rows;
    if (rows <= 8)
        for (size_t row = 0; row < rows; ++row) append(&a, row);
    else if (Status* status = in_parallel(kernel.api, context, append, rows, &a))
        return status;
    for (int sequence = 0; sequence < a.batch; ++sequence)
        a.chunks = std::max(a.chunks, a.chunks_of(sequence, a.queries() - 1));
    const size_t places = static_cast<size_t>(a.batch) * a.kv_heads;
    const size_t shared = places * a.chunks * a.queries() * (a.width + 2);
    if (a.queries() > kMostShared || shared > kMostNumbers) {
        const size_t blocks = (a.rows + kRowBlock - 1) / kRowBlock;
        return in_parallel(kernel.api, context, row_block, places * blocks, &a);
    }
    static thread_local std::vector<float> memory;
    if (memory.size() < shared) memory.resize(shared);
    a.memory = &memory;
    if (Status* status = in_parallel(kernel.api, context, shared_chunk, places * a.chunks, &a)) return status;
    if (a.chunks > 2) return in_parallel(kernel.api, context, fold_shared, places * a.queries(), &a);
    for (size_t task = 0; task < places * a.queries(); ++task) fold_shared(&a, task);
    return nullptr;
}

Status* compute(void* state, runtime::Context* context) {
    const Kernel& kernel = *static_cast<Kernel*>(state);
    Tensors tensors(kernel.api, context);
    const Tensor query = tensors.input(0), key = tensors.input(1), value = tensors.input(2), keys = tensors.input(3),
                 values = tensors.input(4), lengths = tensors.input(5);
    const Tensor output = tensors.output(0, query), new_keys = tensors.output(1, keys),
                 new_values = tensors.output(2, values);
    if (tensors.status != nullptr) return tensors.status;
    Attention a{query.floats(), key.floats(), value.floats(), lengths.integers(), new_keys.floats(),
                new_values.floats(), output.floats(), static_cast<int>(query.sizes[0]),
                static_cast<int>(query.sizes[1]), static_cast<int>(kernel.heads), static_cast<int>(kernel.kv_heads),
                static_cast<int>(query.sizes[2] / kernel.heads), static_cast<int>(keys.sizes[3]),
                static_cast<int>(keys.sizes[2]), 0};
    a.scale = 1 / std::sqrt(static_cast<float>(a.dim));
    const int64_t batch = query.sizes[0], rows = query.sizes[1], kv_width = static_cast<int64_t>(a.kv_heads) * a.dim;
    const bool fits = query.axes == 3 && query.sizes[2] == static_cast<int64_t>(a.heads) * a.dim &&
                      key.is({batch, rows, kv_width}) && value.is({batch, rows, kv_width}) && lengths.is({batch}) &&
                      keys.is({batch, a.kv_heads, a.capacity, a.width}) &&
                      values.is({batch, a.kv_heads, a.capacity, a.width});
    if (!fits || a.width % 8 != 0 || a.width < a.dim || a.heads % a.kv_heads != 0)
        return kernel.api.error("CachedAttention got tensors that do not fit together.");
    for (int sequence = 0; sequence < a.batch; ++sequence)
        if (a.lengths[sequence] < 0 || a.lengths[sequence] > a.capacity - a.rows)
            return kernel.api.error("CachedAttention got more rows than the cache has room for.");
    // Usually one buffer is bound to both.
    const size_t bytes = static_cast<size_t>(a.batch) * a.kv_heads * a.capacity * a.width * sizeof(float);
    if (keys.data != new_keys.data) std::memcpy(new_keys.data, keys.data, bytes);
    if (values.data != new_values.data) std::memcpy(new_values.data, values.data, bytes);
    return a.batch == 0 || a.rows == 0 ? nullptr : run(kernel, context, a);
}

}  // namespace

Operation cached_attention() {
    Operation operation = operation_of<6, 3>();
    operation.name = [](const Operation*) { return "CachedAttention"; };
    operation.input_type = [](const Operation*, size_t index) { return index == 5 ? runtime::kInt64 : runtime::kFloat; };
    operation.create = [](const Operation*, const void* table, const runtime::Info* info, void** state) -> Status* {
        Kernel kernel{Api(table), 0, 0};
        if (Status* status = kernel.api.attribute(info, "num_heads", &kernel.heads)) return status;
        if (Status* status = kernel.api.attribute(info, "num_kv_heads", &kernel.kv_heads)) return status;
        if (kernel.heads < 1 || kernel.kv_heads < 1) return kernel.api.error("CachedAttention needs heads.");
        *state = new Kernel(kernel);
        return nullptr;
    };
    operation.compute = without_exceptions<compute>;
    operation.destroy = [](void* state) { delete static_cast<Kernel*>(state); };
    return operation;
}

}  // namespace mtp
