// The operator `PackedProduct`: rows times a matrix that lies packed in memory.
#include <algorithm>

#include "matrices.h"
#include "operators.h"

namespace mtp {
namespace {

using runtime::Api;
using runtime::Operation;
using runtime::Status;

// Weights that one task reads: enough to make its start cheap, few enough to share them out evenly.
constexpr size_t kTaskBytes = 64 << 10;
constexpr int kRowsAlone = 8;  // Rows that one thread turns and rounds sooner than it wakes another.

struct Kernel {
    Api api;
    const Matrix* matrix;
};

// Buffers of the thread that calls; the pool's threads write and read rows of it while it waits.
struct Scratch {
    BlockInput blocks;
    RotatedInput rotated;
};

struct Call {
    const Matrix* matrix;
    Scratch* scratch;
    const float* x;
    float* out;
    int rows, groups, step;

    void set(int row) const {
        const float* from = x + static_cast<size_t>(row) * matrix->columns;
        if (matrix->kind == Kind::blocks)
            scratch->blocks.set(row, from, matrix->columns);
        else
            scratch->rotated.set(row, from, matrix->columns, matrix->run);
    }
    void multiply(int task) const {
        const int first = task * step, last = std::min(groups, first + step);
        if (matrix->kind == Kind::blocks)
            multiply_blocks(*matrix, scratch->blocks, first, last, out);
        else
            multiply_rotated(*matrix, scratch->rotated, first, last, out);
    }
};

Status* run(const Kernel& kernel, runtime::Context* context, Call& call) {
    const Matrix& matrix = *kernel.matrix;
    static thread_local Scratch scratch;
    call.matrix = &matrix, call.scratch = &scratch;
    if (matrix.kind == Kind::blocks)
        scratch.blocks.resize(call.rows, matrix.blocks);
    else
        scratch.rotated.resize(call.rows, (matrix.columns + 1) / 2 * 2);
    if (call.rows <= kRowsAlone) {
        for (int row = 0; row < call.rows; ++row) call.set(row);
    } else {
        const auto set = [](void* data, size_t row) { static_cast<Call*>(data)->set(static_cast<int>(row)); };
        if (Status* status = kernel.api.parallel_for(context, set, call.rows, &call)) return status;
    }
    call.groups = group_count(matrix);
    call.step = static_cast<int>(std::max<size_t>(1, kTaskBytes / group_bytes(matrix)));
    const int tasks = (call.groups + call.step - 1) / call.step;
    if (tasks == 1) {
        call.multiply(0);
        return nullptr;
    }
    const auto multiply = [](void* data, size_t task) { static_cast<Call*>(data)->multiply(static_cast<int>(task)); };
    return kernel.api.parallel_for(context, multiply, tasks, &call);
}

Status* compute(void* state, runtime::Context* context) {
    const Kernel& kernel = *static_cast<Kernel*>(state);
    Tensors tensors(kernel.api, context);
    const Tensor x = tensors.input(0);
    if (tensors.status != nullptr) return tensors.status;
    if (x.axes == 0 || x.sizes[x.axes - 1] != kernel.matrix->columns)
        return kernel.api.error("The rows have another width than the matrix.");
    Tensor shape = x;
    shape.sizes[x.axes - 1] = kernel.matrix->outputs;
    const Tensor out = tensors.output(0, shape);
    if (tensors.status != nullptr) return tensors.status;
    Call call{};
    call.rows = 1;
    for (size_t axis = 0; axis + 1 < x.axes; ++axis) call.rows *= static_cast<int>(x.sizes[axis]);
    if (call.rows == 0) return nullptr;
    call.x = x.floats(), call.out = out.floats();
    return run(kernel, context, call);
}

Status* create(const Operation*, const void* table, const runtime::Info* info, void** state) {
    const Api api(table);
    int64_t address = 0;
    if (Status* status = api.attribute(info, "matrix", &address)) return status;
    const Matrix* matrix = reinterpret_cast<const Matrix*>(address);
    if (matrix == nullptr || matrix->mark != Matrix::kMark) return api.error("There is no packed matrix.");
    matrix->arena->hold();
    *state = new Kernel{api, matrix};
    return nullptr;
}

void destroy(void* state) {
    Kernel* kernel = static_cast<Kernel*>(state);
    kernel->matrix->arena->let_go();
    delete kernel;
}

}  // namespace

Operation packed_product() {
    Operation operation = operation_of<1, 1>();
    operation.name = [](const Operation*) { return "PackedProduct"; };
    operation.create = create;
    operation.compute = compute;
    operation.destroy = destroy;
    return operation;
}

}  // namespace mtp
