// The library's face: packing for Python, and the operators for ONNX Runtime.
#include <algorithm>
#include <new>
#include <system_error>
#include <thread>
#include <vector>

#include "matrices.h"
#include "operators.h"
#include "processor.h"

namespace mtp {
namespace {

constexpr const char* kDomain = "mtp.kernels";

template <class Pack>
void in_threads(const Matrix& matrix, int threads, Pack pack) {
    const int groups = group_count(matrix), step = (groups - 1) / std::max(1, threads) + 1;
    std::vector<std::thread> running;
    for (int first = step; first < groups; first += step) {
        const int last = std::min(groups, first + step);
        try {
            running.emplace_back([=] { pack(first, last); });
        } catch (const std::system_error&) {  // No more threads: this one does it.
            pack(first, last);
        }
    }
    pack(0, std::min(groups, step));
    for (std::thread& thread : running) thread.join();
}

Matrix* new_matrix(Arena& arena, Kind kind, int outputs, int columns, int run) {
    uint8_t* own = arena.take(sizeof(Matrix));
    if (own == nullptr) return nullptr;
    Matrix* matrix = new (own) Matrix{kind, arena.used, outputs, columns, 0, run, nullptr, nullptr, &arena};
    if (kind == Kind::blocks) matrix->blocks = (columns + kUsed - 1) / kUsed;
    matrix->data = arena.take(group_count(*matrix) * group_bytes(*matrix));
    if (kind == Kind::rotated)
        matrix->scales = reinterpret_cast<float*>(arena.take(group_count(*matrix) * kRotatedGroup * sizeof(float)));
    const bool whole = matrix->data != nullptr && (kind != Kind::rotated || matrix->scales != nullptr);
    if (!whole) return nullptr;
    arena.publish(matrix);
    return matrix;
}

}  // namespace
}  // namespace mtp

#define MTP_EXPORT extern "C" __attribute__((visibility("default")))

MTP_EXPORT const char* mtp_source_digest() { return MTP_SOURCE_DIGEST; }

MTP_EXPORT int mtp_is_supported() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }

// `mtp::Instructions` that this processor has.
MTP_EXPORT int mtp_best_instructions() { return static_cast<int>(mtp::best_instructions()); }

// Its matrices are packed for these instructions, which the processor must have.
MTP_EXPORT void* mtp_new_arena(int instructions) {
    return new mtp::Arena(static_cast<mtp::Instructions>(instructions));
}

MTP_EXPORT void mtp_let_arena_go(void* arena) { static_cast<mtp::Arena*>(arena)->let_go(); }

// A matrix for the attribute of `PackedProduct`, owned by the arena; nullptr if there is no memory.
MTP_EXPORT void* mtp_pack_blocks(void* arena, const uint8_t* blocks, const float* scales, int outputs, int columns,
                                 int threads) {
    mtp::Matrix* matrix = mtp::new_matrix(*static_cast<mtp::Arena*>(arena), mtp::Kind::blocks, outputs, columns, 0);
    if (matrix != nullptr)
        mtp::in_threads(*matrix, threads,
                        [=](int first, int last) { mtp::pack_blocks(blocks, scales, first, last, *matrix); });
    return matrix;
}

MTP_EXPORT void* mtp_pack_rotated(void* arena, const uint8_t* values, const float* scales, int outputs, int columns,
                                  int run, int by_rows, int threads) {
    mtp::Matrix* matrix = mtp::new_matrix(*static_cast<mtp::Arena*>(arena), mtp::Kind::rotated, outputs, columns, run);
    if (matrix != nullptr)
        mtp::in_threads(*matrix, threads, [=](int first, int last) {
            mtp::pack_rotated(values, scales, by_rows != 0, first, last, *matrix);
        });
    return matrix;
}

MTP_EXPORT void* mtp_pack_whole(void* arena, const float* values, int outputs, int columns, int threads) {
    mtp::Matrix* matrix = mtp::new_matrix(*static_cast<mtp::Arena*>(arena), mtp::Kind::whole, outputs, columns, 0);
    if (matrix != nullptr)
        mtp::in_threads(*matrix, threads, [=](int first, int last) { mtp::pack_whole(values, first, last, *matrix); });
    return matrix;
}

namespace {

// The domain that all sessions share, made once.
struct Domain {
    mtp::runtime::Operation operations[8] = {
        mtp::packed_product(),    mtp::packed_choice(),
        mtp::delta_rule(),        mtp::deferred_delta_rule(),        mtp::delta_commit(),
        mtp::short_convolution(), mtp::deferred_short_convolution(), mtp::cached_attention()};
    void* domain = nullptr;
    bool failed;

    explicit Domain(const mtp::runtime::Api& api) : failed(api.create_domain(mtp::kDomain, &domain) != nullptr) {
        for (const mtp::runtime::Operation& operation : operations)
            failed = failed || api.add(domain, &operation) != nullptr;
    }
};

}  // namespace

MTP_EXPORT mtp::runtime::Status* RegisterCustomOps(void* options, const mtp::runtime::Base* base) {
    const mtp::runtime::Api api(base->get_api(mtp::runtime::kVersion));
    static const Domain domain(api);
    if (domain.failed) return api.error("The operators of mtp.kernels cannot be registered.");
    return api.add_domain(options, domain.domain);
}
