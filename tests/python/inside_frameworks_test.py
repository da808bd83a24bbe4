"""Tests that Lightning's and Accelerate's own integrations of Transformer Engine train with NVIDIA's package on te-fl, without a GPU."""

import logging
import unittest
import warnings

import inside_package  # noqa: F401  (it brings transformer_engine in)

import accelerate  # noqa: E402
import torch  # noqa: E402
import transformer_engine.pytorch as te  # noqa: E402
from accelerate.utils import TERecipeKwargs, has_transformer_engine_layers  # noqa: E402
from lightning.fabric import Fabric  # noqa: E402
from lightning.fabric.plugins import TransformerEnginePrecision  # noqa: E402

import te_fl  # noqa: E402


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.layers = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.LayerNorm(64), torch.nn.GELU(), torch.nn.Linear(64, 16))

    def forward(self, x):
        return self.layers(x)


def train(net, optimizer, backward, steps=30):
    """Trains the net to fit a fixed random map; returns the losses."""
    generator = torch.Generator().manual_seed(2)
    target_map = torch.randn(32, 16, generator=generator) / 32**0.5
    losses = []
    for _ in range(steps):
        x = torch.randn(64, 32, generator=generator)
        loss = torch.nn.functional.mse_loss(net(x).float(), x @ target_map)
        optimizer.zero_grad()
        backward(loss)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


class Frameworks(unittest.TestCase):
    def setUp(self):
        te_fl.reset_usage()
        plain = Net()
        self.wanted = train(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2), torch.Tensor.backward)

    def check(self, losses):
        self.assertTrue(any("quantize" in row["op"] for row in te_fl.usage()), te_fl.usage())
        self.assertLess(losses[-1], 0.5 * losses[0])
        self.assertLess(abs(losses[-1] - self.wanted[-1]), 0.1 * self.wanted[-1], (losses[-1], self.wanted[-1]))

    def test_lightning(self):
        logging.getLogger("lightning.fabric").setLevel(logging.ERROR)
        precision = TransformerEnginePrecision(weights_dtype=torch.float32, recipe={"fp8_format": "HYBRID", "amax_history_len": 16},
                                               fallback_compute_dtype=torch.bfloat16)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            fabric = Fabric(accelerator="cpu", devices=1, plugins=precision)
            net = fabric.setup_module(Net())
            optimizer = fabric.setup_optimizers(torch.optim.AdamW(net.parameters(), lr=1e-2))
            self.assertIsInstance(net.module.layers[0], te.Linear)
            self.assertIsInstance(net.module.layers[1], te.LayerNorm)
            self.check(train(net, optimizer, fabric.backward))

    def test_accelerate(self):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            accelerator = accelerate.Accelerator(mixed_precision="fp8", cpu=True, kwargs_handlers=[TERecipeKwargs(amax_history_len=16)])
            net = Net()
            net, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
            self.assertTrue(has_transformer_engine_layers(net))
            self.check(train(net, optimizer, accelerator.backward))

    def test_accelerate_in_fp16(self):
        """Accelerate silently ignores FP16 on a device called "cpu"; the host that stands in for CUDA supports it."""
        reset = accelerate.state.AcceleratorState._reset_state
        for cpu, dtype in ((False, torch.float16), (True, torch.float32)):
            with self.subTest(cpu=cpu), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                reset(True)
                self.addCleanup(reset, True)
                settings = accelerate.utils.GradScalerKwargs(init_scale=1024.0)
                accelerator = accelerate.Accelerator(mixed_precision="fp16", cpu=cpu, kwargs_handlers=[settings])
                net, found = Net(), set()
                net.layers[0].register_forward_hook(lambda layer, inputs, output: found.add(output.dtype))
                net, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
                losses = train(net, optimizer, accelerator.backward)
                self.assertEqual((found, net.layers[0].weight.grad.dtype), ({dtype}, torch.float32))
                self.assertEqual(None if cpu else 1024.0, None if accelerator.scaler is None else accelerator.scaler.get_scale())
                self.assertLess(abs(losses[-1] - self.wanted[-1]), 0.02 * self.wanted[-1])
