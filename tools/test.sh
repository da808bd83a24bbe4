#!/usr/bin/env bash
# Runs every check of the project: format, layering, includes, generated files, the address+undefined and the thread
# sanitizer builds, the fuzzers, the installed prefix, and last ctest on the release build, with the Python tests on a wheel of it.
# usage: tools/test.sh [--quick | --long]
#   --quick  static checks and the release build only; the Python tests run on the build tree with the system's Python packages
#   --long   also the tests that the default leaves out because they take long, see CONTRIBUTING.md
# PyTorch and JAX for the Python tests come from PyPI (3 GB, kept in build/python-env). TE_FL_TEST_PYTHON=/path/to/python names an
# interpreter that has them instead.
set -uo pipefail
cd "$(dirname "$0")/.."
# te-fl would report this variable as a misspelt setting of its own.
export -n TE_FL_TEST_PYTHON
. tools/lib/packages.sh
. tools/lib/build.sh
. tools/lib/wheel.sh
. tools/lib/stages.sh
mode=default
case "${1:-}" in
  "") ;;
  --quick | --long) mode=${1#--} ;;
  -h | --help) sed -n '2,8s/^# //p' "$0"; exit 0 ;;
  *) echo "test.sh: unknown argument '$1'; known: --quick, --long, --help" >&2; exit 2 ;;
esac

begun=$SECONDS
te_fl_need_packages "${te_fl_build_packages[@]}" "${te_fl_example_packages[@]}" "${te_fl_test_packages[@]}" || exit 1
mkdir -p build/logs
if [ "$mode" != quick ]; then # downloads while the builds compute
  set -m # a process group of its own, which ends with this script
  te_fl_make_python_env >build/logs/python-env.log 2>&1 &
  python_env_job=$!
  set +m
  trap 'kill -- -$python_env_job 2>/dev/null' EXIT
  wheel_python=$PWD/$te_fl_python_env/bin/python
fi
long_tests=-DTE_FL_LONG_TESTS=$([ "$mode" = long ] && echo ON || echo OFF)
stages=() times=() failures=0 causes=()

# stage NAME COMMAND...: runs the command with its output in build/logs/NAME.log. On failure prints the end of the log, and keeps its
# first errors for the summary at the end of the run.
stage() {
  local name=$1 start=$SECONDS result=passed
  shift
  echo "== $name"
  if ! "$@" >"build/logs/$name.log" 2>&1; then
    result=FAILED
    failures=$((failures + 1))
    tail -n 60 "build/logs/$name.log"
    causes+=("$name:" "$(grep -nE 'FAILED|[Ee]rror:|error:|Killed|No space|undefined reference' "build/logs/$name.log" | cut -c1-300 | head -n 8)")
    causes+=("$(df -Ph . | awk 'NR == 2 { print "  " $4 " free on this disk" }'), $(awk '/MemAvailable/ { print int($2 / 1048576) }' /proc/meminfo) GiB of memory free")
  fi
  note_stage "$name" "$result" $((SECONDS - start))
}
note_stage() { # NAME RESULT SECONDS
  stages+=("$(printf '%-22s %-7s %5ds  build/logs/%s.log' "$1" "$2" "$3" "$1")")
  times+=("$1 $3")
}

# Builds; if that fails, builds the remaining targets again one file at a time, because the system may have killed a compiler for lack of
# memory. A second failure is an error.
build() { # FOLDER ARGUMENTS...
  local folder=$1
  shift
  cmake --build "$folder" -j "$te_fl_jobs" "$@" && return
  echo "The build of $folder has failed; once more, with one job."
  cmake --build "$folder" -j 1 "$@"
}
sanitizer_build() { # NAME
  local targets=(te_fl_"$1"_programs)
  [ "$1" = tsan ] || for source in tests/fuzz/fuzz_*.cpp; do targets+=("$(basename "$source" .cpp)"); done
  te_fl_configure_"$1" "$long_tests" && build build/"$1" --target "${targets[@]}"
}
sanitizer_tests() { # NAME
  # If a block of thread-local memory starts 16 bytes into a page, LLVM 14 interprets the bytes before the block as glibc 2.19's
  # header, and its leak check reads an arbitrary address. Without that interceptor the check still finds allocations that
  # thread-local memory points to, because the blocks are themselves allocations reachable from the thread's descriptor.
  local tests=(env ASAN_OPTIONS=detect_leaks=1:intercept_tls_get_addr=0:detect_odr_violation=0:strict_string_checks=1 UBSAN_OPTIONS=print_stacktrace=1
    TSAN_OPTIONS="suppressions=$PWD/tests/tsan.supp halt_on_error=0 second_deadlock_stack=1"
    ctest --test-dir build/"$1" -L "^$1\$" -j "$te_fl_jobs" --output-on-failure)
  "${tests[@]}" && return
  # The leak check itself may crash when a program ends, which is no error of the program, so failed tests run once more.
  grep -q 'LeakSanitizer has encountered a fatal error' build/logs/"$1"-tests.log && "${tests[@]}" --rerun-failed
}
# tools/check_includes.py finds files that compile only in a unity build; the long run builds each file by itself.
release_build() {
  local unity
  unity=$(te_fl_unity build/release)
  if [ "$mode" = long ]; then unity=-DTE_FL_UNITY=OFF; fi
  te_fl_configure build/release -DCMAKE_BUILD_TYPE=Release -DTE_FL_BUILD_TESTS=ON -DTE_FL_BUILD_EXAMPLES=ON -DTE_FL_BUILD_BENCH=ON \
    -DTE_FL_CUDA=AUTO -DTE_FL_WHEEL_PYTHON="${wheel_python:-}" "$unity" "$long_tests" && build build/release
}
wheel() {
  wait "$python_env_job"
  local made=$?
  trap - EXIT
  [ "$made" = 0 ] || { cat build/logs/python-env.log; return 1; }
  te_fl_install_wheel build/release && PYTHONDONTWRITEBYTECODE="" PYTHONPYCACHEPREFIX=$PWD/build/release/pycache "$wheel_python" -m te_fl build-node
}

stage format tools/check_format.sh
stage layering python3 tools/check_layering.py
stage one-definition python3 tools/check_odr.py
stage includes python3 tools/check_includes.py
stage comments python3 tools/check_comments.py
stage generated python3 tools/opgen.py --check
stage generated-arguments python3 tools/modulegen.py --check
if [ "$mode" != quick ]; then
  stage asan-build sanitizer_build asan
  stage asan-tests sanitizer_tests asan
  stage fuzz tools/fuzz.sh --seconds "$([ "$mode" = long ] && echo 300 || echo 10)"
  stage tsan-build sanitizer_build tsan
  stage tsan-tests sanitizer_tests tsan
fi
stage release-build release_build
[ "$mode" = quick ] || stage wheel wheel
if [ "$mode" = long ] && [ -z "${TE_FL_TEST_PYTHON:-}" ]; then # needs PyPI
  stage torch-versions python3 tools/torch_versions.py build/wheel/te_fl-*.whl
fi

start=$SECONDS
echo "== ctest"
ctest --test-dir build/release -j "$te_fl_jobs" --output-on-failure 2>&1 | tee build/logs/ctest.log
tests=${PIPESTATUS[0]}
note_stage ctest "$([ "$tests" = 0 ] && echo passed || echo FAILED)" $((SECONDS - start))

echo
printf '%s\n' "${stages[@]}"
printf '%-22s %-7s %5ds\n' total "" $((SECONDS - begun))
[ "$mode" = long ] || te_fl_slow_stages CONTRIBUTING.md "${times[@]}" "total $((SECONDS - begun))"
python3 tools/last_gpu_check.py
echo
sed -n '/tests passed,/,$p' build/logs/ctest.log
if [ "$failures" != 0 ]; then
  echo "$failures stage(s) failed before ctest; see the table above. Their first errors:" >&2
  printf '%s\n' "${causes[@]}" >&2
  exit 1
fi
exit $tests
