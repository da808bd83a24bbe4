"""Tests checkpoints of NVIDIA's Transformer Engine itself, loaded and saved.

data/transformer_engine_2.20.2.pt was written by transformer_engine_checkpoint.py --write. If the real package is installed, or
TRANSFORMER_ENGINE_PYTHON names an interpreter that has it, the test makes a new one, and the package loads checkpoints of te_fl.pytorch.
"""

import importlib.metadata
import io
import os
import pickle
import subprocess
import sys
import tempfile
import unittest

import torch

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, HERE)
import transformer_engine_checkpoint as theirs  # noqa: E402

import te_fl.pytorch as te  # noqa: E402
from te_fl.common.recipe import DelayedScaling  # noqa: E402

PROGRAM, KEPT = os.path.join(HERE, "transformer_engine_checkpoint.py"), os.path.join(HERE, "data", "transformer_engine_2.20.2.pt")
PLACES = {"scaling_fwd": (2, 3), "scaling_bwd": (1, 2)}  # (number of slots that te-fl's layers use, number of slots of a linear layer); the used
                                                         # slots come first


def interpreter():
    named = os.environ.get("TRANSFORMER_ENGINE_PYTHON")
    if named:
        return named
    try:
        importlib.metadata.version("transformer_engine")
    except importlib.metadata.PackageNotFoundError:
        return None
    return sys.executable


class _Anything(pickle.Unpickler):
    """Unpickles a state whose classes are not importable."""

    def find_class(self, module, name):
        if module.startswith("transformer_engine"):
            return type(name, (), {"__init__": lambda self, *supplied: None, "__setstate__": lambda self, state: None})
        if (module, name) == ("builtins", "getattr"):  # an enumerator, as Python 3.11.0 to 3.11.3 pickle it
            return lambda owner, member: None
        return super().find_class(module, name)


def scales(state):
    """Returns {part: {'scaling_fwd': (scale, history), ..}} of a state_dict, for the slots that te-fl's layers have."""
    out = {}
    for key, value in state.items():
        # Transformer Engine saves attention's scales, which are 1, even without fp8_dpa; te-fl does not.
        if not key.endswith("_extra_state") or "core_attention" in key or value is None or value.numel() == 0:
            continue
        found = _Anything(io.BytesIO(value.numpy().tobytes())).load()
        part = out.setdefault(key.removesuffix("_extra_state").rstrip("."), {})
        for which, suffix in (("scaling_fwd", "fwd"), ("scaling_bwd", "bwd")):
            scale, history = found[f"scale_{suffix}"], found[f"amax_history_{suffix}"]
            columns = [i for i in range(scale.numel()) if i % PLACES[which][1] < PLACES[which][0]]
            part[which] = (scale[columns], history[:, columns])
    return out


class Checkpoints(unittest.TestCase):
    def run_theirs(self, *arguments):
        environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "TE_FL_AS_TRANSFORMER_ENGINE")}
        done = subprocess.run([interpreter(), PROGRAM, *arguments], env=environment, capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        return done.stdout

    def same_scales(self, got, want):
        self.assertEqual(got.keys(), want.keys())
        for part, by_direction in want.items():
            for which, pair in by_direction.items():
                for mine, own in zip(got[part][which], pair):
                    self.assertTrue(torch.equal(mine, own), (part, which, mine, own))

    def load(self, path):
        kept = torch.load(path, weights_only=False)
        self.assertEqual(kept["version"], "2.20.2")
        for name, module in theirs.modules(te).items():
            with self.subTest(module=name):
                own = kept["modules"][name]
                result = module.load_state_dict(own["state"], strict=True)
                self.assertEqual((result.missing_keys, result.unexpected_keys), ([], []))
                for key, p in module.named_parameters():
                    self.assertTrue(torch.equal(p.cpu(), own["state"][key]), key)
                want = scales(own["state"])
                self.assertGreater(len(want), 0)
                self.same_scales(scales({k: v for k, v in module.state_dict().items()}), want)
                x = kept["samples"][2].to(next(module.parameters()).device)
                module.eval()
                with torch.no_grad():
                    with te.autocast(recipe=DelayedScaling(amax_history_len=4)):
                        fp8 = module(x).cpu()
                    high = module(x).cpu()
                self.assertGreater(float((fp8.float() - high.float()).abs().max()), 0)
                for got, key, bound in ((high, "high", 2e-2), (fp8, "fp8", 4e-2)):
                    if key in own:  # the checkpoint was written on a GPU
                        off = float((got.float() - own[key].float()).norm() / own[key].float().norm())
                        self.assertLess(off, bound, key)

    def test_theirs_kept(self):
        self.load(KEPT)

    def test_theirs_new(self):
        if interpreter() is None:
            self.skipTest("Transformer Engine is not installed; the kept checkpoint is read")
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "theirs.pt")
            self.run_theirs("--write", path)
            self.load(path)

    def test_ours(self):
        if interpreter() is None:
            self.skipTest("Transformer Engine is not installed, and nothing else can say what it reads")
        samples, out = theirs.samples(), {}
        torch.manual_seed(17)
        for name, module in theirs.modules(te).items():
            device = next(module.parameters()).device
            for x in samples[:2]:
                with te.autocast(recipe=DelayedScaling(amax_history_len=4)):
                    y = module(x.to(device))
                y.float().square().sum().backward()
            state = {k: v.cpu().clone() for k, v in module.state_dict().items()}
            module.eval()
            with torch.no_grad():
                high = module(samples[2].to(device)).cpu()
                with te.autocast(recipe=DelayedScaling(amax_history_len=4)):
                    fp8 = module(samples[2].to(device)).cpu()
            out[name] = {"state": state, "scales": scales(state), "places": PLACES, "high": high, "fp8": fp8}
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "ours.pt")
            torch.save({"samples": samples, "modules": out}, path)
            output = self.run_theirs("--read", path)
        for name in out:
            self.assertIn(f"{name}: loaded", output)


if __name__ == "__main__":
    unittest.main()
