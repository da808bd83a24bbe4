"""Tests that Hugging Face Accelerate's Transformer Engine integration trains with te-fl under Transformer Engine's name."""

import os
import tempfile
import unittest
import warnings

import te_fl

te_fl.as_transformer_engine()

import accelerate  # noqa: E402  (looks for transformer_engine)
import torch  # noqa: E402
import torch.utils.checkpoint  # noqa: E402
from accelerate.utils import TERecipeKwargs, has_transformer_engine_layers  # noqa: E402

import te_fl.pytorch as te  # noqa: E402
from te_fl.common.recipe import DelayedScaling  # noqa: E402


def model():
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.LayerNorm(64), torch.nn.GELU(), torch.nn.Linear(64, 16))


def train(net, optimizer, backward, device, steps=30):
    """Trains the net to fit a fixed random map; returns the losses."""
    generator = torch.Generator().manual_seed(2)
    target_map = torch.randn(32, 16, generator=generator) / 32**0.5
    losses = []
    for _ in range(steps):
        x = torch.randn(64, 32, generator=generator)
        loss = torch.nn.functional.mse_loss(net(x.to(device)).float(), (x @ target_map).to(device))
        optimizer.zero_grad()
        backward(loss)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


class Checkpointed(torch.nn.Module):
    """A model() that recomputes the part after its first layer in the backward. reentrant: None disables checkpointing."""

    def __init__(self, reentrant):
        super().__init__()
        self.parts, self.reentrant = model(), reentrant

    def forward(self, x):
        first, rest = self.parts[0](x), lambda t: self.parts[1:](t)
        return rest(first) if self.reentrant is None else torch.utils.checkpoint.checkpoint(rest, first, use_reentrant=self.reentrant)


class Layers(torch.nn.Module):
    """A model in which some layers have FP8 state and others none, and some parameters are views of one array."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.second = te.Linear(32, 32, device="cpu"), te.Linear(32, 32, device="cpu")
        self.split = te.LayerNormLinear(32, 48, parameters_split=("query", "key", "value"), device="cpu")
        self.attention = te.MultiheadAttention(48, 4, fuse_qkv_params=False, device="cpu")
        self.operations = te.ops.Sequential(te.ops.Linear(48, 32, device="cpu"), te.ops.GELU())
        self.norm = te.RMSNorm(32, device="cpu")
        with torch.no_grad():
            for p in self.parameters():
                p.normal_()

    def forward(self, x):
        with te.autocast(recipe=DelayedScaling()):
            x = self.first(x)
        x = self.attention(self.split(self.second(x)).view(*x.shape[:-1], 48))
        return self.norm(self.operations(x))


class Accelerate(unittest.TestCase):
    def same(self, got, want):
        self.assertEqual(list(got), list(want))
        for name in want:
            self.assertTrue(torch.equal(got[name], want[name]), name)

    def test_every_key_of_a_state_survives(self):
        import io

        from safetensors.torch import load_file, load_model, save_file, save_model
        from torch.distributed import checkpoint as dcp
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            module, path = Layers(1), os.path.join(folder, "model.safetensors")
            module(torch.randn(8, 2, 32)).sum().backward()
            want = {name: value.clone() for name, value in module.state_dict().items()}
            self.assertEqual(sum(v.numel() == 0 for n, v in want.items() if n.endswith("_extra_state")) > 3, True)

            def again():
                other = Layers(2)
                other(torch.randn(8, 2, 32))
                return other

            stream, other = io.BytesIO(), again()
            torch.save(module.state_dict(), stream)
            other.load_state_dict(torch.load(io.BytesIO(stream.getvalue())))
            self.same(other.state_dict(), want)
            save_file(module.state_dict(), path)
            self.same(dict(sorted(load_file(path).items())), dict(sorted(want.items())))
            other = again()
            save_model(module, path)
            self.assertEqual(load_model(other, path), (set(), []))
            self.same(other.state_dict(), want)
            # resets the precision: the other tests use FP8, for which prepare() converts models
            reset = accelerate.state.AcceleratorState._reset_state
            reset(True)
            self.addCleanup(reset, True)
            for safe in (True, False):
                accelerator, other = accelerate.Accelerator(cpu=True), again()
                prepared = accelerator.prepare(module)
                accelerator.save_state(os.path.join(folder, f"state {safe}"), safe_serialization=safe)
                self.same(accelerator.get_state_dict(prepared), want)
                accelerator.save_model(prepared, os.path.join(folder, f"model {safe}"), safe_serialization=safe)
                accelerator = accelerate.Accelerator(cpu=True)
                accelerator.prepare(other)
                accelerator.load_state(os.path.join(folder, f"state {safe}"))
                self.same(other.state_dict(), want)
            self.same(dict(sorted(load_file(os.path.join(folder, "model True", "model.safetensors")).items())), dict(sorted(want.items())))
            for save in (dcp.save, lambda state, **k: dcp.async_save(state, **k).result()):
                other = again()
                save({"model": module.state_dict()}, checkpoint_id=os.path.join(folder, "dcp"))
                state = {"model": other.state_dict()}
                dcp.load(state, checkpoint_id=os.path.join(folder, "dcp"))
                other.load_state_dict(state["model"])
                self.same(other.state_dict(), want)

    def test_a_model_trains_in_fp8(self):
        accelerator = accelerate.Accelerator(mixed_precision="fp8", kwargs_handlers=[TERecipeKwargs(amax_history_len=16)])
        net = model()
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
        net, optimizer = accelerator.prepare(net, optimizer)
        self.assertTrue(has_transformer_engine_layers(net))
        self.assertIsInstance(net[0], te.Linear)
        self.assertIsInstance(net[1], te.LayerNorm)
        te_fl.reset_usage()
        losses = train(net, optimizer, accelerator.backward, accelerator.device)
        self.assertTrue(any("quantize" in row["op"] for row in te_fl.usage()), te_fl.usage())

        plain = model().to(accelerator.device)
        wanted = train(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2), torch.Tensor.backward, accelerator.device)
        self.assertLess(losses[-1], 0.5 * losses[0])
        self.assertLess(abs(losses[-1] - wanted[-1]), 0.1 * wanted[-1], (losses[-1], wanted[-1]))

    def test_gradient_checkpointing(self):
        """The autocast surrounds only the model's forward, so the recomputed forward runs outside of it."""
        results = []
        for reentrant in (None, False, True):
            accelerator = accelerate.Accelerator(mixed_precision="fp8", kwargs_handlers=[TERecipeKwargs(amax_history_len=16)])
            net = Checkpointed(reentrant)
            net, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
            self.assertIsInstance(net.parts[3], te.Linear)
            results.append(train(net, optimizer, accelerator.backward, accelerator.device, steps=8))
        self.assertEqual(results[1], results[0])
        self.assertEqual(results[2], results[0])
        for precision in ("bf16", "no"):  # without FP8 the model keeps PyTorch's own layers
            accelerate.state.AcceleratorState._reset_state(True)
            accelerator = accelerate.Accelerator(mixed_precision=precision)
            net = Checkpointed(False)
            net, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
            self.assertIsInstance(net.parts[3], torch.nn.Linear)
            wanted = train(net, optimizer, accelerator.backward, accelerator.device, steps=8)
            self.assertLess(abs(sum(results[0][-4:]) / sum(wanted[-4:]) - 1), 0.02, precision)
