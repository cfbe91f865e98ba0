// Custom operators: what all of them need, and the list of them.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <new>

#include "runtime.h"

namespace mtp {

using runtime::Api;
using runtime::Operation;
using runtime::Status;

Operation packed_product();
Operation packed_choice();
Operation delta_rule();
Operation deferred_delta_rule();
Operation delta_commit();
Operation short_convolution();
Operation deferred_short_convolution();
Operation cached_attention();

constexpr size_t kMostAxes = 8;
constexpr const char* kNoMemory = "There is not enough memory.";

// Runs tasks on the session's threads. A task that finds no memory makes the call fail: an exception must not leave it.
inline Status* in_parallel(const Api& api, const runtime::Context* context, void (*work)(void*, size_t), size_t total,
                           void* data) {
    struct Guarded {
        void (*work)(void*, size_t);
        void* data;
        std::atomic<bool> failed;
    } guarded{work, data, {false}};
    const auto task = [](void* given, size_t number) {
        Guarded& all = *static_cast<Guarded*>(given);
        try {
            all.work(all.data, number);
        } catch (const std::bad_alloc&) {
            all.failed = true;
        }
    };
    Status* status = api.parallel_for(context, task, total, &guarded);
    return status == nullptr && guarded.failed ? api.error(kNoMemory) : status;
}

// `work` of a kernel whose state begins with an `Api`.
template <Status* (*work)(void*, runtime::Context*)>
Status* without_exceptions(void* state, runtime::Context* context) {
    try {
        return work(state, context);
    } catch (const std::bad_alloc&) {
        return static_cast<const Api*>(state)->error(kNoMemory);
    }
}

struct Tensor {
    void* data = nullptr;
    size_t axes = 0;
    int64_t sizes[kMostAxes] = {};

    float* floats() const { return static_cast<float*>(data); }
    const int64_t* integers() const { return static_cast<const int64_t*>(data); }
    bool is(std::initializer_list<int64_t> expected) const {
        return axes == expected.size() && std::equal(expected.begin(), expected.end(), sizes);
    }
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
        if (status == nullptr && value == nullptr) status = api_.error("An output has no place.");
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
