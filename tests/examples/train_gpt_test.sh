#!/usr/bin/env bash
# The example as its user runs it: it learns, is repeatable bit by bit, continues a checkpoint exactly, shows the
# policy in its closing table, and explains what is wrong with a text.
# usage: train_gpt_test.sh TRAIN_GPT
set -uo pipefail
train=$1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export TE_FL_PLUGIN_PATH= TEFL_LOG_LEVEL=WARNING
failures=0
fail() { echo "FAILED: $*" >&2; failures=$((failures + 1)); }
ok() { echo "ok: $*"; }

# A text with structure that a small model learns in a few steps.
python3 - "$work/text" <<'PY'
import sys
words = "the quick brown fox jumps over a lazy dog while seven wizards box".split()
state, out = 12345, []
for _ in range(6000):
    state = (1103515245 * state + 12345) % 2**31
    out.append(words[(state >> 16) % len(words)])
open(sys.argv[1], "w").write(" ".join(out))
PY
small=(--data "$work/text" --hidden 64 --layers 1 --heads 4 --batch 4 --seq-len 32 --eval-batches 2 --sample-bytes 20 --report-every 1000 --lr 0.01)
json() { python3 -c "import json,sys; print(json.load(open('$1'))$2)"; }

for recipe in delayed current block none; do
  "$train" "${small[@]}" --recipe $recipe --steps 60 --json "$work/$recipe.json" >"$work/$recipe.out" 2>&1 || { cat "$work/$recipe.out"; fail "$recipe runs"; continue; }
  python3 - "$work/$recipe.json" <<'PY' && ok "$recipe learns" || fail "$recipe does not learn"
import json, sys
r = json.load(open(sys.argv[1]))
print("  first", r["training_loss"][0], "validation", r["validation_loss"])
sys.exit(not (r["training_loss"][0] > 5.0 and r["validation_loss"] < 2.4))
PY
done

for recipe in delayed current block none; do
  "$train" "${small[@]}" --experts 8 --top-k 2 --dtype bf16 --microbatches 2 --recipe $recipe --steps 60 --json "$work/$recipe.json" >"$work/$recipe.out" 2>&1 ||
    { cat "$work/$recipe.out"; fail "$recipe runs with experts"; continue; }
  python3 - "$work/$recipe.json" <<'PY' && ok "$recipe learns with experts" || fail "$recipe does not learn with experts"
import json, sys
r = json.load(open(sys.argv[1]))
print("  first", r["training_loss"][0], "validation", r["validation_loss"])
sys.exit(not (r["training_loss"][0] > 5.0 and r["validation_loss"] < 2.6))
PY
done

for style in gpt llama; do
  for i in 1 2; do
    "$train" "${small[@]}" --style $style --groups 2 --dropout 0.1 --microbatches 2 --steps 5 --json "$work/r$i.json" >/dev/null 2>"$work/err" || fail "$style runs: $(cat "$work/err")"
  done
  [ "$(json "$work/r1.json" '["training_loss"]')" = "$(json "$work/r2.json" '["training_loss"]')" ] &&
    [ "$(json "$work/r1.json" '["validation_loss"]')" = "$(json "$work/r2.json" '["validation_loss"]')" ] && ok "$style is repeatable" || fail "$style differs between two runs"
done

for style in gpt llama; do
  for flag in "" --fp8-weights; do
    "$train" "${small[@]}" --style $style --groups 2 --dtype bf16 --microbatches 2 --steps 20 $flag --json "$work/w$flag.json" >"$work/out$flag" 2>&1 || fail "$style $flag runs: $(cat "$work/out$flag")"
  done
  [ "$(json "$work/w.json" '["training_loss"]')" = "$(json "$work/w--fp8-weights.json" '["training_loss"]')" ] &&
    [ "$(json "$work/w.json" '["validation_loss"]')" = "$(json "$work/w--fp8-weights.json" '["validation_loss"]')" ] && ok "$style: --fp8-weights gives the same losses" || fail "$style: --fp8-weights changes the losses"
  a=$(awk '$1 == "quantize" { n += $NF } END { print n }' "$work/out") b=$(awk '$1 == "quantize" { n += $NF } END { print n }' "$work/out--fp8-weights")
  [ "$a" -gt "$b" ] && ok "$style: $b quantisations instead of $a" || fail "$style: $b quantisations with --fp8-weights, $a without"
done

"$train" "${small[@]}" --steps 6 --save "$work/model.safetensors" >"$work/out" 2>&1 || fail "saving: $(cat "$work/out")"
"$train" "${small[@]}" --steps 0 --load "$work/model.safetensors" --json "$work/loaded.json" >"$work/out2" 2>&1 || fail "loading: $(cat "$work/out2")"
a=$(grep -o 'validation loss [0-9.]*' "$work/out") b=$(grep -o 'validation loss [0-9.]*' "$work/out2")
[ -n "$a" ] && [ "$a" = "$b" ] && ok "a checkpoint restores the model ($a)" || fail "checkpoint: '$a' then '$b'"
"$train" "${small[@]}" --experts 4 --style gpt --steps 6 --save "$work/moe.safetensors" >"$work/out" 2>&1 || fail "saving experts: $(cat "$work/out")"
"$train" "${small[@]}" --experts 4 --style gpt --steps 0 --load "$work/moe.safetensors" >"$work/out2" 2>&1 || fail "loading experts: $(cat "$work/out2")"
a=$(grep -o 'validation loss [0-9.]*' "$work/out") b=$(grep -o 'validation loss [0-9.]*' "$work/out2")
[ -n "$a" ] && [ "$a" = "$b" ] && ok "a checkpoint restores the experts ($a)" || fail "checkpoint of experts: '$a' then '$b'"
head -c 1000 "$work/model.safetensors" >"$work/short"
"$train" "${small[@]}" --load "$work/short" --steps 0 >"$work/out" 2>&1 && fail "a truncated checkpoint was accepted"
grep -q 'short' "$work/out" && ok "truncated checkpoint: $(grep -m1 train_gpt: "$work/out")" || fail "message for a truncated checkpoint: $(cat "$work/out")"

TE_FL_PREFER=reference "$train" "${small[@]}" --steps 1 >"$work/out" 2>&1
grep -q 'generic_gemm *reference.host' "$work/out" && ! grep -q 'default.cpu' "$work/out" && ok "TE_FL_PREFER=reference shows in the table" || fail "TE_FL_PREFER=reference: $(tail -n 30 "$work/out")"
"$train" "${small[@]}" --steps 1 >"$work/out" 2>&1
grep -q 'generic_gemm *default.cpu' "$work/out" && ok "the default is the CPU backend" || fail "default implementations: $(tail -n 30 "$work/out")"

# The curve: of this run's losses, in the file and, when asked or on a terminal, as text.
"$train" "${small[@]/#1000/20}" --steps 60 --plot "$work/loss.svg" >"$work/out" 2>&1 || fail "--plot: $(cat "$work/out")"
python3 - "$work/loss.svg" "$work/out" <<'PY' && ok "--plot draws as many points as steps, falling, and the held-out loss" || fail "--plot: $(head -c 2000 "$work/loss.svg")"
import re, sys, xml.etree.ElementTree as xml
root, out = xml.parse(sys.argv[1]).getroot(), open(sys.argv[2]).read()
paths = {p.get("class"): [float(y) for y in re.findall(r"[ML][0-9.]+ ([0-9.]+)", p.get("d"))] for p in root.iter("{http://www.w3.org/2000/svg}path")}
texts = " ".join(t.text for t in root.iter("{http://www.w3.org/2000/svg}text"))
held_out = float(re.search(r"^validation loss ([0-9.]+)", out, re.M)[1])
drawn = float(re.search(r"([0-9.]+) nats/byte", texts)[1])
sys.exit(not (len(paths["training"]) == 60 and paths["training"][-1] > paths["training"][0] + 100 and len(paths["held-out"]) == 2 and abs(drawn - held_out) < 0.001))
PY
grep -q '^Loss, nats/byte' "$work/out" && fail "the chart is printed where nobody asked" || ok "no chart on a pipe"
grep -q $'\r' "$work/out" && fail "a line is rewritten on a pipe" || ok "no rewritten line on a pipe"
[ "$(grep -c '^step ' "$work/out")" = 4 ] && ok "a line every 20 steps" || fail "--report-every: $(cat "$work/out")"
"$train" "${small[@]}" --steps 60 --chart >"$work/out" 2>&1
[ "$(sed -n '/^Loss, nats/,/steps$/p' "$work/out" | tr -cd '*' | wc -c)" = 61 ] && ok "--chart" || fail "--chart: $(cat "$work/out")"
TERM=xterm python3 - "$train" "${small[@]}" --steps 60 >"$work/out" 2>&1 <<'PY' || fail "on a terminal: $(cat "$work/out")"
import os, pty, sys
child, terminal = pty.fork()
if child == 0:
    os.execv(sys.argv[1], sys.argv[1:])
seen = b""
try:
    while data := os.read(terminal, 65536):
        seen += data
except OSError:
    pass  # the program has closed its end
sys.stdout.buffer.write(seen)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
PY
grep -q $'\r\x1b\[Kstep [0-9]* of 60  loss .* to go' "$work/out" && grep -q '^Loss, nats/byte' "$work/out" && ok "a terminal gets a rewritten line and the chart" || fail "on a terminal: $(cat -v "$work/out")"

# What the run takes where nothing is said: the device, and the model for it.
"$train" --data "$work/text" --steps 1 --eval-batches 1 --sample-bytes 0 --json "$work/auto.json" >"$work/out" 2>&1 || fail "the defaults: $(cat "$work/out")"
grep -q '^device cpu.*--device auto found no other device' "$work/out" && ok "$(grep '^device' "$work/out")" || fail "--device auto: $(cat "$work/out")"
[ "$(json "$work/auto.json" '["device"]') $(json "$work/auto.json" '["hidden"]') $(json "$work/auto.json" '["seq_len"]') $(json "$work/auto.json" '["dtype"]')" = "cpu 128 64 f32" ] &&
  ok "the host's default model" || fail "the host's default model: $(head -c 600 "$work/auto.json")"
"$train" --data "$work/text" --steps 1 --eval-batches 1 --sample-bytes 0 --device cpu --hidden 64 --json "$work/auto.json" >"$work/out" 2>&1
[ "$(json "$work/auto.json" '["hidden"]') $(json "$work/auto.json" '["layers"]')" = "64 2" ] && grep -q '^device cpu.*--device names it' "$work/out" && ok "what is said wins" || fail "--hidden 64: $(cat "$work/out")"

code=
expect_error() { # WHAT PATTERN ARGUMENTS...
  local what=$1 pattern=$2
  shift 2
  "$train" "$@" >"$work/out" 2>&1
  code=$?
  if [ $code = 0 ]; then fail "$what was accepted"; return; fi
  grep -q -- "$pattern" "$work/out" && ok "$what: $(grep -m1 -- "$pattern" "$work/out")" || fail "$what: expected '$pattern' in: $(cat "$work/out")"
}
: >"$work/empty"
printf 'too short' >"$work/tiny"
expect_error "a checkpoint that cannot be written" "--save $work/absent/model cannot be written: No such file" "${small[@]}" --steps 1 --save "$work/absent/model"
grep -q '^step' "$work/out" && fail "--save was tried after the training only"
expect_error "a checkpoint that is a folder" "Is a directory" "${small[@]}" --steps 1 --save "$work"
expect_error "a checkpoint that is a device" "--save /dev/full is a device, a pipe or a socket" "${small[@]}" --steps 1 --save /dev/full
grep -q '^step' "$work/out" && fail "--save /dev/full was tried after the training only"
expect_error "a plot that cannot be written" "--plot $work/absent/loss.svg cannot be written: No such file" "${small[@]}" --steps 1 --plot "$work/absent/loss.svg"
grep -q '^step' "$work/out" && fail "--plot was tried after the training only"
expect_error "results that cannot be written" "--json $work cannot be written: Is a directory" "${small[@]}" --steps 1 --json "$work"
expect_error "a missing text" "cannot read the text $work/absent" --data "$work/absent"
expect_error "an empty text" "has 0 bytes" --data "$work/empty"
expect_error "a text smaller than a context" "has 9 bytes" --data "$work/tiny"
expect_error "a misspelt recipe" "did you mean 'delayed'" --recipe delayde
expect_error "a misspelt option" "unknown argument '--stpes'; did you mean '--steps'" --stpes 5
[ "$code" = 2 ] || fail "a misspelt option exits with $code"
expect_error "an option without its dashes" "unknown argument 'steps'; did you mean '--steps'" steps 5
expect_error "a misspelt device" "did you mean 'auto'" --device atuo
expect_error "heads that do not divide" "must be a multiple of --heads" --hidden 100 --heads 3
expect_error "a graph on the host" "cpu cannot capture graphs" "${small[@]}" --graph
expect_error "FP8 weights without their scales" "requires --recipe delayed, not --recipe current" "${small[@]}" --recipe current --fp8-weights
expect_error "more experts a byte than there are" "--top-k 3 must be at most --experts" --experts 2 --top-k 3
expect_error "experts over tensor-parallel ranks" "--experts does not go with --tp 2" --experts 2 --tp 2
expect_error "experts in a graph" "--experts does not go with --graph" "${small[@]}" --experts 2 --graph
expect_error "an unknown device" "cuda:7" "${small[@]}" --device cuda:7
TE_FL_PERFER=vendor expect_error "a misspelt variable" "TE_FL_PREFER" "${small[@]}" --steps 1

[ "$failures" = 0 ] && echo passed
exit $((failures > 0))
