"""te_fl.pytorch in trouble: tensors whose memory goes before the backward, workers that are forked, interrupts, and any order of imports."""

import itertools
import os
import pathlib
import subprocess
import sys
import tempfile
import threading
import unittest

import torch

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from torch_cases import PRODUCTS, RECIPES, Each, each, gradients, input_of, scope  # noqa: E402
from torch_oracle import randn, randomise  # noqa: E402

import te_fl  # noqa: E402
import te_fl.pytorch as te  # noqa: E402
from te_fl.common.recipe import DelayedScaling, Float8CurrentScaling  # noqa: E402
from te_fl.errors import FailedPrecondition  # noqa: E402


class Memory(Each):
    """A forward's tensors until its backward. What version counters show is in torch_autograd_test.py."""

    @each(recipes=RECIPES[:3])
    def test_names_may_go(self, module, device, recipe):
        for drops in (False, True):
            module.zero_grad()
            x = input_of(device)
            hidden = x * 1
            with scope(recipe):
                y = module(hidden)
            if drops:
                del hidden
                junk = [torch.full_like(x, 7) for _ in range(4)]
            y.sum().backward()
            if not drops:
                want = gradients(module, x)
            elif not isinstance(recipe, DelayedScaling):  # whose scales have changed since
                self.same(gradients(module, x), want)
        del junk

    @each(recipes=(None,))
    def test_storage_that_was_freed_or_replaced(self, module, device, _):
        def free(t):
            t.untyped_storage().resize_(0)

        def move(t):
            t.untyped_storage().resize_(16 * t.untyped_storage().nbytes())

        def replace(t):
            t.data = torch.zeros_like(t)

        for change in (free, move, replace):
            x = input_of(device)
            hidden = x * 1
            y = module(hidden)
            change(hidden)
            with self.assertRaisesRegex(FailedPrecondition, "the memory of 'input' has been freed or replaced since the forward"):
                y.sum().backward()
        module.zero_grad()
        module(input_of(device)).sum().backward()

    def test_what_the_backward_does_not_read_may_go(self):
        # In FP8 a product keeps its input's quantised copy.
        module, x = randomise(te.Linear(32, 32, device="cpu")), input_of()
        with scope(Float8CurrentScaling()):
            module(x).sum().backward()
        want = gradients(module, x)
        module.zero_grad()
        x = input_of()
        hidden = x * 1
        with scope(Float8CurrentScaling()):
            y = module(hidden)
        hidden.untyped_storage().resize_(0)
        y.sum().backward()
        self.same(gradients(module, x), want)

    def attention(self, **arguments):
        return te.DotProductAttention(4, 8, attention_dropout=0.0, qkv_format="bshd", **arguments), randn(2, 6, 4, 8).requires_grad_()

    def test_a_mask_written_before_the_backward(self):
        module, q = self.attention(attn_mask_type="arbitrary")
        mask = randn(1, 1, 6, 6, seed=3) > 1
        y = module(q, q, q, attention_mask=mask)
        mask.fill_(False)
        with self.assertRaisesRegex(RuntimeError, "inplace|in place|in-place"):
            y.sum().backward()

    def test_lengths_written_before_the_backward(self):
        module = te.DotProductAttention(4, 8, attention_dropout=0.0, qkv_format="thd", attn_mask_type="padding_causal")
        q, lengths = randn(6, 4, 8).requires_grad_(), torch.tensor([0, 2, 6], dtype=torch.int32)
        arguments = dict(cu_seqlens_q=lengths, cu_seqlens_kv=lengths, max_seqlen_q=4, max_seqlen_kv=4)
        module(q, q, q, **arguments).square().sum().backward()
        y = module(q, q, q, **arguments)
        lengths[1] = 3
        with self.assertRaisesRegex(RuntimeError, "inplace|in place|in-place"):
            y.sum().backward()

    def test_a_bias_whose_memory_goes(self):
        module, q = self.attention(attn_mask_type="no_mask")
        bias = randn(1, 4, 6, 6, seed=3)
        y = module(q, q, q, core_attention_bias_type="post_scale_bias", core_attention_bias=bias)
        bias.untyped_storage().resize_(0)
        with self.assertRaisesRegex(FailedPrecondition, "the memory of 'bias' has been freed or replaced"):
            y.sum().backward()


if __name__ == "__main__":
    unittest.main()
