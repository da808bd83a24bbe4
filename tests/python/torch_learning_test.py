"""Tests that typical training programs reach the same losses in FP8 and in BF16 with te-fl's layers as with PyTorch's own layers in BF16 and FP32."""

import os
import sys
import unittest

import torch
from torch.nn.functional import softplus

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from torch_oracle import DEVICES, randn, randomise  # noqa: E402

import te_fl.pytorch as te  # noqa: E402
from te_fl.common.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling  # noqa: E402

DEVICE = DEVICES[-1]
RECIPES = (DelayedScaling(amax_history_len=4), Float8CurrentScaling(), Float8BlockScaling())


class Arithmetic:
    """The arithmetic of a program: PyTorch's layers or te-fl's, BF16 or not, FP8 with a recipe or not."""

    def __init__(self, own=False, bf16=True, recipe=None):
        self.linear = te.Linear if own else torch.nn.Linear
        self.bf16, self.recipe = bf16, recipe

    def __repr__(self):
        return f"{self.linear.__module__.split('.')[0]} {'BF16' if self.bf16 else 'FP32'} {type(self.recipe).__name__}"

    def __enter__(self):
        self.scopes = [torch.autocast(torch.device(DEVICE).type, dtype=torch.bfloat16, enabled=self.bf16),
                       te.autocast(enabled=self.recipe is not None, recipe=self.recipe)]
        for scope in self.scopes:
            scope.__enter__()

    def __exit__(self, *error):
        for scope in reversed(self.scopes):
            scope.__exit__(*error)


EXACT = Arithmetic(bf16=False)
BF16 = Arithmetic(), Arithmetic(own=True)
FP8 = [Arithmetic(own=True, recipe=recipe) for recipe in RECIPES]


def inputs(*shape, seed):
    return randn(*shape, seed=seed).to(DEVICE)


class Learning(unittest.TestCase):
    def compare(self, train):
        """Compares train(arithmetic), which returns the losses of its steps and the gradients of one step, over all arithmetics."""
        results = {arithmetic: train(arithmetic) for arithmetic in (EXACT, *BF16, *FP8)}
        for arithmetic in FP8:
            losses, gradients = results[arithmetic]
            for other in (EXACT, *BF16):
                with self.subTest(fp8=arithmetic, other=other):
                    wanted, expected = results[other]
                    self.assertLess(abs(sum(losses[-5:]) / sum(wanted[-5:]) - 1), 0.02)
                    for got, want in zip(gradients, expected, strict=True):
                        cosine = torch.cosine_similarity(got.double().flatten(), want.double().flatten(), 0)
                        self.assertGreater(float(cosine), 0.99)
                    whole, of_other = (torch.cat([g.flatten() for g in grads]).norm() for grads in (gradients, expected))
                    self.assertLess(abs(float(whole / of_other) - 1), 0.02)
            self.assertNotEqual(losses, results[BF16[1]][0])  # proves that FP8 was used

    def test_a_gan(self):
        def train(arithmetic):
            make = arithmetic.linear
            discriminator = torch.nn.Sequential(make(32, 64), torch.nn.GELU(), make(64, 16)).to(DEVICE)
            generator = torch.nn.Sequential(make(16, 64), torch.nn.GELU(), make(64, 32)).to(DEVICE)
            nets = (discriminator, generator)
            for i, net in enumerate(nets):
                randomise(net, 9 + i)
            steps = [torch.optim.Adam(net.parameters(), lr=2e-3) for net in nets]
            losses = []
            for step in range(20):
                real, noise = 2 + 0.5 * inputs(64, 32, seed=2 * step), inputs(64, 16, seed=2 * step + 1)
                with arithmetic:
                    fake = generator(noise)
                    a, b = discriminator(real), discriminator(fake.detach())
                loss = softplus(-a.float().mean(-1)).mean() + softplus(b.float().mean(-1)).mean()
                steps[0].zero_grad()
                loss.backward()
                of_discriminator = [p.grad.clone() for p in discriminator.parameters()]
                steps[0].step()
                with arithmetic:
                    judged = discriminator(fake)
                steps[1].zero_grad()
                fooled = softplus(-judged.float().mean(-1)).mean()
                fooled.backward()
                steps[1].step()
                losses.append(loss.item() + fooled.item())
                if step == 4:  # delayed scales have settled, and the weights still hardly differ
                    gradients = of_discriminator + [p.grad.clone() for p in generator.parameters()]
            return losses, gradients
        self.compare(train)

    def test_low_rank_adapters(self):
        def train(arithmetic):
            base, down, up = (randomise(arithmetic.linear(i, o, bias=False), 3 + n).to(DEVICE) for n, (i, o) in enumerate(((32, 32), (32, 16), (16, 32))))
            base.requires_grad_(False)
            with torch.no_grad():
                up.weight.zero_()
            adam, losses, wanted = torch.optim.Adam([down.weight, up.weight], lr=5e-3), [], inputs(32, 32, seed=4) / 6
            for step in range(20):
                x = 30 * inputs(64, 32, seed=step)
                with arithmetic:
                    y = base(x) + up(down(x))
                loss = (y.float() - x @ wanted).square().mean() / 900
                adam.zero_grad()
                loss.backward()
                adam.step()
                losses.append(loss.item())
            with torch.no_grad():
                base.weight.data += up.weight @ down.weight  # merges the adapters into the base weight, as PEFT does
                with arithmetic:
                    merged = base(x)
            gradients = [down.weight.grad.clone(), up.weight.grad.clone()]
            losses[-1:] = [(merged.float() - x @ wanted).square().mean().item() / 900] * 5
            return losses, gradients
        self.compare(train)


if __name__ == "__main__":
    unittest.main()
