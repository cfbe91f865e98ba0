// The operator `PackedProduct`: rows times each of several matrices that lie packed in memory.
#include <algorithm>
#include <memory>
#include <vector>

#include "matrices.h"
#include "operators.h"

namespace mtp {
namespace {

// Weights that one task reads: enough to make its start cheap, few enough to share them out evenly.
constexpr size_t kTaskBytes = 64 << 10;
constexpr size_t kBytesAlone = 64 << 10;  // Weights that one thread multiplies with sooner than it wakes another.
constexpr int kRowsAlone = 8;             // The same for rows that are turned and rounded.

struct Kernel {
    Api api;
    std::vector<const Matrix*> matrices;
    bool rounds_blocks = false, rounds_rows = false;
    Instructions used = Instructions::avx2;

    ~Kernel() {
        for (const Matrix* matrix : matrices) matrix->arena->let_go();
    }
};

// Buffers of the thread that calls; the pool's threads write and read rows of it while it waits.
struct Scratch {
    BlockInput blocks;
    RotatedInput rotated;
};

// A run of groups of one matrix.
struct Task {
    const Matrix* matrix;
    float* out;
    int first, last;
};

struct Call {
    const Kernel* kernel;
    Scratch* scratch;
    const float* x;
    int rows, columns, run;
    std::vector<Task>* tasks;

    void set(int row) const {
        const float* from = x + static_cast<size_t>(row) * columns;
        if (kernel->rounds_blocks) scratch->blocks.set(row, from, columns);
        if (kernel->rounds_rows) scratch->rotated.set(row, from, columns, run);
    }
    void multiply(const Task& task) const {
        switch (task.matrix->kind) {
            case Kind::blocks: return multiply_blocks(*task.matrix, scratch->blocks, task.first, task.last, task.out);
            case Kind::rotated: return multiply_rotated(*task.matrix, scratch->rotated, task.first, task.last, task.out);
            case Kind::whole: return multiply_whole(*task.matrix, x, rows, task.first, task.last, task.out);
        }
    }
};

Status* run(const Kernel& kernel, runtime::Context* context, Call& call, const std::vector<float*>& outputs) {
    static thread_local Scratch scratch;
    static thread_local std::vector<Task> tasks;
    call.kernel = &kernel, call.scratch = &scratch, call.tasks = &tasks;
    size_t bytes = 0;
    tasks.clear();
    for (size_t i = 0; i < outputs.size(); ++i) {
        const Matrix& matrix = *kernel.matrices[i];
        if (matrix.kind == Kind::blocks) scratch.blocks.resize(call.rows, matrix.blocks, kernel.used);
        if (matrix.kind == Kind::rotated) {
            scratch.rotated.resize(call.rows, (matrix.columns + 1) / 2 * 2, kernel.used);
            call.run = matrix.run;
        }
        const int groups = group_count(matrix);
        const int step = static_cast<int>(std::max<size_t>(1, kTaskBytes / group_bytes(matrix)));
        for (int first = 0; first < groups; first += step)
            tasks.push_back({&matrix, outputs[i], first, std::min(groups, first + step)});
        bytes += groups * group_bytes(matrix);
    }
    if (call.rows <= kRowsAlone || !(kernel.rounds_blocks || kernel.rounds_rows)) {
        for (int row = 0; row < call.rows; ++row) call.set(row);
    } else {
        const auto set = [](void* data, size_t row) { static_cast<Call*>(data)->set(static_cast<int>(row)); };
        if (Status* status = in_parallel(kernel.api, context, set, call.rows, &call)) return status;
    }
    if (bytes * std::min(call.rows, kTile) <= kBytesAlone) {
        for (const Task& task : tasks) call.multiply(task);
        return nullptr;
    }
    const auto multiply = [](void* data, size_t task) {
        const Call& given = *static_cast<Call*>(data);
        given.multiply((*given.tasks)[task]);
    };
    return in_parallel(kernel.api, context, multiply, tasks.size(), &call);
}

Status* compute(void* state, runtime::Context* context) {
    const Kernel& kernel = *static_cast<Kernel*>(state);
    Tensors tensors(kernel.api, context);
    const Tensor x = tensors.input(0);
    if (tensors.status != nullptr) return tensors.status;
    const int columns = kernel.matrices[0]->columns;
    if (x.axes == 0 || x.sizes[x.axes - 1] != columns)
        return kernel.api.error("The rows have another width than the matrix.");
    std::vector<float*> outputs;
    for (size_t i = 0; i < kernel.matrices.size(); ++i) {
        Tensor shape = x;
        shape.sizes[x.axes - 1] = kernel.matrices[i]->outputs;
        outputs.push_back(tensors.output(i, shape).floats());
    }
    if (tensors.status != nullptr) return tensors.status;
    Call call{};
    call.rows = 1, call.columns = columns;
    for (size_t axis = 0; axis + 1 < x.axes; ++axis) call.rows *= static_cast<int>(x.sizes[axis]);
    if (call.rows == 0) return nullptr;
    call.x = x.floats();
    return run(kernel, context, call, outputs);
}

Status* make(const Api& api, const runtime::Info* info, void** state) {
    size_t count = 0;
    if (Status* status = api.attributes(info, "matrices", nullptr, &count)) return status;
    std::vector<int64_t> addresses(count);
    if (Status* status = api.attributes(info, "matrices", addresses.data(), &count)) return status;
    auto kernel = std::make_unique<Kernel>(Kernel{api, {}});
    for (const int64_t address : addresses) {
        const Matrix* matrix = held_matrix(address);
        if (matrix == nullptr) return api.error("There is no packed matrix.");
        kernel->matrices.push_back(matrix);
        if (matrix->columns != kernel->matrices[0]->columns) return api.error("The matrices have different widths.");
        if (matrix->used != kernel->matrices[0]->used) return api.error("The matrices are packed differently.");
        kernel->used = matrix->used;
        kernel->rounds_blocks |= matrix->kind == Kind::blocks;
        kernel->rounds_rows |= matrix->kind == Kind::rotated;
    }
    if (kernel->matrices.empty()) return api.error("There is no packed matrix.");
    *state = kernel.release();
    return nullptr;
}

Status* create(const Operation*, const void* table, const runtime::Info* info, void** state) {
    const Api api(table);
    try {
        return make(api, info, state);
    } catch (const std::bad_alloc&) {
        return api.error(kNoMemory);
    }
}

}  // namespace

Operation packed_product() {
    constexpr int several = 2;
    Operation operation = operation_of<1, 1>();
    operation.name = [](const Operation*) { return "PackedProduct"; };
    operation.output_kind = [](const Operation*, size_t) { return several; };
    operation.create = create;
    operation.compute = without_exceptions<compute>;
    operation.destroy = [](void* state) { delete static_cast<Kernel*>(state); };
    return operation;
}

}  // namespace mtp
