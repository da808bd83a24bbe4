"""Tests that PyTorch continues the C++ example's training from a checkpoint of train_gpt, with the same losses bit for bit."""

import json
import math
import os
import pathlib
import struct
import subprocess
import sys
import tempfile
import unittest

import torch

import te_fl.pytorch as te
from te_fl import ops
from te_fl.common import recipe
from te_fl.pytorch.fp8 import extra_state
from te_fl.pytorch.optimizers import FusedAdam, multi_tensor_l2norm, multi_tensor_scale

ROOT = pathlib.Path(__file__).resolve().parents[2]
TRAIN_GPT = pathlib.Path(os.environ.get("TRAIN_GPT") or ROOT / "build/release/bin/train_gpt")
BATCH, LENGTH, HIDDEN, HEADS, LAYERS, EVAL_BATCHES = 4, 32, 64, 4, 2, 2
RECIPES = {"none": None, "delayed": recipe.DelayedScaling, "current": recipe.Float8CurrentScaling, "block": recipe.Float8BlockScaling}
BETAS, WEIGHT_DECAY, MAX_GRAD_NORM, PEAK_LR, SEED = (0.9, 0.95), 0.1, 1.0, 1e-2, 3


# -- the program's text, batches and learning rate

def mixed(seed, counter):
    word = 2 ** 64 - 1
    z = (seed * 0x9e3779b97f4a7c15 + counter * 0xd1b54a32d192ed03 + 0x2545f4914f6cdd1d) & word
    z = ((z ^ (z >> 30)) * 0xbf58476d1ce4e5b9) & word
    z = ((z ^ (z >> 27)) * 0x94d049bb133111eb) & word
    return z ^ (z >> 31)


class Text:
    def __init__(self, path):
        self.bytes = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8).to(torch.int32)
        self.split = len(self.bytes) - len(self.bytes) // 10

    def windows(self, starts):
        rows = torch.stack([self.bytes[s:s + LENGTH + 1] for s in starts])
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()

    def training(self, step):
        return self.windows([mixed(SEED, step * BATCH + b) % (self.split - LENGTH) for b in range(BATCH)])

    def held_out(self, index):
        last, total = len(self.bytes) - self.split - LENGTH - 1, EVAL_BATCHES * BATCH
        return self.windows([self.split + last * (index * BATCH + b) // (total - 1) for b in range(BATCH)])


def learning_rate(step, steps):
    warmup = min(max(steps / 10, 1), 100)
    if step + 1 < warmup:
        return PEAK_LR * (step + 1) / warmup
    t = (step + 1 - warmup) / max(1.0, steps - warmup)
    return PEAK_LR * (0.55 + 0.45 * math.cos(math.pi * min(t, 1.0)))


# -- the model, with modules named as in the program

class Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight, indices):
        ctx.save_for_backward(indices)
        ctx.like = weight
        output = torch.empty(*indices.shape, weight.shape[1], dtype=weight.dtype)
        ops.embedding_fwd(indices=indices, weight=weight, output=output)
        return output

    @staticmethod
    def backward(ctx, grad):
        grad_weight = torch.empty_like(ctx.like)
        ops.embedding_bwd(indices=ctx.saved_tensors[0], grad_output=grad.contiguous(), grad_weight=grad_weight)
        return grad_weight, None


class Embedding(torch.nn.Module):
    def __init__(self, rows):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(rows, HIDDEN))

    def forward(self, indices):
        return Lookup.apply(self.weight, indices)


def rotary_angles(size):
    """Computes the angles as te_fl::nn does, rounded once from FP64. RotaryPositionEmbedding computes them from FP32 frequencies, as Transformer
    Engine does."""
    pairs = torch.arange(0, size, 2, dtype=torch.float64)
    angles = torch.arange(LENGTH, dtype=torch.float64)[:, None] * 10000.0 ** (-pairs / size)
    return torch.cat((angles, angles), dim=-1).float()[:, None, None, :]


class Gpt(torch.nn.Module):
    def __init__(self, style):
        super().__init__()
        llama = style == "llama"
        self.tokens = Embedding(256)
        self.positions = None if llama else Embedding(LENGTH)
        self.angles = rotary_angles(HIDDEN // HEADS) if llama else None
        for i in range(LAYERS):
            self.add_module(f"layers_{i}", te.TransformerLayer(
                HIDDEN, (HIDDEN * 8 // 3 + 15) // 16 * 16 if llama else 4 * HIDDEN, HEADS, hidden_dropout=0.0, attention_dropout=0.0,
                activation="swiglu" if llama else "gelu", normalization="RMSNorm" if llama else "LayerNorm", bias=not llama,
                fuse_qkv_params=True, attn_input_format="bshd", device="cpu"))
        self.final_norm = (te.RMSNorm if llama else te.LayerNorm)(HIDDEN, device="cpu")
        self.head = te.Linear(HIDDEN, 256, bias=False, device="cpu")

    def forward(self, indices, scaling):
        x = self.tokens(indices)
        if self.positions is not None:
            x = x + self.positions(torch.arange(LENGTH, dtype=torch.int32).repeat(len(indices), 1))
        with te.autocast(enabled=scaling is not None, recipe=scaling):
            for i in range(LAYERS):
                x = getattr(self, f"layers_{i}")(x, rotary_pos_emb=self.angles)
        return self.head(self.final_norm(x))


# -- the program's checkpoint

def read_checkpoint(path):
    """Returns the tensors by name, and the number of steps."""
    data = path.read_bytes()
    length = struct.unpack_from("<Q", data)[0]
    header = json.loads(data[8:8 + length])
    metadata = header.pop("__metadata__")
    tensors = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        tensors[name] = torch.frombuffer(bytearray(data[8 + length + begin:8 + length + end]), dtype=torch.float32).reshape(entry["shape"])
    return tensors, int(metadata["te_fl.optimizer_steps"])


def load(model, optimizer, tensors, steps, scaling):
    state = {name: tensors[name] for name, _ in model.named_parameters()}
    for path, module in model.named_modules():
        prefix = path + "."
        scales = [(n[len(prefix):], t) for n, t in tensors.items() if n.startswith(prefix) and "fp8." in n]
        if getattr(module, "_sites", ()) and scales:
            state[prefix + "_extra_state"] = extra_state.write(scaling, extra_state.to_theirs(scales, module._sites), {})
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected and all(name.endswith("_extra_state") for name in missing), (missing, unexpected)
    names = {p: n for n, p in model.named_parameters()}
    saved = optimizer.state_dict()
    order = [p for group in optimizer.param_groups for p in group["params"]]
    for i, p in enumerate(order):
        saved["state"][i] = {part: tensors[f"optimizer.{part}.{names[p]}"] for part in ("exp_avg", "exp_avg_sq")}
    for group in saved["param_groups"]:
        group["step"] = steps
    optimizer.load_state_dict(saved)


# -- training as the program does

def mean(rows):
    """Computes the mean as te_fl::nn::CrossEntropyLoss does: as a matrix product with ones."""
    total = torch.empty(1, 1)
    ops.generic_gemm(a=torch.ones(1, rows.numel()), b=rows.detach().reshape(-1, 1), d=total, alpha=1 / rows.numel())
    return total.item()


def clip(parameters):
    grads = [p.grad for p in parameters]
    norm = multi_tensor_l2norm(0, None, [grads])[0].item()
    if norm > MAX_GRAD_NORM:
        multi_tensor_scale(0, torch.zeros(1, dtype=torch.int32), [grads, grads], MAX_GRAD_NORM / norm)


def continued(checkpoint, text, style, scaling, steps):
    """Returns the losses of `steps` further steps, and the loss of the held-out text after them."""
    model = Gpt(style)
    decays = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() == 1]
    optimizer = FusedAdam([{"params": decays, "weight_decay": WEIGHT_DECAY}, {"params": others}], betas=BETAS)
    tensors, taken = read_checkpoint(checkpoint)
    load(model, optimizer, tensors, taken, scaling)
    losses = []
    for step in range(steps):
        inputs, targets = text.training(step)
        rows = te.parallel_cross_entropy(model(inputs, scaling), targets)
        optimizer.zero_grad()
        rows.backward(torch.full_like(rows, 1 / rows.numel()))
        clip(list(model.parameters()))
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps)
        optimizer.step()
        losses.append(mean(rows))
    model.eval()
    with torch.no_grad():
        held_out = [mean(te.parallel_cross_entropy(model(inputs, scaling), targets))
                    for inputs, targets in map(text.held_out, range(EVAL_BATCHES))]
    return losses, sum(held_out) / EVAL_BATCHES


def words(count):
    """Makes a text with a structure that a small model learns in a few steps."""
    vocabulary, state, out = "the quick brown fox jumps over a lazy dog while seven wizards box".split(), 12345, []
    for _ in range(count):
        state = (1103515245 * state + 12345) % 2 ** 31
        out.append(vocabulary[(state >> 16) % len(vocabulary)])
    return " ".join(out)


@unittest.skipUnless(TRAIN_GPT.exists(), "needs train_gpt of te-fl's examples, which the variable TRAIN_GPT names")
class Continued(unittest.TestCase):
    FIRST, MORE = 5, 12

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        (self.folder / "text").write_text(words(4000))

    def train_gpt(self, style, name, *options):
        """Runs train_gpt; returns the results that it wrote by --json."""
        sizes = {"--batch": BATCH, "--seq-len": LENGTH, "--hidden": HIDDEN, "--heads": HEADS, "--layers": LAYERS, "--lr": PEAK_LR,
                 "--eval-batches": EVAL_BATCHES, "--seed": SEED, "--sample-bytes": 0, "--device": "cpu", "--dtype": "f32"}
        path = self.folder / "results.json"
        done = subprocess.run([str(TRAIN_GPT), "--data", str(self.folder / "text"), "--style", style, "--recipe", name, "--json", str(path),
                               *[str(word) for pair in sizes.items() for word in pair], *map(str, options)], capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        return json.loads(path.read_text())

    def check(self, style, name):
        checkpoint = self.folder / "model.safetensors"
        self.train_gpt(style, name, "--steps", self.FIRST, "--save", checkpoint)
        want = self.train_gpt(style, name, "--steps", self.MORE, "--load", checkpoint)
        scaling = RECIPES[name]() if RECIPES[name] else None
        losses, held_out = continued(checkpoint, Text(self.folder / "text"), style, scaling, self.MORE)
        self.assertLess(losses[-1], losses[0])
        self.assertEqual(losses, want["training_loss"])
        self.assertEqual(held_out, want["validation_loss"])

    def test_losses_are_the_programs(self):
        for style in ("gpt", "llama"):
            for name in RECIPES:
                with self.subTest(style=style, recipe=name):
                    self.check(style, name)


if __name__ == "__main__":
    unittest.main()
