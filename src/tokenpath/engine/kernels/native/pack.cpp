#include "pack.h"

#include <cstring>

namespace tokenpath {

static size_t int4_panel_bytes(size_t groups) {
    return (groups + BLOCK - 1) / BLOCK * INT4_HEAD_BYTES + groups * INT4_GROUP_BYTES;
}

size_t panel_bytes(int bits, int columns) {
    return bits == 8 ? size_t(columns) * PANEL : int4_panel_bytes(columns / GROUP);
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

void pack_int4(const Int4Source& from, int rows, int columns, uint8_t* to) {
    const size_t groups = size_t(columns) / GROUP, blocks = (groups + BLOCK - 1) / BLOCK;
    std::memset(to, 0, size_t(rows + PANEL - 1) / PANEL * panel_bytes(4, columns));
    for (size_t row = 0; row < size_t(rows); row++) {
        const size_t lane = row % PANEL;
        uint8_t* panel = to + row / PANEL * panel_bytes(4, columns);
        for (size_t group = 0; group < groups; group++) {
            const size_t block = group / BLOCK, within = group % BLOCK;
            uint8_t* head = panel + block * (INT4_HEAD_BYTES + BLOCK * INT4_GROUP_BYTES);
            uint16_t* units = reinterpret_cast<uint16_t*>(head);
            units[lane] = from.unit[row * blocks + block];
            units[PANEL + lane] = from.low_unit[row * blocks + block];
            uint8_t* scales = head + 4 * PANEL;
            uint8_t* minima = scales + BLOCK * PANEL;
            scales[within * PANEL + lane] = from.scale[row * groups + group];
            minima[within / 2 * (2 * PANEL) + lane * 2 + within % 2] = from.minimum[row * groups + group];
            uint8_t* codes = head + INT4_HEAD_BYTES + within * INT4_GROUP_BYTES + lane * 4;
            const uint8_t* code = from.codes + row * columns + group * GROUP;
            for (int k = 0; k < GROUP; k++) {
                // Two times four places share their bytes: the later four are the high halves.
                const int high = k / 4 % 2 * 4;
                codes[k / 8 * (4 * PANEL) + k % 4] |= uint8_t((code[k] & 15) << high);
            }
        }
    }
}

}  // namespace tokenpath
