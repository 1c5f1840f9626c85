#include "team.h"

#include <algorithm>

#if defined(__linux__)
#include <sched.h>
#include <unistd.h>
#endif

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

// The same while workers wake up, which takes some microseconds unless one waits for our CPU.
constexpr int WAKE_SPINS = 1000;

int cpu_count() {
#if defined(__linux__)
    return int(std::min<long>(std::max<long>(sysconf(_SC_NPROCESSORS_CONF), 1), CPU_SETSIZE));
#else
    return 0;
#endif
}

}  // namespace

Team::Team(int threads) : taken_(size_t(cpu_count())) {
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
    present_.store(0, std::memory_order_relaxed);
    uint32_t round;
    {
        std::lock_guard<std::mutex> lock(mutex_);
        work_ = &work;
        round = ++round_;
    }
    take_cpu(round);
    wake_.notify_all();
    for (int spins = 0; present_.load(std::memory_order_acquire) < int(workers_.size()); spins++) {
        if (spins < WAKE_SPINS)
            relax();
        else
            std::this_thread::yield();
    }
    work(0);
    barrier();
}

void Team::serve(int thread) {
    uint32_t seen = 0;
    for (;;) {
        const std::function<void(int)>* work;
        {
            std::unique_lock<std::mutex> lock(mutex_);
            wake_.wait(lock, [&] { return closing_ || round_ != seen; });
            if (closing_) return;
            seen = round_;
            work = work_;
        }
        take_cpu(seen);
        present_.fetch_add(1, std::memory_order_release);
        (*work)(thread);
        barrier();
    }
}

// Take the CPU that we are on, or, if another of the team has it in this round, move to a free one.
void Team::take_cpu(uint32_t round) {
#if defined(__linux__)
    const auto take = [&](int cpu) {
        return size_t(cpu) < taken_.size() && taken_[cpu].exchange(round) != round;
    };
    const int here = sched_getcpu();
    cpu_set_t allowed;
    if (here < 0 || take(here) || sched_getaffinity(0, sizeof allowed, &allowed) != 0) return;
    for (int cpu = 0; size_t(cpu) < taken_.size(); cpu++) {
        if (!CPU_ISSET(cpu, &allowed) || !take(cpu)) continue;
        cpu_set_t there;
        CPU_ZERO(&there);
        CPU_SET(cpu, &there);
        // Being held to one CPU moves us there at once; being free again leaves us there.
        sched_setaffinity(0, sizeof there, &there);
        sched_setaffinity(0, sizeof allowed, &allowed);
        return;
    }
#endif
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
