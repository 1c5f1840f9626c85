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

int Program::buffer(int columns, bool quantized, bool sampled) {
    Buffer buffer;
    buffer.columns = columns;
    buffer.quantized = quantized;
    buffer.sampled = sampled;
    buffers_.push_back(std::move(buffer));
    return int(buffers_.size()) - 1;
}

void Program::append(const Operation& operation) {
    operations_.push_back(operation);
    if (operation.kind != Kind::attend) return;
    const AttentionShape& shape = operation.shape;
    const auto same = std::find_if(plans_.begin(), plans_.end(), [&](const Plan& plan) {
        return plan.heads == shape.heads && plan.kv_heads == shape.kv_heads &&
               plan.head_dim == shape.head_dim && plan.window == shape.window;
    });
    operations_.back().plan = size_t(same - plans_.begin());
    if (same == plans_.end())
        plans_.push_back({shape.heads, shape.kv_heads, shape.head_dim, shape.window, {}, {}});
}

void Program::plan_attention(const StepInput& step) {
    for (size_t index = 0; index < plans_.size(); index++) {
        Plan& plan = plans_[index];
        plan.units.clear();
        plan.merges.clear();
        const int most = std::max(1, kernels_->attend_unit_rows / (plan.heads / plan.kv_heads));
        int64_t total = 0;
        for (size_t chunk = 0; chunk < step.batch.chunks; chunk++) {
            const int64_t begin = step.batch.row_starts[chunk], end = step.batch.row_starts[chunk + 1];
            // From the end: the last queries of a prompt see the most keys, and what is long should
            // be begun early.
            for (int64_t stop = end; stop > begin; stop -= most) {
                const int64_t row = std::max(begin, stop - most);
                const int64_t position = step.batch.context_tokens[chunk] - (end - row);
                const int64_t seen = position + (stop - row);  // keys before this one
                const bool slides = plan.window > 0 && position + 1 > plan.window;
                const int64_t first = slides ? (position + 1 - plan.window) / PART : 0;
                const int64_t last = (seen + PART - 1) / PART;
                total += (last - first) * (stop - row) * plan.kv_heads;
                for (int head = 0; head < plan.kv_heads; head++)
                    plan.units.push_back({int(chunk), head, row, int(stop - row), first, last, first, last, 0});
            }
        }
        cut_units(index, total);
    }
}

// Cuts units that are so large a share of a layer's attention (`total` parts times queries) that
// threads would wait for the one that has them: a long sequence that is alone, or nearly so.
void Program::cut_units(size_t index, int64_t total) {
    Plan& plan = plans_[index];
    const int64_t fair = total / (2 * team_->size());
    if (team_->size() == 1) return;
    size_t partials = 0;
    std::vector<AttendUnit> units;
    for (AttendUnit& unit : plan.units) {
        const int64_t parts = unit.last - unit.first, size = parts * unit.queries;
        const int64_t pieces = std::min(parts, (size + fair - 1) / std::max<int64_t>(fair, 1));
        if (size <= fair || pieces < 2) {
            units.push_back(unit);
            continue;
        }
        unit.partial = partials;
        partials += size_t(parts) * unit.queries * (plan.heads / plan.kv_heads);
        plan.merges.push_back(unit);
        for (int64_t piece = 0; piece < pieces; piece++) {
            units.push_back(unit);
            units.back().begin = unit.first + parts * piece / pieces;
            units.back().end = unit.first + parts * (piece + 1) / pieces;
        }
    }
    plan.units = std::move(units);
    const size_t floats = partials * partial_floats(plan.head_dim);
    if (partials_.size() < floats) partials_.resize(floats);
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

void Program::fill(int buffer, const float* from, size_t rows) {
    buffers_[buffer].reserve(rows);
    std::copy(from, from + rows * buffers_[buffer].columns, buffers_[buffer].floats.data());
}

void Program::copy(int buffer, float* to, size_t rows) const {
    const float* from = buffers_[buffer].floats.data();
    std::copy(from, from + rows * buffers_[buffer].columns, to);
}

bool Program::run(const StepInput& step) {
    for (auto& buffer : buffers_) buffer.reserve(buffer.sampled ? step.sampled : step.tokens);
    for (auto& rotary : rotaries_) {
        const size_t size = step.tokens * rotary.inverse_frequencies.size();
        if (rotary.cos.size() < size) {
            rotary.cos.resize(size);
            rotary.sin.resize(size);
        }
    }
    size_t query_heads = 0, query_columns = 0;
    for (const auto& op : operations_) {
        if (op.kind != Kind::split) continue;
        query_heads = std::max(query_heads, size_t(op.shape.heads));
        query_columns = std::max(query_columns, size_t(op.shape.heads) * op.shape.head_dim);
    }
    if (queries_.size() < step.tokens * query_columns) {
        queries_.resize(step.tokens * query_columns);
        query_scales_.resize(step.tokens * query_heads);
    }
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
    return !apart_;
}

// Makes rows whole of which each process has a part, in as many rounds as it takes.
void Program::exchange(const Operation& op, const StepInput& step, size_t rows, int thread) {
    const size_t columns = size_t(op.columns), own = size_t(op.own), first = size_t(op.first);
    const size_t most = meeting_->floats() / columns, threads = size_t(team_->size());
    // What a buffer of this part alone holds begins at its first column.
    const size_t from_first = op.by_token || op.from != op.to ? 0 : first;
    for (size_t begin = 0; begin < rows; begin += most) {
        if (apart_) return;
        const size_t count = std::min(most, rows - begin);
        const size_t low = begin + count * thread / threads, high = begin + count * (thread + 1) / threads;
        float* area = meeting_->area();
        for (size_t row = low; row < high; row++) {
            const float* from = buffers_[op.from].floats.data() + row * buffers_[op.from].columns;
            float* to = area + (row - begin) * columns;
            if (op.by_token) {
                const int64_t token = step.token_ids[row] - op.first;
                if (token >= 0 && token < op.own) std::copy(from, from + columns, to);
            } else if (first < columns) {  // the last part of a vocabulary may be filled up
                const size_t width = std::min(own, columns - first);
                std::copy(from + from_first, from + from_first + width, to + first);
            }
        }
        team_->barrier();
        if (thread == 0 && !meeting_->meet()) apart_ = true;
        team_->barrier();
        float* whole = op.to < 0 ? step.logits : buffers_[op.to].floats.data();
        if (apart_) return;
        if (whole == nullptr) continue;
        for (size_t row = low; row < high; row++)
            std::copy(area + (row - begin) * columns, area + (row - begin + 1) * columns, whole + row * columns);
    }
}

void Program::execute(const Operation& op, const StepInput& step, int thread) {
    const size_t index = size_t(&op - operations_.data());
    const size_t rows = op.sampled ? step.sampled : step.tokens;
    const auto tiles_of = [&](bool int8, int columns) {
        return Tiling{rows, kernels_->tile_rows(int8, columns, rows)};
    };
    const auto shares = [&](size_t count, const auto& work) { share(index, thread, count, work); };
    const auto floats = [&](int buffer, size_t row) {
        return buffers_[buffer].floats.data() + row * buffers_[buffer].columns;
    };
    switch (op.kind) {
        case Kind::embed:
            shares(rows, [&](size_t t) {
                // A row of the packed int8 matrix: every fourth byte group of a panel.
                const Weights& w = op.matrix;
                const int64_t id = step.token_ids[t] - op.first;
                if (id < 0 || id >= w.rows) return;  // another process has it
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
            const Tiling tiling = tiles_of(op.by_run, op.columns);
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
            args.activations =
                buffers_[op.from].view(tiles_of(op.matrix.bits == 8, op.matrix.columns));
            args.out = op.to < 0 ? step.logits : buffers_[op.to].floats.data() + op.first;
            args.out_stride = op.to < 0 ? step.vocab : size_t(buffers_[op.to].columns);
            args.output = op.output;
            args.activation = op.activation;
            const size_t panels = size_t(op.matrix.rows + PANEL - 1) / PANEL;
            const size_t groups = kernels_->matmul_groups(args);
            shares(panels * groups, [&](size_t i) {
                kernels_->matmul_panel(args, int(i % panels), i / panels, groups);
            });
            break;
        }
        case Kind::split: {
            const Rotary& rotary = rotaries_[op.rotary];
            SplitArgs args{&op.shape, op.pool, floats(op.from, 0), size_t(buffers_[op.from].columns),
                           op.weight, op.eps,  op.balance,  rotary.cos.data(),  rotary.sin.data(),
                           step.slots, queries_.data(), query_scales_.data()};
            shares(rows, [&](size_t t) { kernels_->split_row(args, t); });
            break;
        }
        case Kind::attend: {
            const AttendArgs args{&op.shape,       op.pool, step.batch, queries_.data(), query_scales_.data(),
                                  floats(op.to, 0), partials_.data()};
            unsigned char* raw = scratch_[thread].data();
            void* scratch = raw + (64 - reinterpret_cast<uintptr_t>(raw) % 64) % 64;
            const Plan& plan = plans_[op.plan];
            shares(plan.units.size(), [&](size_t i) { kernels_->attend_unit(args, plan.units[i], scratch); });
            if (plan.merges.empty()) break;
            team_->barrier();
            share(operations_.size() + index, thread, plan.merges.size(),
                  [&](size_t i) { kernels_->merge_unit(args, plan.merges[i], scratch); });
            break;
        }
        case Kind::gather:
            shares(rows, [&](size_t i) {
                const float* from = floats(op.from, size_t(step.sampled_rows[i]));
                std::copy(from, from + op.columns, floats(op.to, i));
            });
            break;
        case Kind::exchange:
            exchange(op, step, rows, thread);
            break;
    }
}

}  // namespace tokenpath
