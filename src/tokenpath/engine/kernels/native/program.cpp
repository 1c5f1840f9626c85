#include "program.h"

#include <algorithm>
#include <cmath>

namespace tokenpath {

Quantized Program::Buffer::view(Tiling tiling) {
    return {tiling,
            columns,
            values.data(),
            factor.data(),
            run_scale.data(),
            run_shift.data(),
            scale.data(),
            inverse.data(),
            group_sum.data()};
}

void Program::Buffer::reserve(size_t rows) {
    const size_t size = rows * size_t(columns);
    if (!quantized) {
        if (floats.size() < size) floats.resize(size);
        return;
    }
    if (scale.size() >= rows) return;
    values.resize(size);
    scale.resize(rows);
    factor.resize(rows);
    inverse.resize(rows);
    const size_t runs = rows * (size_t(columns + RUN - 1) / RUN);
    run_scale.resize(runs);
    run_shift.resize(runs);
    group_sum.resize(rows * (size_t(columns / GROUP + 1) / 2 * 2));
}

int Program::rotary(std::vector<float> inverse_frequencies, float magnitude) {
    rotaries_.push_back({std::move(inverse_frequencies), magnitude, {}, {}});
    return int(rotaries_.size()) - 1;
}

int Program::buffer(int columns, bool quantized) {
    Buffer buffer;
    buffer.columns = columns;
    buffer.quantized = quantized;
    buffers_.push_back(std::move(buffer));
    return int(buffers_.size()) - 1;
}

void Program::append(const Operation& operation) {
    operations_.push_back(operation);
    if (operation.kind != Kind::attend) return;
    const int heads = operation.shape.heads, kv_heads = operation.shape.kv_heads;
    const auto same = std::find_if(plans_.begin(), plans_.end(), [&](const Plan& plan) {
        return plan.heads == heads && plan.kv_heads == kv_heads;
    });
    operations_.back().plan = size_t(same - plans_.begin());
    if (same == plans_.end()) plans_.push_back({heads, kv_heads, {}});
}

void Program::plan_attention(const StepInput& step) {
    for (Plan& plan : plans_) {
        plan.units.clear();
        const int most = std::max(1, kernels_->attend_unit_rows / (plan.heads / plan.kv_heads));
        for (size_t chunk = 0; chunk < step.batch.chunks; chunk++) {
            const int64_t begin = step.batch.row_starts[chunk], end = step.batch.row_starts[chunk + 1];
            // From the end: the last queries of a prompt see the most keys, and what is long should
            // be begun early.
            for (int64_t stop = end; stop > begin; stop -= most) {
                const int64_t first = std::max(begin, stop - most);
                for (int head = 0; head < plan.kv_heads; head++)
                    plan.units.push_back({int(chunk), head, first, int(stop - first)});
            }
        }
    }
}

// Calls work(i) for every i < count, shared by the threads (phase is the operation's index, or that
// and the number of operations more for its second half): each has a range of its own, in which it
// goes from one to the next, and helps the others when that is done. A panel's successor is so
// nearly always known when its own product begins, and can be asked for.
template <class Work>
void Program::share(size_t phase, int thread, size_t count, const Work& work) {
    const int threads = team_->size();
    for (int turn = 0; turn < threads; turn++) {
        const int owner = (thread + turn) % threads;
        const size_t begin = count * owner / threads, end = count * (owner + 1) / threads;
        std::atomic<size_t>& next = next_[phase * threads + owner].value;
        while (begin + next.load(std::memory_order_relaxed) < end) {
            const size_t i = begin + next.fetch_add(1, std::memory_order_relaxed);
            if (i < end) work(i);
        }
    }
}

void Program::run(const StepInput& step) {
    for (auto& buffer : buffers_) buffer.reserve(step.tokens);
    for (auto& rotary : rotaries_) {
        const size_t size = step.tokens * rotary.inverse_frequencies.size();
        if (rotary.cos.size() < size) {
            rotary.cos.resize(size);
            rotary.sin.resize(size);
        }
    }
    size_t query_columns = 0;
    for (const auto& op : operations_)
        if (op.kind == Kind::split)
            query_columns = std::max(query_columns, size_t(op.shape.heads) * op.shape.head_dim);
    if (queries_.size() < step.tokens * query_columns) queries_.resize(step.tokens * query_columns);
    if (scratch_.empty())
        for (int i = 0; i < team_->size(); i++) scratch_.emplace_back(kernels_->attend_scratch_bytes + 64);
    plan_attention(step);
    const size_t counters = 2 * (operations_.size() + 1) * team_->size();
    if (!next_) next_.reset(new Counter[counters]);
    for (size_t i = 0; i < counters; i++) next_[i].value.store(0, std::memory_order_relaxed);

    team_->run([&](int thread) {
        share(2 * operations_.size(), thread, step.tokens, [&](size_t t) {
            for (auto& rotary : rotaries_) {
                const size_t planes = rotary.inverse_frequencies.size();
                for (size_t i = 0; i < planes; i++) {
                    const float phase = float(step.positions[t]) * rotary.inverse_frequencies[i];
                    rotary.cos[t * planes + i] = std::cos(phase) * rotary.magnitude;
                    rotary.sin[t * planes + i] = std::sin(phase) * rotary.magnitude;
                }
            }
        });
        team_->barrier();
        for (const auto& operation : operations_) {
            execute(operation, step, thread);
            team_->barrier();
        }
    });
}

void Program::execute(const Operation& op, const StepInput& step, int thread) {
    const size_t index = size_t(&op - operations_.data());
    const size_t rows = op.sampled ? step.sampled : step.tokens;
    const Tiling tiling{rows, size_t(kernels_->tile_rows)};
    const auto shares = [&](size_t count, const auto& work) { share(index, thread, count, work); };
    const auto floats = [&](int buffer, size_t row) {
        return buffers_[buffer].floats.data() + row * buffers_[buffer].columns;
    };
    switch (op.kind) {
        case Kind::embed:
            shares(rows, [&](size_t t) {
                // A row of the packed int8 matrix: every fourth byte group of a panel.
                const Weights& w = op.matrix;
                const int64_t id = step.token_ids[t];
                const uint8_t* from = w.data + size_t(id / PANEL) * w.panel_bytes + id % PANEL * 4;
                const float scale = w.scale[id] * op.scale;
                float* to = floats(op.to, t);
                for (int k = 0; k < w.columns; k++)
                    to[k] = float(int(from[k / 4 * 128 + k % 4]) - 128) * scale;
            });
            break;
        case Kind::norm:
            shares(rows, [&](size_t t) {
                kernels_->norm_row(floats(op.from, t), op.weight, op.eps, op.columns,
                                   floats(op.to, t), op.add);
            });
            break;
        case Kind::quantize: {
            const QuantizeArgs args{floats(op.from, 0), size_t(buffers_[op.from].columns), op.weight,
                                    op.eps, op.by_run, buffers_[op.to].view(tiling)};
            shares(rows, [&](size_t t) { kernels_->scale_row(args, t); });
            team_->barrier();
            const size_t parts = size_t(op.columns + QUANTIZE_COLUMNS - 1) / QUANTIZE_COLUMNS;
            share(operations_.size() + index, thread, tiling.count() * parts, [&](size_t i) {
                kernels_->quantize_tile(args, i / parts, int(i % parts) * QUANTIZE_COLUMNS);
            });
            break;
        }
        case Kind::matmul: {
            MatmulArgs args{};
            args.weights = &op.matrix;
            args.activations = buffers_[op.from].view(tiling);
            args.out = op.to < 0 ? step.logits : buffers_[op.to].floats.data();
            args.out_stride = op.to < 0 ? step.vocab : size_t(buffers_[op.to].columns);
            args.output = op.output;
            args.activation = op.activation;
            const size_t panels = size_t(op.matrix.rows + PANEL - 1) / PANEL;
            shares(panels, [&](size_t panel) { kernels_->matmul_panel(args, int(panel)); });
            break;
        }
        case Kind::split: {
            const Rotary& rotary = rotaries_[op.rotary];
            SplitArgs args{&op.shape, op.pool, floats(op.from, 0), size_t(buffers_[op.from].columns),
                           op.weight, op.eps,  rotary.cos.data(),  rotary.sin.data(),
                           step.slots, queries_.data()};
            shares(rows, [&](size_t t) { kernels_->split_row(args, t); });
            break;
        }
        case Kind::attend: {
            AttendArgs args{&op.shape, op.pool, step.batch, queries_.data(), floats(op.to, 0)};
            unsigned char* raw = scratch_[thread].data();
            void* scratch = raw + (64 - reinterpret_cast<uintptr_t>(raw) % 64) % 64;
            const std::vector<AttendUnit>& units = plans_[op.plan].units;
            shares(units.size(), [&](size_t i) { kernels_->attend_unit(args, units[i], scratch); });
            break;
        }
        case Kind::gather:
            shares(rows, [&](size_t i) {
                const float* from = floats(op.from, size_t(step.sampled_rows[i]));
                std::copy(from, from + op.columns, floats(op.to, i));
            });
            break;
    }
}

}  // namespace tokenpath
