#!/bin/sh
# Builds the C++ test program for 64-bit ARM and runs its kernels and fixtures under emulation:
#   tests/cpp/cross.sh BUILD_DIR [NATIVE_DATA_DIR]
# With the data directory of a run of the test program on x86, NEON must give the bits of its AVX-512 or AVX2. Needs the Debian packages g++-aarch64-linux-gnu and
# qemu-user, cmake, and in PYTHON an interpreter that has lily installed.
set -eu
cd "$(dirname "$0")/../.."
build=${1:?usage: tests/cpp/cross.sh BUILD_DIR [NATIVE_DATA_DIR]}
native=${2:-}
generator=
command -v ninja > /dev/null && generator="-G Ninja"

"${PYTHON:-python3}" tests/cpp/describe.py "$build/data" tests/data/fixtures/a_moe_q4g64 tests/data/fixtures/c_dense_q4g64_tied
cmake -S . -B "$build" $generator -DCMAKE_BUILD_TYPE=None -DLILY_TEST_PROGRAM=ON -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 \
  -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++ > "$build/configure.log" || { cat "$build/configure.log"; exit 1; }
cmake --build "$build" --target lily_test --parallel "$(getconf _NPROCESSORS_ONLN)"

emulated() { LILY_THREADS=1 qemu-aarch64 -L /usr/aarch64-linux-gnu "$build/lily_test" "$build/data" "$1"; }
emulated kernels_ > "$build/kernels.log" 2>&1 &
kernels=$!
emulated cross_
wait "$kernels" || { cat "$build/kernels.log"; exit 1; }
cat "$build/kernels.log"

[ -n "$native" ] || { echo "not compared with x86: no data directory of a run there was given"; exit 0; }
for isa in avx512 avx2; do
  [ -e "$native/logits_$isa.txt" ] && [ -e "$native/kernels_$isa.txt" ] || continue
  for what in kernels logits; do
    if ! diff "$build/data/${what}_neon.txt" "$native/${what}_$isa.txt" > "$build/$what.diff"; then
      echo "neon and $isa differ in $what:"
      head -20 "$build/$what.diff"
      exit 1
    fi
    echo "neon and $isa agree in every bit: $(wc -l < "$build/data/${what}_neon.txt") results of $what"
  done
  exit 0
done
echo "$native holds no results of AVX-512 or AVX2" >&2
exit 1
