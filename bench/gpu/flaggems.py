#!/usr/bin/env python3
"""Checks te_fl.flaggems on an NVIDIA GPU, times its ops beside vendor.cuda and reference.torch, and trains a layer with TE_FL_PREFER=flagos.

On a machine without FlagGems and without a network, its packages travel as an archive of a site-packages folder (flag_gems 5.0.2, SQLAlchemy, PyYAML,
packaging). The command on the machine, with te-fl and its CUDA plugin in build/release:

    mkdir -p /tmp/site && tar xJf site.txz -C /tmp/site && PYTHONPATH=build/release/python:/tmp/site python3 bench/gpu/flaggems.py --json $OUT/flaggems.json

usage: flaggems.py [--json FILE] [--seconds 230] [--check]. Each part runs in processes of its own, with a limit of time, so that none that fails takes
others along: the trainings (with TE_FL_PREFER=flagos, and with TE_FL_SKIP_CUDA=1) and the values of each op against reference.host at the same time, then
the times. --check runs the conformance table (te-fl check --quick) by families instead. What is found is written to the file after each part. Exits 1 if a
value is wrong or a training fails. FLAGGEMS_DEVICE=cpu tries the script on a host.
"""

import argparse
import collections
import contextlib
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve()
DEVICE = os.environ.get("FLAGGEMS_DEVICE", "cuda")
FAMILIES = ("norm", "softmax", "gemm", "activation", "rope", "attention", "tensor")
DTYPES = ("bfloat16", "float16", "float32")
SHAPES = ((16, 64, True), (5, 33, False), (130, 257, False))  # rows, columns, and whether the tensors are strided
IMPLEMENTATIONS = {"flagos": "impl:default.flagos", "cuda": "vendor", "torch": "impl:reference.torch"}
# Rows and columns of the timed calls by a part of the op's name; the first that fits.
TIMED = (("qkv_rope", (2048, 64)), ("rope", (2048, 64)), ("attn", (2048, 128)), ("softmax", (1024, 1024)), ("gemm", (4096, 4096)), ("", (8192, 4096)))
FIRST = ("generic_gemm", "layernorm_fwd", "layernorm_bwd", "rmsnorm_fwd", "rmsnorm_bwd", "fused_attn_fwd", "swiglu", "dswiglu", "gelu", "dgelu", "add")


def note(**row):
    """One result of a child process: a line of JSON."""
    print(json.dumps(row), flush=True)


def family_of(op):
    import te_fl.reference_torch as ours
    names = {"gemm": ours.gemm, "norm": ours.norm, "softmax": ours.softmax, "rope": ours.rope, "attention": ours.attention, "tensor": ours.tensor}
    return next((name for name, module in names.items() if op in module.OPS), "activation")


def registered():
    import te_fl
    return [row["op_name"] for row in te_fl.OpRegistry.instance().snapshot() if row["impl_id"] == "default.flagos"]


def load():
    import te_fl
    te_fl.info()
    with contextlib.suppress(te_fl.Error):  # loaded already if the policy names it
        te_fl.load_plugin("te_fl.flaggems")


def values(argument):
    import torch

    import flaggems_cases as cases
    load()
    family, name = argument.split(":")
    ops, dtype = [op for op in registered() if family_of(op) == family], getattr(torch, name)
    for rows, columns, strided in SHAPES:
        for op in ops:
            if op == "fused_attn_fwd" and dtype == torch.float32:
                continue
            row = {"op": op, "dtype": name, "rows": rows, "columns": columns, "strided": strided}
            try:
                worst, result = cases.far_off(op, *cases.draw(op, dtype, rows, columns), "default.flagos", DEVICE, strided)
                note(**row, ok=worst <= 1, worst=round(worst, 4), result=result)
            except Exception as error:
                note(**row, ok=False, error=f"{type(error).__name__}: {error}"[:400])


def clock(step, count):
    """Microseconds of a call, of `count` calls in a row."""
    import torch
    began = time.perf_counter()
    if DEVICE == "cuda":
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
    for _ in range(count):
        step()
    if DEVICE != "cuda":
        return (time.perf_counter() - began) * 1e6 / count
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e3 / count


def times(_):
    import torch

    import flaggems_cases as cases
    import measure
    import te_fl
    from te_fl import reference_torch
    load()
    te_fl.OpRegistry.instance().register_many(reference_torch.implementations((DEVICE,)))
    if DEVICE == "cuda":
        measure.heat()
    ops = sorted(registered(), key=lambda op: FIRST.index(op) if op in FIRST else len(FIRST))
    for op in ops:
        rows, columns = next(shape for part, shape in TIMED if part in op) if DEVICE == "cuda" else (64, 64)
        row = {"op": op, "rows": rows, "columns": columns, "us": {}}
        try:
            arguments = cases.place(*cases.draw(op, torch.bfloat16, rows, columns), DEVICE)
            steps = {}
            for name, token in IMPLEMENTATIONS.items():
                def step(token=token):
                    with te_fl.policy(per_op={op: [token]}):
                        getattr(te_fl.ops, op)(**arguments)
                try:
                    clock(step, 3)
                    steps[name] = step
                except te_fl.Error as error:
                    row[f"{name}_error"] = str(error)[:300]
            counts, found = {name: max(1, int(2e4 / clock(step, 3))) for name, step in steps.items()}, {name: [] for name in steps}
            for _ in range(7):
                for name, step in steps.items():
                    found[name].append(clock(step, counts[name]))
            row["us"] = {name: round(statistics.median(t), 2) for name, t in found.items()}
            for other in ("cuda", "torch"):
                if "flagos" in found and other in found:
                    row[f"of_{other}"], row[f"of_{other}_spread"] = (round(x, 3) for x in measure.ratio(found["flagos"], found[other]))
        except Exception as error:
            row["error"] = f"{type(error).__name__}: {error}"[:400]
        note(**row)


def train(_):
    import torch

    import te_fl
    import te_fl.pytorch as te
    torch.manual_seed(1)
    layer = te.TransformerLayer(1024, 4096, 16, hidden_dropout=0.0, attention_dropout=0.0, params_dtype=torch.bfloat16, device=DEVICE)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-3)
    x = torch.randn(512, 2, 1024, device=DEVICE, dtype=torch.bfloat16)
    target, losses = torch.randn_like(x), []
    for _ in range(20):
        began = time.perf_counter()
        loss = (layer(x) - target).float().square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(round(loss.item(), 5))
        last = time.perf_counter() - began
    served = collections.defaultdict(dict)
    for row in te_fl.usage():
        served[row["op"]][row["impl_id"]] = row["calls"]
    by_flagos = sorted(op for op, by in served.items() if "default.flagos" in by)
    note(ok=losses[-1] < losses[0] and bool(by_flagos), losses=losses, last_step_ms=round(last * 1e3, 2), by_flagos=by_flagos, served=served)


PARTS = {"values": values, "times": times, "train": train}


class Child:
    def __init__(self, part, argument, limit, command=None, **settings):
        self.part, self.argument, self.until = part, argument, time.monotonic() + limit
        self.out, self.err = tempfile.TemporaryFile("w+"), tempfile.TemporaryFile("w+")
        environment = {k: v for k, v in os.environ.items() if k not in ("TE_FL_PREFER", "TE_FL_SKIP_CUDA")}
        self.cache = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)  # FlagGems' file of choices is locked while a process writes
        environment["FLAGGEMS_CACHE_DIR"] = self.cache.name
        self.process = subprocess.Popen(command or [sys.executable, str(HERE), "--part", part, argument], stdout=self.out, stderr=self.err,
                                        env={**environment, **settings}, process_group=0)

    def result(self):
        """The rows that the child printed, how it ended, and the end of what it wrote to stderr."""
        try:
            code = self.process.wait(max(0.1, self.until - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, 9)
            self.process.wait()
            code = "out of time"
        texts = []
        for file in (self.out, self.err):
            file.seek(0)
            texts.append(file.read())
        rows = []
        for line in texts[0].splitlines():
            with contextlib.suppress(ValueError):
                rows.append(json.loads(line))
        return {"argument": self.argument, "code": code, "rows": [r for r in rows if isinstance(r, dict)], "stderr": texts[1][-1500:] if code else "",
                "stdout": "" if rows else texts[0][-3000:]}


def versions():
    import importlib.metadata as metadata
    import torch
    found = {name: metadata.version(name) for name in ("flag_gems", "torch", "triton", "numpy", "PyYAML", "SQLAlchemy", "packaging")
             if next(metadata.distributions(name=name), None) is not None}
    return {**found, "python": sys.version.split()[0], "device": torch.cuda.get_device_name() if torch.cuda.is_available() else None}


def check(end, save):
    import te_fl.program
    with tempfile.TemporaryDirectory() as folder:
        limit, found = end - time.monotonic() - 3, []
        tables = [Child("check", family, limit, [te_fl.program.program(), "check", "te_fl.flaggems", "--python", sys.executable, "--device", f"{DEVICE}:0",
                                                 "--quick", "--family", family, "--jobs", "2", "--time-limit", "100", "--json", f"{folder}/{family}.json"])
                  for family in FAMILIES]
        for child in tables:
            row, file = child.result(), pathlib.Path(folder) / f"{child.argument}.json"
            row["table"] = json.loads(file.read_text()) if file.exists() else None
            found.append(row)
            print("check", row["argument"], row["code"], row["stdout"][-600:], row["stderr"][-300:])
            save(check=found)
    return any(row["code"] not in (0, 4) for row in found)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", default=os.path.join(os.environ.get("OUT", "."), "flaggems.json"))
    parser.add_argument("--seconds", type=float, default=230)
    parser.add_argument("--check", action="store_true", help="the conformance table instead")
    parser.add_argument("--part", nargs=2, metavar=("PART", "ARGUMENT"), help="what a child process runs")
    options = parser.parse_args()
    if options.part:
        return PARTS[options.part[0]](options.part[1])
    end = time.monotonic() + options.seconds
    report = {"versions": versions()}

    def save(**more):
        report.update(more)
        pathlib.Path(options.json).write_text(json.dumps(report, indent=1))

    if options.check:
        return check(end, save)
    # The trainings answer the most, so they and the values run at the same time; nothing runs beside the times.
    limit = 0.6 * options.seconds
    children = [Child("train", name, limit, **settings) for name, settings in (("TE_FL_PREFER=flagos", {"TE_FL_PREFER": "flagos"}),
                                                                            ("TE_FL_SKIP_CUDA=1", {"TE_FL_SKIP_CUDA": "1"}))]
    children += [Child("values", f"{family}:{dtype}", limit) for family in FAMILIES for dtype in DTYPES]
    save(train=[c.result() for c in children[:2]])
    save(values=[c.result() for c in children[2:]])
    save(times=Child("times", "", max(20, end - time.monotonic() - 5)).result())
    wrong = [f"{r['op']} {r['dtype']} {r['rows']}x{r['columns']}: {r.get('error') or r['worst']}" for part in report["values"] for r in part["rows"]
             if not r["ok"]]
    print(f"values: {sum(len(p['rows']) for p in report['values'])} calls, {len(wrong)} wrong", *wrong, sep="\n  ")
    for row in report["times"]["rows"]:
        print(f"{row['op']:46} {row['us'].get('flagos', 0):10.1f} us  {row.get('of_cuda', 0):7.2f} of cuda  {row.get('of_torch', 0):7.2f} of torch  "
              f"{row.get('error', '')}")
    for part in report["train"]:
        print(part["argument"], part["code"], *[(r["ok"], r["losses"][0], r["losses"][-1], r["last_step_ms"], r["by_flagos"]) for r in part["rows"]],
              part["stderr"][-300:])
    return bool(wrong) or not all(r["ok"] for p in report["train"] for r in p["rows"]) or not all(p["rows"] for p in report["train"])


if __name__ == "__main__":
    sys.exit(main())
