#include "pack.h"

#include <cstring>

namespace tokenpath {

size_t panel_bytes(int bits, int columns) {
    return bits == 8 ? size_t(columns) * PANEL : size_t(columns) / GROUP * INT4_GROUP_BYTES;
}

void pack_int8(const int8_t* weights, int rows, int columns, uint8_t* to) {
    const uint32_t zeros = 0x80808080;  // of what is stored as w + 128
    for (int panel = 0; panel * PANEL < rows; panel++) {
        uint8_t* next = to + size_t(panel) * panel_bytes(8, columns);
        const int8_t* from = weights + size_t(panel) * PANEL * columns;
        const int real = rows - panel * PANEL < PANEL ? rows - panel * PANEL : PANEL;
        for (int k = 0; k < columns; k += 4) {
            for (int lane = 0; lane < PANEL; lane++, next += 4) {
                uint32_t quad = 0;
                if (lane < real) std::memcpy(&quad, from + size_t(lane) * columns + k, 4);
                quad ^= zeros;  // adds 128 to each of four bytes
                std::memcpy(next, &quad, 4);
            }
        }
    }
}

void pack_int4(const uint8_t* codes, const uint16_t* scale, const uint16_t* minimum, int rows,
               int columns, uint8_t* to) {
    const int groups = columns / GROUP;
    for (int panel = 0; panel * PANEL < rows; panel++) {
        for (int group = 0; group < groups; group++) {
            uint8_t* start = to + size_t(panel) * panel_bytes(4, columns) + size_t(group) * INT4_GROUP_BYTES;
            std::memset(start, 0, INT4_GROUP_BYTES);
            uint16_t* halves = reinterpret_cast<uint16_t*>(start + GROUP * PANEL / 2);
            for (int lane = 0; lane < PANEL; lane++) {
                const int row = panel * PANEL + lane;
                if (row >= rows) continue;
                halves[lane] = scale[size_t(row) * groups + group];
                halves[PANEL + lane] = minimum[size_t(row) * groups + group];
                for (int k = 0; k < GROUP; k++) {
                    // Two times four places share their bytes: the later four are the high halves.
                    const uint8_t code = codes[size_t(row) * columns + group * GROUP + k] & 15;
                    start[k / 8 * (4 * PANEL) + lane * 4 + k % 4] |= k / 4 % 2 ? code << 4 : code;
                }
            }
        }
    }
}

}  // namespace tokenpath
