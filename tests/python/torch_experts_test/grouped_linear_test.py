"""Tests te_fl.pytorch.GroupedLinear: equality bit for bit with a loop over Linear, in high precision and FP8; its state; and a mixture of experts
that learns."""

import copy
import pickle
import unittest
from unittest import mock

import torch
from torch_oracle import DEVICES, randn

import te_fl
import te_fl.pytorch as te
from te_fl.common.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling
from te_fl.errors import FailedPrecondition, InvalidArgument, Unsupported
from te_fl.pytorch.fp8 import extra_state
from te_fl.pytorch.functions.permutation import moe_permute_with_probs, moe_unpermute
from te_fl.pytorch.functions.router import fused_compute_score_for_moe_aux_loss, fused_moe_aux_loss, fused_topk_with_score_function

RECIPES = (None, DelayedScaling(amax_history_len=4), Float8CurrentScaling(), Float8BlockScaling())
SPLITS = ([16, 0, 32], [0, 48, 0], [16, 16, 16])
F32, BF16 = torch.float32, torch.bfloat16
torch.set_num_threads(1)  # the matrices are too small for more threads


def pair(device="cpu", experts=3, codes=None, **options):
    """Makes a GroupedLinear, and a Linear for each expert with the same values."""
    with te.quantized_model_init(codes is not None, codes):
        grouped = te.GroupedLinear(experts, 32, 48, device=device, **options)
        loop = [te.Linear(32, 48, device=device, **options) for _ in range(experts)]
    with torch.no_grad():
        for i, layer in enumerate(loop):
            for kind in ("weight", "bias") if grouped.use_bias else ("weight",):
                own = getattr(grouped, f"{kind}{i}")
                own.copy_(randn(*own.shape, seed=20 + i, dtype=torch.float32, device=device) / 8)
                getattr(layer, kind).copy_(own)
    return grouped, loop


def expert_of(grouped, i):
    return [getattr(grouped, name) for name in ((f"weight{i}", f"bias{i}") if grouped.use_bias else (f"weight{i}",))]


class Same(unittest.TestCase):
    def same(self, got, want, what=""):
        self.assertEqual((got.dtype, got.shape), (want.dtype, want.shape), what)
        if got.is_cuda:  # on Hopper GPUs one kernel computes the products of all experts, and adds in an order of its own
            self.assertLessEqual(float((got.float() - want.float()).norm()), 2 ** -8 * float(want.float().norm()), what)
            return
        self.assertTrue(torch.equal(got, want), f"{what}: {(got.float() - want.float()).abs().max() if got.numel() else ''}")

    def step(self, grouped, loop, splits, recipe=None, dtype=F32, device="cpu", seed=1, first=None, **call):
        """Runs forward and backward of both; checks that results and input gradients are equal."""
        x = randn(sum(splits), 32, seed=seed, dtype=dtype, device=device).requires_grad_()
        parts = [p.clone().requires_grad_() for p in x.detach().split(splits)]
        with te.autocast(enabled=recipe is not None, recipe=recipe):
            y, results = grouped(x, splits, first, **call), [layer(p, first) for layer, p in zip(loop, parts)]
        self.same(y, torch.cat(results), "output")
        grad = randn(*y.shape, seed=seed + 1, dtype=torch.float32, device=device).to(y.dtype)
        y.backward(grad)
        torch.autograd.backward(results, [g.contiguous() for g in grad.split(splits)])
        self.same(x.grad, torch.cat([p.grad for p in parts]), "gradient of the input")

    def same_gradients(self, grouped, loop):
        for i, layer in enumerate(loop):
            for a, b in zip(expert_of(grouped, i), layer.parameters()):
                self.assertEqual(a.grad is None, b.grad is None)
                if a.grad is not None:
                    self.same(a.grad, b.grad, f"gradient of expert {i}")


class Values(Same):
    def test_bit_for_bit_a_loop_over_linear(self):
        for device in DEVICES:
            for recipe in RECIPES:
                for dtype, params in ((F32, F32), (BF16, BF16), (torch.float16, torch.float16), (BF16, F32)):
                    for bias in (True, False):
                        with self.subTest(device=device, recipe=type(recipe).__name__, dtype=dtype, params=params, bias=bias):
                            grouped, loop = pair(device, bias=bias, params_dtype=params)
                            for seed, splits in enumerate(SPLITS):
                                self.step(grouped, loop, splits, recipe, dtype, device, seed)
                                self.same_gradients(grouped, loop)

    def test_against_fp64(self):
        grouped, _ = pair()
        x = randn(2, 24, 32).requires_grad_()
        y = grouped(x, torch.tensor(SPLITS[0]))
        y.backward(grad := randn(2, 24, 48, seed=5))
        wide = x.detach().double().view(-1, 32)
        for i, (rows, into) in enumerate(zip(wide.split(SPLITS[0]), grad.double().view(-1, 48).split(SPLITS[0]))):
            weight, bias = (p.detach().double() for p in expert_of(grouped, i))
            at = slice(sum(SPLITS[0][:i]), sum(SPLITS[0][:i + 1]))
            for got, want in ((y.view(-1, 48)[at], rows @ weight.t() + bias), (x.grad.view(-1, 32)[at], into @ weight),
                              (getattr(grouped, f"weight{i}").grad, into.t() @ rows), (getattr(grouped, f"bias{i}").grad, into.sum(0))):
                torch.testing.assert_close(got.detach().double(), want, atol=1e-5, rtol=1e-5)

    def test_no_rows_at_all(self):
        for recipe in RECIPES:
            grouped, loop = pair()
            self.step(grouped, loop, [0, 0, 0], recipe)
            self.same_gradients(grouped, loop)

    def test_torch_autocast(self):
        grouped, loop = pair()
        with torch.autocast("cpu", BF16):
            self.step(grouped, loop, SPLITS[0])
        self.same_gradients(grouped, loop)
        self.assertEqual(grouped.weight0.grad.dtype, F32)

    def test_memory_that_is_given(self):
        for recipe in RECIPES:
            grouped, _ = pair()
            out, dgrad = torch.full((48, 48), 7.0), torch.full((48, 32), 7.0)
            x = randn(48, 32).requires_grad_()
            # results are written directly into place, without a copy
            with te.autocast(enabled=recipe is not None, recipe=recipe), mock.patch.object(torch.Tensor, "copy_", None):
                y = grouped(x, SPLITS[0], out=out, dgrad_out=dgrad)
                y.backward(torch.ones_like(y))
            self.assertEqual((y.data_ptr(), out.requires_grad), (out.data_ptr(), False))
            self.same(dgrad, x.grad)
            self.step(*pair(), SPLITS[0], recipe, out=out)
            self.step(*pair(), SPLITS[0], recipe, dgrad_out=dgrad)
            with torch.no_grad():
                before = out.clone()
                self.same(grouped(x, SPLITS[0], out=out.zero_()), out)
                self.assertGreater(float(before.abs().max()), 0.0)
            self.assertRaisesRegex(InvalidArgument, "dgrad_out is torch.float32", grouped, x, SPLITS[0], dgrad_out=out)
            self.assertRaisesRegex(InvalidArgument, "needs no gradient", grouped, x, SPLITS[0], out=out.clone().requires_grad_())
        x = randn(48, 32).requires_grad_()  # the program writes to the output
        y = grouped(x, SPLITS[0], out=out)
        y += 1
        y.sum().backward()
        torch.testing.assert_close(x.grad, torch.cat([torch.ones(n, 48) @ getattr(grouped, f"weight{i}") for i, n in enumerate(SPLITS[0])]))
        # `out` is memory that nothing else keeps alive
        torch.testing.assert_close(grouped(x, SPLITS[0], out=torch.empty(48, 48)), y - 1, atol=1e-5, rtol=1e-5)

    def test_memory_that_a_backward_still_reads(self):
        grouped, _ = pair()
        out, other = torch.empty(48, 48), randn(48, 48, seed=7).requires_grad_()
        product = grouped(randn(48, 32), SPLITS[0], out=out) * other
        grouped(randn(48, 32, seed=2), SPLITS[0], out=out)
        self.assertRaisesRegex(RuntimeError, "modified by an inplace operation", product.sum().backward)
        x = randn(48, 32).requires_grad_()
        self.assertRaisesRegex(InvalidArgument, "dgrad_out shares memory with the input", grouped, x, SPLITS[0], dgrad_out=x.detach())
        hidden = torch.sigmoid(x)  # sigmoid's backward reads x's values, while the layer's backward reads FP8 codes of x
        with te.autocast(recipe=RECIPES[2]):
            y = grouped(hidden, SPLITS[0], dgrad_out=hidden.detach())
        self.assertRaisesRegex(RuntimeError, "modified by an inplace operation", y.sum().backward)

    def test_a_gradient_over_the_input_of_frozen_weights(self):
        grouped, _ = pair()
        grouped.requires_grad_(False)
        x, dy = randn(48, 32).requires_grad_(), randn(48, 48, seed=3)
        (wanted,) = torch.autograd.grad(grouped(x, SPLITS[0]), x, dy)
        (got,) = torch.autograd.grad(grouped(x, SPLITS[0], dgrad_out=x.detach()), x, dy)
        self.assertEqual(got.data_ptr(), x.data_ptr())
        self.assertTrue(torch.equal(got, wanted))

    def test_frozen_parameters(self):
        for recipe in RECIPES[:2]:
            grouped, loop = pair()
            for i, layer in enumerate(loop):
                for module, names in ((grouped, (f"weight{i}", f"bias{i}")), (layer, ("weight", "bias"))):
                    getattr(module, names[0]).requires_grad_(i != 2)
                    getattr(module, names[1]).requires_grad_(i != 0)
            self.step(grouped, loop, SPLITS[0], recipe)
            self.assertIsNone(grouped.weight2.grad)
            torch.testing.assert_close(grouped.bias2.grad, loop[2].bias.grad)  # the bias gradient is not computed by the GEMM, so it is summed in
                                                                               # another order
            grouped.bias2.grad = loop[2].bias.grad
            self.same_gradients(grouped, loop)

    def test_biases_that_are_returned(self):
        grouped, _ = pair(return_bias=True, params_dtype=F32)
        with_bias, _ = pair()
        x = randn(48, 32, dtype=BF16)
        y, biases = grouped(x, SPLITS[0])
        self.assertEqual([b.dtype for b in biases], [BF16] * 3)
        added = torch.cat([rows + b for rows, b in zip(y.split(SPLITS[0]), biases)])
        torch.testing.assert_close(added, with_bias(x, SPLITS[0]), atol=0.02, rtol=0.02)
        added.float().sum().backward()
        self.same(grouped.bias2.grad, torch.full((48,), 32.0))
        y, biases = te.GroupedLinear(2, 32, 48, bias=False, return_bias=True, device="cpu")(x, [48, 0])
        self.assertEqual([b.numel() for b in biases], [0, 0])


class Calls(Same):
    """Tests the ops that a step calls, and how often the host reads numbers from the device."""

    def counts(self, grouped, recipe, splits=None):
        te_fl.reset_usage()
        x = randn(48, 32).requires_grad_()
        with te.autocast(enabled=recipe is not None, recipe=recipe):
            y = grouped(x, [16, 0, 32] if splits is None else splits)
        y.backward(torch.ones_like(y))
        counts = {}
        for row in te_fl.usage():
            counts[row["op"]] = counts.get(row["op"], 0) + row["calls"]
        return counts

    def test_one_product_for_all_experts_and_one_quantisation(self):
        for recipe in RECIPES:
            for bias in (True, False):
                with self.subTest(recipe=type(recipe).__name__, bias=bias):
                    counts = self.counts(te.GroupedLinear(3, 32, 48, bias=bias, device="cpu"), recipe)
                    self.assertEqual((counts["grouped_gemm"], "generic_gemm" in counts), (3, False))
                    want = {} if recipe is None else {"multi_tensor_quantize": 1, "split_quantize": 1, "bgrad_quantize": 3} if bias else \
                        {"multi_tensor_quantize": 1, "split_quantize": 2}
                    self.assertEqual({op: n for op, n in counts.items() if "quantize" in op}, want)

    def test_sizes_on_a_device_are_read_once(self):
        class OnDevice(torch.Tensor):
            is_cuda = True

        sizes = torch.tensor([16, 0, 32]).as_subclass(OnDevice)
        for recipe in RECIPES:
            grouped, loop = pair()
            reads = []
            read = torch.Tensor.tolist
            with mock.patch.object(torch.Tensor, "tolist", lambda t: reads.append("tolist") or read(t.as_subclass(torch.Tensor))), \
                    mock.patch.object(torch.Tensor, "item", lambda t: reads.append("item")), \
                    mock.patch.object(torch.cuda, "is_current_stream_capturing", lambda: False):
                self.counts(grouped, recipe, sizes)
            self.assertEqual(reads, ["tolist"])
        with mock.patch.object(torch.cuda, "is_current_stream_capturing", lambda: True):
            with self.assertRaisesRegex(Unsupported, "m_splits.*being captured.*a list of numbers"):
                grouped(randn(48, 32), sizes)
            grouped(randn(48, 32), [16, 0, 32])


class Training(Same):
    def test_gradients_in_main_grad(self):
        for recipe in RECIPES[:2]:
            for first, overwrite in ((None, False), (True, False), (False, True)):
                with self.subTest(recipe=type(recipe).__name__, first=first, overwrite=overwrite):
                    grouped, loop = pair(fuse_wgrad_accumulation=True)
                    for i, layer in enumerate(loop):
                        for weight in (getattr(grouped, f"weight{i}"), layer.weight):
                            weight.main_grad, weight.grad_added_to_main_grad = torch.full_like(weight, 3.0), False
                            weight.overwrite_main_grad = overwrite and i == 2
                    self.step(grouped, loop, SPLITS[0], recipe, first=first)
                    for i, layer in enumerate(loop):
                        own = getattr(grouped, f"weight{i}")
                        self.same(own.main_grad, layer.weight.main_grad, f"main_grad {i}")
                        self.assertTrue(own.grad_added_to_main_grad)
                        self.same(getattr(grouped, f"bias{i}").grad, layer.bias.grad)
        grouped, _ = pair(fuse_wgrad_accumulation=True)
        self.assertRaisesRegex(AttributeError, "main_grad", grouped, randn(48, 32), SPLITS[0])

    def test_experts_that_share_a_weight(self):
        """The GEMMs of one grouped call run in no defined order, so GEMMs that add to the same main_grad must be separate calls."""
        grouped = te.GroupedLinear(3, 32, 48, bias=False, fuse_wgrad_accumulation=True, device="cpu")
        grouped.weight1 = grouped.weight0
        for weight in (grouped.weight0, grouped.weight2):
            weight.main_grad = torch.zeros_like(weight)
        x, dy = randn(48, 32), randn(48, 48)
        te_fl.reset_usage()
        grouped(x, [16, 8, 24]).backward(dy)
        # one call for the forward and two for weight gradients
        self.assertEqual([row["calls"] for row in te_fl.usage() if row["op"] == "grouped_gemm"], [3])
        torch.testing.assert_close(grouped.weight0.main_grad, dy[:24].t() @ x[:24])
        torch.testing.assert_close(grouped.weight2.main_grad, dy[24:].t() @ x[24:])
        for asks in (True, False):  # the first backward overwrites main_grad, as requested by the call or the weight; the second adds to it
            for weight in (grouped.weight0, grouped.weight2):
                weight.main_grad, weight.overwrite_main_grad = torch.full_like(weight, float("nan")), not asks
            (grouped(x, [16, 8, 24], is_first_microbatch=asks) + grouped(x, [16, 8, 24], is_first_microbatch=False)).backward(dy)
            torch.testing.assert_close(grouped.weight0.main_grad, 2 * dy[:24].t() @ x[:24])
            torch.testing.assert_close(grouped.weight2.main_grad, 2 * dy[24:].t() @ x[24:])

    def test_gradients_that_are_delayed(self):
        for recipe in RECIPES:
            grouped, loop = pair(delay_wgrad_compute=True)
            plain, _ = pair()
            for seed in (1, 3):
                self.step(grouped, loop, SPLITS[0], recipe, seed=seed)
                self.step(plain, _, SPLITS[0], recipe, seed=seed)
            self.assertIsNone(grouped.weight0.grad)
            called = []
            grouped.register_wgrad_accumulation_and_reduce_hooks(lambda: called.append(1))  # noqa: B023
            for _ in range(2):
                grouped.backward_dw()
            self.assertEqual(len(called), 2)
            for name, p in plain.named_parameters():
                self.same(getattr(grouped, name).grad, p.grad, name)
        self.assertRaisesRegex(FailedPrecondition, "no backward", te.GroupedLinear(2, 32, 48, delay_wgrad_compute=True, device="cpu").backward_dw)

    def test_weights_that_are_codes(self):
        for recipe in RECIPES[1:]:
            grouped, loop = pair(codes=recipe)
            self.assertIsInstance(grouped.weight0, te.Float8Tensor)
            for within in (recipe, None):
                self.step(grouped, loop, SPLITS[0], within)
                self.same_gradients(grouped, loop)

    def test_weights_that_are_used_again(self):
        grouped, loop = pair()
        for first in (True, False):
            self.step(grouped, loop, SPLITS[0], RECIPES[2], first=first)
        self.same_gradients(grouped, loop)
        with torch.no_grad(), te.cache_quantized_weights():
            for _ in range(2):
                x = randn(48, 32, dtype=BF16)
                self.same(grouped(x, SPLITS[0]), torch.cat([layer(p) for layer, p in zip(loop, x.split(SPLITS[0]))]))

    def test_weights_whose_quantisation_fails_are_not_used_again(self):
        grouped, _ = pair(bias=False)
        x = randn(48, 32, dtype=BF16)
        with te.autocast(recipe=RECIPES[2]):
            want = grouped(x, SPLITS[0], True)
            with torch.no_grad():
                grouped.weight0.mul_(2)
            with te_fl.policy(per_op={"multi_tensor_quantize": ["vendor"]}), self.assertRaisesRegex(RuntimeError, "multi_tensor_quantize"):
                grouped(x, SPLITS[0], True)
            y = grouped(x, SPLITS[0], False)
        self.same(y[:16], 2 * want[:16])
        self.same(y[16:], want[16:])

    def test_recomputation(self):
        for recipe in RECIPES[:3]:
            for reentrant in (True, False):
                for checkpoint in (te.checkpoint, torch.utils.checkpoint.checkpoint):
                    grouped, loop = pair()

                    def again(x, splits, first):
                        return checkpoint(grouped, x, splits, use_reentrant=reentrant)  # noqa: B023

                    with self.subTest(recipe=type(recipe).__name__, reentrant=reentrant, checkpoint=checkpoint.__module__):
                        x = randn(48, 32).requires_grad_()
                        plain, _ = pair()
                        for module, function in ((grouped, again), (plain, plain)):
                            x.grad = None
                            with te.autocast(enabled=recipe is not None, recipe=recipe):
                                y = function(x, SPLITS[0], None)
                            y.backward(randn(48, 48, seed=4))
                            seen = [y.detach(), x.grad, *(p.grad for p in module.parameters()), *(t for _, t in module._fp8_state())]
                            if module is grouped:
                                kept = seen
                        for a, b in zip(kept, seen, strict=True):
                            self.same(a, b)


class State(Same):
    def test_names_and_shapes(self):
        layer = te.GroupedLinear(2, 32, 48, device="cpu")
        self.assertEqual(list(layer.state_dict()), ["weight0", "bias0", "weight1", "bias1", "_extra_state"])
        self.assertEqual(te.GroupedLinear(2, 32, 48, bias=False, tp_size=2, parallel_mode="column", device="cpu").weight1.shape, (24, 32))
        row = te.GroupedLinear(2, 32, 48, bias=False, tp_size=2, parallel_mode="row", device="cpu")
        self.assertEqual((row.weight1.shape, row.weight1.partition_dim, layer.weight0.partition_dim), ((48, 16), 1, 0))
        self.assertEqual(row(randn(6, 16), [2, 4]).shape, (6, 48))  # the program sums over ranks outside of the module
        meta = te.GroupedLinear(2, 32, 48, device="meta")
        meta.reset_parameters()
        self.assertFalse(meta.weight1.is_meta)

    def test_fp8_state_of_each_expert(self):
        recipe = RECIPES[1]
        grouped, loop = pair()
        for seed, splits in enumerate(SPLITS):
            self.step(grouped, loop, splits, recipe, seed=seed)
        for i, layer in enumerate(loop):
            want = dict(layer._fp8_state())
            self.assertEqual([name.removeprefix("fp8.") for name in want], ["fwd.scale", "fwd.amax_history", "bwd.scale", "bwd.amax_history", "bwd.fp8_max"])
            for name, t in want.items():
                self.same(dict(grouped._fp8_state())[f"gemm{i}{name.removeprefix('fp8')}"], t, name)
        read = extra_state.read(grouped.get_extra_state(), "test")
        self.assertEqual((read["scale_fwd"].shape, read["amax_history_bwd"].shape, read["extra_fp8_variables"]["num_gemms"]), ((9,), (4, 6), 3))
        self.same(read["scale_fwd"][3:5], dict(loop[1]._fp8_state())["fp8.fwd.scale"])
        fresh = te.GroupedLinear(3, 32, 48, device="cpu")
        fresh.load_state_dict(grouped.state_dict())
        others = [fresh, copy.deepcopy(grouped), pickle.loads(pickle.dumps(grouped))]
        for other in others:
            for (name, a), (_, b) in zip(sorted(other._fp8_state()), sorted(grouped._fp8_state()), strict=True):
                self.same(a, b, name)
        self.step(grouped, loop, SPLITS[0], recipe, seed=9)
        x = randn(48, 32, seed=9)
        with te.autocast(recipe=recipe):
            got = [other(x, SPLITS[0]) for other in others]
        for y in got[1:]:
            self.same(y, got[0])
        others[0].reset_fp8_meta_tensors()
        self.assertEqual({t.max().item() for n, t in others[0]._fp8_state() if n.endswith("scale")}, {1.0})

    def test_checkpoints_of_one_parameter_for_all(self):
        grouped, _ = pair()
        own = grouped.state_dict()
        whole = {k: torch.stack([own[f"{k}{i}"] for i in range(3)]) for k in ("weight", "bias")}
        fresh = torch.nn.Sequential(te.GroupedLinear(3, 32, 48, device="cpu"))
        fresh.load_state_dict({f"0.{k}": v for k, v in {**whole, "_extra_state": own["_extra_state"]}.items()})
        for name, p in grouped.named_parameters():
            self.same(getattr(fresh[0], name), p)

    def test_what_frameworks_ask(self):
        grouped, loop = pair()
        grouped.init_fp8_metadata(num_gemms=3)
        self.assertEqual((grouped.fp8, grouped.fp8_meta["fp8_checkpoint"]), (False, False))
        grouped.fp8_meta["recipe"] = RECIPES[2]
        self.assertIs(grouped.fp8_meta["recipe"], RECIPES[2])
        self.step(grouped, loop, SPLITS[0], RECIPES[1])
        self.assertEqual((grouped.fp8, grouped.fp8_calibration, type(grouped.fp8_meta["recipe"])), (True, False, DelayedScaling))
        self.assertRaisesRegex(InvalidArgument, "num_gemms = 3", grouped.init_fp8_metadata)


class Refused(Same):
    def test_bad_input(self):
        layer, x = te.GroupedLinear(2, 32, 48, device="cpu"), randn(8, 32)
        square = te.GroupedLinear(2, 32, 32, device="cpu")
        for words, error, call in (
                ("m_splits has 3", ValueError, lambda: layer(x, [4, 4, 0])),
                ("sums to 9; the input has 8 rows", InvalidArgument, lambda: layer(x, [4, 5])),
                ("no expert has fewer than 0", InvalidArgument, lambda: layer(x, [9, -1])),
                ("in_features = 32", InvalidArgument, lambda: layer(randn(8, 16), [4, 4])),
                ("must be a torch.Tensor", TypeError, lambda: layer([1], [4, 4])),
                ("torch.float64", NotImplementedError, lambda: layer(x.double(), [4, 4])),
                ("shares memory", InvalidArgument, lambda: square(x[:4], [2, 2], out=x[3:7])),
                ("m_splits is torch.float32", TypeError, lambda: layer(x, torch.ones(2))),
                (r"m_splits is \[4.7, 4\]; it is a list of 2 integers", TypeError, lambda: layer(x, [4.7, 4])),  # must not be truncated to 4
                ("GroupedLinear: in_features is 32.5; it is an integer", TypeError, lambda: te.GroupedLinear(2, 32.5, 48)),
                ("GroupedLinear: out_features is 24.0; it is an integer", TypeError, lambda: te.GroupedLinear(2, 32, 48 / 2)),
                ("num_gemms is 0", ValueError, lambda: te.GroupedLinear(0, 32, 48)),
                ("bias=True with tp_size = 2", ValueError, lambda: te.GroupedLinear(2, 32, 48, tp_size=2)),
                ("use_grouped_tensor", TypeError, lambda: te.GroupedLinear(2, 32, 48, use_grouped_tensor="yes")),
                ("did you mean", TypeError, lambda: te.GroupedLinear(2, 32, 48, num_gemm=2))):
            with self.subTest(words), self.assertRaisesRegex(error, words):
                call()

    def test_one_parameter_for_all_experts(self):
        """The results, gradients and FP8 state are those of one parameter for each expert, bit for bit."""
        for recipe in RECIPES:
            for bias in (True, False):
                many, _ = pair(bias=bias)
                one = te.GroupedLinear(3, 32, 48, bias=bias, device="cpu", single_grouped_weight=True, single_grouped_bias=True)
                names = {"weight": (3, 48, 32), "bias": (3, 48)} if bias else {"weight": (3, 48, 32)}
                self.assertEqual({n: tuple(p.shape) for n, p in one.named_parameters()}, names)
                one.load_state_dict(many.state_dict())
                for splits in SPLITS:
                    results = []
                    for layer in (many, one):
                        x = randn(sum(splits), 32).requires_grad_()
                        with te.autocast(enabled=recipe is not None, recipe=recipe):
                            y = layer(x, splits)
                        y.square().sum().backward()
                        results.append((y, x.grad))
                    for a, b in zip(*results, strict=True):
                        self.same(b, a)
                for kind in names:
                    self.same(getattr(one, kind).grad, torch.stack([getattr(many, f"{kind}{i}").grad for i in range(3)]), kind)
                again = te.GroupedLinear(3, 32, 48, bias=bias, device="cpu")
                again.load_state_dict(one.state_dict())
                self.same(again.weight2, many.weight2)

    def test_one_parameter_in_main_grad(self):
        one = te.GroupedLinear(3, 32, 48, device="cpu", single_grouped_weight=True, single_grouped_bias=True, fuse_wgrad_accumulation=True)
        one.weight.main_grad = torch.ones(3, 48, 32)
        x = randn(48, 32)
        one(x, SPLITS[0]).sum().backward()
        want = torch.stack([part.sum(0).expand(48, 32) for part in x.split(SPLITS[0])]) + 1
        torch.testing.assert_close(one.weight.main_grad, want)
        self.assertEqual(one.bias.grad.shape, (3, 48))
        with te.quantized_model_init(), self.assertRaisesRegex(Unsupported, "single_grouped_weight = True"):
            te.GroupedLinear(2, 32, 48, single_grouped_weight=True)

    def test_one_parameter_as_an_operation(self):
        many = te.ops.GroupedLinear(3, 32, 48, device="cpu")
        one = te.ops.GroupedLinear(3, 32, 48, device="cpu", single_grouped_weight=True, single_grouped_bias=True)
        self.assertEqual([n for n, _ in one.named_parameters()], ["weight", "bias"])
        one.load_state_dict(many.state_dict())
        x, splits = randn(48, 32), torch.tensor(SPLITS[0])
        self.same(te.ops.Sequential(one)(x, splits), te.ops.Sequential(many)(x, splits))

    def test_graphs(self):
        layer, x = te.GroupedLinear(2, 32, 48, device="cpu"), randn(8, 32)
        with self.assertRaises(Exception):
            torch.compile(lambda x: layer(x, [4, 4]), backend="eager", fullgraph=True)(x)
        torch.testing.assert_close(torch.compile(lambda x: layer(x, [4, 4]), backend="eager")(x), layer(x, [4, 4]))


class Mixture(torch.nn.Module):
    """Top-2 mixture of two-layer experts: computed by te-fl's functions, or by a loop over the experts in plain PyTorch with the same parameters."""

    def __init__(self, hidden, experts, dtype):
        super().__init__()
        self.experts = experts
        self.router = torch.nn.Linear(hidden, experts, bias=False, dtype=dtype)
        self.up, self.down = (te.GroupedLinear(experts, *sizes, bias=False, params_dtype=dtype, device="cpu") for sizes in
                              ((hidden, 2 * hidden), (2 * hidden, hidden)))

    def forward(self, x, recipe=None):
        logits = self.router(x)
        probs, mask = fused_topk_with_score_function(logits, 2, False, None, None, None, "softmax", None)
        chosen, scores = fused_compute_score_for_moe_aux_loss(logits, 2, "softmax")
        counts = mask.sum(0)
        rows, own_probs, where = moe_permute_with_probs(x, probs, mask, 2 * len(x))
        pad, unpad = (kind(self.experts, 16) for kind in (te.Fp8Padding, te.Fp8Unpadding))
        padded, sizes = pad(rows, counts.tolist())
        with te.autocast(enabled=recipe is not None, recipe=recipe):
            y = self.down(torch.nn.functional.silu(self.up(padded, sizes)), sizes)
        y = unpad(y, counts.tolist()) * own_probs.unsqueeze(1).to(y.dtype)
        return moe_unpermute(y, where), fused_moe_aux_loss(scores, chosen.sum(0), len(x), self.experts, 2, 0.01), counts

    def by_loop(self, x):
        logits = self.router(x)
        values, indices = logits.topk(2)
        gates, y = torch.softmax(values.float(), -1).to(x.dtype), torch.zeros_like(x)
        for e in range(self.experts):
            token, place = (indices == e).nonzero(as_tuple=True)
            hidden = torch.nn.functional.silu(x[token] @ getattr(self.up, f"weight{e}").t())
            y = y.index_add(0, token, gates[token, place].unsqueeze(1) * (hidden @ getattr(self.down, f"weight{e}").t()))
        share, scores = torch.bincount(indices.view(-1), minlength=self.experts), torch.softmax(logits.float(), -1)
        return y, (0.01 * self.experts / (2 * len(x) ** 2)) * (share * scores.sum(0)).sum(), share


class Learning(unittest.TestCase):
    def losses(self, dtype, how, steps=25):
        torch.manual_seed(0)
        model, generator = Mixture(64, 8, dtype), torch.Generator().manual_seed(3)
        with torch.no_grad():
            model.router.weight[7] = 0.0  # expert 7 often has the lowest scores, so in some steps it gets no token
            model.router.weight[7, 0] = -4.0
        optimizer, losses, fewest = torch.optim.Adam(model.parameters(), 3e-3), [], []
        target = torch.randn(64, 64, generator=generator) / 8
        for _ in range(steps):
            x = torch.randn(48, 64, generator=generator).abs().to(dtype)
            optimizer.zero_grad()
            y, auxiliary, counts = how(model, x)
            loss = (y.float() - x.float() @ target).square().mean()
            (loss + auxiliary.float()).backward()
            optimizer.step()
            losses.append(loss.item())
            fewest.append(int(counts.min()))
        return losses, fewest

    def test_learns_as_a_loop_over_experts(self):
        for dtype, tolerance in ((F32, 1e-3), (BF16, 0.05)):
            by_loop, fewest = self.losses(dtype, Mixture.by_loop)
            own, _ = self.losses(dtype, Mixture.forward)
            self.assertEqual(fewest[0], 0)
            self.assertLess(own[-1], 0.7 * own[0])
            for a, b in zip(own, by_loop):
                self.assertLess(abs(a - b), tolerance * b)
            for recipe in RECIPES[1:]:
                fp8, _ = self.losses(dtype, lambda model, x: model(x, recipe))  # noqa: B023
                self.assertLess(abs(fp8[-1] - own[-1]), 0.1 * own[-1])


if __name__ == "__main__":
    unittest.main()
