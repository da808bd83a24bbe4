"""Tests te_fl.pytorch.MoELayer against a loop over its experts in FP64, in BF16 and FP8; its state, recomputation, graphs and errors."""

import copy
import pathlib
import pickle
import subprocess
import sys
import unittest

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch_oracle import DEVICES, randn

import te_fl.pytorch as te
from te_fl.common.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling, MXFP8BlockScaling
from te_fl.errors import FailedPrecondition, InvalidArgument, Unsupported

RECIPES = (None, DelayedScaling(amax_history_len=4), Float8CurrentScaling(), Float8BlockScaling(), MXFP8BlockScaling())
ROOT = pathlib.Path(__file__).resolve().parents[3]
HIDDEN, FFN, TOKENS = 32, 48, 21
torch.set_num_threads(1)  # the matrices are too small for more threads


def layer(experts=4, top_k=2, seed=0, **options):
    torch.manual_seed(seed)
    made = te.MoELayer(HIDDEN, FFN, experts, top_k, **{"device": "cpu", "init_method": lambda w: torch.nn.init.normal_(w, std=0.3), **options})
    with torch.no_grad():
        for name, p in made.named_parameters():
            if "bias" in name:
                p.normal_(std=0.3)
    return made


def mlp(x, activation, w1, b1, w2, b2):
    pre = F.linear(x, w1, b1)
    if activation == "swiglu":
        a, b = pre.chunk(2, -1)
        act = F.silu(a) * b
    else:
        act = F.gelu(pre, approximate="tanh")
    return F.linear(act, w2, b2)


def loop(m, x, params):
    """The output and the auxiliary loss of m by a loop over its experts, on FP64 values of its parameters."""
    logits = x @ params["router_weight"].T
    bias = m.expert_bias.double() if m.enable_expert_bias else 0
    if m.score_function == "softmax":
        scores = logits.softmax(-1) if m.use_pre_softmax else logits
    else:
        scores = logits.sigmoid()
    chosen = (scores + bias).topk(m.top_k, -1).indices
    own = scores.gather(1, chosen)
    if m.score_function == "softmax":
        own = own if m.use_pre_softmax else own.softmax(-1)
    elif m.top_k > 1:
        own = own / own.sum(-1, keepdim=True)
    probs = torch.zeros_like(logits).scatter(1, chosen, own * m.scaling_factor)
    y = torch.zeros_like(x)
    for e in range(m.num_experts):
        def part(name, e=e):
            if name in params:
                return params[name][e]
            return params.get(f"{name}{e}")
        y = y + probs[:, e:e + 1] * mlp(x, m.activation, part("fc1_weight"), part("fc1_bias"), part("fc2_weight"), part("fc2_bias"))
    if m.shared_ffn_hidden_size:
        shared = mlp(x, m.activation, params["shared_fc1_weight"], params.get("shared_fc1_bias"), params["shared_fc2_weight"], params.get("shared_fc2_bias"))
        y = y + (shared * (x @ params["shared_gate_weight"].T).sigmoid() if m.shared_expert_gate else shared)
    load = torch.zeros_like(logits).scatter(1, chosen, 1.0).sum(0)
    every = logits.softmax(-1) if m.score_function == "softmax" else scores / scores.sum(-1, keepdim=True)
    n = x.shape[0]
    loss = m.aux_loss_coeff * m.num_experts / (m.top_k * n * n) * (load * every.sum(0)).sum()
    return y, loss + m.z_loss_coeff * logits.logsumexp(-1).square().mean()


def call(m, x, recipe=None):
    with te.autocast(enabled=recipe is not None, recipe=recipe):
        y = m(x)
    return y if isinstance(y, tuple) else (y, torch.zeros(()))


def distance(a, b):
    return float((a.detach().double() - b.detach().double()).norm() / b.detach().double().norm())


class AgainstALoop(unittest.TestCase):
    def check(self, m, recipe=None, tolerance=2e-5, dtype=torch.float32):
        device = m.router_weight.device
        x = randn(3, TOKENS // 3, HIDDEN, dtype=dtype, device=device).requires_grad_()
        grad = randn(*x.shape, seed=5, dtype=dtype, device=device)
        y, loss = call(m, x, recipe)
        self.assertEqual((y.dtype, y.shape), (dtype, x.shape))
        ((y * grad).sum() + 3 * loss).backward()
        params = {n: p.detach().double().requires_grad_() for n, p in m.named_parameters()}
        own = x.detach().double().requires_grad_()
        want, want_loss = loop(m, own.view(-1, HIDDEN), params)
        ((want * grad.double().view(-1, HIDDEN)).sum() + 3 * want_loss).backward()
        self.assertLess(distance(y.view(-1, HIDDEN), want), tolerance)
        self.assertAlmostEqual(loss.item(), want_loss.item(), delta=1e-5 + tolerance * abs(want_loss.item()))
        self.assertLess(distance(x.grad, own.grad), tolerance)
        for name, p in m.named_parameters():
            # in FP8, small gradients of the router are differences of rounded numbers
            self.assertLess(distance(p.grad, params[name].grad), tolerance * (5 if name == "router_weight" and recipe else 1), name)

    def test_options(self):
        for options in ({}, {"bias": True}, {"single_grouped_weight": False}, {"single_grouped_weight": False, "bias": True}, {"activation": "gelu"},
                        {"use_pre_softmax": True, "scaling_factor": 2.0}, {"score_function": "sigmoid", "expert_bias": True},
                        {"aux_loss_coeff": 0.5}, {"z_loss_coeff": 0.1, "aux_loss_coeff": 0.5}, {"shared_ffn_hidden_size": 16},
                        {"shared_ffn_hidden_size": 16, "shared_expert_gate": True, "bias": True}, {"experts": 4, "top_k": 4},
                        {"experts": 24, "top_k": 1, "score_function": "sigmoid"}):
            for device in DEVICES:
                with self.subTest(options, device=device):
                    self.check(layer(device=device, **options))

    def test_dtypes_and_recipes(self):
        for device in DEVICES:
            self.check(layer(params_dtype=torch.bfloat16, device=device), dtype=torch.bfloat16, tolerance=2e-2)
            for recipe in RECIPES[1:]:
                with self.subTest(type(recipe).__name__, device=device):
                    m = layer(shared_ffn_hidden_size=16, device=device)
                    for _ in range(2):  # delayed scaling gets its scales
                        call(m, randn(TOKENS, HIDDEN, device=device), recipe)[0].backward(randn(TOKENS, HIDDEN, seed=5, device=device))
                        m.zero_grad()
                    self.check(m, recipe, tolerance=0.12)

    def test_experts_are_grouped_linear_in_fp8(self):
        """The output in FP8 is that of the same padded rows through GroupedLinear: each expert has scales of its own."""
        for recipe in RECIPES[1:]:
            m, x = layer(4, 1, score_function="sigmoid", single_grouped_weight=False), randn(16, HIDDEN)
            fc1, fc2 = (te.GroupedLinear(4, i, o, bias=False, device="cpu") for i, o in ((HIDDEN, 2 * FFN), (FFN, HIDDEN)))
            with torch.no_grad():
                for i in range(4):
                    getattr(fc1, f"weight{i}").copy_(getattr(m, f"fc1_weight{i}"))
                    getattr(fc2, f"weight{i}").copy_(getattr(m, f"fc2_weight{i}"))
                m.router_weight.zero_()
                m.router_weight[2] = 1e-3  # all tokens whose sum is positive go to expert 2, the others to expert 0
            score = (x @ m.router_weight.T).sigmoid()
            chosen = score.argmax(-1)
            order, counts = torch.sort(chosen, stable=True).indices, torch.bincount(chosen, minlength=4)
            padded = [-(-int(c) // 16) * 16 for c in counts]
            rows, at, begin = x.new_zeros(sum(padded), HIDDEN), 0, 0
            places = []
            for c, p in zip(counts.tolist(), padded):
                rows[at:at + c] = x[order[begin:begin + c]]
                places += range(at, at + c)
                at, begin = at + p, begin + c
            factors = rows.new_zeros(len(rows))
            factors[places] = score[order, chosen[order]]
            with torch.no_grad(), te.autocast(recipe=recipe):
                got = m(x)
                a, b = fc1(rows, padded).chunk(2, -1)
                want = fc2(F.silu(a) * b * factors[:, None], padded)[places]
            self.assertLess(distance(got[order], want), 1e-2)  # the activation's rounding may differ, and with it a code


class State(unittest.TestCase):
    def test_round_trip_between_both_forms(self):
        options = {"bias": True, "score_function": "sigmoid", "expert_bias": True, "shared_ffn_hidden_size": 16}
        x = randn(TOKENS, HIDDEN)
        for recipe in (None, DelayedScaling(amax_history_len=4)):
            one = layer(**options)
            one.expert_bias.uniform_(-1, 1)
            call(one, x.clone().requires_grad_(), recipe)[0].sum().backward()
            for single in (True, False):
                other = layer(seed=1, single_grouped_weight=single, **options)
                other.load_state_dict(one.state_dict())
                again = layer(seed=2, **options)
                again.load_state_dict(other.state_dict())
                with torch.no_grad():
                    want = call(copy.deepcopy(one), x, recipe)[0]
                    self.assertTrue(torch.equal(call(other, x, recipe)[0], want))
                    self.assertTrue(torch.equal(call(again, x, recipe)[0], want))

    def test_one_parameter_for_all_experts(self):
        m = layer(128, 8, bias=True)
        self.assertEqual({n: tuple(p.shape) for n, p in m.named_parameters()},
                         {"router_weight": (128, 32), "fc1_weight": (128, 96, 32), "fc1_bias": (128, 96), "fc2_weight": (128, 32, 48),
                          "fc2_bias": (128, 32)})
        y = m(randn(4, HIDDEN))
        edges = y.grad_fn.next_functions
        self.assertLessEqual(len([f for f in edges if f[0] is not None]), 5)

    def test_expert_bias(self):
        m = layer(score_function="sigmoid", expert_bias=True).to(torch.bfloat16)
        self.assertEqual(m.expert_bias.dtype, torch.float32)
        x = randn(TOKENS, HIDDEN, dtype=torch.bfloat16)
        m(x).sum().backward()
        for reentrant in (False, True):  # each counts once
            torch.utils.checkpoint.checkpoint(m, x.clone().requires_grad_(), use_reentrant=reentrant).sum().backward()
        tokens = m.local_tokens_per_expert.clone()
        self.assertEqual(int(tokens.sum()), 3 * 2 * TOKENS)
        with torch.no_grad():
            m(x)
        m.eval()(x)
        self.assertTrue(torch.equal(m.local_tokens_per_expert, tokens))
        m.update_expert_bias(rate=0.5)
        self.assertTrue(torch.equal(m.expert_bias, 0.5 * torch.sign(tokens.float().mean() - tokens.float())))
        self.assertEqual(int(m.local_tokens_per_expert.sum()), 0)
        self.assertIn("expert_bias", m.state_dict())
        self.assertNotIn("local_tokens_per_expert", m.state_dict())

    def test_meta(self):
        m = te.MoELayer(HIDDEN, FFN, 4, device="meta", score_function="sigmoid", expert_bias=True)
        m.to_empty(device="cpu")
        m.expert_bias.fill_(7)
        m.reset_parameters()
        self.assertFalse(m.expert_bias.any() or m.local_tokens_per_expert.any())
        self.assertLess(abs(float(m.fc1_weight.std()) - 0.023), 0.002)
        self.assertTrue(m(randn(TOKENS, HIDDEN)).isfinite().all())

    def test_copies(self):
        m = te.MoELayer(HIDDEN, FFN, 4, device="cpu", aux_loss_coeff=0.1)
        x = randn(TOKENS, HIDDEN)
        want = m(x)
        for other in (copy.deepcopy(m), pickle.loads(pickle.dumps(m))):
            for a, b in zip(other(x), want, strict=True):
                self.assertTrue(torch.equal(a, b))

    def test_frozen_experts(self):
        m = layer(single_grouped_weight=False)
        m.fc1_weight1.requires_grad_(False)
        m(randn(TOKENS, HIDDEN)).sum().backward()
        self.assertIsNone(m.fc1_weight1.grad)
        self.assertIsNotNone(m.fc1_weight2.grad)
        whole = layer()
        whole.fc2_weight.requires_grad_(False)
        x = randn(TOKENS, HIDDEN).requires_grad_()
        whole(x).sum().backward()
        self.assertIsNone(whole.fc2_weight.grad)
        self.assertTrue(x.grad.any() and whole.fc1_weight.grad.any())

    def test_main_grad(self):
        m, other = layer(fuse_wgrad_accumulation=True), layer()
        for p in m.parameters():
            p.main_grad = torch.ones(p.shape)
        x = randn(TOKENS, HIDDEN)
        m(x).sum().backward()
        other(x).sum().backward()
        for name in ("fc1_weight", "fc2_weight", "router_weight"):
            torch.testing.assert_close(getattr(m, name).main_grad, 1 + getattr(other, name).grad)

    def test_delayed_gradients(self):
        m, other, x = layer(delay_wgrad_compute=True), layer(), randn(TOKENS, HIDDEN)
        m(x).sum().backward()
        other(x).sum().backward()
        self.assertIsNone(m.fc1_weight.grad)
        m.backward_dw()
        for name, p in m.named_parameters():
            self.assertTrue(torch.equal(p.grad, getattr(other, name).grad), name)


class Behaviour(unittest.TestCase):
    def test_recomputed_equals_kept(self):
        for recipe in RECIPES:
            for reentrant in (False, True):
                with self.subTest(recipe=type(recipe).__name__, reentrant=reentrant):
                    kept, again = (layer(aux_loss_coeff=0.5, shared_ffn_hidden_size=16) for _ in range(2))
                    results = []
                    for m, checkpoints in ((kept, False), (again, True)):
                        x = randn(TOKENS, HIDDEN).requires_grad_()
                        with te.autocast(enabled=recipe is not None, recipe=recipe):
                            y, loss = te.checkpoint(m, x, use_reentrant=reentrant) if checkpoints else m(x)
                        (y.square().sum() + loss).backward()
                        results.append([y, loss, x.grad, *(p.grad for p in m.parameters())])
                    for a, b in zip(*results, strict=True):
                        self.assertTrue(torch.equal(a, b))

    def test_the_loss_alone(self):
        m = layer(aux_loss_coeff=1.0)
        _, loss = m(randn(TOKENS, HIDDEN))
        loss.backward()
        self.assertTrue(m.router_weight.grad.any())
        self.assertFalse(m.fc1_weight.grad.any())
        m.zero_grad()
        y, _ = m(randn(TOKENS, HIDDEN))
        y.sum().backward()
        plain = layer()
        plain(randn(TOKENS, HIDDEN)).sum().backward()
        self.assertTrue(torch.equal(m.router_weight.grad, plain.router_weight.grad))

    def test_loads(self):
        m = layer(score_function="sigmoid", expert_bias=True)
        m.expert_bias.copy_(torch.tensor([9.0, 9.0, 0.0, 0.0]))
        m(randn(TOKENS, HIDDEN)).sum().backward()
        self.assertEqual(m.local_tokens_per_expert.tolist(), [TOKENS, TOKENS, 0, 0])
        self.assertTrue(m.fc1_weight.grad[:2].any())
        self.assertFalse(m.fc1_weight.grad[2:].any())
        x = torch.empty(0, HIDDEN, requires_grad=True)
        y = m(x)
        y.sum().backward()
        self.assertEqual((y.shape, x.grad.shape), ((0, HIDDEN), (0, HIDDEN)))

    def test_a_token_of_nans(self):
        m, x = layer(), randn(TOKENS, HIDDEN)
        want = m(x)
        x[3] = float("nan")
        got = m(x)
        others = torch.arange(TOKENS) != 3
        self.assertTrue(got[3].isnan().all())
        self.assertTrue(torch.equal(got[others], want[others]))

    def test_compiled(self):
        m, x = layer(aux_loss_coeff=0.5), randn(TOKENS, HIDDEN)
        def step(x):
            y, loss = m(2 * x)
            return y + 1, loss
        for got, want in zip(torch.compile(step, backend="eager")(x), step(x), strict=True):
            torch.testing.assert_close(got, want)

    def test_bad_input(self):
        x = randn(4, HIDDEN)
        for words, error, call in (
                ("top_k is 5; it is at most num_experts, 4", InvalidArgument, lambda: layer(4, 5)),
                ("num_experts is 0", ValueError, lambda: layer(0)),
                ("num_groups is 2; group_topk is None", InvalidArgument, lambda: layer(num_groups=2)),
                ("num_groups is 3; it divides num_experts, 4", InvalidArgument, lambda: layer(num_groups=3, group_topk=1)),
                ("the 1 chosen groups have 1 experts", InvalidArgument, lambda: layer(num_groups=4, group_topk=1)),
                ("score_function is 'tanh'; it is one of", InvalidArgument, lambda: layer(score_function="tanh")),
                ("activation is 'swish'; it is one of", InvalidArgument, lambda: layer(activation="swish")),
                ("use_pre_softmax is True", InvalidArgument, lambda: layer(score_function="sigmoid", use_pre_softmax=True)),
                ("expert_bias is True", InvalidArgument, lambda: layer(expert_bias=True)),
                ("aux_loss_coeff is -1.0", InvalidArgument, lambda: layer(aux_loss_coeff=-1)),
                ("scaling_factor is nan", InvalidArgument, lambda: layer(scaling_factor=float("nan"))),
                ("shared_ffn_hidden_size is -3", InvalidArgument, lambda: layer(shared_ffn_hidden_size=-3)),
                ("shared_expert_gate is True", InvalidArgument, lambda: layer(shared_expert_gate=True)),
                ("did you mean 'num_experts'", TypeError, lambda: te.MoELayer(8, 8, num_expert=2)),
                ("its last dimension is hidden_size = 32", InvalidArgument, lambda: layer()(randn(4, 16))),
                ("must be a torch.Tensor", TypeError, lambda: layer()([1.0])),
                ("torch.float64", NotImplementedError, lambda: layer()(x.double())),
                ("create it with expert_bias=True", FailedPrecondition, lambda: layer().update_expert_bias())):
            with self.subTest(words), self.assertRaisesRegex(error, words):
                call()
        with te.quantized_model_init(), self.assertRaisesRegex(Unsupported, "single_grouped_weight = True"):
            layer()


class Example(unittest.TestCase):
    def test_the_page(self):
        program, names = (ROOT / "docs" / "mixtures.md").read_text().split("```python\n")[1].split("```")[0], {}
        exec(compile(program, "docs/mixtures.md", "exec"), names)
        self.assertTrue(names["layer"].fc1_weight.grad.any())

    def test_learns(self):
        for arguments in (("none",), ("delayed",), ("current", "--balance", "bias"), ("block",)):
            run = subprocess.run([sys.executable, str(ROOT / "examples" / "pytorch" / "moe.py"), "--device", "cpu", "--steps", "31", "--experts", "4",
                                  "--recipe", *arguments], capture_output=True, text=True, timeout=300)
            self.assertEqual(run.returncode, 0, run.stderr)
            losses = [float(line.split("loss ")[1].split()[0]) for line in run.stdout.splitlines() if "loss " in line]
            self.assertLess(losses[-1], 0.75 * losses[0], run.stdout)
            self.assertIn("ops run by default.cpu", run.stdout)


if __name__ == "__main__":
    unittest.main()
