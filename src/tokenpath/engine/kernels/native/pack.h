// From plain quantized weights to the panels that matmul.h reads.
#pragma once

#include "layout.h"

namespace tokenpath {

size_t panel_bytes(int bits, int columns);

// weights [rows, columns]; columns is a multiple of 4. The last panel is filled up with zeros.
void pack_int8(const int8_t* weights, int rows, int columns, uint8_t* to);

// codes [rows, columns] of 0..15, scale and minimum [rows, columns / 32] as half-precision bits.
void pack_int4(const uint8_t* codes, const uint16_t* scale, const uint16_t* minimum, int rows,
               int columns, uint8_t* to);

}  // namespace tokenpath
