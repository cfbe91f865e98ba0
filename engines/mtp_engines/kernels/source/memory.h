// Memory for packed matrices: few large mappings, so that it lies in huge pages.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace mtp {

// Lives as long as anybody holds it: who made it, and every kernel that reads a matrix in it.
class Arena {
public:
    Arena() = default;
    Arena(const Arena&) = delete;
    Arena& operator=(const Arena&) = delete;

    void hold() { ++holders_; }
    void let_go() {
        if (--holders_ == 0) delete this;
    }

    // `bytes` of zeros, aligned to 64; nullptr if there is no memory. Not for two threads at once.
    uint8_t* take(size_t bytes);

private:
    ~Arena();

    struct Mapping {
        uint8_t* start;
        size_t size, used;
    };
    std::vector<Mapping> mappings_;
    std::atomic<int> holders_{1};
};

}  // namespace mtp
