// Included once per instruction set, by a file that has defined ISA: its table of kernels.
#include "attention.h"
#include "chunks.h"
#include "elementwise.h"
#include "kernels.h"
#include "kv_write.h"
#include "matmul.h"

#define TOKENPATH_STRING_(x) #x
#define TOKENPATH_STRING(x) TOKENPATH_STRING_(x)
#define TOKENPATH_TABLE_(x) x##_kernels
#define TOKENPATH_TABLE(x) TOKENPATH_TABLE_(x)

namespace tokenpath {

static void attend(const AttendArgs& args, const AttendUnit& unit, void* scratch) {
    ISA::attend_unit(args, unit, *static_cast<ISA::AttendScratch*>(scratch));
}

static void merge(const AttendArgs& args, const AttendUnit& unit, void* scratch) {
    ISA::merge_unit(args, unit, *static_cast<ISA::AttendScratch*>(scratch));
}

extern const Kernels TOKENPATH_TABLE(ISA);
const Kernels TOKENPATH_TABLE(ISA) = {
    TOKENPATH_STRING(ISA), ISA::tile_rows,     ISA::matmul_groups, ISA::matmul_panel,
    ISA::scale_row,        ISA::quantize_tile, ISA::norm_row,      ISA::split_row,
    attend,                merge,              ISA::chunk_maxima,  ISA::chunk_sums,
    sizeof(ISA::AttendScratch), ISA::UNIT_ROWS,
};

}  // namespace tokenpath
