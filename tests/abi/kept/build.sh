#!/usr/bin/env bash
# Builds the plugins that a release keeps, from this tree, into a folder: null.so, fault.so, SHA256SUMS and the ABI in words.
# Done once for each release that raises the ABI's minor; what was kept is never built again.
# usage: tests/abi/kept/build.sh FOLDER
set -euo pipefail
cd "$(dirname "$0")/../../.."
out=${1:?usage: build.sh FOLDER}
mkdir -p "$out"
# Without paths, so that the same compiler makes the same bytes anywhere.
common=(-O2 -g0 -fPIC -shared -fvisibility=hidden -ffp-contract=off -Wall -Wextra -Iinclude -Itests -ffile-prefix-map="$PWD"=.
  -Wl,--version-script=cmake/plugin.map -Wl,--build-id -s)
gcc -std=c99 "${common[@]}" backends/null/plugin.c -o "$out/null.so"
g++ -std=c++20 -fno-gnu-unique -pthread "${common[@]}" tests/tools/check/wrong_plugin.cpp -o "$out/fault.so" -Wl,-z,nodelete
cp tests/abi/golden_offsets.txt "$out/offsets.txt"
cp tests/abi/golden_values.txt "$out/values.txt"
(cd "$out" && sha256sum null.so fault.so >SHA256SUMS && cat SHA256SUMS && ls -l)
