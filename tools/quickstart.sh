#!/usr/bin/env bash
# Installs what is missing, builds build/release and trains the example GPT in FP8.
# usage: tools/quickstart.sh [-- ARGUMENTS OF train_gpt]
set -euo pipefail
cd "$(dirname "$0")/.."
. tools/lib/packages.sh

case "${1:-}" in
  -h | --help)
    sed -n '2,3s/^# //p' "$0"
    exit 0
    ;;
  "" | --) ;;
  *)
    echo "quickstart.sh: unknown argument '$1'; arguments of train_gpt follow '--', as in: tools/quickstart.sh -- --steps 50" >&2
    exit 2
    ;;
esac
[ "${1:-}" = -- ] && shift

te_fl_need_packages "${te_fl_build_packages[@]}" "${te_fl_example_packages[@]}"
jobs=${TE_FL_BUILD_JOBS:-$(nproc)}
cmake -S . -B build/release -G Ninja -DCMAKE_BUILD_TYPE=Release --log-level=WARNING
cmake --build build/release -j "$jobs" --target train_gpt te-fl
tools/fetch_text.sh
exec build/release/bin/train_gpt "$@"
