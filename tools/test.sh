#!/usr/bin/env bash
# Everything that checks the project: format, layering, generated files, the address+undefined and the thread
# sanitizer builds, the fuzzers, the installed prefix, and last ctest on the release build.
# usage: tools/test.sh [--quick]     (--quick: release build and static checks only)
set -uo pipefail
cd "$(dirname "$0")/.."
. tools/lib/packages.sh
quick=0
case "${1:-}" in
  "") ;;
  --quick) quick=1 ;;
  -h | --help) sed -n '2,4s/^# //p' "$0"; exit 0 ;;
  *) echo "test.sh: unknown argument '$1'; known: --quick, --help" >&2; exit 2 ;;
esac

te_fl_need_packages "${te_fl_build_packages[@]}" "${te_fl_example_packages[@]}" "${te_fl_test_packages[@]}" || exit 1
jobs=${TE_FL_BUILD_JOBS:-$(nproc)}
mkdir -p build/logs
stages=() failures=0

# stage NAME COMMAND...: runs it with its output in build/logs/NAME.log; shows the end of the log on failure.
stage() {
  local name=$1 start=$SECONDS result=passed
  shift
  echo "== $name"
  if ! "$@" >"build/logs/$name.log" 2>&1; then
    result=FAILED
    failures=$((failures + 1))
    tail -n 60 "build/logs/$name.log"
  fi
  stages+=("$(printf '%-22s %-7s %5ds  build/logs/%s.log' "$name" "$result" $((SECONDS - start)) "$name")")
}

configure_and_build() { # BUILD_DIR CMAKE_ARGUMENTS...
  local dir=$1
  shift
  cmake -S . -B "$dir" -G Ninja -DTE_FL_BUILD_TESTS=ON "$@" && cmake --build "$dir" -j "$jobs"
}

sanitizer() { # NAME SANITIZERS LABEL
  configure_and_build "build/$1" -DCMAKE_BUILD_TYPE=RelWithDebInfo -DCMAKE_CXX_FLAGS_RELWITHDEBINFO="-O1 -g1" \
    -DTE_FL_SANITIZE="$2" -DTE_FL_BUILD_EXAMPLES=OFF -DTE_FL_BUILD_BENCH=OFF &&
    ASAN_OPTIONS=detect_leaks=1:detect_odr_violation=0:strict_string_checks=1 UBSAN_OPTIONS=print_stacktrace=1 \
    TSAN_OPTIONS="suppressions=$PWD/tests/tsan.supp halt_on_error=0 second_deadlock_stack=1" \
    ctest --test-dir "build/$1" -L "$3" -j "$jobs" --output-on-failure
}

stage format tools/check_format.sh
stage layering python3 tools/check_layering.py
stage generated python3 tools/opgen.py --check
if [ "$quick" = 0 ]; then
  stage asan-ubsan sanitizer asan address,undefined '^asan$'
  stage tsan sanitizer tsan thread '^tsan$'
  [ -x tools/fuzz.sh ] && stage fuzz tools/fuzz.sh --seconds 60
fi
stage build configure_and_build build/release -DCMAKE_BUILD_TYPE=Release -DTE_FL_BUILD_EXAMPLES=ON -DTE_FL_BUILD_BENCH=ON

echo
printf '%s\n' "${stages[@]}"
echo
ctest --test-dir build/release -j "$jobs" --output-on-failure
tests=$?
if [ "$failures" != 0 ]; then
  echo "$failures stage(s) failed before ctest; see the table above" >&2
  exit 1
fi
exit $tests
