#include "product.h"

#include <algorithm>
#include <memory>
#include <vector>

namespace mtp {
namespace {

constexpr size_t kBytesAlone = 64 << 10;  // Weights that one thread multiplies with sooner than it wakes another.
constexpr int kRowsAlone = 8;             // The same for rows that are turned and rounded.

}  // namespace

Matrices::~Matrices() {
    for (const Matrix* matrix : all) matrix->arena->let_go();
}

Status* Matrices::load(const runtime::Info* info) {
    size_t count = 0;
    if (Status* status = api.attributes(info, "matrices", nullptr, &count)) return status;
    std::vector<int64_t> addresses(count);
    if (Status* status = api.attributes(info, "matrices", addresses.data(), &count)) return status;
    all.reserve(count);
    for (const int64_t address : addresses) {
        const Matrix* matrix = held_matrix(address);
        if (matrix == nullptr) return api.error("There is no packed matrix.");
        all.push_back(matrix);
        if (matrix->columns != columns()) return api.error("The matrices have different widths.");
        if (matrix->used != all[0]->used) return api.error("The matrices are packed differently.");
        used = matrix->used;
        rounds_blocks |= matrix->kind == Kind::blocks;
        rounds_rows |= matrix->kind == Kind::rotated;
    }
    return all.empty() ? api.error("There is no packed matrix.") : nullptr;
}

Status* count_rows(const Matrices& matrices, const Tensor& x, int* count) {
    if (x.axes == 0 || x.sizes[x.axes - 1] != matrices.columns())
        return matrices.api.error("The rows have another width than the matrix.");
    *count = 1;
    for (size_t axis = 0; axis + 1 < x.axes; ++axis) *count *= static_cast<int>(x.sizes[axis]);
    return nullptr;
}

Status* create_with_matrices(const Operation*, const void* table, const runtime::Info* info, void** state) {
    const Api api(table);
    try {
        auto kernel = std::make_unique<Matrices>(api);
        if (Status* status = kernel->load(info)) return status;
        *state = kernel.release();
        return nullptr;
    } catch (const std::bad_alloc&) {
        return api.error(kNoMemory);
    }
}

int groups_of_task(const Matrix& matrix) {
    return static_cast<int>(std::max<size_t>(1, kTaskBytes / group_bytes(matrix)));
}

Status* Rows::set(const Matrices& matrices, runtime::Context* context, const Tensor& x) {
    values = x.floats(), columns = matrices.columns();
    for (const Matrix* matrix : matrices.all) {
        if (matrix->kind == Kind::blocks) blocks.resize(count, matrix->blocks, matrices.used);
        if (matrix->kind == Kind::rotated) {
            rotated.resize(count, (columns + 1) / 2 * 2, matrices.used);
            run = matrix->run;
        }
    }
    struct Call {
        Rows* rows;
        bool blocks, rotated;
    } call{this, matrices.rounds_blocks, matrices.rounds_rows};
    const auto set = [](void* data, size_t row) {
        const Call& call = *static_cast<Call*>(data);
        const float* from = call.rows->values + row * call.rows->columns;
        const int number = static_cast<int>(row);
        if (call.blocks) call.rows->blocks.set(number, from, call.rows->columns);
        if (call.rotated) call.rows->rotated.set(number, from, call.rows->columns, call.rows->run);
    };
    if (count > kRowsAlone && (call.blocks || call.rotated))
        return in_parallel(matrices.api, context, set, count, &call);
    for (int row = 0; row < count; ++row) set(&call, row);
    return nullptr;
}

void Rows::multiply(const Matrix& matrix, int first_group, int last_group, const Output& out) const {
    switch (matrix.kind) {
        case Kind::blocks: return multiply_blocks(matrix, blocks, first_group, last_group, out);
        case Kind::rotated: return multiply_rotated(matrix, rotated, first_group, last_group, out);
        case Kind::whole: return multiply_whole(matrix, values, count, first_group, last_group, out);
    }
}

namespace {

// A run of groups of one matrix.
struct Task {
    const Matrix* matrix;
    Output out;
    int first, last;
};

struct Call {
    const Rows* rows;
    const std::vector<Task>* tasks;

    void run(size_t task) const {
        const Task& given = (*tasks)[task];
        rows->multiply(*given.matrix, given.first, given.last, given.out);
    }
};

Status* compute(void* state, runtime::Context* context) {
    const Matrices& kernel = *static_cast<Matrices*>(state);
    static thread_local Rows rows;
    static thread_local std::vector<Task> tasks;
    Tensors tensors(kernel.api, context);
    const Tensor x = tensors.input(0);
    if (tensors.status == nullptr) tensors.status = count_rows(kernel, x, &rows.count);
    if (tensors.status != nullptr) return tensors.status;
    size_t bytes = 0;
    tasks.clear();
    for (size_t i = 0; i < kernel.all.size(); ++i) {
        const Matrix& matrix = *kernel.all[i];
        Tensor shape = x;
        shape.sizes[x.axes - 1] = matrix.outputs;
        const Output out{tensors.output(i, shape).floats(), static_cast<size_t>(matrix.outputs), 0};
        const int groups = group_count(matrix), step = groups_of_task(matrix);
        for (int first = 0; first < groups; first += step)
            tasks.push_back({&matrix, out, first, std::min(groups, first + step)});
        bytes += groups * group_bytes(matrix);
    }
    if (tensors.status != nullptr || rows.count == 0) return tensors.status;
    if (Status* status = rows.set(kernel, context, x)) return status;
    Call call{&rows, &tasks};
    if (bytes * std::min(rows.count, kTile) <= kBytesAlone) {
        for (size_t task = 0; task < tasks.size(); ++task) call.run(task);
        return nullptr;
    }
    const auto multiply = [](void* data, size_t task) { static_cast<Call*>(data)->run(task); };
    return in_parallel(kernel.api, context, multiply, tasks.size(), &call);
}

}  // namespace

Operation packed_product() {
    constexpr int several = 2;
    Operation operation = operation_of<1, 1>();
    operation.name = [](const Operation*) { return "PackedProduct"; };
    operation.output_kind = [](const Operation*, size_t) { return several; };
    operation.create = create_with_matrices;
    operation.compute = without_exceptions<compute>;
    operation.destroy = [](void* state) { delete static_cast<Matrices*>(state); };
    return operation;
}

}  // namespace mtp
