#!/usr/bin/env python3
"""Trains the GPT of examples/pytorch/quickstart.py without FP8 and in FP8, from the same weights and batches, and compares the held-out losses.

usage: train_gpt.py [--device DEVICE] [--recipes NAME,..] [--steps N] [--layers N] [--hidden N] [--heads N] [--length N] [--batch N] [--lr LR]
                    [--seeds N] [--text FILE] [--within SHARE] [--json FILE]
  --device   cuda where there is one, else cpu
  --recipes  FP8 recipes to run after the run without FP8: delayed, current, block (default: delayed,current)
  --seeds    trainings per recipe, each with other weights and batches; their mean losses are compared (default 1)
  --text     training text, read as bytes; the last tenth is held out (default: the sources of Python's standard library)
  --within   exits 1 if the loss of a recipe differs by more than this share from the loss without FP8

The sizes' defaults are 100 million parameters for a GPU and 3 million for a CPU. Without FP8 a GPU computes in BF16 and the CPU in FP32.
"""

import argparse
import json
import math
import pathlib
import statistics
import sys
import sysconfig
import time

import torch

import te_fl.pytorch as te

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "examples" / "pytorch"))
from quickstart import RECIPES, Gpt  # noqa: E402

SIZES = {"cuda": dict(layers=14, hidden=768, heads=12, length=512, batch=16, steps=500, lr=6e-4),
         "cpu": dict(layers=4, hidden=256, heads=4, length=64, batch=16, steps=100, lr=2e-3)}
EVALUATED = 16  # number of batches of held-out text
BLOCK = 10  # number of steps between two synchronisations with the device


def library_sources() -> bytes:
    folder = pathlib.Path(sysconfig.get_path("stdlib"))
    names = [name for name in sorted(folder.rglob("*.py")) if not {"site-packages", "dist-packages", "test", "tests"} & set(name.parts)]
    return b"".join(name.read_bytes() for name in names)


class Text:
    """Makes batches of windows of a text, random ones from its first nine tenths or evenly spaced ones from the last tenth."""

    def __init__(self, content: bytes, length: int, batch: int, device: torch.device):
        self.bytes = torch.frombuffer(bytearray(content), dtype=torch.uint8).long().to(device)
        self.length, self.batch, self.split = length, batch, len(content) - len(content) // 10
        if len(content) - self.split <= length:
            raise SystemExit(f"train_gpt.py: the text has {len(content)} bytes; --length {length} needs more than {10 * length}")

    def _windows(self, starts: torch.Tensor):
        at = torch.arange(self.length + 1, device=self.bytes.device)
        rows = self.bytes[starts.to(self.bytes.device)[:, None] + at]
        return rows[:, :-1], rows[:, 1:].contiguous()

    def training(self, generator: torch.Generator):
        return self._windows(torch.randint(self.split - self.length, (self.batch,), generator=generator))

    def held_out(self):
        starts = torch.linspace(self.split, len(self.bytes) - self.length - 1, EVALUATED * self.batch, dtype=torch.float64).long()
        return [self._windows(part) for part in starts.split(self.batch)]


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Returns the learning rate: a warm-up over a tenth of the steps, then a cosine down to a tenth of the peak."""
    warmup = max(steps // 10, 1)
    if step < warmup:
        return peak * (step + 1) / warmup
    return peak * (0.55 + 0.45 * math.cos(math.pi * (step - warmup) / max(steps - warmup, 1)))


def compute_loss(model, recipe, windows):
    with te.autocast(enabled=recipe is not None, recipe=recipe):
        logits = model(windows[0])
    return te.parallel_cross_entropy(logits, windows[1]).mean()


def train(name, options, text, device, seed):
    """Trains with the named recipe; returns a row with the held-out loss and the median time of a step."""
    torch.manual_seed(1 + 2 * seed)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    model = Gpt(options.layers, options.hidden, options.heads, options.length, dtype, device)
    optimizer = te.optimizers.FusedAdam(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1, master_weights=dtype is not torch.float32)
    recipe = RECIPES[name]() if RECIPES[name] else None
    generator, times = torch.Generator().manual_seed(2 + 2 * seed), []
    for step in range(options.steps):
        if step % BLOCK == 0:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            times.append(time.perf_counter())
        loss = compute_loss(model, recipe, text.training(generator))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, options.steps, options.lr)
        optimizer.step()
    model.eval()
    with torch.no_grad():
        held_out = statistics.fmean(compute_loss(model, recipe, windows).item() for windows in text.held_out())
    blocks = [(b - a) / BLOCK * 1e3 for a, b in zip(times, times[1:])]
    return {"recipe": name, "parameters": sum(p.numel() for p in model.parameters()), "held_out_loss": held_out,
            "step_ms": statistics.median(blocks) if blocks else None}


def parse(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--recipes", default="delayed,current")
    for name, kind in [(name, float if name == "lr" else int) for name in SIZES["cpu"]]:
        parser.add_argument("--" + name, type=kind)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--text", type=pathlib.Path)
    parser.add_argument("--within", type=float)
    parser.add_argument("--json", type=pathlib.Path)
    options = parser.parse_args(arguments)
    for name, value in SIZES.get(torch.device(options.device).type, SIZES["cpu"]).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    if options.seeds < 1:
        parser.error(f"--seeds is {options.seeds}; it is the number of trainings of each kind, at least 1")
    options.recipes = options.recipes.split(",")
    for name in options.recipes:
        if name not in RECIPES or RECIPES[name] is None:
            parser.error(f"--recipes has {name!r}; they are {', '.join(n for n, r in RECIPES.items() if r)}")
    return options


def main(arguments=None) -> int:
    options = parse(arguments)
    device = torch.device(options.device)
    text = Text(options.text.read_bytes() if options.text else library_sources(), options.length, options.batch, device)
    rows = []
    for name in ["none", *options.recipes]:
        runs = [train(name, options, text, device, seed) for seed in range(options.seeds)]
        losses = [run["held_out_loss"] for run in runs]
        rows.append({**runs[0], "held_out_loss": statistics.fmean(losses), "held_out_losses": losses})
        row, base = rows[-1], rows[0]["held_out_loss"]
        if name == "none":
            print(f"{row['parameters'] / 1e6:.1f} M parameters, {options.steps} steps of {options.batch * options.length} bytes on {device}")
        took = "" if row["step_ms"] is None else f", {row['step_ms']:.1f} ms a step"
        each = "" if len(losses) == 1 else "; seeds: " + ", ".join(f"{b / a:.4f}" for a, b in zip(rows[0]["held_out_losses"], losses))
        print(f"{name:8} held-out loss {row['held_out_loss']:.4f} nats a byte{took}, {row['held_out_loss'] / base:.4f} of the first{each}", flush=True)
    if options.json:
        options.json.write_text(json.dumps({**{n: getattr(options, n) for n in [*SIZES["cpu"], "seeds"]}, "device": str(device), "rows": rows}, indent=1) + "\n")
    far = [r["recipe"] for r in rows if options.within is not None and abs(r["held_out_loss"] / base - 1) > options.within]
    if far:
        print(f"further than {options.within:.1%} from the loss without FP8: {', '.join(far)}")
    return 1 if far else 0


if __name__ == "__main__":
    sys.exit(main())
