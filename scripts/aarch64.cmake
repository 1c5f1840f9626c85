# Cross-compiles for Linux on Arm with zig's C++ compiler (ZIG), which brings the target's headers and
# libraries along. Used by scripts/arm.sh.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_TRY_COMPILE_PLATFORM_VARIABLES ZIG)
set(CMAKE_CXX_COMPILER ${ZIG} c++ -target aarch64-linux-gnu)
