// A fixed team of threads that run one function together and meet at barriers.
//
// A step of the engine is some 300 short operations, each shared by all threads. Waking threads for
// each would cost more than the operation, so the team enters a whole step at once and waits at
// barriers by spinning; between steps it sleeps.
//
// The kernel may wake a sleeper on the CPU of the thread that woke it, although another is idle, and
// takes some ten milliseconds to notice that two threads that never sleep share one. So the team
// begins a step by finding out whose CPU is whose, and a worker that finds its own taken moves to a
// free one. It is not pinned there: if something else needs that CPU, the kernel may move it.
#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace tokenpath {

class Team {
   public:
    explicit Team(int threads);
    ~Team();
    Team(const Team&) = delete;
    Team& operator=(const Team&) = delete;

    int size() const { return int(workers_.size()) + 1; }

    // Calls work(thread) on every thread, the caller's being 0, and returns when all have. Work
    // must not throw.
    void run(const std::function<void(int)>& work);

    // To be called by all threads inside run(), equally often: nobody goes on before all are here.
    void barrier();

   private:
    void serve(int thread);
    void take_cpu(uint32_t round);

    std::vector<std::thread> workers_;
    std::mutex mutex_;
    std::condition_variable wake_;
    const std::function<void(int)>* work_ = nullptr;
    uint32_t round_ = 0;
    bool closing_ = false;
    std::vector<std::atomic<uint32_t>> taken_;  // by CPU: the last round in which one of us took it
    std::atomic<int> present_{0};               // workers that are awake in this round
    std::atomic<int> arrived_{0};
    std::atomic<uint32_t> phase_{0};
};

}  // namespace tokenpath
