#!/usr/bin/env bash
# Training on a device that has one op of its own, the others run by host implementations on copies: the same
# numbers as on the host, native and staged ops told apart in the table, and the policy obeyed.
# usage: train_gpt_staged_test.sh TRAIN_GPT TE_FL FAR_PLUGIN
set -uo pipefail
train=$1 te_fl=$2 far=$3
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export TE_FL_PLUGIN_PATH= TEFL_LOG_LEVEL=WARNING TE_FL_PLUGIN_MODULES=$far
failures=0
fail() { echo "FAILED: $*" >&2; failures=$((failures + 1)); }
ok() { echo "ok: $*"; }

python3 -c "
import random
random.seed(7)
print(' '.join(random.choice('one two three four five six seven'.split()) for _ in range(20000)))" >"$work/text"
small=(--data "$work/text" --hidden 64 --layers 1 --heads 4 --batch 4 --seq-len 32 --eval-batches 2 --sample-bytes 8 --report-every 1000 --lr 0.01 --style gpt --dtype f32)

same() { # A B: the losses of two runs, bit by bit
  python3 - "$1" "$2" <<'PY'
import json, sys
a, b = (json.load(open(p)) for p in sys.argv[1:])
sys.exit(not (a["training_loss"] == b["training_loss"] and a["validation_loss"] == b["validation_loss"]))
PY
}
who() { # FILE CONDITION on op, impl, calls, staged_calls, staged_bytes, staged_us of every row
  python3 - "$1" "$2" <<'PY'
import json, sys
rows = json.load(open(sys.argv[1]))["usage"]
wrong = [r for r in rows if not eval(sys.argv[2], {}, r)]
for r in wrong: print("  ", r)
sys.exit(bool(wrong) or not rows)
PY
}

for recipe in none delayed current block; do
  for device in cpu ext:far:0; do
    "$train" "${small[@]}" --recipe $recipe --device $device --steps 8 --dropout 0.1 --json "$work/$device.json" >"$work/$device.out" 2>&1 || fail "$recipe on $device: $(cat "$work/$device.out")"
  done
  same "$work/cpu.json" "$work/ext:far:0.json" && ok "$recipe: the device's losses are the host's" || fail "$recipe: other losses than on the host"
done
who "$work/cpu.json" "staged_calls == 0" && grep -q "staged to the host: none" "$work/cpu.out" && ok "nothing is staged on the host" || fail "staged on the host: $(cat "$work/cpu.out")"
who "$work/ext:far:0.json" "staged_calls == (0 if impl == 'vendor.far' else calls) and (impl == 'vendor.far' or staged_bytes > 0)" &&
  grep -q 'generic_gemm *default.cpu' "$work/ext:far:0.out" && grep -Eq 'staged to the host: [1-9]' "$work/ext:far:0.out" &&
  ok "$(grep 'staged to the host' "$work/ext:far:0.out")" || fail "counting: $(cat "$work/ext:far:0.out")"
[ "$(grep -c "op 'generic_gemm' on ext:far:0 is run by 'default.cpu'" "$work/ext:far:0.out")" = 1 ] && ok "one line about an op" || fail "lines: $(cat "$work/ext:far:0.out")"

# Where the host would run most ops on copies, --device auto takes the host, and says so.
"$train" "${small[@]}" --steps 1 --json "$work/auto.json" >"$work/out" 2>&1 && who "$work/auto.json" "staged_calls == 0" &&
  grep -q '^device cpu.*passed over ext:far:0 (it leaves .* to the host)' "$work/out" && ok "$(grep '^device' "$work/out")" || fail "--device auto: $(cat "$work/out")"

run() { "$train" "${small[@]}" --device ext:far:0 --steps 2 --json "$work/run.json" >"$work/out" 2>&1; }
TE_FL_PREFER=reference run && who "$work/run.json" "impl == 'reference.host' and staged_calls == calls" && ok "TE_FL_PREFER=reference" || fail "TE_FL_PREFER=reference: $(cat "$work/out")"
TE_FL_PREFER=reference TE_FL_STRICT=1 run && ok "which strict allows" || fail "TE_FL_PREFER=reference, strict: $(cat "$work/out")"
TE_FL_DENY_VENDORS=far run && who "$work/run.json" "impl == 'default.cpu' and staged_calls == calls" && ok "TE_FL_DENY_VENDORS=far" || fail "TE_FL_DENY_VENDORS: $(cat "$work/out")"
TE_FL_PER_OP=layernorm_fwd=reference run && who "$work/run.json" "(op == 'layernorm_fwd') == (impl == 'reference.host')" && ok "TE_FL_PER_OP=layernorm_fwd=reference" || fail "TE_FL_PER_OP: $(cat "$work/out")"
refused() { # WHAT PATTERN
  if run; then fail "$1 was not refused"; else grep -q -- "$2" "$work/out" && ok "$1: refused" || fail "$1: $(cat "$work/out")"; fi
}
TE_FL_STRICT=1 refused "TE_FL_STRICT=1" "strict (TE_FL_STRICT) allows that only if"
TE_FL_MAX_STAGED_BYTES=0 refused "TE_FL_MAX_STAGED_BYTES=0" "TE_FL_MAX_STAGED_BYTES is 0"
TE_FL_MAX_STAGED_BYTES=20000 refused "TE_FL_MAX_STAGED_BYTES=20000" "bytes, more than the 20000 of TE_FL_MAX_STAGED_BYTES"

"$te_fl" explain layernorm_fwd --device ext:far:0 --json | python3 -c "
import json, sys
r = json.load(sys.stdin)
sys.exit(not (r['impl_id'] == 'default.cpu' and all(c['staged'] and c['accepted'] for c in r['candidates'])))" && ok "te-fl explain" || fail "te-fl explain"
"$te_fl" explain layernorm_fwd --device ext:far:0 --set TE_FL_STRICT=1 >"$work/out" 2>&1
[ $? = 3 ] && grep -q "strict (TE_FL_STRICT) allows" "$work/out" && ok "te-fl explain under TE_FL_STRICT=1" || fail "te-fl explain, strict: $(cat "$work/out")"

[ "$failures" = 0 ] && echo passed
exit $((failures > 0))
