"""Hugging Face Accelerate's Transformer Engine integration trains with te-fl under Transformer Engine's name."""

import unittest

import te_fl

te_fl.as_transformer_engine()

import accelerate  # noqa: E402  (looks for transformer_engine)
import torch  # noqa: E402
import torch.utils.checkpoint  # noqa: E402
from accelerate.utils import TERecipeKwargs, has_transformer_engine_layers  # noqa: E402

import te_fl.pytorch as te  # noqa: E402


def model():
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.LayerNorm(64), torch.nn.GELU(), torch.nn.Linear(64, 16))


def train(net, optimizer, backward, device, steps=30):
    """The losses of fitting a fixed random map."""
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
    """model() whose part after the first layer runs again in the backward. reentrant: None keeps activations."""

    def __init__(self, reentrant):
        super().__init__()
        self.parts, self.reentrant = model(), reentrant

    def forward(self, x):
        first, rest = self.parts[0](x), lambda t: self.parts[1:](t)
        return rest(first) if self.reentrant is None else torch.utils.checkpoint.checkpoint(rest, first, use_reentrant=self.reentrant)


class Accelerate(unittest.TestCase):
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
        """The autocast is around the model's forward alone, so that the second run is outside of it."""
        results = []
        for reentrant in (None, False, True):
            accelerator = accelerate.Accelerator(mixed_precision="fp8", kwargs_handlers=[TERecipeKwargs(amax_history_len=16)])
            net = Checkpointed(reentrant)
            net, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
            self.assertIsInstance(net.parts[3], te.Linear)
            results.append(train(net, optimizer, accelerator.backward, accelerator.device, steps=8))
        self.assertEqual(results[1], results[0])
        self.assertEqual(results[2], results[0])
        for precision in ("bf16", "no"):  # PyTorch's own layers
            accelerate.state.AcceleratorState._reset_state(True)
            accelerator = accelerate.Accelerator(mixed_precision=precision)
            net = Checkpointed(False)
            net, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
            self.assertIsInstance(net.parts[3], torch.nn.Linear)
            wanted = train(net, optimizer, accelerator.backward, accelerator.device, steps=8)
            self.assertLess(abs(sum(results[0][-4:]) / sum(wanted[-4:]) - 1), 0.02, precision)
