#!/usr/bin/env bash
# An implementation that is slightly wrong, in a training run: TE_FL_VERIFY finds it, it is put into quarantine, the run goes
# on with right results, and later runs know.
# usage: train_gpt_verify_test.sh TRAIN_GPT TE_FL SLIGHTLY_WRONG_PLUGIN
set -uo pipefail
train=$1 te_fl=$2 plugin=$3
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export TE_FL_PLUGIN_PATH= TEFL_LOG_LEVEL=WARNING TE_FL_QUARANTINE_FILE=$work/quarantine.json
failures=0
fail() { echo "FAILED: $*" >&2; failures=$((failures + 1)); }
ok() { echo "ok: $*"; }

python3 -c "
import random
random.seed(7)
print(' '.join(random.choice('one two three four five six seven'.split()) for _ in range(20000)))" >"$work/text"
run() { # NAME: a training run, its results in NAME.json and NAME.out
  "$train" --data "$work/text" --recipe none --style gpt --hidden 64 --layers 2 --heads 4 --batch 4 --seq-len 32 --steps 40 --eval-batches 4 \
    --sample-bytes 8 --report-every 1000 --json "$work/$1.json" >"$work/$1.out" 2>&1 || fail "the run '$1': $(cat "$work/$1.out")"
}
# default.cpu computes GELU inside of the MLP's products, so calls of gelu are the plugin's.
that() { # NAME CONDITION on calls (of gelu, by implementation), loss and clean (all losses of this run and of the clean one)
  python3 - "$work/clean.json" "$work/$1.json" "$2" <<'PY'
import json, sys
clean, this = (json.load(open(p)) for p in sys.argv[1:3])
calls = {r["impl"]: r["calls"] for r in this["usage"] if r["op"] == "gelu"}
losses = [r["training_loss"] + [r["validation_loss"]] for r in (this, clean)]
good = eval(sys.argv[3], {}, {"calls": calls, "loss": losses[0], "clean": losses[1]})
if not good: print(calls, [l[-1] for l in losses])
sys.exit(not good)
PY
}
wrong=vendor.slightly_wrong

run clean
that clean "not calls" && ok "without the plugin" || fail "the clean run: $(tail -n 30 "$work/clean.out")"
# Right implementations raise nothing: each call of short trainings with every recipe and style is checked.
for options in "--recipe delayed --style gpt --dropout 0.1" "--recipe block --style llama" "--recipe current --style llama --dtype bf16 --groups 2" \
  "--recipe none --style gpt --dtype bf16" "--recipe delayed --style llama --fp8-weights --dtype f16"; do
  # shellcheck disable=SC2086
  TE_FL_VERIFY=1 TE_FL_VERIFY_DIR='' "$train" --data "$work/text" --device cpu --steps 3 --eval-batches 1 --sample-bytes 0 $options >"$work/quiet" 2>&1 &&
    grep -q 'checked by TE_FL_VERIFY: [1-9][0-9]* calls agreed, 0 differed' "$work/quiet" && ok "TE_FL_VERIFY=1 raises nothing: $options" ||
    fail "TE_FL_VERIFY=1 $options: $(cat "$work/quiet")"
done
export TE_FL_PLUGIN_MODULES=$plugin TE_FL_PREFER=vendor
run unwatched
that unwatched "list(calls) == ['$wrong'] and calls['$wrong'] >= 2 * 40 and loss != clean and abs(loss[-1] - clean[-1]) < 0.01 * clean[-1]" &&
  ok "unwatched, it runs every call, and the loss does not show it" || fail "unwatched: $(tail -n 30 "$work/unwatched.out")"
"$te_fl" info --fingerprint >"$work/before" 2>&1

export TE_FL_VERIFY_DIR=$work/log_cases
TE_FL_VERIFY=0.05 run logged
that logged "list(calls) == ['$wrong']" && grep -q "op 'gelu': '$wrong' (slightly_wrong) does not agree with 'reference.host'" "$work/logged.out" &&
  [ ! -e "$TE_FL_QUARANTINE_FILE" ] && ok "TE_FL_VERIFY=0.05 finds it; it still runs" || fail "logged: $(cat "$work/logged.out")"

export TE_FL_VERIFY_DIR=$work/cases
TE_FL_VERIFY=0.05 TE_FL_VERIFY_ACTION=quarantine run watched
that watched "0 < calls.get('$wrong', 0) < 40 and len(calls) == 1 and abs(loss[-1] - clean[-1]) < 0.01 * clean[-1]" &&
  ok "under quarantine another one runs from the next call on" || fail "watched: $(tail -n 30 "$work/watched.out")"
grep -q "'$wrong' is no longer used for op 'gelu' with f32 (scaling none)" "$work/watched.out" &&
  grep -q 'in quarantine: vendor.slightly_wrong for gelu' "$work/watched.out" && ok "which is said" || fail "not said: $(cat "$work/watched.out")"

cases=("$work"/cases/gelu-*.call)
"$te_fl" replay "${cases[0]}" >"$work/replay" 2>&1
[ $? = 1 ] && grep -q 'against the reference: differs' "$work/replay" && ok "te-fl replay: $(grep elements "$work/replay" | tail -n1 | sed 's/^ *//')" ||
  fail "te-fl replay: $(cat "$work/replay")"
"$te_fl" replay "${cases[0]}" --impl default.cpu >"$work/replay" 2>&1 && grep -q 'against the reference: agrees' "$work/replay" &&
  ok "default.cpu does that call right" || fail "te-fl replay --impl default.cpu: $(cat "$work/replay")"

grep -q "TE_FL_PLUGIN_MODULES=$plugin te-fl replay $work/log_cases/" "$work/logged.out" && ok "the logged command names the plugin" ||
  fail "the logged command: $(grep 'te-fl replay' "$work/logged.out")"
command=$(sed -n "s|.*\`\(TE_FL_PLUGIN_MODULES=.* te-fl replay [^\`]*\)\`.*|\1|p" "$work/logged.out" | head -n1)
(unset TE_FL_PLUGIN_MODULES; PATH="$(dirname "$te_fl"):$PATH" eval "$command" >"$work/replay" 2>&1)
grep -q 'against the reference: differs' "$work/replay" && ok "and runs as it stands" || fail "$command: $(cat "$work/replay")"

run later
that later "not calls and loss == clean" && ok "a later run: bit for bit that without the plugin" || fail "later: $(tail -n 30 "$work/later.out")"
TE_FL_PER_OP="gelu=vendor:fault|default" run named
that named "not calls and loss == clean" && ok "also if a list names it" || fail "named: $(tail -n 30 "$work/named.out")"
"$te_fl" explain gelu --dtype f32 >"$work/explain" 2>&1 && grep -q "no *$wrong .*quarantined for this op and signature" "$work/explain" &&
  ok "te-fl explain" || fail "te-fl explain: $(cat "$work/explain")"
"$te_fl" info --fingerprint >"$work/after" 2>&1
if "$te_fl" fingerprint diff "$work/before" "$work/after" >"$work/diff" 2>&1; then fail "the fingerprint is the same"; fi
grep -q "quarantine gelu $wrong" "$work/diff" && ok "another fingerprint" || fail "te-fl fingerprint diff: $(cat "$work/diff")"
"$te_fl" quarantine list >"$work/list" 2>&1 && grep -Eq "gelu +$wrong .*f32 +none" "$work/list" && ok "te-fl quarantine list" || fail "te-fl quarantine list: $(cat "$work/list")"
"$te_fl" quarantine clear gelu --impl $wrong >"$work/list" 2>&1 && ok "te-fl quarantine clear: $(cat "$work/list")" || fail "te-fl quarantine clear: $(cat "$work/list")"
run again
that again "list(calls) == ['$wrong']" && ok "once it is cleared it runs again" || fail "again: $(tail -n 30 "$work/again.out")"

[ "$failures" = 0 ] && echo passed
exit $((failures > 0))
