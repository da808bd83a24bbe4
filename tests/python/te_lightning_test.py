"""Tests that Lightning's Transformer Engine plugin trains with te-fl under Transformer Engine's name."""

import logging
import unittest
import warnings

import te_fl

te_fl.as_transformer_engine()

import torch  # noqa: E402
from lightning.fabric import Fabric  # noqa: E402  (looks for transformer_engine)
from lightning.fabric.plugins import TransformerEnginePrecision  # noqa: E402

import lightning  # noqa: E402
import te_fl.pytorch as te  # noqa: E402


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
    device, losses = next(net.parameters()).device, []
    for _ in range(steps):
        x = torch.randn(64, 32, generator=generator)
        loss = torch.nn.functional.mse_loss(net(x.to(device)).float(), (x @ target_map).to(device))
        optimizer.zero_grad()
        backward(loss)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


class Lightning(unittest.TestCase):
    def test_a_model_trains_in_fp8(self):
        logging.getLogger("lightning.fabric").setLevel(logging.ERROR)
        precision = TransformerEnginePrecision(weights_dtype=torch.float32, recipe={"fp8_format": "HYBRID", "amax_history_len": 16},
                                               fallback_compute_dtype=torch.bfloat16)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the plugin enters torch.autocast("cuda"), which warns on a CPU
            fabric = Fabric(accelerator="auto", devices=1, plugins=precision)
            net = Net()
            net = fabric.setup_module(net)
            optimizer = fabric.setup_optimizers(torch.optim.AdamW(net.parameters(), lr=1e-2))
            self.assertIsInstance(net.module.layers[0], te.Linear)
            self.assertIsInstance(net.module.layers[1], te.LayerNorm)
            te_fl.reset_usage()
            losses = train(net, optimizer, fabric.backward)
        self.assertTrue(any("quantize" in row["op"] for row in te_fl.usage()), te_fl.usage())
        plain = Net().to(fabric.device)
        wanted = train(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2), torch.Tensor.backward)
        self.assertLess(losses[-1], 0.5 * losses[0])
        self.assertLess(abs(losses[-1] - wanted[-1]), 0.1 * wanted[-1], (losses[-1], wanted[-1]))

    def test_a_trainer_learns_in_fp8_as_in_bf16(self):
        """Trains by the default Trainer with only `precision` set, which also makes the weights BF16: in FP8, in BF16 with PyTorch's layers, and in
        FP32."""
        generator = torch.Generator().manual_seed(2)
        target_map = torch.randn(32, 16, generator=generator) / 32**0.5
        x = torch.randn(64 * 60, 32, generator=generator)

        class Task(lightning.LightningModule):
            def __init__(self):
                super().__init__()
                self.net, self.losses, self.validated = Net(), [], []

            def training_step(self, batch, index):
                loss = torch.nn.functional.mse_loss(self.net(batch[0]).float(), batch[1].float())
                self.losses.append(float(loss.detach()))
                return loss

            def validation_step(self, batch, index):  # the Trainer's sanity check calls this before any training step
                self.validated.append(float(torch.nn.functional.mse_loss(self.net(batch[0]).float(), batch[1].float())))

            def configure_optimizers(self):
                return torch.optim.AdamW(self.parameters(), lr=4e-3)

        def fit(precision):
            data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, x @ target_map), batch_size=64)
            trainer = lightning.Trainer(precision=precision, max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
                                        enable_model_summary=False)
            task = Task()
            trainer.fit(task, data, torch.utils.data.DataLoader(data.dataset, batch_size=640))
            return task

        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            te_fl.reset_usage()
            fp8 = fit("transformer-engine")
            self.assertTrue(any("quantize" in row["op"] for row in te_fl.usage()))
            others = {precision: fit(precision) for precision in ("bf16-true", "32-true")}
        self.assertIsInstance(fp8.net.layers[0], te.Linear)
        self.assertEqual(fp8.net.layers[0].weight.dtype, torch.bfloat16)
        self.assertEqual((len(fp8.losses), len(fp8.validated)), (60, 2 + 6))
        self.assertLess(sum(fp8.validated[2:]) / 6, 0.5 * fp8.validated[0])
        for precision, other in others.items():
            within = 0.02 if precision == "32-true" else 0.03  # with BF16 weights the optimizer's steps round differently in each training
            self.assertLess(abs(sum(fp8.losses[-20:]) / sum(other.losses[-20:]) - 1), within, precision)
            self.assertLess(abs(sum(fp8.validated[2:]) / sum(other.validated[2:]) - 1), within, precision)
