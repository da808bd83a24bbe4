#!/usr/bin/env bash
# The OpenCL plugin as a whole. usage: opencl_test.sh BIN PLUGIN device|train, or
# opencl_test.sh BIN PLUGIN conformance FAMILY EXPECTED [--reduced], or opencl_test.sh BIN PLUGIN gemm KERNEL EXPECTED
set -uo pipefail
bin=$1 plugin=$2 part=$3
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export TEFL_LOG_LEVEL=WARNING TE_FL_PLUGIN_MODULES=$plugin
failures=0
fail() { echo "FAILED: $*" >&2; failures=$((failures + 1)); }
ok() { echo "ok: $*"; }

if ! "$bin/te-fl" info >"$work/info" 2>&1; then fail "te-fl info: $(cat "$work/info")"; exit 1; fi
if ! grep -q '^ *opencl:0 ' "$work/info"; then
  grep -qE '^ *opencl +te-fl .* active ' "$work/info" || { fail "the plugin is not active: $(cat "$work/info")"; exit 1; }
  echo "SKIPPED: no OpenCL device; pocl-opencl-icd is a driver for CPUs"
  exit 77
fi

case $part in
conformance)
  unset TE_FL_PLUGIN_MODULES
  exec "$bin/conformance" --plugin "$plugin" --device opencl:0 --impl default.opencl --guards --family "$4" --expected "$5" ${6:+"$6"}
  ;;
gemm)
  # Each case compiles, which takes seconds: one of each kind.
  export TE_FL_OPENCL_GEMM=$4
  "$bin/te-fl" doctor >"$work/doctor" 2>&1
  if [ "$4" = clblast ] && ! grep -q '^ok .*CLBlast: .*libclblast' "$work/doctor"; then
    grep -q '^note .*CLBlast was not found' "$work/doctor" || { fail "te-fl doctor does not speak of CLBlast: $(cat "$work/doctor")"; exit 1; }
    echo "SKIPPED: no CLBlast; it is in libclblast1"
    exit 77
  fi
  unset TE_FL_PLUGIN_MODULES
  for case in 'f32*f32->f32/13x21x17' 'f32*f32->f32/1x257x31' 'f32*f32->f32/130x65x67' 'f32*f32->f32/97x101x103/NN' \
    'f32*f32->f32/300x200x700' 'f32*f32->f32/5x3x0/NT' 'f32*f32->f32/19x34x50/NT/alpha/accumulate.beta' 'bf16*bf16->bf16/256x512x384' \
    'f16*f16->f16/13x21x17/TN' '19x34x50/NT/bias=f32/gelu/pre_gelu_out=f32' 'f8e4m3.tensor.current.row+col->bf16/48x80x64/NN'; do
    "$bin/conformance" --plugin "$plugin" --device opencl:0 --impl default.opencl --op generic_gemm --case "$case" --expected "$5" >"$work/out" 2>&1 &&
      grep -qE '^[1-9][0-9]* passed, 0 failed, 0 not' "$work/out" && ok "$4: $case" || fail "$4: $case: $(cat "$work/out")"
  done
  ;;
device)
  grep -qE '^ *opencl +te-fl .* active +[1-9]' "$work/info" && ok "te-fl info" || fail "te-fl info: $(cat "$work/info")"
  name=$(sed -nE 's/^ *opencl:0 +([^ ]+).*/\1/p' "$work/info")
  for wanted in 0 "$name" "nothing like it, 0"; do
    TE_FL_OPENCL_DEVICE=$wanted "$bin/te-fl" info >"$work/out" 2>&1
    case $wanted in
    nothing*) grep -q "TE_FL_OPENCL_DEVICE has 'nothing like it', which is no OpenCL device's number" "$work/out" && ! grep -q '^ *opencl:0 ' "$work/out" ;;
    *) grep -q '^ *opencl:0 ' "$work/out" ;;
    esac && ok "TE_FL_OPENCL_DEVICE='$wanted'" || fail "TE_FL_OPENCL_DEVICE='$wanted': $(cat "$work/out")"
  done
  # What is on disk is used again; damaged, truncated or another's, it is compiled again and replaced.
  export XDG_CACHE_HOME=$work/cache
  relu() { "$bin/conformance" --device opencl:0 --impl default.opencl --case relu/f32/7x33 >"$work/out" 2>&1; }
  relu || fail "relu: $(cat "$work/out")"
  files=("$work"/cache/te_fl/opencl/*)
  [ "${#files[@]}" -ge 1 ] && [ -s "${files[0]}" ] && ok "${#files[@]} programs are kept" || fail "nothing is kept in $work/cache"
  stamp() { stat -c %y.%i.%s "${files[0]}"; }
  before=$(stamp)
  relu && [ "$(stamp)" = "$before" ] && ok "a kept program is used" || fail "a kept program is not used"
  for damage in "truncated to 100" "one byte short" "empty" "zeros at its end"; do
    size=$(stat -c %s "${files[0]}")
    case $damage in
    truncated*) truncate -s 100 "${files[0]}" ;;
    one*) truncate -s $((size - 1)) "${files[0]}" ;;
    empty) truncate -s 0 "${files[0]}" ;;
    zeros*) dd if=/dev/zero of="${files[0]}" bs=1 seek=$((size - 64)) count=64 conv=notrunc status=none ;;
    esac
    damaged=$(stamp)
    relu && [ "$(stamp)" != "$damaged" ] && before=$(stamp) && relu && [ "$(stamp)" = "$before" ] &&
      ok "$damage: compiled again" || fail "$damage: $(cat "$work/out")"
  done
  [ -z "$(find "$work/cache/te_fl/opencl" -type f ! -name '*.bin')" ] && ok "no temporary files stay" || fail "temporary files: $(ls "$work/cache/te_fl/opencl")"
  # Drivers install signal handlers when they start; the process's own stay (rule R8).
  (unset TE_FL_PLUGIN_MODULES && "$bin/te-fl" check "$plugin" --op relu --quick) >"$work/out" 2>&1
  [ $? = 4 ] && grep -q '^no certificate: [1-9][0-9]* passed, 0 failed' "$work/out" &&
    ok "te-fl check: relu" || fail "te-fl check: $(cat "$work/out")"
  XDG_CACHE_HOME=/proc/nowhere relu && ok "a folder that cannot be written" || fail "a folder that cannot be written: $(cat "$work/out")"
  ;;
train)
  python3 -c "
import random
random.seed(7)
print(' '.join(random.choice('one two three four five six seven'.split()) for _ in range(20000)))" >"$work/text"
  small=(--data "$work/text" --hidden 64 --layers 1 --heads 4 --batch 4 --seq-len 32 --eval-batches 2 --sample-bytes 8 --report-every 1000 --lr 0.002 --steps 20) # slow enough that a rounding does not grow to a percent
  for style in "gpt --recipe none" "gpt --recipe delayed --dropout 0.1" "gpt --recipe current --dtype bf16" "llama --recipe delayed"; do
    for device in cpu opencl; do
      TE_FL_PREFER=flagos "$bin/train_gpt" "${small[@]}" --style $style --device $device --json "$work/$device.json" >"$work/$device.out" 2>&1 ||
        fail "$style on $device: $(cat "$work/$device.out")"
    done
    python3 - "$work/cpu.json" "$work/opencl.json" <<'PY' && ok "$style: $(grep 'staged to the host' "$work/opencl.out")" || fail "$style: $(tail -n 40 "$work/opencl.out")"
import json, sys
host, device = (json.load(open(p)) for p in sys.argv[1:])
a, b = host["validation_loss"], device["validation_loss"]
rows = device["usage"]
native = {r["op"] for r in rows if r["impl"] == "default.opencl" and r["staged_calls"] == 0}
staged = {r["op"] for r in rows if r["staged_calls"] == r["calls"] > 0}
wrong = []
if not abs(a - b) <= 0.01 * a: wrong.append(f"validation loss {b}, on the host {a}")
if not {"generic_gemm", "multi_tensor_adam", "strided_copy"} <= native: wrong.append(f"native: {native}")
if not {"fused_attn_fwd", "embedding_bwd", "cross_entropy_fwd"} <= staged: wrong.append(f"staged: {staged}")
for w in wrong: print(w)
sys.exit(bool(wrong))
PY
  done
  ;;
esac
[ "$failures" = 0 ] && echo passed
exit $((failures > 0))
