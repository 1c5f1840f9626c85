#!/usr/bin/env bash
# Compile and link the native extension for Linux on Arm, from any machine: does it build there?
# The compiler and all that it needs are in an environment of their own, build/arm/venv.
set -euo pipefail
cd "$(dirname "$0")/.."

venv=build/arm/venv
tools=(ziglang==0.17.1 nanobind==3.1.0 cmake==4.4.5 ninja==1.13.2)
if [ "$(cat $venv/.tools 2>/dev/null)" != "${tools[*]}" ]; then
    echo "arm: installing ${tools[*]} into $venv (half a gigabyte)"
    rm -rf $venv
    "${PYTHON:-python3}" -m venv $venv
    $venv/bin/python -m pip --disable-pip-version-check install --quiet "${tools[@]}"
    echo "${tools[*]}" >$venv/.tools
fi
zig=$($venv/bin/python -c 'import ziglang, os; print(os.path.dirname(ziglang.__file__))')/zig
export PATH="$PWD/$venv/bin:$PATH"
cmake -S . -B build/arm/objects -G Ninja -DCMAKE_BUILD_TYPE=Release \
    -DCMAKE_TOOLCHAIN_FILE=scripts/aarch64.cmake -DZIG="$zig" \
    -DPython_EXECUTABLE="$PWD/$venv/bin/python" \
    -Dnanobind_DIR="$($venv/bin/python -m nanobind --cmake_dir)" >build/arm/cmake.log ||
    { cat build/arm/cmake.log >&2; exit 1; }
ninja -C build/arm/objects
python - build/arm/objects/_native*.so <<'CHECK'
import sys

AARCH64 = 183
with open(sys.argv[1], "rb") as file:
    header = file.read(20)
machine = int.from_bytes(header[18:20], "little")
if machine != AARCH64:
    sys.exit(f"arm: {sys.argv[1]} is for machine {machine}, not for AArch64")
print(f"arm: {sys.argv[1]} is built for AArch64")
CHECK
