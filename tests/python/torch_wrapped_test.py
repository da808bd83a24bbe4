"""Tests te_fl.pytorch's modules in PyTorch's wrappers and programs, and the texts of errors."""

import copy
import os
import sys
import tempfile
import threading
import unittest
import warnings

import torch

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from torch_cases import BF16, MODULES, PRODUCTS, Each, gradients, make_input, scope  # noqa: E402
import torch_oracle as oracle  # noqa: E402
from torch_oracle import DEVICES, near, randn, randomise  # noqa: E402

import te_fl.pytorch as te  # noqa: E402
from te_fl.common.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling  # noqa: E402


class Wrapped(Each):
    """Tests PyTorch's wrappers on one rank."""

    @classmethod
    def setUpClass(cls):
        import torch.distributed as dist
        cls.folder = tempfile.TemporaryDirectory()
        dist.init_process_group("gloo", init_method=f"file://{cls.folder.name}/ranks", rank=0, world_size=1)

    @classmethod
    def tearDownClass(cls):
        torch.distributed.destroy_process_group()
        cls.folder.cleanup()

    def train(self, make, wrap, recipe):
        module = randomise(make())
        wrapped = wrap(module)
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
        outputs = []
        for seed in (1, 2, 3):
            optimizer.zero_grad()
            with scope(recipe):
                y = wrapped(make_input(seed=seed, dtype=next(module.parameters()).dtype).detach())
            y.square().mean().backward()
            optimizer.step()
            outputs.append(y.detach())
        return outputs

    def wrapped(self, wrap, **arguments):
        for name in PRODUCTS:
            for recipe in (None, DelayedScaling(amax_history_len=4)):
                with self.subTest(module=name, recipe=type(recipe).__name__):
                    make = lambda: MODULES[name](device="cpu", **arguments)  # noqa: E731
                    self.same(self.train(make, wrap, recipe), self.train(make, lambda m: m, recipe))

    def test_ddp(self):
        self.wrapped(lambda m: torch.nn.parallel.DistributedDataParallel(m))

    def sharded(self):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
        mesh = init_device_mesh("cpu", (1,))
        try:  # tests whether PyTorch's own layer can be wrapped here
            plain = fully_shard(torch.nn.Linear(4, 4), mesh=mesh)
            plain(torch.zeros(2, 4)).sum().backward()
        except Exception as error:
            self.skipTest(f"PyTorch cannot here: {error}")
        return lambda m: fully_shard(m, mesh=mesh)

    def test_fsdp2(self):
        self.wrapped(self.sharded())

    def test_fsdp2_in_bf16(self):
        """FSDP gathers shards by writing to memory without changing its version counter."""
        self.wrapped(self.sharded(), params_dtype=BF16)

    def test_fsdp2_reads_what_was_written(self):
        shard = self.sharded()
        for name in PRODUCTS:
            for recipe in (None, Float8CurrentScaling(), Float8BlockScaling()):
                for autocast in (False, True):
                    with self.subTest(module=name, recipe=type(recipe).__name__, autocast=autocast):
                        outputs = []
                        for wrap in (shard, lambda m: m):
                            module = wrap(randomise(MODULES[name](device="cpu"))).eval()
                            with torch.no_grad(), scope(recipe), torch.autocast("cpu", dtype=BF16, enabled=autocast):
                                x = make_input().detach()
                                module(x)
                                module(x)
                                for p in module.parameters():
                                    p.mul_(1.5)
                                outputs.append(module(x))
                        self.same(*([y] for y in outputs))

    def test_ddp_with_views_as_buckets(self):
        self.wrapped(lambda m: torch.nn.parallel.DistributedDataParallel(m, gradient_as_bucket_view=True))


class Uses(Each):
    """Tests uses of modules other than calling them."""

    def test_tied_parameters(self):
        for recipe in (None, Float8CurrentScaling()):
            with self.subTest(recipe=type(recipe).__name__):
                one, two = (randomise(te.Linear(32, 32, bias=False, device="cpu"), seed) for seed in (1, 2))
                two.weight = one.weight
                x = make_input()
                with scope(recipe):
                    two(one(x)).sum().backward()
                got = one.weight.grad.clone()
                three = randomise(te.Linear(32, 32, bias=False, device="cpu"), 1)
                one.weight.grad = None
                x = make_input()
                with scope(recipe):
                    three(one(x)).sum().backward()
                near(self, got, one.weight.grad + three.weight.grad, 1e-6, "gradient")
                with torch.no_grad():
                    one.weight.mul_(2)
                    three.weight.mul_(2)
                    with scope(recipe):
                        self.assertTrue(torch.equal(two(x), three(x)))

    def test_replaced_parameters(self):
        for name in PRODUCTS:
            for recipe in (None, Float8CurrentScaling()):
                with self.subTest(module=name, recipe=type(recipe).__name__):
                    module, other = (randomise(MODULES[name](device="cpu"), seed) for seed in (1, 2))
                    x = make_input()
                    for mode in (True, False):
                        module.train(mode)
                        with scope(recipe), torch.no_grad():
                            module(x)
                            for path, p in list(other.named_parameters()):
                                owner = module.get_submodule(path.rpartition(".")[0])
                                setattr(owner, path.rpartition(".")[2], torch.nn.Parameter(p.detach().clone()))
                            self.assertTrue(torch.equal(module(x), other(x)))

    def test_parametrisations(self):
        from torch.nn.utils import parametrize

        class Doubled(torch.nn.Module):
            def forward(self, w):
                return 2 * w
        for name in ("Linear", "LayerNormLinear"):
            with self.subTest(module=name):
                module = randomise(MODULES[name](device="cpu"))
                parametrize.register_parametrization(module, "weight", Doubled())
                want = randomise(MODULES[name](device="cpu"))
                with torch.no_grad():
                    want.weight.mul_(2)
                x = make_input()
                y = module(x)
                self.assertTrue(torch.equal(y, want(x)))
                y.sum().backward()
                want(x).sum().backward()
                near(self, module.parametrizations.weight.original.grad, 2 * want.weight.grad, 1e-6, "gradient")

    def test_parametrisations_supply_what_they_compute(self):
        """With a parametrisation each forward gets a new weight tensor, perhaps at the previous one's address."""
        from torch.nn.utils import parametrize

        class Doubled(torch.nn.Module):
            def forward(self, w):
                return 2 * w
        module, plain = (randomise(te.Linear(32, 32, device="cpu")).eval() for _ in range(2))
        parametrize.register_parametrization(module, "weight", Doubled())
        x = make_input().detach()
        with torch.no_grad(), scope(Float8CurrentScaling()):
            for _ in range(20):
                plain.weight.copy_(2 * module.parametrizations.weight.original)
                self.assertTrue(torch.equal(module(x), plain(x)))
                module.parametrizations.weight.original.mul_(1.25)

    def test_copies_of_parametrised_modules(self):
        """Copies modules as AveragedModel does. PyTorch has its own copy function for parametrised modules."""
        from torch.nn.utils import parametrizations
        for name in ("Linear", "LayerNormLinear"):
            for recipe in (None, DelayedScaling(amax_history_len=4)):
                with self.subTest(module=name, recipe=type(recipe).__name__):
                    module = parametrizations.weight_norm(randomise(MODULES[name](device="cpu")))
                    for seed in (1, 2):
                        with scope(recipe):
                            module(make_input(seed=seed)).square().sum().backward()
                    other = copy.deepcopy(module)
                    outputs = []
                    for each in (module, other):
                        with scope(recipe):
                            outputs.append([each(make_input(seed=3)).detach()])
                    self.same(*outputs)

    def test_contents_of_parameters_are_swapped(self):
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            for name in PRODUCTS:
                with self.subTest(module=name):
                    module, other = (randomise(MODULES[name](device="cpu"), seed) for seed in (1, 2))
                    module(make_input()).sum().backward()
                    module.load_state_dict(other.state_dict())
                    x = make_input().detach()
                    self.same([module(x)], [other(x)])
                    module.to(BF16)
                    self.assertEqual(module(x.to(BF16)).dtype, BF16)
        finally:
            torch.__future__.set_swap_module_params_on_conversion(False)

    def test_the_output_of_attention_is_written(self):
        """The backward reads attention's output, so PyTorch refuses after a write to it, as for its own attention."""
        module, q = te.DotProductAttention(4, 8, attn_mask_type="no_mask", qkv_format="bshd"), randn(2, 6, 4, 8).requires_grad_()
        y = module(q, q, q)
        y.mul_(2)
        with self.assertRaisesRegex(RuntimeError, "inplace operation"):
            y.sum().backward()

    def test_in_inference_mode(self):
        for name in MODULES:
            for recipe in (None, Float8CurrentScaling()):
                with self.subTest(module=name, recipe=type(recipe).__name__):
                    module = randomise(MODULES[name](device="cpu"))
                    with scope(recipe):
                        want = module(make_input()).detach()
                        with torch.inference_mode():
                            x = make_input()
                            near(self, module(x), want, 1e-6, "output")
                            inside = randomise(MODULES[name](device="cpu"))
                            near(self, inside(x), want, 1e-6, "output")
                            for p in inside.parameters():
                                p.mul_(2)
                            for p in module.parameters():
                                p.data.mul_(2)
                            module.eval(), inside.eval()
                            self.assertTrue(torch.equal(inside(x), module(x)))
                            for p in (*inside.parameters(), *module.parameters()):
                                p.mul_(0.5)
                            near(self, inside(x), want, 1e-6, "output")
                            near(self, module(x), want, 1e-6, "output")

    def test_a_mask_in_inference_mode(self):
        module = te.DotProductAttention(4, 8, attn_mask_type="padding", qkv_format="bshd")
        with torch.inference_mode():
            q = randn(2, 6, 4, 8)
            mask = torch.zeros(2, 1, 1, 6, dtype=torch.bool)
            mask[0, ..., 4:] = True
            y = module(q, q, q, attention_mask=mask)
            near(self, y[0, :4], oracle.attention(q[:1, :4].double(), q[:1, :4].double(), q[:1, :4].double())[0], 1e-5, "output")
            mask[0, ..., 2:] = True
            y = module(q, q, q, attention_mask=mask)
            near(self, y[0, :2], oracle.attention(q[:1, :2].double(), q[:1, :2].double(), q[:1, :2].double())[0], 1e-5, "output")

    def test_a_mask_that_changes(self):
        module = te.DotProductAttention(4, 8, attn_mask_type="padding", qkv_format="bshd")
        q = randn(1, 6, 4, 8)
        mask = torch.zeros(1, 1, 1, 6, dtype=torch.bool)
        for length in (5, 3):
            mask[..., length:] = True
            near(self, module(q, q, q, attention_mask=mask)[0, :length], oracle.attention(*[q[:, :length].double()] * 3)[0], 1e-5, "output")

    def test_a_mask_written_unseen(self):
        # Writes to a mask that PyTorch's version counter misses: through NumPy, as a loader does, or through .data.
        writes = (lambda mask: mask.numpy()[..., 3:].fill(True), lambda mask: mask.data[..., 3:].fill_(True))
        for device in DEVICES:
            q = randn(1, 6, 4, 8, device=device)
            for write in writes[device == "cuda":]:
                for kind in ("padding", "no_mask", "causal"):
                    if device == "cuda" and kind != "padding":
                        continue  # on a GPU a device-side assertion refuses a mask that hides more keys than before
                    module = te.DotProductAttention(4, 8, attn_mask_type=kind, qkv_format="bshd")
                    mask = torch.zeros(1, 1, 1, 6, dtype=torch.bool, device=device)
                    module(q, q, q, attention_mask=mask)
                    write(mask)
                    want = te.DotProductAttention(4, 8, attn_mask_type=kind, qkv_format="bshd")(q, q, q, attention_mask=mask.clone())
                    with self.subTest(device=device, kind=kind):
                        got, length = module(q, q, q, attention_mask=mask), 3 if kind == "padding" else 6
                        near(self, got[0, :length], want[0, :length], 1e-6, "output")
                        if kind != "causal":
                            near(self, got[0, :3], oracle.attention(*[q[:, :3].double()] * 3)[0], 1e-5, "output")

    def test_anomaly_mode(self):
        with torch.autograd.detect_anomaly(check_nan=True), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            module, x = randomise(te.TransformerLayer(32, 64, 4, device="cpu")), make_input()
            module(x).sum().backward()

    def test_saved_on_the_host(self):
        for recipe in (None, Float8CurrentScaling()):
            module, x = randomise(te.LayerNormMLP(32, 64, device="cpu")), make_input()
            with scope(recipe):
                module(x).sum().backward()
            want = gradients(module, x)
            module.zero_grad()
            x.grad = None
            with torch.autograd.graph.save_on_cpu(), scope(recipe):
                y = module(x)
            y.sum().backward()
            self.same(gradients(module, x), want)

    def test_after_fork(self):
        """On Linux, DataLoader workers are forks of a process whose thread pools are running."""
        module, x = randomise(te.Linear(256, 256, device="cpu")), randn(64, 256)
        with torch.no_grad():
            want = module(x)
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                with torch.no_grad():
                    code = 0 if torch.equal(module(x), want) else 2
            finally:
                os._exit(code)
        deadline = threading.Timer(20, lambda: os.kill(pid, 9))
        deadline.start()
        _, status = os.waitpid(pid, 0)
        deadline.cancel()
        self.assertEqual(os.waitstatus_to_exitcode(status), 0)

    def test_compiled(self):
        for name in MODULES:
            with self.subTest(module=name):
                module, x = randomise(MODULES[name](device="cpu")), make_input()
                module(x).sum().backward()
                want = gradients(module, x)
                module.zero_grad()
                x.grad = None
                torch._dynamo.reset()
                torch.compile(module, backend="aot_eager", fullgraph=True)(x).sum().backward()
                self.same(gradients(module, x), want)


class Errors(unittest.TestCase):
    """Each error text names the argument, its value, and the rule or a solution."""

    def refused(self, *parts, kind=Exception):
        test = self

        class Context:
            def __enter__(self):
                return self

            def __exit__(self, type_, error, trace):
                test.assertIsNotNone(error, "nothing was raised")
                test.assertIsInstance(error, kind)
                test.assertNotIsInstance(error, (AttributeError, KeyError, UnboundLocalError, AssertionError))
                for part in parts:
                    test.assertRegex(str(error).lower(), part.lower())
                return True
        return Context()

    def test_last_dimension(self):
        for name, make in MODULES.items():
            with self.subTest(module=name), self.refused("32", "24"):
                make(device="cpu")(randn(8, 2, 24))

    def test_dtype(self):
        for name, make in MODULES.items():
            for x, word in ((randn(8, 2, 32).double(), "64"), (torch.ones(8, 2, 32, dtype=torch.int64), "int64|i64"),
                            (torch.ones(8, 2, 32, dtype=torch.complex64), "complex64|dtype .code 5"),
                            (torch.ones(8, 2, 32, dtype=torch.bool), "bool")):
                if x.dtype == torch.float64 and name in ("LayerNorm", "RMSNorm"):
                    continue  # these cast FP64 inputs, as in Transformer Engine
                with self.subTest(module=name, dtype=x.dtype), self.refused(word):
                    make(device="cpu")(x)

    def test_a_half_precision_input_of_other_weights(self):
        for name in PRODUCTS:
            with self.subTest(module=name):
                module, x = randomise(MODULES[name](device="cpu")), make_input(dtype=BF16)
                try:
                    y = module(x)
                except Exception as error:
                    self.assertIn("bf16", str(error).lower().replace("bfloat16", "bf16"))
                    continue
                oracle.near_by_norm(self, y, module(x.float()), 0.05, "output")
                y.sum().backward()
                self.assertEqual(x.grad.dtype, BF16)

    def test_layout(self):
        sparse = torch.eye(32).to_sparse()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            csr = torch.eye(32).to_sparse_csr()
        for name in ("Linear", "LayerNorm", "LayerNormMLP"):
            for x in (sparse, csr):
                with self.subTest(module=name, layout=x.layout), self.refused("sparse"):
                    MODULES[name](device="cpu")(x)

    def test_device(self):
        for name, make in MODULES.items():
            module = make(device="cpu")
            for _ in range(2):  # before its C++ layer exists, and after
                with self.subTest(module=name), self.refused("meta"):
                    module(torch.empty(8, 2, 32, device="meta"))
                module(randn(8, 2, 32))
            with self.subTest(module=name), self.refused("the parameter '.*weight' is on the meta device", "reset_parameters"):
                make(device="meta")(randn(8, 2, 32))
            module = randomise(make(device="cpu"))
            module(make_input())
            with self.subTest(module=name, after="a forward"), self.refused("the parameter '.*weight' is on the meta device"):
                # moves the parameters by other means than .to()
                for part in module.modules():
                    for own, p in part.named_parameters(recurse=False):
                        setattr(part, own, torch.nn.Parameter(torch.empty_like(p, device="meta")))
                module(make_input())

    @unittest.skipUnless("cuda" in DEVICES, "a GPU")
    def test_two_devices(self):
        for name, make in MODULES.items():
            module = randomise(make(device="cuda"))
            want = module(make_input("cuda"))
            for used in (False, True):
                module = module if used else copy.deepcopy(module)
                with self.subTest(module=name, used=used), self.refused("the input is on cpu and the parameter '.*weight' on cuda:0", "to.'cuda:0'"):
                    module(randn(8, 2, 32))
                self.assertTrue(torch.equal(module(make_input("cuda")), want))

    def test_numbers_of_dimensions(self):
        for name in ("MultiheadAttention", "TransformerLayer"):
            with self.subTest(module=name), self.refused("rank 3|sequence, batch"):
                MODULES[name](device="cpu")(randn(8, 32))

    def test_constructors(self):
        for make, parts in (
                (lambda: te.Linear(32, 33, parameters_split=("a", "b")), ("parameters_split", "33")),
                (lambda: te.Linear(32, 32, parameters_split={"a": 5}), ("parameters_split", "5", "32")),
                (lambda: te.Linear(32, 32, params_dtype=torch.float64), ("params_dtype", "float64")),
                (lambda: te.Linear(32, 33, tp_size=2, parallel_mode="column"), ("out_features", "33", "tp_size")),
                (lambda: te.LayerNormLinear(32, 32, normalization="BatchNorm"), ("normalization", "BatchNorm", "RMSNorm")),
                (lambda: te.LayerNormMLP(32, 32, activation="gelu2"), ("activation", "gelu2", "swiglu")),
                (lambda: te.LayerNormMLP(32, 32, activation="swiglu", activation_params={"limit": 3}), ("activation_params", "limit")),
                (lambda: te.LayerNormMLP(32, 32, activation="clamped_swiglu", activation_params={"beta": 3}),
                 ("activation_params", "beta")),
                (lambda: te.DotProductAttention(4, 8, attn_mask_type="cause"), ("attn_mask_type", "cause", "causal")),
                (lambda: te.DotProductAttention(4, 8, qkv_format="bhsd"), ("qkv_format", "bhsd", "sbhd")),
                (lambda: te.DotProductAttention(4, 8, num_gqa_groups=3), ("groups", "3", "4")),
                (lambda: te.DotProductAttention(4, 8, attention_dropout=1.5)(*[randn(3, 2, 4, 8)] * 3), ("dropout", "1.5")),
                (lambda: te.DotProductAttention(4, 8, softmax_type="hard"), ("softmax_type", "hard", "vanilla")),
                (lambda: te.DotProductAttention(4, 8, window_size=(-3, 0)), ("window_size", "-3")),
                (lambda: te.MultiheadAttention(32, 4, attention_type="both"), ("attention_type", "both", "cross")),
                (lambda: te.MultiheadAttention(32, 4, qk_norm_type="x"), ("qk_norm_type", "x", "RMSNorm")),
                (lambda: te.TransformerLayer(32, 64, 4, layer_type="coder"), ("layer_type", "coder", "decoder")),
                (lambda: te.TransformerLayer(32, 64, 4, hidden_dropout=-0.5, device="cpu")(randn(3, 2, 32)), ("dropout", "-0.5")),
                (lambda: te.TransformerLayer(32, 64, 4, attn_input_format="x"), ("format", "x", "sbhd"))):
            with self.subTest(parts=parts), self.refused(*parts):
                make()

    def test_calls_of_attention(self):
        module = te.DotProductAttention(4, 8, attn_mask_type="causal", qkv_format="bshd")
        q = randn(2, 6, 4, 8)
        for parts, call in (
                (("attention_mask",), lambda: module(q, q, q, attn_mask_type="arbitrary")),
                (("attn_mask_type", "cause"), lambda: module(q, q, q, attn_mask_type="cause")),
                (("core_attention_bias",), lambda: module(q, q, q, core_attention_bias_type="post_scale_bias")),
                (("core_attention_bias_type", "pre"), lambda: module(q, q, q, core_attention_bias_type="pre")),
                (("score_mod",), lambda: module(q, q, q, score_mod=lambda s: s)),
                (("inference_params",), lambda: module(q, q, q, inference_params=object())),
                (("softcap", "-3"), lambda: module(q, q, q, softcap=-3.0)),
                (("window_size",), lambda: module(q, q, q, window_size=(-7, 0))),
                (("5",), lambda: module(q, randn(2, 6, 5, 8), randn(2, 6, 5, 8))),
                (("7",), lambda: module(q, randn(2, 6, 4, 8), randn(2, 7, 4, 8))),
                (("3",), lambda: module(q, randn(3, 6, 4, 8), randn(3, 6, 4, 8))),
                (("cu_seqlens",), lambda: module(randn(6, 4, 8), randn(6, 4, 8), randn(6, 4, 8), qkv_format="thd"))):
            with self.subTest(parts=parts), self.refused(*parts):
                call()

    def test_a_padding_mask_with_holes(self):
        module = te.DotProductAttention(4, 8, attn_mask_type="padding", qkv_format="bshd")
        mask = torch.zeros(2, 1, 1, 6, dtype=torch.bool)
        mask[0, ..., 0] = True
        with self.refused("padding mask", "arbitrary"):
            module(*[randn(2, 6, 4, 8)] * 3, attention_mask=mask)
        with self.refused("mask", "float32|f32"):
            module(*[randn(2, 6, 4, 8)] * 3, attention_mask=mask.float())

    def test_lengths_that_lie(self):
        module = te.DotProductAttention(4, 8, attn_mask_type="padding", qkv_format="thd")
        x = randn(6, 4, 8)
        for lengths in ([0, 3, 9], [0, 5, 3, 6]):
            at = torch.tensor(lengths, dtype=torch.int32)
            with self.subTest(lengths=lengths), self.refused("cu_seqlens"):
                module(x, x, x, cu_seqlens_q=at, cu_seqlens_kv=at, max_seqlen_q=6, max_seqlen_kv=6)
        with self.refused("cu_seqlens", "int64|i64"):
            at = torch.tensor([0, 3, 6])
            module(x, x, x, cu_seqlens_q=at, cu_seqlens_kv=at, max_seqlen_q=6, max_seqlen_kv=6)

    def test_errors_leave_nothing_behind(self):
        for name, make in MODULES.items():
            module, x = randomise(make(device="cpu")), make_input()
            want = module(x)
            for bad in (randn(8, 2, 24), x.bool(), None):
                with self.assertRaises(Exception):
                    with te.autocast(recipe=DelayedScaling()):
                        module(bad)
            self.assertTrue(torch.equal(module(x), want))

    def test_a_scope_ends_with_an_exception(self):
        module, x = randomise(te.Linear(32, 32, device="cpu")), make_input()
        want = module(x)
        with self.assertRaises(KeyError):
            with te.autocast(recipe=Float8CurrentScaling()):
                raise KeyError
        self.assertTrue(torch.equal(module(x), want))


class Scopes(Each):
    def test_nested(self):
        module, x = randomise(te.Linear(32, 32, device="cpu")), make_input()
        plain = module(x)
        with te.autocast(recipe=Float8CurrentScaling()):
            current = module(x)
            with te.autocast(enabled=False):
                self.assertTrue(torch.equal(module(x), plain))
            with te.autocast(recipe=Float8BlockScaling()):
                block = module(x)
            self.assertTrue(torch.equal(module(x), current))
        self.assertFalse(torch.equal(plain, current))
        self.assertFalse(torch.equal(block, current))

    def test_of_a_thread(self):
        module, x = randomise(te.Linear(32, 32, device="cpu")), make_input()
        plain, found = module(x), []
        with te.autocast(recipe=Float8CurrentScaling()):
            thread = threading.Thread(target=lambda: found.append(module(x)))
            thread.start()
            thread.join()
        self.assertTrue(torch.equal(found[0], plain))

    def test_older_name(self):
        module, x = randomise(te.Linear(32, 32, device="cpu")), make_input()
        with te.autocast(recipe=Float8CurrentScaling()):
            want = module(x)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with te.fp8_autocast(enabled=True, fp8_recipe=Float8CurrentScaling()):
                self.assertTrue(torch.equal(module(x), want))

    def test_refused_recipes(self):
        from te_fl.common.recipe import MXFP8BlockScaling
        from te_fl.errors import Unsupported
        with self.assertRaisesRegex(Unsupported, "MXFP8BlockScaling"):
            te.autocast(recipe=MXFP8BlockScaling(fp8_dpa=True)).__enter__()
        with te.autocast(enabled=False, recipe=MXFP8BlockScaling(fp8_dpa=True)):
            pass


if __name__ == "__main__":
    unittest.main()
