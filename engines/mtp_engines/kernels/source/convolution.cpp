// The operator `ShortConvolution`: depthwise causal convolution over rows, then SiLU.
#include <immintrin.h>

#include <algorithm>
#include <cstring>

#include "exponential.h"
#include "operators.h"

namespace mtp {
namespace {

constexpr int kTaskChannels = 512;
constexpr size_t kAlone = 4 << 10;  // Numbers that one thread works off sooner than it wakes another.

struct Kernel {
    Api api;
};

struct Convolution {
    const float *x, *weight, *past;
    float *output, *present;
    int sequences, rows, channels, taps;
    // Rows that come between the past and these, [sequences, most, width], of which a sequence keeps the first ones.
    const float* pending = nullptr;
    const int64_t* counts = nullptr;
    int most = 0, width = 0;
    bool keeps_rows = true;

    int parts() const { return (channels + kTaskChannels - 1) / kTaskChannels; }

    int count(int sequence) const { return counts == nullptr ? 0 : static_cast<int>(counts[sequence]); }

    // Row `row` of a sequence, which for negative ones stands among those before, and before these in the past.
    const float* at(int sequence, int row) const {
        if (row >= 0) return x + (static_cast<size_t>(sequence) * rows + row) * channels;
        row += count(sequence);
        if (row >= 0) return pending + (static_cast<size_t>(sequence) * most + row) * width;
        return past + (static_cast<size_t>(sequence) * (taps - 1) + taps - 1 + row) * channels;
    }
};

__m256 silu(__m256 x) {
    const __m256 one = _mm256_set1_ps(1), negative = _mm256_sub_ps(_mm256_setzero_ps(), x);
    return _mm256_div_ps(x, _mm256_add_ps(one, exponential(negative)));
}

struct Lanes {
    __m256i mask;

    explicit Lanes(int count) {
        static constexpr int lanes[16] = {-1, -1, -1, -1, -1, -1, -1, -1};
        mask = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(lanes + 8 - count));
    }
    __m256 load(const float* from) const { return _mm256_maskload_ps(from, mask); }
    void store(float* to, __m256 values) const { _mm256_maskstore_ps(to, mask, values); }
};

struct AllLanes {
    __m256 load(const float* from) const { return _mm256_loadu_ps(from); }
    void store(float* to, __m256 values) const { _mm256_storeu_ps(to, values); }
};

// Up to 8 channels of a row; the last ones of a row by the same arithmetic as the others.
template <class Access>
void convolve(const Convolution& c, int sequence, int row, int first, const Access& access) {
    __m256 sum = _mm256_setzero_ps();
    for (int tap = 0; tap < c.taps; ++tap) {
        const __m256 weight = access.load(c.weight + static_cast<size_t>(tap) * c.channels + first);
        sum = _mm256_fmadd_ps(access.load(c.at(sequence, row + tap + 1 - c.taps) + first), weight, sum);
    }
    access.store(c.output + (static_cast<size_t>(sequence) * c.rows + row) * c.channels + first, silu(sum));
}

void run_task(void* data, size_t task) {
    const Convolution& c = *static_cast<Convolution*>(data);
    const int part = static_cast<int>(task) % c.parts(), place = static_cast<int>(task) / c.parts();
    const int last = std::min(c.channels, (part + 1) * kTaskChannels);
    int channel = part * kTaskChannels;
    for (; channel + 8 <= last; channel += 8) convolve(c, place / c.rows, place % c.rows, channel, AllLanes());
    if (channel < last) convolve(c, place / c.rows, place % c.rows, channel, Lanes(last - channel));
}

// With `deferred` the inputs end as those of a deferred delta rule do; rows begin with what the convolution reads.
template <bool deferred>
Status* compute(void* state, runtime::Context* context) {
    const Kernel& kernel = *static_cast<Kernel*>(state);
    Tensors tensors(kernel.api, context);
    const Tensor x = tensors.input(0), weight = tensors.input(1), past = tensors.input(2);
    const Tensor output = tensors.output(0, x), present = tensors.output(1, past);
    if (tensors.status != nullptr) return tensors.status;
    Convolution c{x.floats(), weight.floats(), past.floats(), output.floats(), present.floats(),
                  static_cast<int>(x.sizes[0]), static_cast<int>(x.sizes[1]), static_cast<int>(x.sizes[2]),
                  static_cast<int>(weight.sizes[0])};
    const bool fits = x.axes == 3 && weight.is({c.taps, c.channels}) && past.is({x.sizes[0], c.taps - 1, c.channels});
    if (!fits || c.taps < 1)
        return kernel.api.error("ShortConvolution got tensors that do not fit together.");
    if constexpr (deferred) {
        const Tensor pending = tensors.input(3), counts = tensors.input(4), keeps = tensors.input(5);
        if (tensors.status != nullptr) return tensors.status;
        const int64_t most = pending.sizes[1], *given = counts.integers();
        const bool known = pending.axes == 3 && pending.is({c.sequences, most, pending.sizes[2]}) &&
                           pending.sizes[2] >= c.channels && counts.is({c.sequences}) && keeps.is({1});
        if (!known || std::any_of(given, given + c.sequences, [&](int64_t n) { return n < 0 || n > most; }))
            return kernel.api.error("ShortConvolution got rows before its own that do not fit.");
        c.pending = pending.floats(), c.counts = given, c.most = static_cast<int>(most);
        c.width = static_cast<int>(pending.sizes[2]), c.keeps_rows = keeps.integers()[0] != 0;
    }
    const int kept = c.keeps_rows ? c.rows : 0;
    for (int sequence = 0; sequence < c.sequences; ++sequence)
        for (int tap = 0; tap + 1 < c.taps; ++tap)
            std::memcpy(c.present + (static_cast<size_t>(sequence) * (c.taps - 1) + tap) * c.channels,
                        c.at(sequence, kept + tap + 1 - c.taps), c.channels * sizeof(float));
    const size_t tasks = static_cast<size_t>(c.sequences) * c.rows * c.parts();
    if (static_cast<size_t>(c.sequences) * c.rows * c.channels > kAlone)
        return in_parallel(kernel.api, context, run_task, tasks, &c);
    for (size_t task = 0; task < tasks; ++task) run_task(&c, task);
    return nullptr;
}

Status* create(const Operation*, const void* table, const runtime::Info*, void** state) {
    *state = new Kernel{Api(table)};
    return nullptr;
}

void destroy(void* state) { delete static_cast<Kernel*>(state); }

}  // namespace

Operation short_convolution() {
    Operation operation = operation_of<3, 2>();
    operation.name = [](const Operation*) { return "ShortConvolution"; };
    operation.create = create;
    operation.compute = without_exceptions<compute<false>>;
    operation.destroy = destroy;
    return operation;
}

Operation deferred_short_convolution() {
    Operation operation = operation_of<6, 2>();
    operation.name = [](const Operation*) { return "DeferredShortConvolution"; };
    operation.input_type = [](const Operation*, size_t index) { return index >= 4 ? runtime::kInt64 : runtime::kFloat; };
    operation.create = create;
    operation.compute = without_exceptions<compute<true>>;
    operation.destroy = destroy;
    return operation;
}

}  // namespace mtp
