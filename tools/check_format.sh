#!/usr/bin/env bash
# Every C and C++ file that is not generated must be as clang-format leaves it.
set -euo pipefail
cd "$(dirname "$0")/.."
git ls-files '*.c' '*.cpp' '*.h' '*.hpp' | grep -v -E '^(include/te_fl/ops/|include/te_fl/ops\.hpp|core/op/generated/)' |
  xargs clang-format --dry-run -Werror
echo "format: clean"
