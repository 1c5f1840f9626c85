// The Python module: packing weights, and building and running programs.
//
// Memory belongs to Python (NumPy arrays of packed weights, torch tensors of the KV pool); programs
// hold addresses, and native_backend.py keeps alive what they point to.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <stdexcept>

#include "convert.h"
#include "pack.h"
#include "program.h"

namespace nb = nanobind;
using namespace tokenpath;

namespace {

template <class T, class... Shape>
using Array = nb::ndarray<T, nb::c_contig, nb::device::cpu, Shape...>;
using Bytes = Array<const uint8_t, nb::ndim<2>>;
using Halves = Array<const uint16_t, nb::ndim<2>>;
using Ints = Array<const int64_t, nb::ndim<1>>;
using Chunks = Array<const float, nb::shape<-1, -1, CHUNK>>;

const Kernels* find_kernels(const std::string& name) {
    for (const Kernels* kernels : usable_kernels())
        if (name == kernels->name) return kernels;
    throw std::invalid_argument("this processor cannot run the kernels '" + name + "'");
}

const GgufType& gguf_type(const std::string& name, const Bytes& blocks, size_t rows, size_t columns) {
    for (size_t i = 0; i < GGUF_TYPE_COUNT; i++) {
        const GgufType& type = GGUF_TYPES[i];
        if (name != type.name) continue;
        if (columns % type.block || blocks.shape(0) != rows ||
            blocks.shape(1) != columns / type.block * type.block_bytes)
            throw std::invalid_argument("blocks of " + name + " have the wrong size");
        return type;
    }
    throw std::invalid_argument("the GGUF type '" + name + "' is not known here");
}

Weights weights_of(int bits, int rows, int columns, const Array<const uint8_t, nb::ndim<1>>& data,
                   const Array<const float, nb::ndim<1>>& scale, uintptr_t bias) {
    const size_t panels = size_t(rows + PANEL - 1) / PANEL;
    if (data.size() != panels * panel_bytes(bits, columns))
        throw std::invalid_argument("packed weights have the wrong size");
    if (bits == 8 && scale.size() != panels * PANEL)
        throw std::invalid_argument("scales have the wrong size");
    return {bits, rows, columns, panel_bytes(bits, columns), data.data(), scale.data(),
            reinterpret_cast<const float*>(bias)};
}

// What all operations on rows have in common.
Operation rows(Kind kind, int from, int to, int columns, bool sampled) {
    Operation op;
    op.kind = kind;
    op.from = from;
    op.to = to;
    op.columns = columns;
    op.sampled = sampled;
    return op;
}

Operation norm(Kind kind, int from, int to, int columns, uintptr_t weight, float eps, bool add,
               bool sampled) {
    Operation op = rows(kind, from, to, columns, sampled);
    op.weight = reinterpret_cast<const float*>(weight);
    op.eps = eps;
    op.add = add;
    return op;
}

// Calls work(row, first, count) for all chunks of all rows, each thread a part of equal size.
template <class Work>
void share_chunks(Team& team, size_t rows, size_t chunks, const Work& work) {
    nb::gil_scoped_release free;
    team.run([&](int thread) {
        const size_t all = rows * chunks, threads = size_t(team.size());
        size_t at = all * thread / threads;
        const size_t end = all * (thread + 1) / threads;
        while (at < end) {
            const size_t row = at / chunks, first = at % chunks;
            const size_t count = std::min(chunks - first, end - at);
            work(row, first, count);
            at += count;
        }
    });
}

}  // namespace

NB_MODULE(_native, m) {
    m.attr("PANEL") = PANEL;
    m.attr("BLOCK") = BLOCK;
    m.attr("RUN") = RUN;
    m.attr("PACKED_LAYOUT") = PACKED_LAYOUT;

    m.def("usable", [] {
        std::vector<std::string> names;
        for (const Kernels* kernels : usable_kernels()) names.emplace_back(kernels->name);
        return names;
    }, "Names of the instruction sets that this processor can run, fastest first.");

    m.def("panel_bytes", &panel_bytes, nb::arg("bits"), nb::arg("columns"));

    m.def("pack_int8", [](Array<const int8_t, nb::ndim<2>> weights, Array<uint8_t, nb::ndim<1>> to) {
        nb::gil_scoped_release free;
        pack_int8(weights.data(), int(weights.shape(0)), int(weights.shape(1)), to.data());
    }, "Lay int8 weights [N, K] out in panels.");

    m.def("pack_int4", [](Bytes codes, Bytes scale, Bytes minimum, Halves unit, Halves low_unit,
                          Array<uint8_t, nb::ndim<1>> to) {
        nb::gil_scoped_release free;
        pack_int4({codes.data(), scale.data(), minimum.data(), unit.data(), low_unit.data()},
                  int(codes.shape(0)), int(codes.shape(1)), to.data());
    }, "Lay 4-bit codes [N, K] with their scales and minima [N, K / 32] and those's half-precision "
       "units [N, ceil(K / 256)] out in panels.");

    m.def("gguf_types", [] {
        std::vector<std::string> names;
        for (size_t i = 0; i < GGUF_TYPE_COUNT; i++) names.emplace_back(GGUF_TYPES[i].name);
        return names;
    }, "Names of the GGUF types that dequantize and gguf_int8 know.");

    m.def("dequantize", [](const std::string& name, Bytes blocks, Array<float, nb::ndim<2>> to) {
        const GgufType& type = gguf_type(name, blocks, to.shape(0), to.shape(1));
        nb::gil_scoped_release free;
        for (size_t row = 0; row < to.shape(0); row++)
            type.dequantize(blocks.data() + row * blocks.shape(1), to.shape(1),
                            to.data() + row * to.shape(1));
    }, "Turn rows of GGUF blocks into float32 [N, K].");

    m.def("gguf_int8", [](const std::string& name, Bytes blocks, Array<int8_t, nb::ndim<2>> codes,
                          Array<float, nb::ndim<1>> scale) {
        const size_t columns = codes.shape(1);
        const GgufType& type = gguf_type(name, blocks, codes.shape(0), columns);
        if (scale.size() != codes.shape(0)) throw std::invalid_argument("a scale for each row");
        nb::gil_scoped_release free;
        std::vector<float> floats(columns);
        for (size_t row = 0; row < codes.shape(0); row++) {
            type.dequantize(blocks.data() + row * blocks.shape(1), columns, floats.data());
            scale.data()[row] = round_int8(floats.data(), columns, codes.data() + row * columns);
        }
    }, "Turn rows of GGUF blocks into int8 codes [N, K] with a scale for each row.");

    m.def("round_int8", [](Array<const float, nb::ndim<2>> weights, Array<int8_t, nb::ndim<2>> codes,
                           Array<float, nb::ndim<1>> scale) {
        const size_t columns = codes.shape(1);
        if (weights.shape(0) != codes.shape(0) || weights.shape(1) != columns ||
            scale.size() != codes.shape(0))
            throw std::invalid_argument("codes as many as weights, and a scale for each row");
        nb::gil_scoped_release free;
        for (size_t row = 0; row < codes.shape(0); row++)
            scale.data()[row] = round_int8(weights.data() + row * columns, columns,
                                           codes.data() + row * columns);
    }, "Round float32 [N, K] to int8 codes with a scale for each row.");

    m.def("take_q4_k", [](Bytes blocks, Array<uint8_t, nb::ndim<2>> codes,
                          Array<uint8_t, nb::ndim<2>> scale, Array<uint8_t, nb::ndim<2>> minimum,
                          Array<uint16_t, nb::ndim<2>> unit, Array<uint16_t, nb::ndim<2>> low_unit) {
        const size_t rows = codes.shape(0), columns = codes.shape(1);
        gguf_type("Q4_K", blocks, rows, columns);
        if (scale.size() != rows * columns / 32 || minimum.size() != rows * columns / 32 ||
            unit.size() != rows * columns / 256 || low_unit.size() != rows * columns / 256)
            throw std::invalid_argument("scales and units have the wrong size");
        nb::gil_scoped_release free;
        for (size_t row = 0; row < rows; row++)
            take_q4_k(blocks.data() + row * blocks.shape(1), columns, codes.data() + row * columns,
                      scale.data() + row * columns / 32, minimum.data() + row * columns / 32,
                      unit.data() + row * columns / 256, low_unit.data() + row * columns / 256);
    }, "Take rows of Q4_K apart, into what pack_int4 takes.");

    m.def("checksum", [](Array<const uint8_t, nb::ndim<1>> bytes) {
        nb::gil_scoped_release free;
        return checksum(bytes.data(), bytes.size());
    });

    nb::class_<Weights>(m, "Weights");
    m.def("weights", &weights_of, nb::arg("bits"), nb::arg("rows"), nb::arg("columns"),
          nb::arg("data"), nb::arg("scale"), nb::arg("bias"));

    nb::class_<AttentionShape>(m, "AttentionShape")
        .def("__init__", [](AttentionShape* self, int heads, int kv_heads, int head_dim, float scale,
                            int window, float softcap) {
            new (self) AttentionShape{heads, kv_heads, head_dim, scale, window, softcap};
        }, nb::arg("heads"), nb::arg("kv_heads"), nb::arg("head_dim"), nb::arg("scale"),
           nb::arg("window"), nb::arg("softcap"));

    nb::class_<KvPool>(m, "KvPool")
        .def("__init__", [](KvPool* self, uintptr_t keys, uintptr_t values, uintptr_t key_scales,
                            uintptr_t value_scales, int block_tokens) {
            new (self) KvPool{reinterpret_cast<void*>(keys), reinterpret_cast<void*>(values),
                              reinterpret_cast<float*>(key_scales),
                              reinterpret_cast<float*>(value_scales), block_tokens};
        }, nb::arg("keys"), nb::arg("values"), nb::arg("key_scales"), nb::arg("value_scales"),
           nb::arg("block_tokens"));

    nb::class_<Meeting>(m, "Meeting")
        .def("__init__", [](Meeting* self, Array<uint8_t, nb::ndim<1>> memory, int part, int parts,
                            double timeout_s) {
            new (self) Meeting(memory.data(), memory.size(), part, parts, timeout_s);
        }, nb::arg("memory"), nb::arg("part"), nb::arg("parts"), nb::arg("timeout_s"),
           nb::keep_alive<1, 2>())
        .def("give_up", &Meeting::give_up);

    nb::class_<Team>(m, "Team").def(nb::init<int>(), nb::arg("threads"));

    m.def("chunk_maxima", [](Team& team, const std::string& kernels, Chunks logits,
                             Array<float, nb::ndim<2>> maxima) {
        const Kernels& with = *find_kernels(kernels);
        const size_t rows = logits.shape(0), chunks = logits.shape(1);
        if (maxima.shape(0) != rows || maxima.shape(1) != chunks)
            throw std::invalid_argument("maxima have the wrong size");
        share_chunks(team, rows, chunks, [&](size_t row, size_t first, size_t count) {
            const size_t at = row * chunks + first;
            with.chunk_maxima(logits.data() + at * CHUNK, count, maxima.data() + at);
        });
    }, nb::arg("team"), nb::arg("kernels"), nb::arg("logits"), nb::arg("maxima"));
    m.def("chunk_sums", [](Team& team, const std::string& kernels, Chunks logits,
                           Array<const float, nb::ndim<1>> best,
                           Array<const float, nb::ndim<1>> temperature,
                           Array<float, nb::ndim<2>> sums) {
        const Kernels& with = *find_kernels(kernels);
        const size_t rows = logits.shape(0), chunks = logits.shape(1);
        if (sums.shape(0) != rows || sums.shape(1) != chunks || best.size() != rows ||
            temperature.size() != rows)
            throw std::invalid_argument("sums have the wrong size");
        share_chunks(team, rows, chunks, [&](size_t row, size_t first, size_t count) {
            const size_t at = row * chunks + first;
            with.chunk_sums(logits.data() + at * CHUNK, count, best.data()[row],
                            temperature.data()[row], sums.data() + at);
        });
    }, nb::arg("team"), nb::arg("kernels"), nb::arg("logits"), nb::arg("best"),
       nb::arg("temperature"), nb::arg("sums"));

    nb::class_<Program>(m, "Program")
        .def("__init__", [](Program* self, std::shared_ptr<Team> team, const std::string& kernels) {
            new (self) Program(std::move(team), find_kernels(kernels));
        }, nb::arg("team"), nb::arg("kernels"))
        .def("rotary", &Program::rotary, nb::arg("inverse_frequencies"), nb::arg("magnitude"))
        .def("buffer", &Program::buffer, nb::arg("columns"), nb::arg("quantized"),
             nb::arg("sampled") = false)
        .def("join", &Program::join, nb::arg("meeting"))
        .def("embed", [](Program& self, int to, const Weights& matrix, float scale, int first) {
            Operation op = rows(Kind::embed, -1, to, matrix.columns, false);
            op.matrix = matrix;
            op.scale = scale;
            op.first = first;
            self.append(op);
        }, nb::arg("to"), nb::arg("matrix"), nb::arg("scale"), nb::arg("first") = 0)
        .def("norm", [](Program& self, int from, int to, int columns, uintptr_t weight, float eps,
                        bool add, bool sampled) {
            self.append(norm(Kind::norm, from, to, columns, weight, eps, add, sampled));
        }, nb::arg("source"), nb::arg("to"), nb::arg("columns"), nb::arg("weight"), nb::arg("eps"),
           nb::arg("add"), nb::arg("sampled"))
        .def("quantize", [](Program& self, int from, int to, int columns, bool by_run,
                            uintptr_t weight, float eps, bool sampled) {
            Operation op = norm(Kind::quantize, from, to, columns, weight, eps, false, sampled);
            op.by_run = by_run;
            self.append(op);
        }, nb::arg("source"), nb::arg("to"), nb::arg("columns"), nb::arg("by_run"),
           nb::arg("weight") = 0, nb::arg("eps") = 0.0f, nb::arg("sampled") = false)
        .def("matmul", [](Program& self, int from, int to, const Weights& matrix, bool add,
                          const std::string& activation, bool sampled, int first) {
            Operation op = rows(Kind::matmul, from, to, matrix.columns, sampled);
            op.matrix = matrix;
            op.output = !activation.empty() ? Output::gated : add ? Output::add : Output::store;
            op.activation = activation == "gelu_tanh" ? Activation::gelu_tanh : Activation::silu;
            op.first = first;
            self.append(op);
        }, nb::arg("source"), nb::arg("to"), nb::arg("matrix"), nb::arg("add"), nb::arg("activation"),
           nb::arg("sampled"), nb::arg("first") = 0)
        .def("exchange", [](Program& self, int from, int to, int own, int first, int columns,
                            bool sampled) {
            Operation op = rows(Kind::exchange, from, to, columns, sampled);
            op.own = own;
            op.first = first;
            self.append(op);
        }, nb::arg("source"), nb::arg("to"), nb::arg("own"), nb::arg("first"), nb::arg("columns"),
           nb::arg("sampled"))
        .def("exchange_rows", [](Program& self, int buffer, int columns, int first, int own) {
            Operation op = rows(Kind::exchange, buffer, buffer, columns, false);
            op.own = own;
            op.first = first;
            op.by_token = true;
            self.append(op);
        }, nb::arg("buffer"), nb::arg("columns"), nb::arg("first"), nb::arg("own"))
        .def("fill", [](Program& self, int buffer, Array<const float, nb::ndim<2>> rows) {
            self.fill(buffer, rows.data(), rows.shape(0));
        }, nb::arg("buffer"), nb::arg("rows"))
        .def("copy", [](const Program& self, int buffer, Array<float, nb::ndim<2>> rows) {
            self.copy(buffer, rows.data(), rows.shape(0));
        }, nb::arg("buffer"), nb::arg("rows"))
        .def("split", [](Program& self, int from, const AttentionShape& shape, const KvPool& pool,
                         uintptr_t weight, float eps, uintptr_t balance, int rotary) {
            Operation op = norm(Kind::split, from, -1, 0, weight, eps, false, false);
            op.shape = shape;
            op.pool = pool;
            op.balance = reinterpret_cast<const float*>(balance);
            op.rotary = rotary;
            self.append(op);
        }, nb::arg("source"), nb::arg("shape"), nb::arg("pool"), nb::arg("norm"), nb::arg("eps"),
           nb::arg("balance"), nb::arg("rotary"))
        .def("attend", [](Program& self, int to, const AttentionShape& shape, const KvPool& pool) {
            Operation op = rows(Kind::attend, -1, to, 0, false);
            op.shape = shape;
            op.pool = pool;
            self.append(op);
        }, nb::arg("to"), nb::arg("shape"), nb::arg("pool"))
        .def("gather", [](Program& self, int from, int to, int columns) {
            self.append(rows(Kind::gather, from, to, columns, true));
        }, nb::arg("source"), nb::arg("to"), nb::arg("columns"))
        .def("run", [](Program& self, Ints token_ids, Ints positions, Ints slots, Ints row_starts,
                       Ints context_tokens, Array<const int64_t, nb::ndim<2>> block_tables,
                       Ints sampled_rows, Array<float, nb::ndim<2>> logits) {
            const size_t tokens = token_ids.size(), chunks = context_tokens.size();
            if (positions.size() != tokens || slots.size() != tokens ||
                row_starts.size() != chunks + 1 || block_tables.shape(0) != chunks ||
                (logits.shape(0) != sampled_rows.size() && logits.shape(0) != 0))
                throw std::invalid_argument("the arrays of a step do not fit each other");
            const StepInput step{tokens, token_ids.data(), positions.data(), slots.data(),
                                 {chunks, row_starts.data(), context_tokens.data(),
                                  block_tables.data(), block_tables.shape(1)},
                                 sampled_rows.size(), sampled_rows.data(),
                                 logits.shape(0) == 0 ? nullptr : logits.data(), logits.shape(1)};
            nb::gil_scoped_release free;
            return self.run(step);
        }, nb::arg("token_ids"), nb::arg("positions"), nb::arg("slots"), nb::arg("row_starts"),
           nb::arg("context_tokens"), nb::arg("block_tables"), nb::arg("sampled_rows"), nb::arg("logits"));
}
