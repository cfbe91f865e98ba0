// The operators `DeltaRule`, rows of a gated delta layer, and `DeltaCommit`, which repeats some of them.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "delta.h"
#include "operators.h"

namespace mtp {
namespace {

struct Kernel {
    Api api;
    int64_t key_heads, key_dim;
};

Status* create(const Operation*, const void* table, const runtime::Info* info, void** state) {
    Kernel kernel{Api(table), 0, 0};
    if (Status* status = kernel.api.attribute(info, "key_heads", &kernel.key_heads)) return status;
    if (Status* status = kernel.api.attribute(info, "key_dim", &kernel.key_dim)) return status;
    if (kernel.key_heads < 1 || kernel.key_dim < 1) return kernel.api.error("A delta rule needs heads and a width.");
    *state = new Kernel(kernel);
    return nullptr;
}

void destroy(void* state) { delete static_cast<Kernel*>(state); }

// One call: a task is the head of a sequence.
struct Rule {
    const float *key, *value, *decay, *beta, *past;
    const float* query;
    float *output, *present;
    int rows, key_heads, value_heads, key_dim, value_dim;
};

struct RuleHead {
    const Rule* rule;
    int sequence, head;
};

DeltaRow row_of_rule(const void* data, int row) {
    const RuleHead& at = *static_cast<const RuleHead*>(data);
    const Rule& rule = *at.rule;
    const size_t place = static_cast<size_t>(at.sequence) * rule.rows + row;
    const size_t key = (place * rule.key_heads + at.head / (rule.value_heads / rule.key_heads)) * rule.key_dim;
    const size_t value = (place * rule.value_heads + at.head) * rule.value_dim;
    const size_t gate = place * rule.value_heads + at.head;
    return {rule.query + key, rule.key + key,    rule.value + value, rule.decay[gate],
            rule.beta[gate],  rule.output + value};
}

void run_head(void* data, size_t task) {
    const Rule& rule = *static_cast<Rule*>(data);
    const RuleHead at{&rule, static_cast<int>(task) / rule.value_heads, static_cast<int>(task) % rule.value_heads};
    const size_t state = task * rule.key_dim * rule.value_dim;
    delta_rows(rule.past + state, rule.present + state, rule.key_dim, rule.value_dim, rule.rows, row_of_rule, &at);
}

// Rows of x, each of several heads, made unit length.
struct Units {
    const float *query, *key;
    float *unit_query, *unit_key;
    int heads, dim;
};

void unit_heads(void* data, size_t row) {
    const Units& units = *static_cast<Units*>(data);
    const float scale = 1 / std::sqrt(static_cast<float>(units.dim));
    for (int head = 0; head < units.heads; ++head) {
        const size_t at = (row * units.heads + head) * units.dim;
        unit_row(units.query + at, units.dim, scale, units.unit_query + at);
        unit_row(units.key + at, units.dim, 1, units.unit_key + at);
    }
}

constexpr int kRowsAlone = 8;  // Rows that one thread makes unit length sooner than it wakes another.

Status* compute_rule(void* state, runtime::Context* context) {
    const Kernel& kernel = *static_cast<Kernel*>(state);
    Tensors tensors(kernel.api, context);
    const Tensor query = tensors.input(0), key = tensors.input(1), value = tensors.input(2), decay = tensors.input(3),
                 beta = tensors.input(4), past = tensors.input(5);
    const Tensor output = tensors.output(0, value), present = tensors.output(1, past), unit_key = tensors.output(2, key);
    if (tensors.status != nullptr) return tensors.status;
    const int64_t batch = query.sizes[0], all_rows = query.sizes[1], key_width = kernel.key_heads * kernel.key_dim;
    const bool fits = query.is({batch, all_rows, key_width}) && key.is({batch, all_rows, key_width}) &&
                      past.axes == 4 && past.is({batch, past.sizes[1], kernel.key_dim, past.sizes[3]}) &&
                      value.is({batch, all_rows, past.sizes[1] * past.sizes[3]}) &&
                      decay.is({batch, all_rows, past.sizes[1]}) && beta.is({batch, all_rows, past.sizes[1]});
    if (!fits || past.sizes[1] % kernel.key_heads != 0)
        return kernel.api.error("DeltaRule got tensors that do not fit together.");
    const int count = static_cast<int>(query.sizes[0] * query.sizes[1]);
    static thread_local std::vector<float> unit_query;
    unit_query.resize(static_cast<size_t>(count) * query.sizes[2]);
    Rule rule{unit_key.floats(), value.floats(), decay.floats(), beta.floats(), past.floats(), unit_query.data(),
              output.floats(), present.floats(), static_cast<int>(query.sizes[1]),
              static_cast<int>(kernel.key_heads), static_cast<int>(past.sizes[1]), static_cast<int>(past.sizes[2]),
              static_cast<int>(past.sizes[3])};
    Units units{query.floats(), key.floats(), unit_query.data(), unit_key.floats(), rule.key_heads, rule.key_dim};
    if (count <= kRowsAlone)
        for (int row = 0; row < count; ++row) unit_heads(&units, row);
    else if (Status* status = in_parallel(kernel.api, context, unit_heads, count, &units))
        return status;
    return in_parallel(kernel.api, context, run_head, query.sizes[0] * past.sizes[1], &rule);
}

// One commit: rows of a layer's factors lie beside each other, raw rows of the convolution, then key, value, decay, beta.
struct Commit {
    const float* factors;
    const float *past, *past_rows;
    float *present, *present_rows;
    const int64_t* counts;
    int rows, width, key_heads, value_heads, key_dim, value_dim, taps, channels;
};

struct CommitHead {
    const Commit* commit;
    const float* factors;
    int head;
};

DeltaRow row_of_commit(const void* data, int row) {
    const CommitHead& at = *static_cast<const CommitHead*>(data);
    const Commit& commit = *at.commit;
    const float* key = at.factors + static_cast<size_t>(row) * commit.width + commit.channels;
    const float* value = key + commit.key_heads * commit.key_dim;
    const float* decay = value + commit.value_heads * commit.value_dim;
    return {nullptr, key + at.head / (commit.value_heads / commit.key_heads) * commit.key_dim,
            value + at.head * commit.value_dim, decay[at.head], decay[commit.value_heads + at.head], nullptr};
}

void commit_head(void* data, size_t task) {
    const Commit& commit = *static_cast<Commit*>(data);
    const size_t sequence = task / commit.value_heads;
    const float* factors = commit.factors + sequence * commit.rows * commit.width;
    const CommitHead at{&commit, factors, static_cast<int>(task % commit.value_heads)};
    const size_t state = task * commit.key_dim * commit.value_dim;
    const int count = static_cast<int>(commit.counts[sequence]);
    delta_rows(commit.past + state, commit.present + state, commit.key_dim, commit.value_dim, count, row_of_commit, &at);
    if (at.head != 0) return;
    // The last raw rows that end with the last kept one.
    for (int tap = 0; tap < commit.taps; ++tap) {
        const int row = count + tap - commit.taps;
        const float* from = row >= 0 ? factors + static_cast<size_t>(row) * commit.width
                                     : commit.past_rows + (sequence * commit.taps + count + tap) * commit.channels;
        std::memcpy(commit.present_rows + (sequence * commit.taps + tap) * commit.channels, from,
                    commit.channels * sizeof(float));
    }
}

Status* compute_commit(void* state, runtime::Context* context) {
    const Kernel& kernel = *static_cast<Kernel*>(state);
    Tensors tensors(kernel.api, context);
    const Tensor factors = tensors.input(0), past = tensors.input(1), past_rows = tensors.input(2),
                 counts = tensors.input(3);
    const Tensor present = tensors.output(0, past), present_rows = tensors.output(1, past_rows);
    if (tensors.status != nullptr) return tensors.status;
    Commit commit{factors.floats(), past.floats(), past_rows.floats(), present.floats(), present_rows.floats(),
                  counts.integers(), static_cast<int>(factors.sizes[1]), static_cast<int>(factors.sizes[2]),
                  static_cast<int>(kernel.key_heads), static_cast<int>(past.sizes[1]), static_cast<int>(past.sizes[2]),
                  static_cast<int>(past.sizes[3]), static_cast<int>(past_rows.sizes[1]),
                  static_cast<int>(past_rows.sizes[2])};
    const int expected = commit.channels + commit.key_heads * commit.key_dim +
                         commit.value_heads * (commit.value_dim + 2);
    const int64_t batch = factors.sizes[0];
    const bool fits = factors.axes == 3 && commit.width == expected && past.axes == 4 &&
                      past.is({batch, past.sizes[1], kernel.key_dim, past.sizes[3]}) && past_rows.axes == 3 &&
                      past_rows.sizes[0] == batch && counts.is({batch});
    if (!fits || past.sizes[1] % kernel.key_heads != 0)
        return kernel.api.error("DeltaCommit got tensors that do not fit together.");
    for (int64_t sequence = 0; sequence < factors.sizes[0]; ++sequence)
        if (commit.counts[sequence] < 0 || commit.counts[sequence] > commit.rows)
            return kernel.api.error("DeltaCommit was to keep more rows than there are.");
    return in_parallel(kernel.api, context, commit_head, factors.sizes[0] * past.sizes[1], &commit);
}

}  // namespace

Operation delta_rule() {
    Operation operation = operation_of<6, 3>();
    operation.name = [](const Operation*) { return "DeltaRule"; };
    operation.create = create;
    operation.compute = without_exceptions<compute_rule>;
    operation.destroy = destroy;
    return operation;
}

Operation delta_commit() {
    Operation operation = operation_of<4, 2>();
    operation.name = [](const Operation*) { return "DeltaCommit"; };
    operation.input_type = [](const Operation*, size_t index) { return index == 3 ? runtime::kInt64 : runtime::kFloat; };
    operation.create = create;
    operation.compute = without_exceptions<compute_commit>;
    operation.destroy = destroy;
    return operation;
}

}  // namespace mtp
