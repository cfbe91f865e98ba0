#include "memory.h"

#include <sys/mman.h>

#include <algorithm>

namespace mtp {
namespace {

constexpr size_t kHuge = size_t{2} << 20;
constexpr size_t kMapping = size_t{256} << 20;  // Only what is written to takes memory.
constexpr size_t kAlignment = 64;

}  // namespace

std::mutex Arena::mutex_;
std::set<Arena*> Arena::living_;

void Arena::let_go() {
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        if (--holders_ > 0) return;
        living_.erase(this);
    }
    delete this;
}

void Arena::publish(const void* address) {
    const std::lock_guard<std::mutex> lock(mutex_);
    published_.insert(address);
    living_.insert(this);
}

bool Arena::hold(const void* address) {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (Arena* arena : living_)
        if (arena->published_.count(address) != 0) {
            ++arena->holders_;
            return true;
        }
    return false;
}

Arena::~Arena() {
    for (const Mapping& mapping : mappings_) munmap(mapping.start, mapping.size);
}

uint8_t* Arena::take(size_t bytes) {
    bytes = (bytes + kAlignment - 1) / kAlignment * kAlignment;
    if (mappings_.empty() || mappings_.back().size - mappings_.back().used < bytes) {
        // One huge page more, since a mapping need not begin at one.
        const size_t size = std::max(kMapping, (bytes + kHuge - 1) / kHuge * kHuge) + kHuge;
        void* found = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (found == MAP_FAILED) return nullptr;
        madvise(found, size, MADV_HUGEPAGE);  // Refused where there are none: then pages are small.
        const size_t skipped = (kHuge - reinterpret_cast<uintptr_t>(found) % kHuge) % kHuge;
        mappings_.push_back({static_cast<uint8_t*>(found), size, skipped});
    }
    Mapping& mapping = mappings_.back();
    uint8_t* taken = mapping.start + mapping.used;
    mapping.used += bytes;
    return taken;
}

}  // namespace mtp
