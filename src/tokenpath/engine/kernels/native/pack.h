// From plain quantized weights to the panels that matmul.h reads.
#pragma once

#include "layout.h"

namespace tokenpath {

size_t panel_bytes(int bits, int columns);

// weights [rows, columns]; columns is a multiple of 4. The last panel is filled up with zeros.
void pack_int8(const int8_t* weights, int rows, int columns, uint8_t* to);

// A matrix [rows, columns] of 4 bits: weight = unit * scale * code - low_unit * minimum.
struct Int4Source {
    const uint8_t* codes;      // [rows, columns] of 0..15
    const uint8_t* scale;      // [rows, groups]
    const uint8_t* minimum;    // [rows, groups]
    const uint16_t* unit;      // [rows, blocks], half-precision bits
    const uint16_t* low_unit;  // [rows, blocks]
};
void pack_int4(const Int4Source& from, int rows, int columns, uint8_t* to);

}  // namespace tokenpath
