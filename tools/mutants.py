#!/usr/bin/env python3
"""Judges te-fl check by mutants: plugins whose ops are the reference's with one planted error each. Prints the score by op and the
survivors. usage: tools/mutants.py [BUILD] [--sample N] [--right N] [--long | --training] [--op OP] [--per-op N] [--again FILE] [--list] [--jobs N]
[--json FILE]

The mutants are drawn from the op specification (ops/*.yaml): for each op errors in each argument, dtype, class of sizes and saved output.
tests/mutants/mutation.hpp describes the errors. With --training TE_FL_VERIFY is judged instead, by trainings of the example in which the mutant
runs its op: a mutant counts if it changes a result there, and is caught if TE_FL_VERIFY reports a difference. Exit status 1 if an op without an error fails, or the share of mutants that were caught
is below --least."""
import argparse
import collections
import concurrent.futures
import json
import os
import pathlib
import random
import re
import subprocess
import sys
import tempfile
import time

import op_spec

ROOT = pathlib.Path(__file__).resolve().parent.parent
HIGH = ["f32", "f16", "bf16"]
# Wrong plugins that te-fl check once certified; always among the mutants.
KNOWN = [
    "embedding_bwd if accumulate given, grad_weight rows > 99: ignore accumulate",
    "generic_gemm if accumulate absent: write d old",
    "generic_gemm if accumulate given, beta == 0: write d old",
    "rmsnorm_fwd if residual given, zero_centered_gamma given, x is f16: ignore zero_centered_gamma",
    "multi_tensor_adam if step > 1000: cap step 1000",
    "relu: write output nan 4096",
    "fill if output is i64: float value",
    "silu if output is f32, output elements > 700000: write output last",
    "quantize if input is f16: unscaled output 1024",
    "quantize if input is bf16: scale output up",
    "quantize if input is bf16: ties output input",
    "silu if output is bf16: write output truncate",
    "rmsnorm_fwd: write rsigma from 70000",
    "device copy to_device above 8388608",
    "device copy to_host above 8388608",
    "device copy within above 8388608",
]
DEVICE = [f"device {what} above {size}" for what in ("copy to_device", "copy to_host", "copy within", "fill")
          for size in ("0", "4096", "65536", "1048576", "16777216", "100000 on a stream")]
SIZES = [("elements", 4096), ("elements", 65536), ("elements", 700000), ("elements", 1048576), ("rows", 99), ("rows", 1024), ("rows", 70000),
         ("columns", 255), ("columns", 1024), ("columns", 4095)]
# The trainings of --training: options of train_gpt. Together they use every recipe, dtype and style of the example.
TRAININGS = ["--recipe delayed --style gpt --dropout 0.1", "--recipe none --style gpt --dtype bf16", "--recipe block --style llama",
             "--recipe current --style llama --dtype bf16 --groups 2", "--recipe delayed --style llama --fp8-weights --dtype f16",
             "--recipe delayed --style gpt --fp8-attention --dtype bf16", "--recipe none --style gpt"]
# Formats whose results are compared to the bit: those of ops that copy, and the codes of ops that quantise unchanged inputs.
EXACT = {"quantize", "cast_to_fp8", "fp8_transpose", "compute_amax", "strided_copy", "fill", "embedding_fwd", "moe_permute_fwd",
         "multi_tensor_quantize", "split_quantize", "moe_sort_chunks_fwd", "fused_multi_row_padding", "fused_multi_row_unpadding"}


# Arguments that change no result: what the op specification calls a hint, or leaves to the implementation.
HINTS = {"use_split_accumulator", "max_seqlen_q", "max_seqlen_kv", "fused_score_for_moe_aux_loss_bwd.topk"}
# Numbers whose values beyond 2^24 have a meaning; of others that many elements would be needed.
LONG_NUMBERS = {"value", "stride", "ignore_index"}
# Ops in which the effect of NaN is not defined (conformance/cases/parts/special.cpp has the reasons).
NO_NAN = r"fused_attn|fused_topk|fused_score|multi_tensor|compute_amax|fused_amax"


def is_vector(arg):
    """True for an argument of one dimension, which has one row and seldom many elements."""
    return arg.shape != "any" and "..." not in arg.shape.split() and len(arg.shape.split()) < 2


def line(op, conditions, fault):
    return op + (" if " + ", ".join(conditions) if conditions else "") + ": " + fault


class Op:
    """Draws the mutants of one op. Classes of errors are drawn in turn, so that each argument, dtype and size has its chance."""

    def __init__(self, op):
        self.op, self.random = op, random.Random(op.name)
        tensors = [a for a in op.args if a.is_tensor and not a.host and "TE_FL_ARG_QUANT_ONLY" not in a.flags]
        self.floats = [a for a in tensors if set(a.dtypes) & set(HIGH) and a.role == "in"]
        self.outputs = [a for a in tensors if a.role != "in" and a.name != "noop_flag"]
        self.main = next((a for a in self.outputs if set(a.dtypes) & set(HIGH)), (self.outputs or tensors or [None])[0])
        self.input = next(iter(self.floats), None)

    def when(self, subjects=(), sizes=True):
        """One condition: a dtype or a class of sizes of an output, an input or `subjects`; or none."""
        kind = self.random.choice(["none", "dtype", "dtype", "size" if sizes else "none"])
        subjects = [a for a in subjects or (self.main, self.input) if a is not None and a.shape not in ("", "1")]
        if not subjects or kind == "none":
            return []
        subject = self.random.choice(subjects)
        dtypes = [d for d in subject.dtypes if d in HIGH] or subject.dtypes
        if kind == "dtype" and len(dtypes) > 1:
            return [f"{subject.name} is {self.random.choice(dtypes)}"]
        if kind == "size" and not subject.type == "list" and not is_vector(subject):
            heads = "attn" in self.op.name  # whose columns are the elements of a head
            what, n = self.random.choice([s for s in SIZES if not heads or s[0] != "columns"])
            return [f"{subject.name} {what} > {n}"]
        return []

    def scalars(self):
        for a in self.op.args:
            if not a.is_scalar or a.name in HINTS or f"{self.op.name}.{a.name}" in HINTS:
                continue
            if a.type == "bool":
                yield self.when() + [f"{a.name} given"], f"ignore {a.name}"
                yield self.when(), f"set {a.name} {1 - int(a.default)}"
            elif a.type == "enum":
                for value in range(len(a.enum_names)):
                    if value != a.default:
                        yield self.when() + [f"{a.name} == {value}"], f"set {a.name} {int(a.default)}"
            else:
                yield self.when(), f"ignore {a.name}"
                if a.default and not a.min == a.default:
                    yield [], f"floor {a.name} {a.default}"
                if a.default:
                    yield [], f"cap {a.name} {a.default}"
                if a.name in LONG_NUMBERS:
                    yield [], f"float {a.name}"

    def absent(self):
        """An optional input that is not read."""
        for a in self.op.args:
            if a.optional and a.role == "in" and (a.is_tensor or a.type == "ints"):
                required = any(re.search(rf"requires .*\b{a.name}\b|\bor {a.name}\b|^{a.name} or\b", rule) for rule in self.op.rules)
                if not required:
                    yield self.when() + [f"{a.name} given"], f"ignore {a.name}"

    def pairs(self):
        """One of two arguments has no effect if both are given."""
        choices = [a for a in self.op.args if (a.optional and a.is_tensor and a.role == "in") or (a.is_scalar and a.type == "bool")]
        for a in choices:
            for b in choices:
                if a is not b and not any(a.name in rule and b.name in rule for rule in self.op.rules):
                    dtypes = [d for d in self.main.dtypes if d in HIGH]
                    extra = [f"{self.main.name} is {self.random.choice(dtypes)}"] if dtypes else []
                    yield extra + [f"{a.name} given", f"{b.name} given"], f"ignore {b.name}"

    def inputs(self):
        for a in self.op.args:
            if not a.is_tensor or a.host or a.role != "in" or a.name == "noop_flag":
                continue
            yield self.when(), f"read {a.name} last"
            if not is_vector(a) and a.shape != "any":
                yield [], f"read {a.name} rows {self.random.choice([1, 16, 100, 1024, 70000])}"
            stepped = re.search("relu|reglu|clamped", self.op.name) and a.name != "grad"  # NaN times a step of 0 may be either
            undefined = "freqs" in a.name or (stepped and "input" != self.op.args[0].name) or re.search(NO_NAN, self.op.name)
            if set(a.dtypes) & set(HIGH) and a.shape not in ("", "1") and not undefined:
                yield self.when(), f"read {a.name} nan {self.random.choice([0, 100, 4096])}"
                if self.op.name in EXACT:
                    yield self.when(), f"read {a.name} inf"
                    yield self.when(), f"read {a.name} subnormal"
            if a.scaling_names != ["none"]:
                yield self.when(), f"read {a.name} scale"
        for a in self.op.args:
            if a.name == "noop_flag" and a.role == "in":
                yield [], "read noop_flag odd"
                yield [], "ignore noop_flag"

    def written(self):
        for a in self.outputs:
            yield self.when(), f"write {a.name} none"
            yield self.when(), f"write {a.name} last"
            if a.shape not in ("", "1"):
                sizes = [("from", 1000), ("from", 65536)] if is_vector(a) else [
                    ("from", 70000), ("from", 4096), ("rows", 1024), ("from", 1048576), ("rows", 100)]
                kind, n = self.random.choice(sizes)
                if "#" not in a.shape:  # a shape with # is that of a list, which has few tensors
                    yield self.when(sizes=False), f"write {a.name} {kind} {n}"
            if a.inout_if:
                yield self.when() + [f"{a.inout_if} absent"], f"write {a.name} old"
            if a.alias:
                yield [f"{a.name} in_place"], f"write {a.name} last"

    def rounding(self):
        """Values of one dtype that are further off than the format allows."""
        for a in self.outputs:
            for d in a.dtypes:
                where = [f"{a.name} is {d}"]
                if d in HIGH and self.op.name not in EXACT:
                    yield where, f"write {a.name} off {dict(f32=3e-4, f16=6e-3, bf16=3e-2)[d]}"
                    if d != "f32":
                        yield where, f"write {a.name} truncate"
                elif d in ("i64", "i32") or (d in HIGH and self.op.name in EXACT):
                    yield where, f"write {a.name} step"
                elif d in ("f8e4m3", "f8e5m2", "f4e2m1"):
                    yield where + self.when([self.input]), f"write {a.name} step {self.random.choice([0, 1000])}"
            if a.scaling_names != ["none"] or set(a.dtypes) <= {"f8e4m3", "f8e5m2"}:
                continue
            if set(a.dtypes) & set(HIGH) and self.floats and not re.search(NO_NAN, self.op.name):
                yield self.when(), f"write {a.name} nan {self.random.choice([0, 1000, 4096])}"

    def quantised(self):
        modes = dict(tensor=["tensor"], block=["block1x128", "block128x128"], mx=["mxfp8"], nv=["nvfp4"])
        for a in self.outputs:
            names = [m for s in a.scaling_names if s != "none" for m in modes[s]]
            for mode in names:
                parts = ["columnwise_data", "scale_inv", "amax" if mode in ("tensor", "nvfp4") else "columnwise_data"]
                parts.append("scale" if mode == "tensor" else "columnwise_scale_inv")
                for part in parts:
                    yield [f"{a.name} is {mode}"] + self.when([self.input]), f"part {a.name} {part} {self.random.choice(['none', 'last'])}"
            if "tensor" in names and self.input is not None:
                for d in HIGH:
                    yield [f"{self.input.name} is {d}"], f"unscaled {a.name} {self.random.choice([100, 1024])}"
                    if self.op.name in EXACT:  # elsewhere the values may differ by more before they are quantised
                        yield [f"{self.input.name} is {d}"], f"scale {a.name} up"
                        yield [f"{self.input.name} is {d}"], f"ties {a.name} {self.input.name}"

    def random_state(self):
        if self.op.rng:
            yield from (([], f"rng {part}") for part in ("offset", "seed_address", "offset_address", "high"))

    def all(self):
        """Every error that the specification gives rise to, one class after the other."""
        classes = []
        for draw in (self.scalars, self.absent, self.pairs, self.inputs, self.written, self.rounding, self.quantised, self.random_state):
            lines = list(dict.fromkeys(line(self.op.name, c, f) for c, f in draw())) if self.main is not None or draw == self.scalars else []
            self.random.shuffle(lines)
            classes.append(lines)
        turns = [lines[i] for i in range(max(map(len, classes))) for lines in classes if i < len(lines)]
        return list(dict.fromkeys(turns))


def mutants(per_op):
    """The mutants by op: per_op of each, and the known ones."""
    families, _, _ = op_spec.load(ROOT / "ops")
    chosen = collections.OrderedDict()
    for _, _, ops in families:
        for op in ops:
            if op.op_class == "compute":
                chosen[op.name] = [m for m in KNOWN if re.match(rf"{op.name}\b", m)]
                chosen[op.name] += [m for m in Op(op).all() if m not in chosen[op.name]][:per_op]
    chosen["device"] = list(dict.fromkeys(DEVICE + [m for m in KNOWN if m.startswith("device")]))
    return chosen


def check(build, mutant, long):
    """Runs te-fl check on the mutant. Returns (caught, seconds of processor time, its output)."""
    plugin = build / "tests/mutants/plugins/mutant.so"
    command = [build / "bin/te-fl", "check", plugin, "--jobs", "1", "--stop"] + (["--long"] if long else [])
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT,
                                   env={**os.environ, "MUTANT": mutant, "TE_FL_PLUGIN_PATH": "", "TEFL_LOG_LEVEL": "OFF"})
        _, status, usage = os.wait4(process.pid, 0)  # the processor time of its children, too
        code = process.returncode = os.waitstatus_to_exitcode(status)
        output.seek(0)
        text = output.read()
    if code not in (0, 1, 4):  # 4: a plugin of a device alone has no certificate
        raise SystemExit(f"mutants.py: te-fl check ended with {code} on \"{mutant}\":\n{text}")
    return code == 1, usage.ru_utime + usage.ru_stime, text


def judge(build, op, mutant, long):
    """Judges by the default run; a survivor also by the long run if `long`. The long run makes every call of the default run."""
    right = mutant.endswith(": none")
    caught, seconds, text = check(build, mutant, False)
    row = {"op": op, "mutant": mutant, "right": right, "caught": caught, "seconds": round(seconds, 2), "text": text}
    if long and not caught and not right:
        row["caught_by_long"], row["seconds_of_long"], _ = check(build, mutant, True)
    return row


class Trainings:
    """Short trainings of the example, in which one op runs in the mutant and TE_FL_VERIFY checks each of its calls."""

    def __init__(self, build):
        self.build, self.folder = build, tempfile.TemporaryDirectory()
        words, rng = "one two three four five six seven eight nine ten".split(), random.Random(7)
        self.text = pathlib.Path(self.folder.name, "text")
        self.text.write_text(" ".join(rng.choice(words) for _ in range(20000)))
        self.ops = [self.run(options, "", "")[0] for options in TRAININGS]  # the ops of each training

    def run(self, options, op, mutant):
        """Runs a training. Returns the ops that ran; whether the mutant changed a result, whether TE_FL_VERIFY found a difference, and the output."""
        with tempfile.TemporaryDirectory(dir=self.folder.name) as folder:
            results, changes = pathlib.Path(folder, "results.json"), pathlib.Path(folder, "changes")
            environment = {**os.environ, "TE_FL_PLUGIN_PATH": "", "TEFL_LOG_LEVEL": "WARNING", "TE_FL_VERIFY_DIR": "", "TE_FL_SKIP_CUDA": "1"}
            if mutant:
                plugin = str(self.build.resolve() / "tests/mutants/plugins/mutant.so")
                environment |= {"MUTANT": mutant, "MUTANT_CHANGES": str(changes), "TE_FL_PLUGIN_MODULES": plugin, "TE_FL_VERIFY": f"1:{op}",
                                "TE_FL_PER_OP": f"{op}=impl:vendor.mutant|default|reference"}
            process = subprocess.run([self.build / "bin/train_gpt", "--data", self.text, "--device", "cpu", "--steps", "3", "--sample-bytes", "0",
                                      "--eval-batches", "1", "--json", results, *options.split()], capture_output=True, text=True, env=environment)
            if process.returncode != 0 and not mutant or "MUTANT" in process.stderr:
                raise SystemExit(f"mutants.py: train_gpt {options} ended with {process.returncode} on \"{mutant}\":\n{process.stdout}{process.stderr}")
            ops = {row["op"] for row in json.loads(results.read_text())["usage"]} if results.exists() else set()
            text = process.stdout + process.stderr
            return ops, changes.exists(), f"op '{op}': 'vendor.mutant'" in text and "does not agree with" in text, text

    def judge(self, op, mutant):
        """A mutant is caught if any of the trainings reports it. An op without an error must be reported by none."""
        right, changed, caught, texts, begun = mutant.endswith(": none"), False, False, [], time.monotonic()
        for options, ops in zip(TRAININGS, self.ops):
            if op not in ops or (caught and not right):
                continue
            _, changes, found, text = self.run(options, op, mutant)
            changed, caught = changed or changes, caught or found
            texts.append(f"{options}:\n{text}")
        return {"op": op, "mutant": mutant, "right": right, "caught": caught, "changed": changed, "seconds": round(time.monotonic() - begun, 2),
                "text": "\n".join(texts)}


def report(rows, long):
    """Prints the score by op. Returns the share of mutants that were caught, in percent."""
    planted = [r for r in rows if not r["right"]]
    counts = {}
    for r in planted:
        count = counts.setdefault(r["op"], [0, 0, 0])
        count[0] += 1
        count[1] += r["caught"]
        count[2] += r["caught"] or r.get("caught_by_long", False)
    print("| op | mutants | caught |" + (" by --long |" if long else ""))
    print("|---|---|---|" + ("---|" if long else ""))
    for op, (all_of_them, caught, by_long) in counts.items():
        print(f"| {op} | {all_of_them} | {caught} |" + (f" {by_long} |" if long else ""))
    total, caught, by_long = (sum(count[i] for count in counts.values()) for i in range(3))
    print(f"{caught} of {total} mutants were caught ({100 * caught / max(total, 1):.1f} %)" +
          (f", {by_long} ({100 * by_long / max(total, 1):.1f} %) by the long run" if long else ""))
    for r in rows:
        if r["right"] and r["caught"]:
            print(f"{'reported' if 'changed' in r else 'not certified'} although right: {r['mutant']}\n{r['text']}")
    return 100 * (by_long if long else caught) / max(total, 1)


def chosen_work(options):
    """The mutants that the options choose, as (op, mutant)."""
    chosen = mutants(options.per_op)
    if options.op:
        chosen = {op: lines for op, lines in chosen.items() if re.fullmatch(options.op, op)}
        if not chosen:
            raise SystemExit(f"mutants.py: --op {options.op}: no op of such a name has mutants")
    work = [(op, m) for op, lines in chosen.items() for m in lines]
    if options.again:
        survived = {r["mutant"] for r in json.loads(options.again.read_text()) if not r["caught"]}
        work = [(op, m) for op, m in work if m in survived]
    if options.sample:
        known, drawn = ([item for item in work if (item[1] in KNOWN) == wanted] for wanted in (True, False))
        count = min(options.sample, len(drawn))
        work = known + [drawn[i * len(drawn) // count] for i in range(count)]
    ops = list(chosen)
    right = min(options.right, len(ops))
    return work + [(op, f"{op}: none") for op in (ops[i * len(ops) // right] for i in range(right))]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build", nargs="?", default="build/release", type=pathlib.Path)
    parser.add_argument("--sample", type=int, default=0, help="the known ones and this many of the others, evenly over the list; 0: all")
    parser.add_argument("--seconds", type=float, default=0, help="begins no mutant after this time; they then run in an order that mixes the ops")
    parser.add_argument("--per-op", type=int, default=5)
    parser.add_argument("--op", default="", help="mutants of the ops whose names match this expression (device: of devices)")
    parser.add_argument("--again", type=pathlib.Path, help="only those that survived in this file of --json")
    parser.add_argument("--long", action="store_true", help="judges survivors by te-fl check --long as well")
    parser.add_argument("--training", action="store_true", help="judges TE_FL_VERIFY in trainings of the example instead of te-fl check")
    parser.add_argument("--right", type=int, default=0, help="also runs this many ops without an error, which must be certified")
    parser.add_argument("--list", action="store_true", help="prints the mutants and runs nothing")
    parser.add_argument("--least", type=float, default=0, help="the least share of mutants that must be caught, in percent")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--json", type=pathlib.Path)
    options = parser.parse_args()
    if options.training and options.long:
        raise SystemExit("mutants.py: --training judges TE_FL_VERIFY and --long te-fl check; give one of them")
    work = chosen_work(options)
    trainings = None
    if options.training:
        trainings = Trainings(options.build)
        work = [(op, m) for op, m in work if any(op in ops for ops in trainings.ops)]
    if options.list:
        print("\n".join(m for _, m in work))
        return 0
    begun, rows, unchanged = time.monotonic(), [], 0
    in_order = list(work)
    if options.seconds:
        random.Random(1).shuffle(work)

    def one(item):
        late = options.seconds and time.monotonic() - begun > options.seconds
        if late:
            return None
        return judge(options.build, *item, options.long) if trainings is None else trainings.judge(*item)

    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        for row in pool.map(one, work):
            if row is None:
                continue
            if row["right"] or row.get("changed", True):
                rows.append(row)
            else:
                unchanged += 1
                continue
            if not row["caught"] and not row["right"]:
                by = "" if not options.long else " the default run" if row["caught_by_long"] else " both runs"
                print(f"survived{by}: {row['mutant']} ({row['seconds']:.1f} s)", flush=True)
    order = {item: i for i, item in enumerate(in_order)}
    rows.sort(key=lambda row: order[row["op"], row["mutant"]])
    share = report(rows, options.long)
    if unchanged:
        print(f"{unchanged} mutants change no result of these trainings")
    if len(rows) + unchanged < len(work):
        print(f"{len(work) - len(rows) - unchanged} mutants were not judged (--seconds)")
    print(f"{time.monotonic() - begun:.0f} s")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))
    return 1 if share < options.least or any(r["right"] and r["caught"] for r in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
