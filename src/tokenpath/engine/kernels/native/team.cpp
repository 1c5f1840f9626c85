#include "team.h"

namespace tokenpath {

namespace {

inline void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// After so many turns the others are not merely late: their CPU runs something else, and ours
// should be given away, too.
constexpr int SPINS = 20000;

}  // namespace

Team::Team(int threads) {
    for (int thread = 1; thread < threads; thread++)
        workers_.emplace_back([this, thread] { serve(thread); });
}

Team::~Team() {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        closing_ = true;
    }
    wake_.notify_all();
    for (auto& worker : workers_) worker.join();
}

void Team::run(const std::function<void(int)>& work) {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        work_ = &work;
        round_++;
    }
    wake_.notify_all();
    work(0);
    barrier();
}

void Team::serve(int thread) {
    uint64_t seen = 0;
    for (;;) {
        const std::function<void(int)>* work;
        {
            std::unique_lock<std::mutex> lock(mutex_);
            wake_.wait(lock, [&] { return closing_ || round_ != seen; });
            if (closing_) return;
            seen = round_;
            work = work_;
        }
        (*work)(thread);
        barrier();
    }
}

void Team::barrier() {
    const int threads = size();
    if (threads == 1) return;
    const uint32_t phase = phase_.load(std::memory_order_acquire);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == threads) {
        arrived_.store(0, std::memory_order_relaxed);
        phase_.store(phase + 1, std::memory_order_release);
        return;
    }
    for (int spins = 0; phase_.load(std::memory_order_acquire) == phase; spins++) {
        if (spins < SPINS)
            relax();
        else
            std::this_thread::yield();
    }
}

}  // namespace tokenpath
