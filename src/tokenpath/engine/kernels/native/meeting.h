// Where processes that compute one model together put their parts of its activations side by side.
//
// The place is memory that all of them have mapped. It has two areas, used in turn: whoever has come
// to a round has read all of the one before, so that area may be written again. No part of what is
// exchanged is added up, so that the result does not depend on how many take part.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace tokenpath {

class Meeting {
   public:
    // `bytes` of zeroed memory, shared by `parts` processes of which this is `part`. Throws
    // std::invalid_argument.
    Meeting(uint8_t* memory, size_t bytes, int part, int parts, double timeout_s);

    // Numbers that fit into an area.
    size_t floats() const { return floats_; }

    // The area of the round that comes next.
    float* area() const;

    // Waits until all have come to the end of this round, and have written what they had to write.
    // False if one does not come in time, or has given up; then it is false for good, for all.
    bool meet();

    // Lets everybody's meet() fail; from any thread.
    void give_up();

   private:
    struct alignas(64) Word {
        std::atomic<uint64_t> value;
    };

    bool wait_for(int part) const;

    Word* words_;  // the first says that somebody has given up, the others who has come how far
    uint8_t* areas_;
    size_t floats_;
    uint64_t round_ = 0;
    int part_, parts_;
    double timeout_s_;
};

}  // namespace tokenpath
