// A whole forward pass as a list of operations, run by a team of threads in one call from Python.
//
// Python reads a loaded decoder once and appends an operation per kernel call (native_program.py);
// here they are executed, each shared by all threads, with a barrier between. Buffers are numbered:
// Python decides which value lives where, this module sizes them for the step at hand.
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "kernels.h"
#include "meeting.h"
#include "team.h"

namespace tokenpath {

// What a step brings: the arrays of Python's StepBatch, and which rows' logits are wanted where.
struct StepInput {
    size_t tokens;
    const int64_t* token_ids;
    const int64_t* positions;
    const int64_t* slots;
    Ragged batch;
    size_t sampled;
    const int64_t* sampled_rows;
    float* logits;  // [sampled, vocab]; null where another process has them
    size_t vocab;
};

enum class Kind { embed, norm, quantize, matmul, split, attend, gather, exchange };

struct Operation {
    Kind kind;
    int from = -1;    // buffer read
    int to = -1;      // buffer written; -1 of a matmul: the logits
    int columns = 0;  // of the input
    bool add = false;
    bool by_run = false;  // of a quantize: for an int8 product
    bool sampled = false;  // works on the rows that a gather left, not on all of the step's
    // Of a model that is divided among processes:
    int first = 0;         // the column from which a product is written, or the first token of an
                           // embedding, or the column (or token) from which this part has its own
    int own = 0;           // of an exchange: so many columns, or tokens, are this part's
    bool by_token = false;  // of an exchange: rows are whole, and their tokens say whose they are
    float scale = 0.0f;
    float eps = 0.0f;
    const float* weight = nullptr;
    const float* balance = nullptr;  // of a split
    Weights matrix{};
    Output output = Output::store;
    Activation activation = Activation::silu;
    AttentionShape shape{};
    KvPool pool{};
    int rotary = 0;
    size_t plan = 0;  // of an attention: which list of units
};

// Angles of one kind of layer.
struct Rotary {
    std::vector<float> inverse_frequencies;
    float magnitude;
    std::vector<float> cos, sin;  // [tokens, planes] of the step
};

class Program {
   public:
    Program(std::shared_ptr<Team> team, const Kernels* kernels) : team_(std::move(team)), kernels_(kernels) {}

    int rotary(std::vector<float> inverse_frequencies, float magnitude);
    // A float32 buffer of so many columns a row, or an int8 one with its scales.
    // One for sampled rows has no room for others.
    int buffer(int columns, bool quantized, bool sampled);
    // Have exchanges, which take place there.
    void join(std::shared_ptr<Meeting> meeting) { meeting_ = std::move(meeting); }
    void append(const Operation& operation);
    // False if an exchange failed; then nothing that was made is of use.
    bool run(const StepInput& step);
    // Write rows of a float buffer before a run, or read them after it.
    void fill(int buffer, const float* from, size_t rows);
    void copy(int buffer, float* to, size_t rows) const;

   private:
    struct Buffer {
        int columns;
        bool quantized;
        bool sampled;
        std::vector<float> floats;
        std::vector<int8_t> values;
        std::vector<float> factor, scale, inverse, run_scale;
        std::vector<int32_t> run_shift;
        std::vector<int16_t> group_sum;

        Quantized view(Tiling tiling);
        void reserve(size_t rows);
    };

    void execute(const Operation& operation, const StepInput& step, int thread);
    template <class Work>
    void share(size_t operation, int thread, size_t count, const Work& work);
    void exchange(const Operation& operation, const StepInput& step, size_t rows, int thread);
    void plan_attention(const StepInput& step);
    void cut_units(size_t plan, int64_t total);

    std::shared_ptr<Team> team_;
    std::shared_ptr<Meeting> meeting_;
    bool apart_ = false;  // an exchange failed
    const Kernels* kernels_;
    std::vector<Operation> operations_;
    std::vector<Buffer> buffers_;
    std::vector<Rotary> rotaries_;
    std::vector<uint16_t> queries_;
    std::vector<float> query_scales_;
    // Layers with the same heads and window attend in the same units.
    struct Plan {
        int heads, kv_heads, head_dim, window;
        std::vector<AttendUnit> units;   // and pieces of those that are cut
        std::vector<AttendUnit> merges;  // units that are cut
    };
    std::vector<Plan> plans_;
    std::vector<float> partials_;
    std::vector<std::vector<unsigned char>> scratch_;  // of each thread
    // A line of its own for each, which its thread writes while others do not read.
    struct alignas(64) Counter {
        std::atomic<size_t> value;
    };
    std::unique_ptr<Counter[]> next_;  // see share()
};

}  // namespace tokenpath
