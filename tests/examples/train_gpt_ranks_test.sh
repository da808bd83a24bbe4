#!/usr/bin/env bash
# train_gpt on four processes that divide layers and batch: it learns with the losses of one, says which implementation ran each collective, and what two
# ranks have saved is loaded by one. Each rank takes a device of its own.
# usage: train_gpt_ranks_test.sh TRAIN_GPT LAUNCH GLOO_PLUGIN FAR_PLUGIN
set -uo pipefail
train=$1 launch=$2
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export TE_FL_PLUGIN_PATH= TE_FL_PLUGIN_MODULES=$3 TEFL_LOG_LEVEL=WARNING OMP_NUM_THREADS=1
failures=0
fail() { echo "FAILED: $*" >&2; failures=$((failures + 1)); }
ok() { echo "ok: $*"; }

python3 - "$work/text" <<'PY'
import sys
words = "the quick brown fox jumps over a lazy dog while seven wizards box".split()
state, out = 12345, []
for _ in range(6000):
    state = (1103515245 * state + 12345) % 2**31
    out.append(words[(state >> 16) % len(words)])
open(sys.argv[1], "w").write(" ".join(out))
PY
small=(--device cpu --data "$work/text" --hidden 64 --layers 1 --heads 4 --batch 8 --seq-len 32 --eval-batches 2 --sample-bytes 5 --report-every 1000 --lr 0.01)

# losses NAME LIMIT: those of NAME.json against one rank's, relative to them.
losses() {
  python3 - "$work/one-$1.json" "$work/many-$1.json" "$2" <<'PY'
import json, sys
one, many = (json.load(open(path)) for path in sys.argv[1:3])
pairs = list(zip(one["training_loss"] + [one["validation_loss"]], many["training_loss"] + [many["validation_loss"]]))
worst = max(abs(a - b) / a for a, b in pairs)
print(f"  losses {pairs[0][1]:.4f} to {pairs[-1][1]:.4f}, at most {worst:.2g} from one rank's")
sys.exit(len(pairs) != 21 or not worst <= float(sys.argv[3]) or not pairs[-1][1] < 0.7 * pairs[0][1])
PY
}

"$train" "${small[@]}" --steps 20 --recipe none --json "$work/one-f32.json" >"$work/out" 2>&1 || fail "one rank: $(cat "$work/out")"
"$launch" -n 4 -- "$train" "${small[@]}" --steps 20 --recipe none --tp 2 --dp 2 --json "$work/many-f32.json" >"$work/out" 2>&1 || fail "four ranks: $(cat "$work/out")"
losses f32 3e-5 && ok "--tp 2 --dp 2 has the losses of one rank" || fail "--tp 2 --dp 2 has other losses"
grep -q '^\[0\] 4 ranks, provider gloo: .*all_reduce=' "$work/out" && ok "the first rank reports who runs collectives" || fail "no rank reports who runs collectives: $(cat "$work/out")"
python3 - "$work/many-f32.json" <<'PY' && ok "--json has the ranks" || fail "--json has other ranks"
import json, sys
r = json.load(open(sys.argv[1]))
sys.exit((r["ranks"], r["tp"], r["dp"], r["sp"]) != (4, 2, 2, False))
PY
[ "$(grep -vc '^\[0\]' "$work/out")" = 0 ] && ok "the other ranks are silent" || fail "others print: $(grep -v '^\[0\]' "$work/out")"

"$train" "${small[@]}" --steps 20 --style gpt --json "$work/one-fp8.json" >"$work/out" 2>&1 || fail "one rank in FP8: $(cat "$work/out")"
"$launch" -n 2 -- "$train" "${small[@]}" --steps 20 --style gpt --tp 2 --sp --save "$work/model" --json "$work/many-fp8.json" >"$work/out" 2>&1 || fail "--sp: $(cat "$work/out")"
losses fp8 0.005 && ok "--tp 2 --sp in FP8 has the losses of one rank" || fail "--tp 2 --sp in FP8 has other losses"
"$train" "${small[@]}" --style gpt --steps 0 --load "$work/model" --json "$work/loaded.json" >"$work/out" 2>&1 || fail "loading: $(cat "$work/out")"
python3 - "$work/many-fp8.json" "$work/loaded.json" <<'PY' && ok "one rank loads what two have saved" || fail "one rank loads something else"
import json, sys
a, b = (json.load(open(path))["validation_loss"] for path in sys.argv[1:3])
print(f"  validation losses {a:.4f} and {b:.4f}")
sys.exit(abs(a - b) > 0.005 * a)
PY

"$launch" -n 2 -- "$train" "${small[@]}" --steps 20 --recipe none --dp 2 --zero --save "$work/zero" --json "$work/many-f32.json" >"$work/out" 2>&1 || fail "--zero: $(cat "$work/out")"
losses f32 3e-5 && ok "--dp 2 --zero has the losses of one rank" || fail "--dp 2 --zero has other losses"
"$train" "${small[@]}" --recipe none --steps 0 --load "$work/zero" --json "$work/loaded.json" >"$work/out" 2>&1 || fail "loading what --zero saved: $(cat "$work/out")"
[ -f "$work/zero.optimizer.1-of-2" ] && grep -q 'at step 20' "$work/out" && ok "one rank loads what two with --zero have saved" || fail "--zero has saved something else: $(ls "$work") $(cat "$work/out")"
"$train" "${small[@]}" --zero >"$work/out" 2>&1 && fail "--zero runs without --dp"
grep -q -- '--zero .* --dp, which is 1' "$work/out" && ok "--zero without --dp is refused" || fail "--zero: $(cat "$work/out")"

"$train" "${small[@]}" --tp 2 >"$work/out" 2>&1 && fail "--tp 2 runs on one rank"
grep -q 'tools/launch.py -n 2' "$work/out" && ok "too few ranks are refused" || fail "too few ranks: $(cat "$work/out")"
"$train" "${small[@]}" --dp 3 >"$work/out" 2>&1 && fail "--dp 3 divides 8 sequences"
grep -q -- '--batch 8 must be a multiple of --dp' "$work/out" && ok "a batch that does not divide is refused" || fail "--dp 3: $(cat "$work/out")"

# A device for each rank of a machine that has two in all, whose memory gloo does not serve.
export TE_FL_PLUGIN_MODULES=$3,$4
"$launch" -n 3 -- "$train" "${small[@]:2}" --device ext:far --dp 3 >"$work/out" 2>&1 && fail "three ranks share two devices"
grep -q 'this machine has 2 ext:far devices and 3 ranks of the job.*--device cpu' "$work/out" && ok "too few devices are refused" || fail "--device ext:far: $(cat "$work/out")"
"$launch" -n 2 -- "$train" "${small[@]:2}" --device ext:far --tp 2 >"$work/out" 2>&1 && fail "gloo supports far memory"
grep -q '^\[0\].*no provider .* ext:far:0' "$work/out" && grep -q '^\[1\].*no provider .* ext:far:1' "$work/out" && ok "each rank takes a device of its own" || fail "devices of two ranks: $(cat "$work/out")"
"$launch" -n 2 -- "$train" "${small[@]:2}" --device ext:far:0 --tp 2 >"$work/out" 2>&1 && fail "two ranks take the device named"
grep -q -- '--device ext:far:0 names one device, and the job has 2 ranks.*--device ext:far each' "$work/out" && ok "one device for all ranks is refused" || fail "--device ext:far:0: $(cat "$work/out")"
exit $((failures > 0))
