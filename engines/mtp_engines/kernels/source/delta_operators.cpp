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

// Rows of factors of one layer, of which a sequence keeps the first ones. A row holds the raw row of the convolution,
// then key, value, decay, beta.
struct Factors {
    const float* rows;
    const int64_t* counts;  // [sequences]
    int most, width, channels;
    int key_heads, value_heads, key_dim, value_dim;

    // Whether a tensor [sequences, most, width] and the counts are what a layer of such a state has.
    bool fits(const Tensor& given, const Tensor& given_counts, int64_t sequences) const {
        const int least = key_heads * key_dim + value_heads * (value_dim + 2);
        return given.is({sequences, most, width}) && given_counts.is({sequences}) && channels >= 0 && width >= least;
    }
    bool are_there(int64_t sequences) const {
        return std::all_of(counts, counts + sequences, [&](int64_t count) { return count >= 0 && count <= most; });
    }
};

Factors factors_of(const Tensor& rows, const Tensor& counts, const Kernel& kernel, const Tensor& state) {
    Factors found{rows.floats(), counts.integers(), static_cast<int>(rows.sizes[1]), static_cast<int>(rows.sizes[2]), 0,
                  static_cast<int>(kernel.key_heads), static_cast<int>(state.sizes[1]), static_cast<int>(kernel.key_dim),
                  static_cast<int>(state.sizes[3])};
    found.channels = found.width - found.key_heads * found.key_dim - found.value_heads * (found.value_dim + 2);
    return found;
}

struct FactorsHead {
    const Factors* factors;
    const float* rows;
    int head;
};

DeltaRow row_of_factors(const void* data, int row) {
    const FactorsHead& at = *static_cast<const FactorsHead*>(data);
    const Factors& factors = *at.factors;
    const float* key = at.rows + static_cast<size_t>(row) * factors.width + factors.channels;
    const float* value = key + factors.key_heads * factors.key_dim;
    const float* decay = value + factors.value_heads * factors.value_dim;
    return {nullptr, key + at.head / (factors.value_heads / factors.key_heads) * factors.key_dim,
            value + at.head * factors.value_dim, decay[at.head], decay[factors.value_heads + at.head], nullptr};
}

// Calls `work` with the rows that the sequence of a task keeps; a task is the head of a sequence.
template <class Work>
void with_kept_rows(const Factors& factors, size_t task, Work work) {
    const size_t sequence = task / factors.value_heads;
    const FactorsHead at{&factors, factors.rows + sequence * factors.most * factors.width,
                         static_cast<int>(task % factors.value_heads)};
    work(DeltaRun{static_cast<int>(factors.counts[sequence]), row_of_factors, &at});
}

// One call: a task is the head of a sequence.
struct Rule {
    const float *key, *value, *decay, *beta, *past;
    const float* query;
    float *output, *present;
    int rows, key_heads, value_heads, key_dim, value_dim;
    // Of rows that come before these: the state that is kept is then the one after them, or after all.
    const Factors* pending = nullptr;
    bool keeps_rows = true;
};

constexpr DeltaRun kNoRows{0, nullptr, nullptr};

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
    const DeltaRun rows{rule.rows, row_of_rule, &at};
    const auto run = [&](const DeltaRun& pending) {
        // Without a row before these, the state that was there is still the one to keep.
        float* present = rule.keeps_rows || pending.count > 0 ? rule.present + state : nullptr;
        delta_rows(rule.past + state, present, rule.key_dim, rule.value_dim, pending, rows, rule.keeps_rows);
    };
    if (rule.pending == nullptr)
        run(kNoRows);
    else
        with_kept_rows(*rule.pending, task, run);
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

// With `deferred` the inputs end in factors of rows that come before these, how many of them each sequence keeps, and
// whether the state after these rows is to be kept, or the one before them.
template <bool deferred>
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
    Factors pending{};
    bool keeps_rows = true;
    if constexpr (deferred) {
        const Tensor factors = tensors.input(6), counts = tensors.input(7), keeps = tensors.input(8);
        if (tensors.status != nullptr) return tensors.status;
        if (factors.axes == 3) pending = factors_of(factors, counts, kernel, past);
        if (factors.axes != 3 || !keeps.is({1}) || !pending.fits(factors, counts, batch) || !pending.are_there(batch))
            return kernel.api.error("DeltaRule got rows before its own that do not fit.");
        keeps_rows = keeps.integers()[0] != 0;
    }
    const int count = static_cast<int>(query.sizes[0] * query.sizes[1]);
    static thread_local std::vector<float> unit_query;
    unit_query.resize(static_cast<size_t>(count) * query.sizes[2]);
    Rule rule{unit_key.floats(), value.floats(), decay.floats(), beta.floats(), past.floats(), unit_query.data(),
              output.floats(), present.floats(), static_cast<int>(query.sizes[1]),
              static_cast<int>(kernel.key_heads), static_cast<int>(past.sizes[1]), static_cast<int>(past.sizes[2]),
              static_cast<int>(past.sizes[3]), deferred ? &pending : nullptr, keeps_rows};
    Units units{query.floats(), key.floats(), unit_query.data(), unit_key.floats(), rule.key_heads, rule.key_dim};
    if (count <= kRowsAlone)
        for (int row = 0; row < count; ++row) unit_heads(&units, row);
    else if (Status* status = in_parallel(kernel.api, context, unit_heads, count, &units))
        return status;
    return in_parallel(kernel.api, context, run_head, query.sizes[0] * past.sizes[1], &rule);
}

// One commit.
struct Commit {
    Factors factors;
    const float *past, *past_rows;
    float *present, *present_rows;
    int taps;
};

void commit_head(void* data, size_t task) {
    const Commit& commit = *static_cast<Commit*>(data);
    const Factors& factors = commit.factors;
    const size_t state = task * factors.key_dim * factors.value_dim;
    with_kept_rows(factors, task, [&](const DeltaRun& kept) {
        delta_rows(commit.past + state, commit.present + state, factors.key_dim, factors.value_dim, kept, kNoRows, true);
    });
    if (task % factors.value_heads != 0) return;
    // The last raw rows that end with the last kept one.
    const size_t sequence = task / factors.value_heads;
    const int count = static_cast<int>(factors.counts[sequence]);
    const float* rows = factors.rows + sequence * factors.most * factors.width;
    for (int tap = 0; tap < commit.taps; ++tap) {
        const int row = count + tap - commit.taps;
        const float* from = row >= 0 ? rows + static_cast<size_t>(row) * factors.width
                                     : commit.past_rows + (sequence * commit.taps + count + tap) * factors.channels;
        std::memcpy(commit.present_rows + (sequence * commit.taps + tap) * factors.channels, from,
                    factors.channels * sizeof(float));
    }
}

Status* compute_commit(void* state, runtime::Context* context) {
    const Kernel& kernel = *static_cast<Kernel*>(state);
    Tensors tensors(kernel.api, context);
    const Tensor rows = tensors.input(0), past = tensors.input(1), past_rows = tensors.input(2),
                 counts = tensors.input(3);
    const Tensor present = tensors.output(0, past), present_rows = tensors.output(1, past_rows);
    if (tensors.status != nullptr) return tensors.status;
    const int64_t batch = rows.sizes[0];
    Commit commit{factors_of(rows, counts, kernel, past), past.floats(), past_rows.floats(), present.floats(),
                  present_rows.floats(), static_cast<int>(past_rows.sizes[1])};
    const bool fits = past.axes == 4 && past.is({batch, past.sizes[1], kernel.key_dim, past.sizes[3]}) &&
                      past.sizes[1] % kernel.key_heads == 0 && past_rows.is({batch, commit.taps, commit.factors.channels});
    if (!fits || !commit.factors.fits(rows, counts, batch))
        return kernel.api.error("DeltaCommit got tensors that do not fit together.");
    if (!commit.factors.are_there(batch)) return kernel.api.error("DeltaCommit was to keep more rows than there are.");
    return in_parallel(kernel.api, context, commit_head, batch * past.sizes[1], &commit);
}

}  // namespace

Operation delta_rule() {
    Operation operation = operation_of<6, 3>();
    operation.name = [](const Operation*) { return "DeltaRule"; };
    operation.create = create;
    operation.compute = without_exceptions<compute_rule<false>>;
    operation.destroy = destroy;
    return operation;
}

Operation deferred_delta_rule() {
    Operation operation = operation_of<9, 3>();
    operation.name = [](const Operation*) { return "DeferredDeltaRule"; };
    operation.input_type = [](const Operation*, size_t index) { return index >= 7 ? runtime::kInt64 : runtime::kFloat; };
    operation.create = create;
    operation.compute = without_exceptions<compute_rule<true>>;
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
