#include "program.h"

#include <algorithm>
#include <cmath>

namespace tokenpath {

Quantized Program::Buffer::view() {
    return {values.data(), size_t(columns), scale.data(),
            sum.data(),    group_sum.data(), size_t(columns / GROUP)};
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
    sum.resize(rows);
    group_sum.resize(size / GROUP);
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

void Program::plan_attention(const StepInput& step) {
    units_.assign(operations_.size(), {});
    // Layers of one shape share their units.
    std::vector<std::pair<const Operation*, size_t>> planned;
    for (size_t i = 0; i < operations_.size(); i++) {
        const Operation& op = operations_[i];
        if (op.kind != Kind::attend) continue;
        const auto same = std::find_if(planned.begin(), planned.end(), [&](const auto& other) {
            return other.first->shape.heads == op.shape.heads &&
                   other.first->shape.kv_heads == op.shape.kv_heads;
        });
        if (same != planned.end()) {
            units_[i] = units_[same->second];
            continue;
        }
        planned.emplace_back(&op, i);
        const int most = std::max(1, kernels_->attend_unit_rows / (op.shape.heads / op.shape.kv_heads));
        for (size_t chunk = 0; chunk < step.batch.chunks; chunk++) {
            const int64_t begin = step.batch.row_starts[chunk], end = step.batch.row_starts[chunk + 1];
            // From the end: the last queries of a prompt see the most keys, and what is long should
            // be begun early.
            for (int64_t stop = end; stop > begin; stop -= most) {
                const int64_t first = std::max(begin, stop - most);
                for (int head = 0; head < op.shape.kv_heads; head++)
                    units_[i].push_back({int(chunk), head, first, int(stop - first)});
            }
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
    if (!next_) next_.reset(new std::atomic<size_t>[operations_.size() + 1]);
    for (size_t i = 0; i <= operations_.size(); i++) next_[i] = 0;

    team_->run([&](int thread) {
        const size_t share = 64;
        for (;;) {
            const size_t begin = next_[operations_.size()].fetch_add(share);
            if (begin >= step.tokens) break;
            for (auto& rotary : rotaries_) {
                const size_t planes = rotary.inverse_frequencies.size();
                for (size_t t = begin; t < std::min(step.tokens, begin + share); t++)
                    for (size_t i = 0; i < planes; i++) {
                        const float phase = float(step.positions[t]) * rotary.inverse_frequencies[i];
                        rotary.cos[t * planes + i] = std::cos(phase) * rotary.magnitude;
                        rotary.sin[t * planes + i] = std::sin(phase) * rotary.magnitude;
                    }
            }
        }
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
    const auto shares = [&](size_t count, size_t share, const auto& work) {
        for (;;) {
            const size_t begin = next_[index].fetch_add(share, std::memory_order_relaxed);
            if (begin >= count) return;
            const size_t end = std::min(count, begin + share);
            for (size_t i = begin; i < end; i++) work(i);
        }
    };
    const size_t few = std::max<size_t>(1, std::min<size_t>(8, rows / size_t(2 * team_->size())));
    const auto floats = [&](int buffer, size_t row) {
        return buffers_[buffer].floats.data() + row * buffers_[buffer].columns;
    };
    switch (op.kind) {
        case Kind::embed:
            shares(rows, few, [&](size_t t) {
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
            shares(rows, few, [&](size_t t) {
                kernels_->norm_row(floats(op.from, t), op.weight, op.eps, op.columns,
                                   floats(op.to, t), op.add);
            });
            break;
        case Kind::quantize:
            shares(rows, few, [&](size_t t) {
                kernels_->quantize_row(floats(op.from, t), op.columns, buffers_[op.to].view(), t);
            });
            break;
        case Kind::norm_quantize: {
            std::vector<float> normed(size_t(op.columns) + 16);
            shares(rows, few, [&](size_t t) {
                kernels_->norm_row(floats(op.from, t), op.weight, op.eps, op.columns, normed.data(),
                                   false);
                kernels_->quantize_row(normed.data(), op.columns, buffers_[op.to].view(), t);
            });
            break;
        }
        case Kind::matmul: {
            const Quantized a = buffers_[op.from].view();
            MatmulArgs args{};
            args.weights = &op.matrix;
            args.tokens = rows;
            args.activations = a.values;
            args.activation_stride = a.stride;
            args.activation_scale = a.scale;
            args.activation_sum = a.sum;
            args.group_sum = a.group_sum;
            args.group_stride = a.group_stride;
            args.out = op.to < 0 ? step.logits : buffers_[op.to].floats.data();
            args.out_stride = op.to < 0 ? step.vocab : size_t(buffers_[op.to].columns);
            args.output = op.output;
            args.activation = op.activation;
            const size_t panels = size_t(op.matrix.rows + PANEL - 1) / PANEL;
            const size_t share = std::max<size_t>(1, panels / size_t(32 * team_->size()));
            shares(panels, share, [&](size_t panel) { kernels_->matmul_panel(args, int(panel)); });
            break;
        }
        case Kind::split: {
            const Rotary& rotary = rotaries_[op.rotary];
            SplitArgs args{&op.shape, op.pool, floats(op.from, 0), size_t(buffers_[op.from].columns),
                           op.weight, op.eps,  rotary.cos.data(),  rotary.sin.data(),
                           step.slots, queries_.data()};
            shares(rows, few, [&](size_t t) { kernels_->split_row(args, t); });
            break;
        }
        case Kind::attend: {
            AttendArgs args{&op.shape, op.pool, step.batch, queries_.data(), floats(op.to, 0)};
            unsigned char* raw = scratch_[thread].data();
            void* scratch = raw + (64 - reinterpret_cast<uintptr_t>(raw) % 64) % 64;
            shares(units_[index].size(), 1,
                   [&](size_t i) { kernels_->attend_unit(args, units_[index][i], scratch); });
            break;
        }
        case Kind::gather:
            shares(rows, few, [&](size_t i) {
                const float* from = floats(op.from, size_t(step.sampled_rows[i]));
                std::copy(from, from + op.columns, floats(op.to, i));
            });
            break;
    }
}

}  // namespace tokenpath
