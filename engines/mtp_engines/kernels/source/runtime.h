// The part of ONNX Runtime's C interface that a custom operator needs.
//
// The interface is a table of functions whose places never change, so places are enough; the wheels of ONNX Runtime
// carry no header.
#pragma once

#include <cstddef>
#include <cstdint>

namespace mtp::runtime {

using Status = void;
using Info = void;
using Context = void;
using Value = void;

constexpr uint32_t kVersion = 17;  // The first with ParallelFor.
constexpr int kFloat = 1;
constexpr int kInt64 = 7;
constexpr int kInvalidArgument = 2;

struct Base {
    const void* (*get_api)(uint32_t version);
    const char* (*get_version)();
};

// Calls to the table of functions of one ONNX Runtime.
class Api {
public:
    explicit Api(const void* table) : table_(static_cast<void* const*>(table)) {}

    Status* error(const char* message) const { return call<0, Status*>(kInvalidArgument, message); }
    Status* create_domain(const char* name, void** domain) const { return call<26, Status*>(name, domain); }
    Status* add(void* domain, const void* operation) const { return call<27, Status*>(domain, operation); }
    Status* add_domain(void* options, void* domain) const { return call<28, Status*>(options, domain); }
    Status* attribute(const Info* info, const char* name, int64_t* value) const {
        return call<86, Status*>(info, name, value);
    }
    // The number of values where `values` is nullptr.
    Status* attributes(const Info* info, const char* name, int64_t* values, size_t* count) const {
        return call<163, Status*>(info, name, values, count);
    }
    Status* input(const Context* context, size_t index, const Value** value) const {
        return call<90, Status*>(context, index, value);
    }
    Status* output(Context* context, size_t index, const int64_t* sizes, size_t axes, Value** value) const {
        return call<91, Status*>(context, index, sizes, axes, value);
    }
    Status* data(const Value* value, void** pointer) const { return call<51, Status*>(value, pointer); }
    Status* shape(const Value* value, void** shape) const { return call<65, Status*>(value, shape); }
    Status* axes(const void* shape, size_t* count) const { return call<61, Status*>(shape, count); }
    Status* sizes(const void* shape, int64_t* values, size_t count) const {
        return call<62, Status*>(shape, values, count);
    }
    void release_shape(void* shape) const { call<99, void>(shape); }
    Status* parallel_for(const Context* context, void (*work)(void*, size_t), size_t total, void* data) const {
        return call<274, Status*>(context, work, total, size_t{0}, data);
    }

private:
    template <int place, class Result, class... Arguments>
    Result call(Arguments... arguments) const {
        return reinterpret_cast<Result (*)(Arguments...)>(table_[place])(arguments...);
    }

    void* const* table_;
};

// A custom operator as ONNX Runtime reads it, up to the members of version 17.
struct Operation {
    uint32_t version = kVersion;
    void* (*create_old)(const Operation*, const void*, const Info*) = nullptr;
    const char* (*name)(const Operation*) = nullptr;
    const char* (*provider)(const Operation*) = nullptr;
    int (*input_type)(const Operation*, size_t) = nullptr;
    size_t (*inputs)(const Operation*) = nullptr;
    int (*output_type)(const Operation*, size_t) = nullptr;
    size_t (*outputs)(const Operation*) = nullptr;
    void (*compute_old)(void*, Context*) = nullptr;
    void (*destroy)(void*) = nullptr;
    int (*input_kind)(const Operation*, size_t) = nullptr;
    int (*output_kind)(const Operation*, size_t) = nullptr;
    int (*memory)(const Operation*, size_t) = nullptr;
    int (*least_inputs)(const Operation*) = nullptr;
    int (*inputs_alike)(const Operation*) = nullptr;
    int (*least_outputs)(const Operation*) = nullptr;
    int (*outputs_alike)(const Operation*) = nullptr;
    Status* (*create)(const Operation*, const void*, const Info*, void**) = nullptr;
    Status* (*compute)(void*, Context*) = nullptr;
    Status* (*infer)(const Operation*, void*) = nullptr;
    int (*first_opset)(const Operation*) = nullptr;
    int (*last_opset)(const Operation*) = nullptr;
    // Read by later releases only where `version` is theirs.
    void* later[4] = {};
};

}  // namespace mtp::runtime
