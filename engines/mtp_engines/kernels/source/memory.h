// Memory for packed matrices: few large mappings, so that it lies in huge pages.
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <set>
#include <vector>

#include "processor.h"

namespace mtp {

// Lives as long as anybody holds it: who made it, and every kernel that reads a matrix in it.
class Arena {
public:
    explicit Arena(Instructions used) : used(used) {}
    Arena(const Arena&) = delete;
    Arena& operator=(const Arena&) = delete;

    void let_go();

    // Makes `address` known as something that lies in this memory.
    void publish(const void* address);

    // What its matrices are packed for.
    const Instructions used;

    // Holds the memory in which a published address lies; false if there is none.
    static bool hold(const void* address);

    // `bytes` of zeros, aligned to 64; nullptr if there is no memory. Not for two threads at once.
    uint8_t* take(size_t bytes);

private:
    ~Arena();

    struct Mapping {
        uint8_t* start;
        size_t size, used;
    };
    std::vector<Mapping> mappings_;
    std::set<const void*> published_;
    int holders_ = 1;

    static std::mutex mutex_;
    static std::set<Arena*> living_;
};

}  // namespace mtp
