// The kernels for one instruction set; CMakeLists.txt says with which flags.
#define ISA portable
#include "kernels_isa.h"
