#!/usr/bin/env python3
"""Tests multi-rank features, each rank on a GPU of its own (or, with --device cpu, over Gloo): the plugin's collectives, training at every
degree against one rank, graphs, checkpoints loaded at another degree, ranks that are killed, hang or stop calling, and transfers
that overlap products. Prints a table last; the exit code is 1 if a row failed. Needs no network.

usage: tools/ranks_check.py [--build DIR] [--device cuda|cpu] [--ranks N ...] [--only PART ...] [--python PATH] [--text FILE] [--out DIR]
  --build DIR   a build tree, or a folder with its bin/{te-fl,train_gpt,gpu_collectives_test} and plugins (default build/release)
  --device      where the ranks compute (default cuda)
  --ranks N ... numbers of ranks (default 2, and 4 where there are four GPUs)
  --only PART   some of collectives, conformance, certificate, train, graph, checkpoints, trouble, pytorch, overlap
  --python PATH a Python with PyTorch and te_fl (default: python3, with DIR/python in its path)
  --text FILE   training text (default build/data/text.txt, from tools/fetch_text.sh; if absent, the documents of this project)
  --out DIR     where logs go (default build/ranks_check)"""
import argparse
import glob
import json
import math
import os
import pathlib
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
PARTS = ("collectives", "conformance", "certificate", "train", "graph", "checkpoints", "trouble", "pytorch", "overlap")
TIMEOUT_MS = 4000  # time-out of collectives in the jobs that are expected to fail
TRAIN = ["--batch", "16", "--sample-bytes", "0", "--report-every", "10", "--eval-batches", "4", "--hidden", "256", "--layers", "2",
         "--seq-len", "128", "--heads", "8"]

# Limits for the median, over the steps, of the relative difference between the losses of a model sharded over ranks and those of one rank. Single
# steps of runs in low precision differ by up to 1.6 % and converge again. Over Gloo, 20 steps on two ranks have medians of 5e-7 in F32, 6e-5 with
# block scaling, 7e-4 with current and 1.3e-3 with delayed scaling. If one rank's gradients are halved or doubled by mistake, every limit is exceeded;
# the limit of delayed scaling only slightly.
APART = {"F32": 1e-4, "none": 2.5e-3, "block": 1e-3, "current": 2.5e-3, "delayed": 2.5e-3}


def apart(losses, others):
    """Returns the median and the maximum of the relative differences; both are infinite if a loss is missing or not finite."""
    found = [abs(a - b) / abs(b) for a, b in zip(losses, others)]
    if not found or len(losses) != len(others) or not all(map(math.isfinite, found)):
        return math.inf, math.inf
    return statistics.median(found), max(found)


class Check:
    def __init__(self, options):
        self.options = options
        self.build = pathlib.Path(options.build).resolve()
        self.out = pathlib.Path(options.out).resolve()
        self.out.mkdir(parents=True, exist_ok=True)
        self.rows, self.failures = [], 0
        self.plugin = self.build / "plugins" / ("libte_fl_cuda.so" if options.device == "cuda" else "libte_fl_gloo.so")
        self.impl, self.place = ("vendor.nccl", "cuda:0") if options.device == "cuda" else ("default.gloo", "cpu")
        # NVLink multicast (NVLS) is off because it can disable the GPUs of a shared host.
        self.environment = {"NCCL_NVLS_ENABLE": "0", **os.environ, "TE_FL_PLUGIN_PATH": "", "TE_FL_PLUGIN_MODULES": str(self.plugin)}
        libraries = [str(self.build / "lib"), os.environ.get("LD_LIBRARY_PATH", "")]
        self.environment["LD_LIBRARY_PATH"] = os.pathsep.join(x for x in libraries if x)
        for name in ("TE_FL_RANK", "TE_FL_WORLD_SIZE", "TE_FL_LOCAL_RANK", "TE_FL_STORE"):
            self.environment.pop(name, None)
        self.text = pathlib.Path(options.text)
        if not self.text.is_file():
            self.text = self.out / "text.txt"
            self.text.write_bytes(b"".join(pathlib.Path(f).read_bytes() for f in sorted(glob.glob(str(ROOT / "docs" / "*.md")))))

    def row(self, name, passed, detail):
        self.rows.append((name, "passed" if passed else "FAILED", detail))
        self.failures += not passed
        print(f"{name:44} {'passed' if passed else 'FAILED':7} {detail}", flush=True)

    def program(self, name):
        return str(self.build / "bin" / name)

    def run(self, name, command, limit=240, **more):
        """Runs a command with its output in a file; returns (exit code, or None after the time limit, output)."""
        log = self.out / (re.sub(r"[^A-Za-z0-9.]+", "-", name) + ".log")
        with open(log, "w", encoding="utf-8") as file:
            try:
                code = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, env={**self.environment, **more}, cwd=ROOT, timeout=limit).returncode
            except subprocess.TimeoutExpired:
                code = None
        return code, log.read_text(encoding="utf-8", errors="replace")

    def launched(self, name, ranks, command, **more):
        return self.run(name, [sys.executable, str(ROOT / "tools" / "launch.py"), "-n", str(ranks), "--", *command], **more)

    # ---- the plugin's collectives
    def collectives(self):
        test = self.program("gpu_collectives_test" if self.options.device == "cuda" else "gloo_test")
        code, text = self.run("collectives", [test, "--gtest_filter=-*Times*"])
        counts = re.findall(r"\[  (PASSED|SKIPPED|FAILED) +\] (\d+) test", text)
        self.row("collectives", code == 0, ", ".join(f"{n} {what.lower()}" for what, n in counts) or f"exit code {code}")

    def conformance(self):
        for ranks in self.options.ranks:
            name = f"conformance, {ranks} processes"
            code, text = self.launched(name, ranks, [self.program("conformance"), "--plugin", str(self.plugin), "--impl", self.impl, "--device", self.place])
            found = re.findall(r"\d+ passed[^\n]*", text)
            self.row(name, code == 0, found[-1] if found else f"exit code {code}")

    def certificate(self):
        code, text = self.run("te-fl check", [self.program("te-fl"), "check", str(self.plugin), "--family", "collective", "--json", str(self.out / "check.json")], 400)
        try:
            found = json.loads((self.out / "check.json").read_text())
            cases = [f for f in found.get("findings", found.get("results", [])) if f.get("check") == "processes"]
            detail = f"{sum(f.get('outcome', f.get('result')) in ('pass', 'passed') for f in cases)} cases of several processes passed, of {len(cases)}"
        except (OSError, ValueError):
            detail = text.strip().splitlines()[-1] if text.strip() else ""
        # exit code 4: a selection of ops gives no certificate
        self.row("te-fl check, its collectives", code in (0, 4), f"{detail}; exit code {code}")

    # ---- training
    def train(self, name, ranks, more, steps=20, **variables):
        """Runs train_gpt; returns its JSON, or None."""
        file = self.out / "train.json"
        file.unlink(missing_ok=True)
        device = ["--device", "cuda" if ranks > 1 else "cuda:0"] if self.options.device == "cuda" else ["--device", "cpu"]
        command = [self.program("train_gpt"), "--data", str(self.text), *TRAIN, "--steps", str(steps), *device, *more, "--json", str(file)]
        code, text = self.launched(name, ranks, command, **variables) if ranks > 1 else self.run(name, command, **variables)
        if code != 0 or not file.exists():
            print("\n".join(text.strip().splitlines()[-12:]))
            return None
        return json.loads(file.read_text())

    def degrees(self):
        """Lists (name, ranks, arguments) of every combination of tensor and data parallelism."""
        for n in self.options.ranks:
            for tp in [t for t in (1, 2, 4) if n % t == 0 and t <= n]:
                dp = n // tp
                yield f"tp {tp} dp {dp}", n, ["--tp", str(tp), "--dp", str(dp)]
                if tp > 1:
                    yield f"tp {tp} dp {dp} sp", n, ["--tp", str(tp), "--dp", str(dp), "--sp"]
                if dp > 1:
                    yield f"tp {tp} dp {dp}{' sp' if tp > 1 else ''} zero", n, ["--tp", str(tp), "--dp", str(dp), "--zero"] + (["--sp"] if tp > 1 else [])

    def grid(self, part, variants, more=()):
        for label, arguments in variants:
            whole = self.train(f"{part} {label} one rank", 1, [*arguments, *more])
            if whole is None:
                self.row(f"{part}, {label}, one rank", False, "did not run")
                continue
            limit, medians, most, failed = APART[label], [], 0, []
            for name, ranks, degree in self.degrees():
                divided = self.train(f"{part} {label} {name}", ranks, [*arguments, *more, *degree])
                if divided is None:
                    failed.append(f"{name}: did not run")
                    continue
                median, largest = apart(divided["training_loss"] + [divided["validation_loss"]], whole["training_loss"] + [whole["validation_loss"]])
                medians.append(median)
                most = max(most, largest)
                if not median <= limit:
                    failed.append(f"{name}: {median:.2e}")
            self.row(f"{part}, {label}, {len(medians)} divisions", not failed, f"losses apart {max(medians, default=0):.2e} of {limit:g} in the "
                     f"median, {most:.2e} at one step" + (f"; {'; '.join(failed)}" if failed else ""))

    def training(self):
        recipes = [("F32", ["--recipe", "none", "--dtype", "f32"])] + [(r, ["--recipe", r]) for r in ("delayed", "current", "block")]
        self.grid("train", recipes)

    def graph(self):
        if self.options.device != "cuda":
            return
        self.grid("graph", [("delayed", ["--recipe", "delayed"])], ["--graph"])

    def checkpoints(self):
        place, most = self.out / "checkpoint.safetensors", max(self.options.ranks)
        degrees = [("one", 1, [])] + [(f"tp {t}", t, ["--tp", str(t), "--sp"]) for t in (2, 4) if t <= most]
        same, wrong, moves = ["--recipe", "none", "--dtype", "f32"], [], 0
        for saved, ranks, degree in degrees:
            for old in self.out.glob("checkpoint*"):
                old.unlink()
            first = self.train(f"save at {saved}", ranks, [*same, *degree, "--save", str(place)])
            for loaded, other, its in degrees:
                second = first and self.train(f"load of {saved} at {loaded}", other, [*same, *its, "--load", str(place)], steps=0)
                moves += 1
                if not second or abs(second["validation_loss"] - first["validation_loss"]) > 1e-4 * first["validation_loss"]:
                    wrong.append(f"{saved} at {loaded}: {second and second['validation_loss']}, not {first and first['validation_loss']}")
        self.row("checkpoints between degrees", not wrong, f"{moves} moves" + ("; " + "; ".join(wrong) if wrong else ", validation losses within 1e-4"))

    # ---- trouble
    def trouble(self):
        n = max(self.options.ranks)
        for what, sent in (("killed", signal.SIGKILL), ("terminated", signal.SIGTERM), ("hung", signal.SIGSTOP)):
            self.lost_rank(n, what, sent)

    def lost_rank(self, n, what, sent):
        store, name = self.out / "store", f"a rank {what} in mid-step, {n} ranks"
        shutil.rmtree(store, ignore_errors=True)
        store.unlink(missing_ok=True)
        device = ["--device", "cuda" if self.options.device == "cuda" else "cpu"]
        command = [self.program("train_gpt"), "--data", str(self.text), *TRAIN, "--steps", "100000", *device, "--tp", "2", "--dp", str(n // 2), "--sp"]
        logs = [open(self.out / f"{what}.{r}.log", "w+", encoding="utf-8") for r in range(n)]
        own = [{"TE_FL_RANK": str(r), "TE_FL_LOCAL_RANK": str(r), "TE_FL_WORLD_SIZE": str(n), "TE_FL_STORE": f"file:{store}", "TE_FL_COMM_TIMEOUT_MS": str(TIMEOUT_MS)}
               for r in range(n)]
        ranks = [subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env={**self.environment, **e}, cwd=ROOT) for log, e in zip(logs, own)]
        try:
            began = time.monotonic()
            while "step    10" not in self.read(logs[0]) and time.monotonic() - began < 90:
                time.sleep(0.05)
            time.sleep(0.5)
            lost = n - 1
            ranks[lost].send_signal(sent)
            began, ends = time.monotonic(), {}
            while len(ends) < n - 1 and time.monotonic() - began < 30:
                for r, process in enumerate(ranks[:-1]):
                    if r not in ends and process.poll() is not None:
                        ends[r] = time.monotonic() - began
                time.sleep(0.02)
            texts = [self.read(log) for log in logs[:-1]]
            named = [bool(re.search(rf"COMM_FAILED.*\b(rank|ranks|of) [^.]*\b{lost}\b", t, re.S)) for t in texts]
            codes = [p.returncode for p in ranks[:-1]]
            good = len(ends) == n - 1 and all(codes) and any(named) and all("COMM_FAILED" in t for t in texts)
            detail = f"the others ended after {min(ends.values(), default=0):.1f} to {max(ends.values(), default=0):.1f} s, exit codes {codes}, {sum(named)} of {n - 1} name rank {lost}"
            self.row(name, good, detail)
            errors = re.findall(r"[^\n]*COMM_FAILED[^\n]*", texts[0])
            print("    " + (errors[-1][:400] if errors else texts[0].strip()[-300:]))
        finally:
            for process in ranks:
                if process.poll() is None:
                    process.kill()
                process.wait()
            for log in logs:
                log.close()
        after = self.train(f"after {what}", n, ["--recipe", "none", "--tp", str(n)])
        self.row(f"the devices after a rank {what}", after is not None, "a job of the same ranks trains" if after else "the next job fails")

    @staticmethod
    def read(file):
        return pathlib.Path(file.name).read_text(encoding="utf-8", errors="replace")

    # ---- te_fl.pytorch
    def torchrun(self, name, ranks, command, **more):
        path = os.pathsep.join(x for x in (str(self.build / "python") if (self.build / "python").is_dir() else "", os.environ.get("PYTHONPATH", "")) if x)
        return self.run(name, [self.options.python or sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), *command],
                        PYTHONPATH=path, TE_FL_PLUGIN_MODULES=str(self.plugin) if self.options.device == "cuda" else "", **more)

    def overlap(self):
        """Tests TE_FL_TP_OVERLAP=1 between GPUs; the ordinary tests cover Gloo."""
        if self.options.device != "cuda":
            return
        program = str(ROOT / "tests/python/torch_parallel_test/overlap_on_gpus.py")
        for n in self.options.ranks:
            name = f"transfers beside products, {n} ranks"
            code, text = self.torchrun(name, n, [program])
            print("\n".join(x for x in text.splitlines() if x.startswith("rank ")))
            found = re.findall(r"\d+ passed, \d+ failed", text)
            self.row(name, code == 0, found[-1] if found else f"exit code {code}")
        n, began = max(self.options.ranks), time.monotonic()
        code, text = self.torchrun("a rank lost beside products", n, [program, "--lose-rank"])
        # matches torchrun's report of a killed rank; a program that failed in another way has another exit code
        killed = re.search(rf"rank +: {n - 1} .*?exitcode +: -9", text, re.S) is not None
        self.row(f"a rank killed beside products, {n} ranks", code not in (0, None) and killed and "went on" not in text,
                 f"torchrun ended all after {time.monotonic() - began:.0f} s" if killed else f"exit code {code}, and no rank {n - 1} that was killed")
        code, text = self.torchrun("after a rank lost", n, [program])
        self.row("the devices after it", code == 0, "the same job passes" if code == 0 else f"exit code {code}")

    def pytorch(self):
        for recipe in ("none", "delayed", "current", "block"):
            losses, wrong = {}, []
            for name, ranks, tp in [("one rank", 1, 1)] + [(f"tp {t} dp {n // t}", n, t) for n in self.options.ranks for t in (1, 2, 4) if n % t == 0 and t <= n]:
                command = [str(ROOT / "examples/pytorch/parallel_gpt.py"), "--tp", str(tp), "--recipe", recipe, "--steps", "50", "--device", self.options.device]
                code, text = self.torchrun(f"pytorch {recipe} {name}", ranks, command)
                found = re.findall(r"step +\d+ +loss ([\d.]+)", text)
                if code != 0 or not found:
                    wrong.append(f"{name}: exit code {code}")
                    print("\n".join(text.strip().splitlines()[-8:]))
                    continue
                losses[name] = [float(loss) for loss in found]
            whole, limit = losses.get("one rank", []), APART[recipe]
            medians = {name: apart(its, whole)[0] for name, its in losses.items()}
            wrong += [f"{name}: {median:.2e}" for name, median in medians.items() if not median <= limit]
            self.row(f"te_fl.pytorch, {recipe}, {len(losses)} degrees", not wrong,
                     f"losses apart {max(medians.values(), default=0):.2e} of {limit:g} in the median" + (f"; {'; '.join(wrong)}" if wrong else ""))


def gpus():
    try:
        return len([x for x in subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True).stdout.splitlines() if x.startswith("GPU ")])
    except OSError:
        return 0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, usage=argparse.SUPPRESS)
    parser.add_argument("--build", default=str(ROOT / "build" / "release"))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--ranks", type=int, nargs="+")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--python")
    parser.add_argument("--text", default=str(ROOT / "build" / "data" / "text.txt"))
    parser.add_argument("--out", default=str(ROOT / "build" / "ranks_check"))
    options = parser.parse_args()
    here = gpus()
    if options.device == "cuda" and here < 2:
        sys.exit(f"ranks_check.py: {here} GPU here, and ranks on GPUs have one each; take a machine with two or more, or --device cpu for Gloo")
    options.ranks = options.ranks or ([2, 4] if options.device == "cpu" or here >= 4 else [2])
    if any(n < 2 or n % 2 for n in options.ranks) or (options.device == "cuda" and max(options.ranks) > here):
        sys.exit(f"ranks_check.py: --ranks {' '.join(map(str, options.ranks))}: even numbers from 2 to the number of GPUs, {here}")
    check = Check(options)
    if not check.plugin.exists() or not os.access(check.program("train_gpt"), os.X_OK):
        sys.exit(f"ranks_check.py: {check.build} has no {check.plugin.name} and bin/train_gpt; build the project, or name a build by --build")
    steps = {"collectives": check.collectives, "conformance": check.conformance, "certificate": check.certificate, "train": check.training, "graph": check.graph,
             "checkpoints": check.checkpoints, "trouble": check.trouble, "pytorch": check.pytorch, "overlap": check.overlap}
    began = time.monotonic()
    for part in PARTS:
        if part in options.only:
            steps[part]()
    print(f"\n{len(check.rows)} rows in {time.monotonic() - began:.0f} s, {check.failures} failed; logs in {check.out}")
    for name, result, detail in check.rows:
        print(f"{name:44} {result:7} {detail}")
    sys.exit(1 if check.failures else 0)


if __name__ == "__main__":
    main()
