#!/usr/bin/env bash
# Installs what is missing, builds build/release and trains the example GPT in FP8.
# usage: tools/quickstart.sh [--cuda] [-- ARGUMENTS OF train_gpt]
#   --cuda  also builds the CUDA plugin on a machine without a GPU (needs nvcc); with a GPU it is built if nvcc is found
set -euo pipefail
cd "$(dirname "$0")/.."
. tools/lib/packages.sh
. tools/lib/build.sh

cuda=OFF
[ ! -e /dev/nvidiactl ] || cuda=AUTO
if [ "${1:-}" = --cuda ]; then
  cuda=ON
  shift
fi
case "${1:-}" in
  -h | --help)
    sed -n '2,4s/^# //p' "$0"
    exit 0
    ;;
  "" | --) ;;
  *)
    echo "quickstart.sh: unknown argument '$1'; known: --cuda, --help; arguments of train_gpt follow '--', as in: tools/quickstart.sh -- --steps 50" >&2
    exit 2
    ;;
esac
[ "${1:-}" = -- ] && shift

te_fl_need_packages "${te_fl_build_packages[@]}" "${te_fl_example_packages[@]}"
targets=(train_gpt)
te_fl_configure build/release -DCMAKE_BUILD_TYPE=Release -DTE_FL_CUDA=$cuda "$(te_fl_unity build/release)" --log-level=WARNING
if grep -q '^build te_fl_cuda:' build/release/build.ninja; then
  targets+=(te_fl_cuda)
elif [ $cuda != OFF ]; then
  echo "quickstart.sh: a GPU is here but nvcc was not found, so the CUDA plugin is not built and the example trains on the cores; install the CUDA Toolkit, or put nvcc on PATH" >&2
fi
cmake --build build/release -j "$te_fl_jobs" --target "${targets[@]}"
tools/fetch_text.sh
exec build/release/bin/train_gpt "$@"
