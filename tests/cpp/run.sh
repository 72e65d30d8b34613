#!/bin/sh
# Builds the C++ test program under sanitizers and runs it on the fixtures:
#   tests/cpp/run.sh BUILD_DIR [part of a test's name, or -PART for all without it; "build" builds only, without lily]
# SANITIZE=thread runs the tests of threads under the thread sanitizer; PYTHON names an interpreter that has lily installed.
set -eu
cd "$(dirname "$0")/../.."
build=${1:?usage: tests/cpp/run.sh BUILD_DIR [part of a test\'s name]}
sanitize=${SANITIZE:-ON}
generator=
command -v ninja > /dev/null && generator="-G Ninja"

mkdir -p "$build"
[ "${2:-}" = build ] || "${PYTHON:-python3}" tests/cpp/describe.py "$build/data" tests/data/fixtures/a_moe_q4g64 tests/data/fixtures/c_dense_q4g64_tied
cmake -S . -B "$build" $generator -DCMAKE_BUILD_TYPE=None -DLILY_TEST_PROGRAM=ON -DLILY_SANITIZE="$sanitize" > "$build/configure.log" || { cat "$build/configure.log"; exit 1; }
cmake --build "$build" --target lily_test --parallel "$(getconf _NPROCESSORS_ONLN)"
[ "${2:-}" != build ] || exit 0

# Every finding ends the program with an error; leaks are looked for at its end.
export ASAN_OPTIONS="detect_leaks=1:halt_on_error=1:abort_on_error=0:detect_stack_use_after_return=1:strict_string_checks=1:check_initialization_order=1"
export UBSAN_OPTIONS="halt_on_error=1:print_stacktrace=1"
export TSAN_OPTIONS="halt_on_error=1:second_deadlock_stack=1"
if [ "$sanitize" = thread ] && [ $# -lt 2 ]; then
  for tests in pool sessions_ forks_ closing_ device_ limits_; do "$build/lily_test" "$build/data" "$tests"; done
else
  "$build/lily_test" "$build/data" "${2:-}"
fi
