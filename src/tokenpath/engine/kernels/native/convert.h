// From what checkpoints store to rounded weights: the part of packing that NumPy is too slow for.
//
// Everything here works on whole rows and gives, bit by bit, what the gguf library and quantize.py
// give; it is only faster.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tokenpath {

// Turns one row of GGUF blocks into floats; columns is a multiple of the type's block.
using Dequantize = void (*)(const uint8_t* blocks, size_t columns, float* to);

struct GgufType {
    const char* name;  // as the gguf library calls it
    size_t block;      // values
    size_t block_bytes;
    Dequantize dequantize;
};

extern const GgufType GGUF_TYPES[];
extern const size_t GGUF_TYPE_COUNT;

// codes [columns] and their scale; a row that holds NaN or an infinity gets a NaN scale.
float round_int8(const float* row, size_t columns, int8_t* codes);

// Q4_K has the form of Int4Source: one row of it, taken over as it is. columns is a multiple of 256.
void take_q4_k(const uint8_t* blocks, size_t columns, uint8_t* codes, uint8_t* scale,
               uint8_t* minimum, uint16_t* unit, uint16_t* low_unit);

// Tells whether bytes are what was written. Not against malice: against disks and power cuts.
uint64_t checksum(const uint8_t* bytes, size_t count);

}  // namespace tokenpath
