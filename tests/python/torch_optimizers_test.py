"""Tests FusedAdam and FusedSGD against PyTorch's optimizers in FP64, and saving, loading and reading their state."""

import copy
import pickle
import unittest

import torch

from te_fl.errors import InvalidArgument, Unsupported
from te_fl.pytorch import optimizers

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = ((5, 7), (3,), (0, 4), (33, 2))


def params(dtype=torch.float32, shapes=SHAPES):
    generator = torch.Generator().manual_seed(1)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).to(DEVICE, dtype)) for shape in shapes]


def give_grads(weights, step, dtype=None):
    generator = torch.Generator().manual_seed(step)
    for p in weights:
        grad = torch.randn(p.shape, generator=generator).to(torch.bfloat16)  # these gradients are exact in every dtype of the test
        p.grad = grad.to(p.device, dtype or p.dtype)


def steps(optimizer, weights, first=0, count=4):
    for step in range(first, first + count):
        give_grads(weights, step)
        optimizer.step()
    return weights


def wide(weights):
    return [torch.nn.Parameter(p.detach().double()) for p in weights]


class Compared(unittest.TestCase):
    def same(self, weights, oracle, **tolerance):
        for p, want in zip(weights, oracle):
            torch.testing.assert_close(p.detach().double(), want.detach(), **(tolerance or dict(atol=2e-6, rtol=2e-6)))


class Adam(Compared):
    def test_against_pytorch(self):
        options = dict(lr=0.01, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1)
        for decoupled, kind in ((True, torch.optim.AdamW), (False, torch.optim.Adam)):
            weights = params()
            oracle = wide(weights)
            steps(optimizers.FusedAdam(weights, adam_w_mode=decoupled, **options), weights)
            self.same(weights, steps(kind(oracle, **options), oracle))

    def test_defaults(self):
        weights = params()
        oracle = wide(weights)
        steps(optimizers.FusedAdam(weights), weights)
        self.same(weights, steps(torch.optim.AdamW(oracle, weight_decay=0.0), oracle))

    def test_without_bias_correction(self):
        weights = params(shapes=((4,),))
        before = weights[0].detach().double()
        give_grads(weights, 0)
        g = weights[0].grad.double()
        optimizers.FusedAdam(weights, lr=0.1, bias_correction=False).step()
        self.same(weights, [before - 0.1 * (0.1 * g) / ((0.001 * g * g).sqrt() + 1e-8)])

    def test_param_groups_and_missing_gradients(self):
        weights = params()
        oracle = wide(weights)
        groups = lambda ps: [{"params": ps[:2], "lr": 0.1}, {"params": ps[2:]}, {"params": []}]
        served, wanted = optimizers.FusedAdam(groups(weights), lr=0.01), torch.optim.AdamW(groups(oracle), lr=0.01, weight_decay=0)
        for step in range(3):
            give_grads(weights, step)
            give_grads(oracle, step)
            weights[1].grad = oracle[1].grad = None
            served.step()
            wanted.step()
        self.same(weights, oracle)
        self.assertEqual([group["step"] for group in served.param_groups], [3, 3, 3])
        self.assertNotIn(weights[1], served.state)

    def test_low_precision_with_master_weights(self):
        for dtype in (torch.bfloat16, torch.float16):
            weights = params(dtype)
            oracle = wide(weights)
            optimizer = optimizers.FusedAdam(weights, lr=1e-3, master_weights=True)
            steps(optimizer, weights)
            steps(torch.optim.AdamW(oracle, lr=1e-3, weight_decay=0), oracle)
            masters = [optimizer.state[p]["master_param"] for p in weights]
            self.same(masters, oracle)
            for p, master in zip(weights, masters):
                self.assertTrue(torch.equal(p.detach(), master.to(dtype)))

    def test_parameters_of_several_dtypes(self):
        weights = params() + params(torch.bfloat16) + params(torch.float16)
        oracle = wide(weights)
        optimizer = optimizers.FusedAdam(weights, lr=1e-3, master_weights=True)
        steps(optimizer, weights)
        steps(torch.optim.AdamW(oracle, lr=1e-3, weight_decay=0), oracle)
        self.same([optimizer.state[p]["master_param"] for p in weights], oracle)

    def test_decoupled_gradients(self):
        weights = params(torch.bfloat16)
        oracle = wide(weights)
        optimizer = optimizers.FusedAdam(weights, lr=1e-2, master_weights=True, use_decoupled_grad=True)
        give_grads(weights, 0)
        give_grads(oracle, 0)
        for p in weights:
            p.decoupled_grad, p.grad = p.grad.float(), None
        optimizer.step()
        torch.optim.AdamW(oracle, lr=1e-2, weight_decay=0).step()
        self.same([optimizer.state[p]["master_param"] for p in weights], oracle)
        optimizer.zero_grad(set_to_none=False)
        self.assertEqual(float(weights[0].decoupled_grad.abs().sum()), 0)
        optimizer.zero_grad()
        self.assertIsNone(weights[0].decoupled_grad)

    def test_capturable(self):
        weights = params()
        oracle = wide(weights)
        optimizer = optimizers.FusedAdam(weights, lr=0.01, capturable=True)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        wanted = torch.optim.AdamW(oracle, lr=0.01, weight_decay=0)
        for step in range(4):
            give_grads(weights, step)
            give_grads(oracle, step)
            wanted.param_groups[0]["lr"] = 0.01 if step < 2 else 0.005
            optimizer.step()
            wanted.step()
            schedule.step()
        self.same(weights, oracle)
        self.assertEqual(int(optimizer.param_groups[0]["step"]), 4)

    def test_a_loss_scale_and_a_skipped_step(self):
        weights = params(torch.float32)
        oracle = wide(weights)
        optimizer = optimizers.FusedAdam(weights, lr=0.01, capturable=True)
        wanted = torch.optim.AdamW(oracle, lr=0.01, weight_decay=0)
        scaler = torch.amp.GradScaler(DEVICE, init_scale=1024.0, growth_interval=100)
        for step in range(3):
            give_grads(weights, step)
            scaler.scale(torch.ones((), device=DEVICE))
            for p in weights:
                p.grad *= scaler.get_scale()
            if step == 1:
                weights[0].grad[0, 0] = float("inf")
            optimizer.step(grad_scaler=scaler)
            scaler.update()
            if step != 1:
                give_grads(oracle, step)
                wanted.step()
        self.same(weights, oracle)
        self.assertEqual(int(optimizer.param_groups[0]["step"]), 2)
        self.assertEqual(scaler.get_scale(), 512.0)

    def test_state_travels(self):
        for master in (False, True):
            weights = params(torch.bfloat16)
            optimizer = optimizers.FusedAdam(weights, lr=0.01, master_weights=master)
            steps(optimizer, weights)
            others = [torch.nn.Parameter(p.detach().clone()) for p in weights]
            other = optimizers.FusedAdam(others, master_weights=master)
            saved = copy.deepcopy(optimizer.state_dict())
            self.assertEqual(set(saved["state"][0]), {"exp_avg", "exp_avg_sq", "master_param"} if master else {"exp_avg", "exp_avg_sq"})
            self.assertEqual(saved["param_groups"][0]["step"], 4)
            other.load_state_dict(saved)
            self.assertEqual(other.state[others[0]]["exp_avg"].dtype, torch.float32)
            steps(optimizer, weights, first=4)
            steps(other, others, first=4)
            for a, b in zip(weights, others):
                self.assertTrue(torch.equal(a, b))

    def test_a_float32_parameter_is_its_own_master_weight(self):
        for kinds in ({}, dict(master_weight_dtype=torch.float16), dict(exp_avg_dtype=torch.bfloat16, exp_avg_sq_dtype=torch.bfloat16)):
            weights, others = params(), params()
            optimizer = optimizers.FusedAdam(weights, lr=0.01, master_weights=True, **kinds)
            steps(optimizer, weights)
            steps(optimizers.FusedAdam(others, lr=0.01, **{k: v for k, v in kinds.items() if k != "master_weight_dtype"}), others)
            for p, q in zip(weights, others):
                self.assertTrue(torch.equal(p, q))
                self.assertTrue(torch.equal(optimizer.get_unscaled_state(p, "master_param"), p))
                self.assertEqual(optimizer.state[p]["master_param"].data_ptr(), p.data_ptr())
            saved = optimizer.state_dict()
            self.assertEqual(set(saved["state"][0]), {"exp_avg", "exp_avg_sq", "master_param"})
            self.assertTrue(torch.equal(saved["state"][0]["master_param"], weights[0]))
            kept = weights[0].detach().clone()
            saved["state"][0]["master_param"].zero_()  # as in a new state of Transformer Engine's, before any step
            optimizer.load_state_dict(saved)
            self.assertTrue(torch.equal(weights[0], kept))
            weights[0].data = weights[0].data.clone()
            steps(optimizer, weights, first=4)
            steps_of = optimizers.FusedAdam(others, lr=0.01, **{k: v for k, v in kinds.items() if k != "master_weight_dtype"})
            steps_of.load_state_dict({**saved, "state": {n: {k: v for k, v in e.items() if k != "master_param"} for n, e in saved["state"].items()}})
            steps(steps_of, others, first=4)
            for p, q in zip(weights, others):
                self.assertTrue(torch.equal(p, q))
                self.assertEqual(optimizer.state[p]["master_param"].data_ptr(), p.data_ptr())

    def test_state_of_pytorchs_own(self):
        oracle = wide(params())
        wanted = torch.optim.AdamW(oracle, lr=0.01, weight_decay=0.1)
        steps(wanted, oracle)
        weights = [torch.nn.Parameter(p.detach().float()) for p in oracle]
        optimizer = optimizers.FusedAdam(weights)
        optimizer.load_state_dict(wanted.state_dict())
        self.assertEqual(optimizer.param_groups[0]["step"], 4)
        steps(wanted, oracle, first=4)
        steps(optimizer, weights, first=4)
        self.same(weights, oracle)
        for option in ("amsgrad", "maximize"):
            state = torch.optim.AdamW(oracle, **{option: True}).state_dict()
            with self.assertRaisesRegex(Unsupported, f"{option}=True"):
                optimizer.load_state_dict(state)
        give_grads(oracle[:1], 9)
        for p in oracle[1:]:
            p.grad = None
        wanted.step()
        with self.assertRaisesRegex(InvalidArgument, r"\[8, 9\] steps"):
            optimizer.load_state_dict(wanted.state_dict())

    def test_state_goes_on_as_capturable(self):
        weights = params()
        optimizer = optimizers.FusedAdam(weights, lr=0.01)
        steps(optimizer, weights)
        others = [torch.nn.Parameter(p.detach().clone()) for p in weights]
        other = optimizers.FusedAdam(others, capturable=True)
        other.load_state_dict(optimizer.state_dict())
        steps(optimizer, weights, first=4)
        steps(other, others, first=4)
        self.same(others, [p.double() for p in weights], atol=1e-7, rtol=1e-7)

    def test_state_without_master_weights_gets_them(self):
        weights = params(torch.bfloat16)
        optimizer = optimizers.FusedAdam(weights, lr=0.01)
        steps(optimizer, weights)
        other = optimizers.FusedAdam(weights, master_weights=True)
        other.load_state_dict(optimizer.state_dict())
        self.assertTrue(torch.equal(other.state[weights[0]]["master_param"], weights[0].detach().float()))

    def test_state_by_name(self):
        weights = params(torch.bfloat16)
        optimizer = optimizers.FusedAdam(weights, master_weights=True)
        optimizer.initialize_state(weights[0], False)
        optimizer.set_scaled_state(weights[0], "exp_avg", torch.full(weights[0].shape, 0.1))
        self.assertEqual(float(optimizer.get_unscaled_state(weights[0], "exp_avg")[0, 0]), float(torch.tensor(0.1)))

    def test_autograd_sees_the_write(self):
        weights = params(shapes=((4,),))
        product = (weights[0] * weights[0]).sum()
        give_grads(weights, 0)
        optimizers.FusedAdam(weights).step()
        with self.assertRaisesRegex(RuntimeError, "modified by an inplace operation"):
            product.backward()

    def test_a_layer_sees_the_new_weights(self):
        import te_fl.pytorch as te
        torch.manual_seed(3)
        served = te.Linear(32, 16, params_dtype=torch.float32)
        plain = torch.nn.Linear(32, 16).to(served.weight.device)
        plain.load_state_dict({name: p.detach().clone() for name, p in served.named_parameters()})
        x = torch.randn(8, 32, device=served.weight.device)
        for layer, optimizer in ((served, optimizers.FusedAdam(served.parameters(), lr=0.01)),
                                 (plain, torch.optim.AdamW(plain.parameters(), lr=0.01, weight_decay=0))):
            for _ in range(3):
                optimizer.zero_grad()
                layer(x).square().sum().backward()
                optimizer.step()
        with torch.no_grad():
            torch.testing.assert_close(served(x), plain(x), atol=1e-5, rtol=1e-5)

    def test_parameters_of_several_ranks(self):
        # Uses a mesh of one CPU rank, because Gloo supports every collective there. The optimizer's memory, gradient and state are those of the
        # DTensor's local part.
        import torch.distributed as dist
        from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
        dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
        self.addCleanup(dist.destroy_process_group)
        mesh = dist.init_device_mesh("cpu", (1,))
        plain = [torch.nn.Parameter(p.detach().cpu()) for p in params()]
        weights = [torch.nn.Parameter(distribute_tensor(p.detach().clone(), mesh, [Shard(0) if p.dim() > 1 else Replicate()])) for p in plain]
        served, alone = optimizers.FusedAdam(weights, lr=0.1), optimizers.FusedAdam(plain, lr=0.1)
        for step in range(2):
            give_grads(plain, step)
            for p, q in zip(weights, plain):
                p.grad = distribute_tensor(q.grad.clone(), mesh, p.placements)
            served.step()
            alone.step()
        for p, q in zip(weights, plain):
            self.assertTrue(torch.equal(p.full_tensor(), q))
        self.assertIsInstance(served.state[weights[0]]["exp_avg"], DTensor)
        served.load_state_dict(copy.deepcopy(served.state_dict()))
        self.assertIsInstance(served.state[weights[0]]["exp_avg"], DTensor)

    def test_closures(self):
        weights = params(shapes=((4,),))
        optimizer = optimizers.FusedAdam(weights, lr=0.1)
        def closure():
            optimizer.zero_grad()
            loss = weights[0].square().sum()
            loss.backward()
            return loss
        first = float(optimizer.step(closure).detach())
        self.assertLess(float(optimizer.step(closure).detach()), first)

    def test_zero_grad(self):
        weights = params()
        with self.assertWarnsRegex(DeprecationWarning, "set_grad_none"):
            optimizer = optimizers.FusedAdam(weights, set_grad_none=False)
        give_grads(weights, 0)
        optimizer.zero_grad()
        self.assertEqual(float(weights[0].grad.abs().sum()), 0)
        with self.assertRaisesRegex(InvalidArgument, "set_to_none=True"):
            optimizer.zero_grad(set_to_none=True)
        other = optimizers.FusedAdam(weights)
        other.zero_grad()
        self.assertIsNone(weights[0].grad)

    def test_what_is_refused(self):
        with self.assertRaisesRegex(Unsupported, "amsgrad"):
            optimizers.FusedAdam(params(), amsgrad=True)
        for words, options in (("master_weight_dtype is torch.bfloat16", dict(master_weights=True, master_weight_dtype=torch.bfloat16)),
                               ("exp_avg_dtype is torch.float64", dict(exp_avg_dtype=torch.float64)),
                               ("exp_avg_sq_dtype is torch.int8", dict(exp_avg_sq_dtype=torch.int8)),
                               ("capturable=True with exp_avg_dtype=torch.float16", dict(capturable=True, exp_avg_dtype=torch.float16)),
                               ("capturable=True with exp_avg_dtype=torch.bfloat16", dict(capturable=True, exp_avg_dtype=torch.bfloat16)),
                               ("whole master weights", dict(capturable=True, master_weights=True, master_weight_dtype=torch.float16)),
                               ("whole master weights", dict(capturable=True, master_weights=True, store_param_remainders=True))):
            with self.subTest(words), self.assertRaisesRegex(InvalidArgument, words):
                optimizers.FusedAdam(params(), **options)
        for words, options in (("lr is -1.0; it is 0 or more", dict(lr=-1)), ("lr is -1.0", dict(lr=torch.tensor(-1.0), capturable=True)),
                               ("lr is nan", dict(lr=float("nan"))), ("lr is a tensor of 2 elements", dict(lr=torch.ones(2))),
                               ("eps is -1.0", dict(eps=-1)), ("weight_decay is -0.1", dict(weight_decay=-0.1)),
                               (r"betas\[0\] is 1.0; it is 0 or more and less than 1", dict(betas=(1.0, 0.9))),
                               (r"betas\[1\] is -0.5", dict(betas=(0.9, -0.5))), (r"betas is \(0.9,\); it is a pair", dict(betas=(0.9,)))):
            with self.subTest(words), self.assertRaisesRegex(InvalidArgument, words):
                optimizers.FusedAdam(params(), **options)
        with self.assertRaisesRegex(TypeError, "FusedAdam: lr is '0.1'; it is a number"):
            optimizers.FusedAdam(params(), lr="0.1")
        weights = [torch.nn.Parameter(torch.randn(4, 5, device=DEVICE).t())]
        give_grads(weights, 0)
        with self.assertRaisesRegex(Unsupported, "not contiguous"):
            optimizers.FusedAdam(weights).step()
        weights = [torch.nn.Parameter(torch.randn(4, dtype=torch.float64, device=DEVICE))]
        give_grads(weights, 0)
        with self.assertRaisesRegex(Unsupported, "float64"):
            optimizers.FusedAdam(weights).step()


def rounded(values, dtype):
    """Computes the values that a state of the dtype stores: FP16 and FP8 (uint8) are scaled so that the largest magnitude becomes the largest used
    value."""
    if dtype is torch.float32 or not values.numel():
        return values.clone()
    if dtype is torch.bfloat16:
        return values.bfloat16().float()
    scale = values.abs().max() / (65504 / 2 if dtype is torch.float16 else 448)
    scale = scale if scale > 0 else torch.ones(())
    codes = (values / scale).half() if dtype is torch.float16 else (values * (1 / scale)).to(torch.float8_e4m3fn)
    return codes.float() * scale


class AdamStates(Compared):
    """Tests states in other dtypes than FP32 against hand-written Adam whose state is rounded after each step."""

    KINDS = (dict(exp_avg_dtype=torch.bfloat16, exp_avg_sq_dtype=torch.bfloat16), dict(exp_avg_dtype=torch.float16, exp_avg_sq_dtype=torch.float16),
             dict(exp_avg_dtype=torch.uint8, exp_avg_sq_dtype=torch.float16), dict(exp_avg_dtype=torch.uint8, exp_avg_sq_dtype=torch.uint8),
             dict(master_weight_dtype=torch.float16), dict(exp_avg_dtype=torch.bfloat16))

    def by_hand(self, weights, kinds, count, lr=0.01, wd=0.1):
        kept = [[torch.zeros_like(p, dtype=torch.float32), torch.zeros_like(p, dtype=torch.float32),
                 rounded(p.detach().float(), kinds.get("master_weight_dtype", torch.float32))] for p in weights]
        results = [p.detach().clone() for p in weights]
        for step in range(count):
            give_grads(weights, step)
            for state, p, at in zip(kept, weights, range(len(kept))):
                m, v, w, g = *(t.double() for t in state), p.grad.double()
                a, b = (float(torch.tensor(beta, dtype=torch.float32)) for beta in (0.9, 0.999))  # rounded to FP32 as in the op
                m, v, t = a * m + (1 - a) * g, b * v + (1 - b) * g * g, step + 1
                w = w - lr * (m / (1 - a ** t) / ((v / (1 - b ** t)).sqrt() + 1e-8) + wd * w)
                results[at] = w.float().to(p.dtype)
                state[:] = [rounded(x.float(), kinds.get(name, torch.float32)) for x, name in
                            ((m, "exp_avg_dtype"), (v, "exp_avg_sq_dtype"), (w, "master_weight_dtype"))]
        return results, kept

    def test_against_adam_by_hand(self):
        for kinds in self.KINDS:
            with self.subTest(**kinds):
                weights = params(torch.bfloat16)
                want, kept = self.by_hand(params(torch.bfloat16), kinds, 4)
                optimizer = optimizers.FusedAdam(weights, lr=0.01, weight_decay=0.1, master_weights=True, **kinds)
                steps(optimizer, weights)
                for p, w, state in zip(weights, want, kept):
                    # one unit in the last place of BF16, where FP32 sums differ
                    torch.testing.assert_close(p.detach().float(), w.float(), atol=1e-2, rtol=8e-3)
                    if not p.numel():
                        continue
                    for name, values in zip(("exp_avg", "exp_avg_sq", "master_param"), state):
                        own = optimizer.get_unscaled_state(p, name)
                        self.assertEqual(own.dtype, torch.float32)
                        # A sum near the midpoint of two codes may round to the other one.
                        step = {torch.uint8: 0.13, torch.bfloat16: 8e-3}.get(optimizer._states.dtypes[name], 2e-3 if name == "master_param" else 1e-5)
                        torch.testing.assert_close(own, values, atol=step * float(values.abs().max()) / 16, rtol=step)
                self.assertEqual(optimizer.state[weights[0]]["exp_avg"].dtype, kinds.get("exp_avg_dtype", torch.float32))

    def test_state_travels(self):
        for kinds in (*self.KINDS, dict(store_param_remainders=True)):
            with self.subTest(**kinds):
                weights = params(torch.bfloat16)
                optimizer = optimizers.FusedAdam(weights, lr=0.01, master_weights=True, **kinds)
                steps(optimizer, weights)
                saved = copy.deepcopy(optimizer.state_dict())
                remainders = "store_param_remainders" in kinds
                self.assertEqual({k: t.dtype for k, t in saved["state"][0].items()},
                                 {"exp_avg": torch.float32, "exp_avg_sq": torch.float32, "master_param": torch.int16 if remainders else torch.float32})
                others = [torch.nn.Parameter(p.detach().clone()) for p in weights]
                other = optimizers.FusedAdam(others, lr=0.01, master_weights=True, **kinds)
                other.load_state_dict(saved)
                steps(optimizer, weights, first=4)
                steps(other, others, first=4)
                for a, b in zip(weights, others):
                    self.assertTrue(torch.equal(a, b))

    def test_remainders_are_whole_master_weights(self):
        weights, others = params(torch.bfloat16), params(torch.bfloat16)
        kept = optimizers.FusedAdam(weights, lr=1e-3, master_weights=True, store_param_remainders=True)
        whole = optimizers.FusedAdam(others, lr=1e-3, master_weights=True)
        before = weights[0]._version
        for first in range(0, 12, 4):
            steps(kept, weights, first)
            steps(whole, others, first)
            for p, q in zip(weights, others):
                low, high = kept.state[p]["master_param"].to(torch.int32), p.detach().view(torch.int16).to(torch.int32)
                bits = ((high - (low < 0).int()) << 16) | (low & 0xFFFF)
                self.assertTrue(torch.equal(bits.view(torch.float32), whole.state[q]["master_param"]))
                self.assertTrue(torch.equal(p, q))
        self.assertEqual(kept.state[weights[0]]["master_param"].dtype, torch.int16)
        self.assertGreater(weights[0]._version, before)
        for optimizer, state in ((whole, kept), (kept, whole)):
            with self.assertRaisesRegex(InvalidArgument, "store_param_remainders as when it was saved"):
                optimizer.load_state_dict(copy.deepcopy(state.state_dict()))
        plain = params()
        steps(optimizers.FusedAdam(plain, master_weights=True, store_param_remainders=True), plain)  # FP32 parameters have no remainders
        with self.assertRaisesRegex(InvalidArgument, "store_param_remainders=False for a parameter of torch.bfloat16"):
            kept.initialize_state(weights[0], False)

    def test_zeros(self):
        for kinds in self.KINDS:
            weights = [torch.nn.Parameter(torch.zeros(4, 8, dtype=torch.bfloat16, device=DEVICE))]
            weights[0].grad = torch.zeros_like(weights[0])
            optimizer = optimizers.FusedAdam(weights, master_weights=True, **kinds)
            for _ in range(2):
                optimizer.step()
            self.assertEqual([float(optimizer.get_unscaled_state(weights[0], n).abs().max()) for n in ("exp_avg", "exp_avg_sq", "master_param")], [0.0] * 3)

    def test_capturable_in_bfloat16(self):
        kinds = dict(exp_avg_dtype=torch.bfloat16, exp_avg_sq_dtype=torch.bfloat16)
        weights, others = params(torch.bfloat16), params(torch.bfloat16)
        steps(optimizers.FusedAdam(weights, lr=0.01, master_weights=True, capturable=True, **kinds), weights)
        steps(optimizers.FusedAdam(others, lr=0.01, master_weights=True, **kinds), others)
        for p, q in zip(weights, others):
            self.assertTrue(torch.equal(p, q))
        optimizer = optimizers.FusedAdam(params(torch.bfloat16), **kinds)
        optimizer.initialize_state(weights[0])
        self.assertEqual(optimizer.get_unscaled_state(weights[0], "exp_avg", skip_unscale=True).dtype, torch.bfloat16)
        with self.assertRaisesRegex(InvalidArgument, "skip_unscale"):
            other = optimizers.FusedAdam(weights)
            other.initialize_state(weights[0])
            other.get_unscaled_state(weights[0], "exp_avg", skip_unscale=True)

    def test_weights_that_are_codes(self):
        import te_fl.pytorch as te
        for kinds in (dict(master_weight_dtype=torch.float16), dict(exp_avg_dtype=torch.uint8, exp_avg_sq_dtype=torch.bfloat16)):
            with te.quantized_model_init():
                layer = te.Linear(32, 16, bias=False, params_dtype=torch.bfloat16)
            before = layer.weight.dequantize()
            optimizer = optimizers.FusedAdam([layer.weight], lr=0.1, master_weights=True, **kinds)
            layer.weight.grad = torch.ones(16, 32, dtype=torch.bfloat16, device=layer.weight.device)
            optimizer.step()
            torch.testing.assert_close(layer.weight.dequantize().float(), before.float() - 0.1, atol=0.01, rtol=0.07)


class SGD(Compared):
    def test_against_pytorch(self):
        for options in (dict(lr=0.1), dict(lr=0.1, weight_decay=0.1), dict(lr=0.1, momentum=0.9, weight_decay=0.1),
                        dict(lr=0.1, momentum=0.9, dampening=0.5), dict(lr=0.1, momentum=0.9, nesterov=True)):
            with self.subTest(**options):
                weights = params()
                oracle = wide(weights)
                steps(optimizers.FusedSGD(weights, **options), weights)
                self.same(weights, steps(torch.optim.SGD(oracle, **options), oracle), atol=1e-5, rtol=1e-5)

    def test_weight_decay_after_momentum(self):
        weights = params(shapes=((4,),))
        p, m = weights[0].detach().double(), 0
        optimizer = optimizers.FusedSGD(weights, lr=0.1, momentum=0.9, weight_decay=0.1, wd_after_momentum=True)
        for step in range(3):
            give_grads(weights, step)
            g = weights[0].grad.double()
            m = g if step == 0 else 0.9 * m + g
            p = p - 0.1 * (m + 0.1 * p)
            optimizer.step()
        self.same(weights, [p])

    def test_a_gradient_that_comes_later(self):
        weights = params(shapes=((4,), (3,)))
        oracle = wide(weights)
        served, wanted = optimizers.FusedSGD(weights, lr=0.1, momentum=0.9), torch.optim.SGD(oracle, lr=0.1, momentum=0.9)
        for step in range(3):
            give_grads(weights, step)
            give_grads(oracle, step)
            if step == 0:
                weights[1].grad = oracle[1].grad = None
            served.step()
            wanted.step()
        self.same(weights, oracle)

    def test_state_travels(self):
        weights = params(torch.bfloat16)
        optimizer = optimizers.FusedSGD(weights, lr=0.1, momentum=0.9)
        steps(optimizer, weights)
        others = [torch.nn.Parameter(p.detach().clone()) for p in weights]
        other = optimizers.FusedSGD(others, lr=0.5)
        other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        steps(optimizer, weights, first=4)
        steps(other, others, first=4)
        for a, b in zip(weights, others):
            self.assertTrue(torch.equal(a, b))

    def test_what_is_refused(self):
        with self.assertRaisesRegex(InvalidArgument, "momentum is -1"):
            optimizers.FusedSGD(params(), lr=0.1, momentum=-1)
        with self.assertRaisesRegex(InvalidArgument, "nesterov"):
            optimizers.FusedSGD(params(), lr=0.1, nesterov=True)
        with self.assertRaisesRegex(Unsupported, "materialize_master_grads"):
            optimizers.FusedSGD(params(), lr=0.1, materialize_master_grads=False)
        with self.assertRaisesRegex(ValueError, "lr"):
            optimizers.FusedSGD(params())


class Copies(Compared):
    def test_a_copy_goes_on_as_its_original(self):
        for make in (lambda p: optimizers.FusedAdam(p, lr=0.1, adam_w_mode=False, weight_decay=0.1),
                     lambda p: optimizers.FusedAdam(p, lr=0.1, master_weights=True, exp_avg_dtype=torch.uint8),
                     lambda p: optimizers.FusedAdam(p, lr=0.1, capturable=True),
                     lambda p: optimizers.FusedSGD(p, lr=0.1, momentum=0.9, weight_decay=0.1, wd_after_momentum=True)):
            for copied in (copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))):
                weights = params(torch.bfloat16)
                optimizer = make(weights)
                steps(optimizer, weights)
                other = copied(optimizer)
                others = other.param_groups[0]["params"]
                steps(other, others, first=4, count=2)
                self.assertFalse(torch.equal(others[0], weights[0]))
                steps(optimizer, weights, first=4, count=2)
                for a, b in zip(weights, others):
                    self.assertTrue(torch.equal(a, b))


class Lists(Compared):
    def test_scale_and_norms(self):
        weights = [p.detach() for p in params()]
        out, flag = [torch.empty_like(p) for p in weights], torch.zeros(1, dtype=torch.int32, device=DEVICE)
        applier = optimizers.multi_tensor_applier
        applier(optimizers.multi_tensor_scale, flag, [weights, out], 0.5)
        for p, half in zip(weights, out):
            self.assertTrue(torch.equal(half, p * 0.5))
        self.assertEqual(int(flag), 0)
        norm, each = applier(optimizers.multi_tensor_l2norm, flag, [weights], True)
        torch.testing.assert_close(float(norm), float(torch.cat([p.double().flatten() for p in weights]).norm()), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(each.double(), torch.stack([p.double().norm() for p in weights if p.numel()]), atol=1e-5, rtol=1e-5)
        norm, each = applier(optimizers.multi_tensor_unscale_l2norm, flag, [weights], torch.full((1,), 2.0, device=DEVICE))
        torch.testing.assert_close(float(norm), 2 * float(torch.cat([p.double().flatten() for p in weights]).norm()), atol=1e-5, rtol=1e-5)
        self.assertEqual(each.numel(), 0)
        weights[0][0, 0] = float("nan")
        applier(optimizers.multi_tensor_scale, flag, [weights, out], 0.5)
        self.assertEqual(int(flag), 1)

    def test_steps_on_lists_are_the_optimizers_steps(self):
        flag = torch.zeros(1, dtype=torch.int32, device=DEVICE)
        weights, others = params(), params()
        steps(optimizers.FusedAdam(weights, lr=0.1, weight_decay=0.1), weights, count=1)
        give_grads(others, 0)
        state = [[torch.zeros_like(p.detach()) for p in others] for _ in range(2)]
        optimizers.multi_tensor_applier(optimizers.multi_tensor_adam, flag, [[p.grad for p in others], others, *state], 0.1, 0.9, 0.999,
                                        1e-8, 1, 1, 1, 0.1)
        for a, b in zip(weights, others):
            self.assertTrue(torch.equal(a, b))
        steps(optimizers.FusedSGD(weights, lr=0.1), weights, count=1)
        optimizers.multi_tensor_applier(optimizers.multi_tensor_sgd, flag, [[p.grad for p in others], others, state[0]], 0.0, 0.0, 0.0, 0.1,
                                        False, True, False, 1.0)
        for a, b in zip(weights, others):
            self.assertTrue(torch.equal(a, b))

    def test_numbers_on_the_device(self):
        flag, factor = torch.zeros(1, dtype=torch.int32, device=DEVICE), torch.tensor([0.25], device=DEVICE)
        sources = [p.detach() for p in params()]
        out = [torch.empty_like(p) for p in sources]
        optimizers.multi_tensor_applier(optimizers.multi_tensor_scale_tensor, flag, [sources, out], factor)
        for p, quarter in zip(sources, out):
            self.assertTrue(torch.equal(quarter, p * 0.25))
        for dtype, function in ((torch.float32, optimizers.multi_tensor_adam_capturable), (torch.bfloat16, optimizers.multi_tensor_adam_capturable_master)):
            weights, others = params(dtype), params(dtype)
            give_grads(weights, 0)
            give_grads(others, 0)
            masters = [[p.detach().float() for p in others]] if dtype is torch.bfloat16 else []
            state = [[torch.zeros_like(p, dtype=torch.float32) for p in others] for _ in range(2)]
            for p in others:
                p.grad.mul_(4)  # applies a loss scale
            before = others[0]._version
            optimizers.multi_tensor_applier(function, flag, [[p.grad for p in others], others, *state, *masters], torch.tensor([0.1], device=DEVICE), 0.9,
                                            0.999, 1e-8, torch.tensor([1], dtype=torch.int32, device=DEVICE), 1, 1, 0.1, factor)
            grads = [p.grad.clone() for p in weights]
            optimizers.FusedAdam(weights, lr=0.1, weight_decay=0.1, master_weights=bool(masters)).step()
            for a, b, g in zip(weights, others, grads):
                torch.testing.assert_close(b.detach(), a.detach(), atol=1e-6, rtol=1e-6)
                self.assertTrue(torch.equal(b.grad, g))
            self.assertGreater(others[0]._version, before)

    def test_parameters_of_codes(self):
        flag = torch.zeros(1, dtype=torch.int32, device=DEVICE)
        masters = [p.detach().clone() for p in params() if p.numel()]
        want = [torch.nn.Parameter(m.clone()) for m in masters]
        give_grads(want, 0)
        optimizers.FusedAdam(want, lr=0.1).step()
        codes = [torch.zeros_like(m, dtype=torch.uint8) for m in masters]
        state = [[torch.zeros_like(m) for m in masters] for _ in range(2)]
        scales, amaxes, inverses = ([torch.full((1,), v, device=DEVICE) for _ in masters] for v in (16.0, 0.0, 0.0))
        optimizers.multi_tensor_applier(optimizers.multi_tensor_adam_fp8, flag, [[p.grad for p in want], codes, *state, masters, scales, amaxes, inverses],
                                        0.1, 0.9, 0.999, 1e-8, 1, 1, 1, 0.0, 7)
        for p, master, code, amax, inverse in zip(want, masters, codes, amaxes, inverses):
            self.assertTrue(torch.equal(master, p))
            self.assertTrue(torch.equal(code, (p.detach() * 16).to(torch.float8_e4m3fn).view(torch.uint8)))
            self.assertEqual((float(amax), float(inverse)), (float(p.detach().abs().max()), 1 / 16))
        with self.assertRaisesRegex(InvalidArgument, "fp8_dtype is 5"):
            optimizers.multi_tensor_adam_fp8(1, flag, [[p.grad for p in want], codes, *state, masters, scales, amaxes, inverses], 0.1, 0.9, 0.999, 1e-8, 1,
                                             1, 1, 0.0, 5)

    def test_lists_of_unequal_length(self):
        with self.assertRaisesRegex(InvalidArgument, r"\[2, 1\]"):
            optimizers.multi_tensor_applier(optimizers.multi_tensor_scale, None, [params()[:2], params()[:1]], 1.0)
