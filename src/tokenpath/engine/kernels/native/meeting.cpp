#include "meeting.h"

#include <chrono>
#include <stdexcept>
#include <thread>

namespace tokenpath {

namespace {

constexpr size_t HEADER_BYTES = 4096;
static_assert(std::atomic<uint64_t>::is_always_lock_free, "processes share these");

// After so many turns the others are not merely late, and our CPU may be of use to somebody else;
// after some more they may take long, and it should be saved.
constexpr int SPINS = 2000;
constexpr int YIELDS = 2000;

inline void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

}  // namespace

Meeting::Meeting(uint8_t* memory, size_t bytes, int part, int parts, double timeout_s)
    : words_(reinterpret_cast<Word*>(memory)),
      areas_(memory + HEADER_BYTES),
      part_(part),
      parts_(parts),
      timeout_s_(timeout_s) {
    if (part < 0 || part >= parts || size_t(parts) + 1 > HEADER_BYTES / sizeof(Word))
        throw std::invalid_argument("so many parts cannot meet");
    if (bytes < 3 * HEADER_BYTES) throw std::invalid_argument("a meeting needs more memory");
    floats_ = (bytes - HEADER_BYTES) / 2 / sizeof(float);
}

float* Meeting::area() const {
    return reinterpret_cast<float*>(areas_) + (round_ % 2) * floats_;
}

bool Meeting::meet() {
    words_[1 + part_].value.store(++round_, std::memory_order_release);
    for (int part = 0; part < parts_; part++)
        if (!wait_for(part)) return false;
    return true;
}

bool Meeting::wait_for(int part) const {
    using Clock = std::chrono::steady_clock;
    Clock::time_point until{};
    for (int turn = 0; words_[1 + part].value.load(std::memory_order_acquire) < round_; turn++) {
        if (turn < SPINS) {
            relax();
            continue;
        }
        if (words_[0].value.load(std::memory_order_relaxed)) return false;
        if (turn < SPINS + YIELDS) {
            std::this_thread::yield();
            continue;
        }
        const auto now = Clock::now();
        if (until == Clock::time_point{})
            until = now + std::chrono::duration_cast<Clock::duration>(
                              std::chrono::duration<double>(timeout_s_));
        if (now > until) {
            words_[0].value.store(1, std::memory_order_relaxed);
            return false;
        }
        std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
    return true;
}

void Meeting::give_up() { words_[0].value.store(1, std::memory_order_relaxed); }

}  // namespace tokenpath
