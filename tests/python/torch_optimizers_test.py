"""FusedAdam and FusedSGD against PyTorch's own in FP64, and what of their state can be saved, loaded and looked at."""

import copy
import unittest

import torch

from te_fl.errors import InvalidArgument, Unsupported
from te_fl.pytorch import optimizers

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = ((5, 7), (3,), (0, 4), (33, 2))


def params(dtype=torch.float32, shapes=SHAPES):
    generator = torch.Generator().manual_seed(1)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).to(DEVICE, dtype)) for shape in shapes]


def give_grads(given, step, dtype=None):
    generator = torch.Generator().manual_seed(step)
    for p in given:
        grad = torch.randn(p.shape, generator=generator).to(torch.bfloat16)  # exact in every dtype of the test
        p.grad = grad.to(p.device, dtype or p.dtype)


def steps(optimizer, given, first=0, count=4):
    for step in range(first, first + count):
        give_grads(given, step)
        optimizer.step()
    return given


def wide(given):
    return [torch.nn.Parameter(p.detach().double()) for p in given]


class Compared(unittest.TestCase):
    def same(self, given, oracle, **tolerance):
        for p, want in zip(given, oracle):
            torch.testing.assert_close(p.detach().double(), want.detach(), **(tolerance or dict(atol=2e-6, rtol=2e-6)))


class Adam(Compared):
    def test_against_pytorch(self):
        options = dict(lr=0.01, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1)
        for decoupled, kind in ((True, torch.optim.AdamW), (False, torch.optim.Adam)):
            given = params()
            oracle = wide(given)
            steps(optimizers.FusedAdam(given, adam_w_mode=decoupled, **options), given)
            self.same(given, steps(kind(oracle, **options), oracle))

    def test_defaults(self):
        given = params()
        oracle = wide(given)
        steps(optimizers.FusedAdam(given), given)
        self.same(given, steps(torch.optim.AdamW(oracle, weight_decay=0.0), oracle))

    def test_without_bias_correction(self):
        given = params(shapes=((4,),))
        before = given[0].detach().double()
        give_grads(given, 0)
        g = given[0].grad.double()
        optimizers.FusedAdam(given, lr=0.1, bias_correction=False).step()
        self.same(given, [before - 0.1 * (0.1 * g) / ((0.001 * g * g).sqrt() + 1e-8)])

    def test_param_groups_and_missing_gradients(self):
        given = params()
        oracle = wide(given)
        groups = lambda ps: [{"params": ps[:2], "lr": 0.1}, {"params": ps[2:]}, {"params": []}]
        served, wanted = optimizers.FusedAdam(groups(given), lr=0.01), torch.optim.AdamW(groups(oracle), lr=0.01, weight_decay=0)
        for step in range(3):
            give_grads(given, step)
            give_grads(oracle, step)
            given[1].grad = oracle[1].grad = None
            served.step()
            wanted.step()
        self.same(given, oracle)
        self.assertEqual([group["step"] for group in served.param_groups], [3, 3, 3])
        self.assertNotIn(given[1], served.state)

    def test_low_precision_with_master_weights(self):
        for dtype in (torch.bfloat16, torch.float16):
            given = params(dtype)
            oracle = wide(given)
            optimizer = optimizers.FusedAdam(given, lr=1e-3, master_weights=True)
            steps(optimizer, given)
            steps(torch.optim.AdamW(oracle, lr=1e-3, weight_decay=0), oracle)
            masters = [optimizer.state[p]["master_param"] for p in given]
            self.same(masters, oracle)
            for p, master in zip(given, masters):
                self.assertTrue(torch.equal(p.detach(), master.to(dtype)))

    def test_parameters_of_several_dtypes(self):
        given = params() + params(torch.bfloat16) + params(torch.float16)
        oracle = wide(given)
        optimizer = optimizers.FusedAdam(given, lr=1e-3, master_weights=True)
        steps(optimizer, given)
        steps(torch.optim.AdamW(oracle, lr=1e-3, weight_decay=0), oracle)
        self.same([optimizer.state[p].get("master_param", p) for p in given], oracle)

    def test_decoupled_gradients(self):
        given = params(torch.bfloat16)
        oracle = wide(given)
        optimizer = optimizers.FusedAdam(given, lr=1e-2, master_weights=True, use_decoupled_grad=True)
        give_grads(given, 0)
        give_grads(oracle, 0)
        for p in given:
            p.decoupled_grad, p.grad = p.grad.float(), None
        optimizer.step()
        torch.optim.AdamW(oracle, lr=1e-2, weight_decay=0).step()
        self.same([optimizer.state[p]["master_param"] for p in given], oracle)
        optimizer.zero_grad(set_to_none=False)
        self.assertEqual(float(given[0].decoupled_grad.abs().sum()), 0)
        optimizer.zero_grad()
        self.assertIsNone(given[0].decoupled_grad)

    def test_capturable(self):
        given = params()
        oracle = wide(given)
        optimizer = optimizers.FusedAdam(given, lr=0.01, capturable=True)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        wanted = torch.optim.AdamW(oracle, lr=0.01, weight_decay=0)
        for step in range(4):
            give_grads(given, step)
            give_grads(oracle, step)
            wanted.param_groups[0]["lr"] = 0.01 if step < 2 else 0.005
            optimizer.step()
            wanted.step()
            schedule.step()
        self.same(given, oracle)
        self.assertEqual(int(optimizer.param_groups[0]["step"]), 4)

    def test_a_loss_scale_and_a_skipped_step(self):
        given = params(torch.float32)
        oracle = wide(given)
        optimizer = optimizers.FusedAdam(given, lr=0.01, capturable=True)
        wanted = torch.optim.AdamW(oracle, lr=0.01, weight_decay=0)
        scaler = torch.amp.GradScaler(DEVICE, init_scale=1024.0, growth_interval=100)
        for step in range(3):
            give_grads(given, step)
            scaler.scale(torch.ones((), device=DEVICE))
            for p in given:
                p.grad *= scaler.get_scale()
            if step == 1:
                given[0].grad[0, 0] = float("inf")
            optimizer.step(grad_scaler=scaler)
            scaler.update()
            if step != 1:
                give_grads(oracle, step)
                wanted.step()
        self.same(given, oracle)
        self.assertEqual(int(optimizer.param_groups[0]["step"]), 2)
        self.assertEqual(scaler.get_scale(), 512.0)

    def test_state_travels(self):
        for master in (False, True):
            given = params(torch.bfloat16)
            optimizer = optimizers.FusedAdam(given, lr=0.01, master_weights=master)
            steps(optimizer, given)
            others = [torch.nn.Parameter(p.detach().clone()) for p in given]
            other = optimizers.FusedAdam(others, master_weights=master)
            saved = copy.deepcopy(optimizer.state_dict())
            self.assertEqual(set(saved["state"][0]), {"exp_avg", "exp_avg_sq", "master_param"} if master else {"exp_avg", "exp_avg_sq"})
            self.assertEqual(saved["param_groups"][0]["step"], 4)
            other.load_state_dict(saved)
            self.assertEqual(other.state[others[0]]["exp_avg"].dtype, torch.float32)
            steps(optimizer, given, first=4)
            steps(other, others, first=4)
            for a, b in zip(given, others):
                self.assertTrue(torch.equal(a, b))

    def test_state_goes_on_as_capturable(self):
        given = params()
        optimizer = optimizers.FusedAdam(given, lr=0.01)
        steps(optimizer, given)
        others = [torch.nn.Parameter(p.detach().clone()) for p in given]
        other = optimizers.FusedAdam(others, capturable=True)
        other.load_state_dict(optimizer.state_dict())
        steps(optimizer, given, first=4)
        steps(other, others, first=4)
        self.same(others, [p.double() for p in given], atol=1e-7, rtol=1e-7)

    def test_state_without_master_weights_gets_them(self):
        given = params(torch.bfloat16)
        optimizer = optimizers.FusedAdam(given, lr=0.01)
        steps(optimizer, given)
        other = optimizers.FusedAdam(given, master_weights=True)
        other.load_state_dict(optimizer.state_dict())
        self.assertTrue(torch.equal(other.state[given[0]]["master_param"], given[0].detach().float()))

    def test_state_by_name(self):
        given = params(torch.bfloat16)
        optimizer = optimizers.FusedAdam(given, master_weights=True)
        optimizer.initialize_state(given[0], False)
        optimizer.set_scaled_state(given[0], "exp_avg", torch.full(given[0].shape, 0.1))
        self.assertEqual(float(optimizer.get_unscaled_state(given[0], "exp_avg")[0, 0]), float(torch.tensor(0.1)))

    def test_autograd_sees_the_write(self):
        given = params(shapes=((4,),))
        product = (given[0] * given[0]).sum()
        give_grads(given, 0)
        optimizers.FusedAdam(given).step()
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
        # One rank plays them all, on the CPU, where Gloo has every collective: memory, gradient and state are the local part's.
        import torch.distributed as dist
        from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
        dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
        self.addCleanup(dist.destroy_process_group)
        mesh = dist.init_device_mesh("cpu", (1,))
        plain = [torch.nn.Parameter(p.detach().cpu()) for p in params()]
        given = [torch.nn.Parameter(distribute_tensor(p.detach().clone(), mesh, [Shard(0) if p.dim() > 1 else Replicate()])) for p in plain]
        served, alone = optimizers.FusedAdam(given, lr=0.1), optimizers.FusedAdam(plain, lr=0.1)
        for step in range(2):
            give_grads(plain, step)
            for p, q in zip(given, plain):
                p.grad = distribute_tensor(q.grad.clone(), mesh, p.placements)
            served.step()
            alone.step()
        for p, q in zip(given, plain):
            self.assertTrue(torch.equal(p.full_tensor(), q))
        self.assertIsInstance(served.state[given[0]]["exp_avg"], DTensor)
        served.load_state_dict(copy.deepcopy(served.state_dict()))
        self.assertIsInstance(served.state[given[0]]["exp_avg"], DTensor)

    def test_closures(self):
        given = params(shapes=((4,),))
        optimizer = optimizers.FusedAdam(given, lr=0.1)
        def closure():
            optimizer.zero_grad()
            loss = given[0].square().sum()
            loss.backward()
            return loss
        first = float(optimizer.step(closure).detach())
        self.assertLess(float(optimizer.step(closure).detach()), first)

    def test_zero_grad(self):
        given = params()
        with self.assertWarnsRegex(DeprecationWarning, "set_grad_none"):
            optimizer = optimizers.FusedAdam(given, set_grad_none=False)
        give_grads(given, 0)
        optimizer.zero_grad()
        self.assertEqual(float(given[0].grad.abs().sum()), 0)
        with self.assertRaisesRegex(InvalidArgument, "set_to_none=True"):
            optimizer.zero_grad(set_to_none=True)
        other = optimizers.FusedAdam(given)
        other.zero_grad()
        self.assertIsNone(given[0].grad)

    def test_what_is_refused(self):
        for option in (dict(amsgrad=True), dict(master_weight_dtype=torch.float16), dict(exp_avg_dtype=torch.bfloat16),
                       dict(exp_avg_sq_dtype=torch.uint8), dict(store_param_remainders=True)):
            with self.assertRaisesRegex(Unsupported, next(iter(option))):
                optimizers.FusedAdam(params(), **option)
        given = [torch.nn.Parameter(torch.randn(4, 5, device=DEVICE).t())]
        give_grads(given, 0)
        with self.assertRaisesRegex(Unsupported, "not contiguous"):
            optimizers.FusedAdam(given).step()
        given = [torch.nn.Parameter(torch.randn(4, dtype=torch.float64, device=DEVICE))]
        give_grads(given, 0)
        with self.assertRaisesRegex(Unsupported, "float64"):
            optimizers.FusedAdam(given).step()


class SGD(Compared):
    def test_against_pytorch(self):
        for options in (dict(lr=0.1), dict(lr=0.1, weight_decay=0.1), dict(lr=0.1, momentum=0.9, weight_decay=0.1),
                        dict(lr=0.1, momentum=0.9, dampening=0.5), dict(lr=0.1, momentum=0.9, nesterov=True)):
            with self.subTest(**options):
                given = params()
                oracle = wide(given)
                steps(optimizers.FusedSGD(given, **options), given)
                self.same(given, steps(torch.optim.SGD(oracle, **options), oracle), atol=1e-5, rtol=1e-5)

    def test_weight_decay_after_momentum(self):
        given = params(shapes=((4,),))
        p, m = given[0].detach().double(), 0
        optimizer = optimizers.FusedSGD(given, lr=0.1, momentum=0.9, weight_decay=0.1, wd_after_momentum=True)
        for step in range(3):
            give_grads(given, step)
            g = given[0].grad.double()
            m = g if step == 0 else 0.9 * m + g
            p = p - 0.1 * (m + 0.1 * p)
            optimizer.step()
        self.same(given, [p])

    def test_a_gradient_that_comes_later(self):
        given = params(shapes=((4,), (3,)))
        oracle = wide(given)
        served, wanted = optimizers.FusedSGD(given, lr=0.1, momentum=0.9), torch.optim.SGD(oracle, lr=0.1, momentum=0.9)
        for step in range(3):
            give_grads(given, step)
            give_grads(oracle, step)
            if step == 0:
                given[1].grad = oracle[1].grad = None
            served.step()
            wanted.step()
        self.same(given, oracle)

    def test_state_travels(self):
        given = params(torch.bfloat16)
        optimizer = optimizers.FusedSGD(given, lr=0.1, momentum=0.9)
        steps(optimizer, given)
        others = [torch.nn.Parameter(p.detach().clone()) for p in given]
        other = optimizers.FusedSGD(others, lr=0.5)
        other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        steps(optimizer, given, first=4)
        steps(other, others, first=4)
        for a, b in zip(given, others):
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


class Lists(Compared):
    def test_scale_and_norms(self):
        given = [p.detach() for p in params()]
        out, flag = [torch.empty_like(p) for p in given], torch.zeros(1, dtype=torch.int32, device=DEVICE)
        applier = optimizers.multi_tensor_applier
        applier(optimizers.multi_tensor_scale, flag, [given, out], 0.5)
        for p, half in zip(given, out):
            self.assertTrue(torch.equal(half, p * 0.5))
        self.assertEqual(int(flag), 0)
        norm, each = applier(optimizers.multi_tensor_l2norm, flag, [given], True)
        torch.testing.assert_close(float(norm), float(torch.cat([p.double().flatten() for p in given]).norm()), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(each.double(), torch.stack([p.double().norm() for p in given if p.numel()]), atol=1e-5, rtol=1e-5)
        norm, each = applier(optimizers.multi_tensor_unscale_l2norm, flag, [given], torch.full((1,), 2.0, device=DEVICE))
        torch.testing.assert_close(float(norm), 2 * float(torch.cat([p.double().flatten() for p in given]).norm()), atol=1e-5, rtol=1e-5)
        self.assertEqual(each.numel(), 0)
        given[0][0, 0] = float("nan")
        applier(optimizers.multi_tensor_scale, flag, [given, out], 0.5)
        self.assertEqual(int(flag), 1)

    def test_steps_on_lists_are_the_optimizers_steps(self):
        flag = torch.zeros(1, dtype=torch.int32, device=DEVICE)
        given, others = params(), params()
        steps(optimizers.FusedAdam(given, lr=0.1, weight_decay=0.1), given, count=1)
        give_grads(others, 0)
        state = [[torch.zeros_like(p.detach()) for p in others] for _ in range(2)]
        optimizers.multi_tensor_applier(optimizers.multi_tensor_adam, flag, [[p.grad for p in others], others, *state], 0.1, 0.9, 0.999,
                                        1e-8, 1, 1, 1, 0.1)
        for a, b in zip(given, others):
            self.assertTrue(torch.equal(a, b))
        steps(optimizers.FusedSGD(given, lr=0.1), given, count=1)
        optimizers.multi_tensor_applier(optimizers.multi_tensor_sgd, flag, [[p.grad for p in others], others, state[0]], 0.0, 0.0, 0.0, 0.1,
                                        False, True, False, 1.0)
        for a, b in zip(given, others):
            self.assertTrue(torch.equal(a, b))

    def test_lists_of_unequal_length(self):
        with self.assertRaisesRegex(InvalidArgument, r"\[2, 1\]"):
            optimizers.multi_tensor_applier(optimizers.multi_tensor_scale, None, [params()[:2], params()[:1]], 1.0)
