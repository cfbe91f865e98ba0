// Custom operators: what all of them need, and the list of them.
#pragma once

#include <cstddef>
#include <cstdint>

#include "runtime.h"

namespace mtp {

using runtime::Api;
using runtime::Operation;
using runtime::Status;

Operation packed_product();
Operation delta_rule();
Operation delta_commit();
Operation short_convolution();
Operation cached_attention();

constexpr size_t kMostAxes = 8;

struct Tensor {
    void* data = nullptr;
    size_t axes = 0;
    int64_t sizes[kMostAxes] = {};

    float* floats() const { return static_cast<float*>(data); }
    const int64_t* integers() const { return static_cast<const int64_t*>(data); }
};

// Inputs and outputs of one call; after the first failure `status` says what it was, and tensors are empty.
class Tensors {
public:
    Tensors(const Api& api, runtime::Context* context) : api_(api), context_(context) {}

    Tensor input(size_t index) {
        Tensor tensor;
        const runtime::Value* value = nullptr;
        void* shape = nullptr;
        if (status == nullptr) status = api_.input(context_, index, &value);
        if (status == nullptr) status = api_.shape(value, &shape);
        if (status == nullptr) status = api_.axes(shape, &tensor.axes);
        if (status == nullptr && tensor.axes > kMostAxes) status = api_.error("A tensor has too many axes.");
        if (status == nullptr) status = api_.sizes(shape, tensor.sizes, tensor.axes);
        if (shape != nullptr) api_.release_shape(shape);
        if (status == nullptr) status = api_.data(value, &tensor.data);
        return tensor;
    }

    // An output of the shape of `like`.
    Tensor output(size_t index, Tensor like) {
        runtime::Value* value = nullptr;
        if (status == nullptr) status = api_.output(context_, index, like.sizes, like.axes, &value);
        if (status == nullptr) status = api_.data(value, &like.data);
        return like;
    }

    Status* status = nullptr;

private:
    const Api& api_;
    runtime::Context* context_;
};

// An operator with a fixed number of inputs and outputs, all of them float32.
template <size_t inputs, size_t outputs>
Operation operation_of() {
    Operation operation;
    operation.provider = [](const Operation*) -> const char* { return nullptr; };
    operation.inputs = [](const Operation*) { return inputs; };
    operation.outputs = [](const Operation*) { return outputs; };
    operation.input_type = operation.output_type = [](const Operation*, size_t) { return runtime::kFloat; };
    operation.input_kind = operation.output_kind = operation.memory = [](const Operation*, size_t) { return 0; };
    operation.least_inputs = operation.least_outputs = [](const Operation*) { return 1; };
    operation.inputs_alike = operation.outputs_alike = [](const Operation*) { return 1; };
    operation.first_opset = [](const Operation*) { return 1; };
    operation.last_opset = [](const Operation*) { return 0x7fffffff; };
    return operation;
}

}  // namespace mtp
