#!/usr/bin/env bash
# Checks that clang-format would not change any C or C++ file, except generated ones.
set -euo pipefail
cd "$(dirname "$0")/.."
git ls-files '*.c' '*.cpp' '*.h' '*.hpp' | grep -v -E '^(include/te_fl/ops/|include/te_fl/ops\.hpp|core/op/generated/)' |
  xargs clang-format --dry-run -Werror
echo "format: clean"
