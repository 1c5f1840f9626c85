// The kernels for one instruction set; CMakeLists.txt says with which flags.
#define ISA avx2
#include "kernels_isa.h"
