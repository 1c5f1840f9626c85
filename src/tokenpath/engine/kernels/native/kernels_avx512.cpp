// The kernels for one instruction set; CMakeLists.txt says with which flags.
#define ISA avx512
#include "kernels_isa.h"
