#!/usr/bin/env bash
# Builds the libFuzzer targets in build/asan and runs each for a while, starting from its committed corpus.
# usage: tools/fuzz.sh [--seconds N] [TARGET...]      (default: 60 s each, all targets)
set -uo pipefail
cd "$(dirname "$0")/.."
. tools/lib/packages.sh
. tools/lib/build.sh
seconds=60 targets=()
while [ $# -gt 0 ]; do
  case "$1" in
    --seconds) seconds=${2:?--seconds needs a number}; shift 2 ;;
    -h | --help) sed -n '2,3s/^# //p' "$0"; exit 0 ;;
    -*) echo "fuzz.sh: unknown option '$1'; known: --seconds N" >&2; exit 2 ;;
    *) targets+=("$1"); shift ;;
  esac
done
te_fl_need_packages "${te_fl_build_packages[@]}" clang lld "libclang-rt-dev|libclang-rt-14-dev|libclang-rt-18-dev" || exit 1
[ "${#targets[@]}" -gt 0 ] || for f in tests/fuzz/fuzz_*.cpp; do targets+=("$(basename "$f" .cpp)"); done
te_fl_configure_asan && cmake --build build/asan -j "$te_fl_jobs" --target "${targets[@]}" || exit 1

# Runs the targets in parallel, one per core.
failed=0 pids=() names=()
finish() { # waits for the oldest
  if ! wait "${pids[0]}"; then
    failed=$((failed + 1))
    echo "FAILED ${names[0]}: the input that breaks it is under build/fuzz/found; log build/fuzz/${names[0]}.log"
    tail -n 40 "build/fuzz/${names[0]}.log"
  else
    echo "passed ${names[0]}: $(grep -E '^(Done|#[0-9]+\s+DONE)' "build/fuzz/${names[0]}.log" | tail -n1)"
  fi
  pids=("${pids[@]:1}") names=("${names[@]:1}")
}
mkdir -p build/fuzz/found
for t in "${targets[@]}"; do
  [ "${#pids[@]}" -lt "$(nproc)" ] || finish
  mkdir -p "build/fuzz/work/$t" "tests/fuzz/corpus/${t#fuzz_}"
  TEFL_LOG_LEVEL=OFF build/asan/bin/"$t" -max_total_time="$seconds" -timeout=10 -rss_limit_mb=2048 -print_final_stats=1 \
    -artifact_prefix="build/fuzz/found/$t-" "build/fuzz/work/$t" "tests/fuzz/corpus/${t#fuzz_}" >"build/fuzz/$t.log" 2>&1 &
  pids+=($!) names+=("$t")
done
while [ "${#pids[@]}" -gt 0 ]; do finish; done
exit $((failed > 0))
