// The operator `PackedChoice`: the column of a packed matrix whose product with a row is the greatest. Products stay in
// the cache: those of one row with a large vocabulary would take a megabyte.
#include <immintrin.h>

#include <algorithm>
#include <limits>
#include <memory>
#include <vector>

#include "product.h"

namespace mtp {
namespace {

constexpr int kVector = 8;
constexpr float kLeast = -std::numeric_limits<float>::infinity();

// Of some columns.
struct Best {
    float value;
    int column;
    float spoilt;  // 0, or NaN where a product is not finite.
};

// The first of the greatest of `count` values, which are those of the columns from `first` on.
Best best_of(const float* values, int count, int first) {
    float greatest[kVector], spoilt[kVector];
    __m256 most = _mm256_set1_ps(kLeast), nothing = _mm256_setzero_ps();
    int i = 0;
    for (; i + kVector <= count; i += kVector) {
        const __m256 given = _mm256_loadu_ps(values + i);
        most = _mm256_max_ps(given, most);
        nothing = _mm256_fmadd_ps(given, _mm256_setzero_ps(), nothing);
    }
    _mm256_storeu_ps(greatest, most);
    _mm256_storeu_ps(spoilt, nothing);
    Best best{*std::max_element(greatest, greatest + kVector), first, 0};
    for (const float lane : spoilt) best.spoilt += lane;
    for (; i < count; ++i) {
        best.value = std::max(best.value, values[i]);
        best.spoilt += values[i] * 0;
    }
    const float* found = std::find(values, values + count, best.value);
    if (found != values + count) best.column = first + static_cast<int>(found - values);
    return best;
}

struct Call {
    const Matrix* matrix;
    const Rows* rows;
    Best* found;  // [task, row]
    int step, width;

    void run(size_t task) const {
        static thread_local std::vector<float> products;
        products.resize(static_cast<size_t>(rows->count) * width);
        const int group = static_cast<int>(task) * step, last = std::min(group_count(*matrix), group + step);
        const int first = group * group_size(*matrix), count = std::min(width, matrix->outputs - first);
        rows->multiply(*matrix, group, last, {products.data(), static_cast<size_t>(width), first});
        for (int row = 0; row < rows->count; ++row)
            found[task * rows->count + row] = best_of(products.data() + static_cast<size_t>(row) * width, count, first);
    }
};

Status* compute(void* state, runtime::Context* context) {
    const Matrices& kernel = *static_cast<Matrices*>(state);
    static thread_local Rows rows;
    static thread_local std::vector<Best> found;
    Tensors tensors(kernel.api, context);
    const Tensor x = tensors.input(0);
    if (tensors.status == nullptr) tensors.status = count_rows(kernel, x, &rows.count);
    if (tensors.status != nullptr) return tensors.status;
    Tensor shape = x;
    shape.axes = x.axes - 1;
    const Tensor ids = tensors.output(0, shape), checksum = tensors.output(1, shape);
    if (tensors.status != nullptr || rows.count == 0) return tensors.status;
    if (Status* status = rows.set(kernel, context, x)) return status;
    const Matrix& matrix = *kernel.all[0];
    const int step = groups_of_task(matrix);
    const size_t tasks = (group_count(matrix) + step - 1) / step;
    found.resize(tasks * rows.count);
    Call call{&matrix, &rows, found.data(), step, step * group_size(matrix)};
    const auto run = [](void* data, size_t task) { static_cast<Call*>(data)->run(task); };
    if (Status* status = in_parallel(kernel.api, context, run, tasks, &call)) return status;
    for (int row = 0; row < rows.count; ++row) {
        Best best = found[row];
        for (size_t task = 1; task < tasks; ++task) {
            const Best& next = found[task * rows.count + row];
            best.spoilt += next.spoilt;
            if (next.value > best.value) best.value = next.value, best.column = next.column;
        }
        static_cast<int64_t*>(ids.data)[row] = best.column;
        checksum.floats()[row] = best.spoilt;
    }
    return nullptr;
}

}  // namespace

Operation packed_choice() {
    Operation operation = operation_of<1, 2>();
    operation.name = [](const Operation*) { return "PackedChoice"; };
    operation.output_type = [](const Operation*, size_t index) { return index == 0 ? runtime::kInt64 : runtime::kFloat; };
    operation.create = create_with_matrices;
    operation.compute = without_exceptions<compute>;
    operation.destroy = [](void* state) { delete static_cast<Matrices*>(state); };
    return operation;
}

}  // namespace mtp
