// The kernels for one instruction set; CMakeLists.txt says with which flags.
#define ISA amx
#include "kernels_isa.h"
