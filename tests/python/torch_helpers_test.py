"""Tests availability queries, named random states, layouts of weights, and further names that frameworks import."""

import collections
import subprocess
import sys
import tempfile
import unittest

import torch

import te_fl
from te_fl.common import recipe
from te_fl.errors import AlreadyExists, InvalidArgument, NotFound, Unsupported
from te_fl.pytorch.compile import graph_state
from te_fl.pytorch.fp8 import availability, quantization
from te_fl.pytorch.functions import framework_helpers, weights
from te_fl.pytorch.runtime import constants, rng


class Availability(unittest.TestCase):
    def test_the_cpu_has_what_te_fl_supports(self):
        if torch.cuda.is_available():
            self.skipTest("asks for the CPU")
        for ask, there in ((availability.is_fp8_available, True), (availability.is_fp8_block_scaling_available, True),
                           (availability.is_bf16_available, True), (availability.is_mxfp8_available, True),
                           (availability.is_nvfp4_available, True)):
            self.assertIs(ask(), there)
            answer, reason = ask(return_reason=True)
            self.assertIs(answer, there)
            self.assertEqual(reason == "", there)
        self.assertEqual(availability.get_device_compute_capability(), (0, 0))
        self.assertEqual(availability.get_cudnn_version(), (0, 0, 0))

    def test_the_answer_is_the_routers(self):
        availability._who_multiplies.cache_clear()
        try:
            with te_fl.policy(per_op={"generic_gemm": ["impl:nobody"]}):
                served, reason = availability.check_fp8_support()
        finally:
            availability._who_multiplies.cache_clear()
        self.assertFalse(served)
        self.assertIn("default.cpu", reason)

    def test_recipes(self):
        self.assertTrue(availability.get_default_recipe().delayed())
        availability.check_recipe_support(recipe.DelayedScaling())
        for chosen in (recipe.MXFP8BlockScaling(), recipe.NVFP4BlockScaling(), recipe.CustomRecipe(qfactory=print)):
            availability.check_recipe_support(chosen)
        with self.assertRaisesRegex(Unsupported, "MXFP8BlockScaling.*fp8_dpa"):
            availability.check_recipe_support(recipe.MXFP8BlockScaling(fp8_dpa=True))
        hybrid = recipe.DelayedScaling()
        self.assertEqual([availability.get_fp8_max(hybrid), availability.get_fp8_max(hybrid, fprop_tensor=False)], [448, 57344])
        self.assertEqual(availability.get_fp8_torch_dtype(recipe.Float8BlockScaling(), False), torch.float8_e4m3fn)
        self.assertEqual(availability.get_align_size_for_quantization(recipe.CustomRecipe(qfactory=print, quantization_alignment=7)), 7)
        self.assertEqual(availability.torch_version(), tuple(int(n) for n in torch.__version__.split("+")[0].split(".")))

    def test_constants(self):
        self.assertEqual(constants.TE_DType_To_Torch[constants.DType.cast(7)], torch.float8_e4m3fn)
        self.assertIs(constants.dist_group_type, torch.distributed.ProcessGroup)


class Package(unittest.TestCase):
    def test_the_compiler_is_not_imported(self):
        """Importing PyTorch's compiler takes a second, which a program that does not compile should not spend."""
        look = "import torch, sys; before = 'torch._dynamo' in sys.modules; import te_fl.pytorch; print(before, 'torch._dynamo' in sys.modules)"
        found = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=True, timeout=120).stdout.split()
        self.assertEqual(found[1], found[0])

    def test_names_and_modules_that_are_imported_when_they_are_read(self):
        import te_fl.pytorch as te
        self.assertIs(te.RotaryPositionEmbedding, te.attention.RotaryPositionEmbedding)
        self.assertIs(te.FusedAdam, te.optimizers.FusedAdam)
        self.assertIn("parallel_cross_entropy", dir(te))
        with self.assertRaisesRegex(AttributeError, "MXFP8Tensor.*transformer-engine.md"):
            te.MXFP8Tensor
        code = "import sys, te_fl.pytorch; assert not {'te_fl.pytorch.functions.cross_entropy', 'te_fl.pytorch.optimizers'} & set(sys.modules)"
        subprocess.run([sys.executable, "-c", code], check=True)

    def test_modules_with_transformer_engines_names(self):
        code = ("import importlib, importlib.util, sys, te_fl.pytorch as te\n"
                "from te_fl.compat import known_names, table\n"
                "for name in table.SAME_MODULES:\n"
                "    own, theirs = f'te_fl.pytorch.{name}', f'transformer_engine.pytorch.{name}'\n"
                "    module = importlib.import_module(own)\n"
                "    assert module is getattr(te, name) is sys.modules[own] and importlib.util.find_spec(own) is module.__spec__, module\n"
                "    served = [n for n in known_names.NAMES[theirs].split() if table.home(theirs, n)]\n"
                "    assert served, name\n"
                "    for n in served: assert getattr(module, n) is getattr(importlib.import_module(table.home(theirs, n)), n), n\n"
                "from te_fl.pytorch.attention import DotProductAttention\n"
                "assert DotProductAttention is te.DotProductAttention\n"
                "try: te.router.nothing\n"
                "except AttributeError as error: assert 'te_fl.pytorch.router has no' in str(error), error\n"
                "else: raise SystemExit(1)")
        subprocess.run([sys.executable, "-c", code], check=True)

    def test_a_pickled_module_loads_where_only_the_package_is_imported(self):
        write = ("import sys, torch, te_fl.pytorch as te\n"
                 "from te_fl.common.recipe import Float8CurrentScaling\n"
                 "with te.quantized_model_init(recipe=Float8CurrentScaling()):\n"
                 "    coded = te.Linear(16, 16, device='cpu')\n"
                 "torch.save([te.TransformerLayer(32, 32, 2, device='cpu'), te.LayerNormMLP(16, 16, device='cpu'), coded], sys.argv[1])")
        read = ("import sys, torch, te_fl.pytorch as te\n"
                "layer, mlp, coded = torch.load(sys.argv[1], weights_only=False)\n"
                "assert type(layer) is te.TransformerLayer and type(coded.weight) is te.Float8Tensor\n"
                "layer(torch.randn(4, 2, 32)); mlp(torch.randn(4, 16)); coded(torch.randn(16, 16))")
        with tempfile.TemporaryDirectory() as folder:
            for code in (write, read):
                subprocess.run([sys.executable, "-c", code, f"{folder}/modules.pt"], check=True)


class RandomStates(unittest.TestCase):
    DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

    def draw(self):
        return torch.rand(4, device=self.DEVICE)

    def test_a_state_goes_on_and_the_outer_one_stays(self):
        torch.manual_seed(5)
        expected_outside = [self.draw(), self.draw()]
        torch.manual_seed(7)
        expected_inside = [self.draw(), self.draw()]
        tracker = rng.CudaRNGStatesTracker()
        tracker.add("model-parallel-rng", 7)
        torch.manual_seed(5)
        outside, inside = [self.draw()], []
        for _ in range(2):
            with tracker.fork():
                inside.append(self.draw())
        outside.append(self.draw())
        for got, want in zip(outside + inside, expected_outside + expected_inside):
            self.assertTrue(torch.equal(got, want))

    def test_an_exception_gives_the_outer_state_back(self):
        tracker = rng.CudaRNGStatesTracker()
        tracker.add("a", 1)
        torch.manual_seed(5)
        expected = self.draw()
        torch.manual_seed(5)
        with self.assertRaises(KeyboardInterrupt):
            with tracker.fork("a"):
                self.draw()
                raise KeyboardInterrupt
        self.assertTrue(torch.equal(self.draw(), expected))

    def test_names_and_seeds(self):
        tracker = rng.CudaRNGStatesTracker()
        tracker.add("a", 1)
        self.assertIs(rng.get_all_rng_states(), tracker.states_)
        with self.assertRaisesRegex(AlreadyExists, "seed 1"):
            tracker.add("b", 1)
        with self.assertRaisesRegex(AlreadyExists, "'a'"):
            tracker.add("a", 2)
        with self.assertRaisesRegex(NotFound, "'b'.*'a'"):
            with tracker.fork("b"):
                pass
        other = rng.CudaRNGStatesTracker()
        other.set_states(tracker.get_states())
        with other.fork("a"):
            self.draw()
        tracker.reset()
        self.assertEqual(tracker.get_states(), {})


class OfFrameworks(unittest.TestCase):
    def test_splits(self):
        for sections, squeeze, count in (([2, 1, 3], False, 3), (2, False, 3), (1, True, 6)):
            for dim in (1, -2):
                x, y = (torch.randn(4, 6, 5, generator=torch.Generator().manual_seed(1)).requires_grad_() for _ in range(2))
                parts, want = framework_helpers.SplitAlongDim.apply(x, dim, sections, squeeze), torch.split(y, sections, dim)
                want = [p.squeeze(dim) for p in want] if squeeze else want
                self.assertEqual(len(parts), count)
                for a, b in zip(parts, want, strict=True):
                    self.assertTrue(torch.equal(a, b))
                torch.autograd.backward([p.sin().sum() for p in parts[:2]])  # the weight's other parts have no gradient
                torch.autograd.backward([p.sin().sum() for p in want[:2]])
                torch.testing.assert_close(x.grad, y.grad, atol=0, rtol=0)

    def test_gradients_that_are_not_read(self):
        first = framework_helpers.get_dummy_wgrad([3, 4], torch.bfloat16, zero=True)
        again = framework_helpers.get_dummy_wgrad([3, 4], torch.bfloat16)
        self.assertEqual((first.shape, first.dtype, first.data_ptr()), ((3, 4), torch.bfloat16, again.data_ptr()))
        self.assertEqual(float(again.abs().max()), 0.0)
        self.assertNotEqual(framework_helpers.get_dummy_wgrad([4, 3], torch.bfloat16).data_ptr(), first.data_ptr())

    def test_memory_without_an_owner(self):
        device = "cuda" if torch.cuda.is_available() else "cpu"
        x = torch.randn(6, 8, device=device).to(torch.bfloat16)[1:5, ::2]
        made = framework_helpers.make_weak_ref({"a": (x, 3, None), "b": [x.t(), True]})
        self.assertEqual((made["a"][1:], made["b"][1]), ((3, None), True))
        for got, want in ((made["a"][0], x), (made["b"][0], x.t())):
            self.assertEqual((got.data_ptr(), got.stride(), got.dtype), (want.data_ptr(), want.stride(), want.dtype))
            self.assertTrue(torch.equal(got, want))
        self.assertEqual(made["a"][0] is x, device == "cpu")
        self.assertEqual(framework_helpers.make_weak_ref(torch.empty(0, 3, device=device)).shape, (0, 3))
        named = framework_helpers.make_weak_ref(torch.max(x, dim=0))
        self.assertTrue(torch.equal(named[0], x.max(0).values))
        pair = collections.namedtuple("Pair", "a b")
        self.assertEqual(framework_helpers.make_weak_ref(pair(1, [None])), pair(1, [None]))
        with self.assertRaisesRegex(TypeError, "str"):
            framework_helpers.make_weak_ref("text")

    def test_reset(self):
        """FP8GlobalStateManager.reset(), which Transformer Engine's test suites call between tests, resets the global state; an open autocast still
        ends normally."""
        manager = te_fl.pytorch.FP8GlobalStateManager
        manager.set_skip_fp8_weight_update_tensor(True)
        graph_state.set_capture_start()
        manager.reset()
        self.assertIsNone(manager.get_skip_fp8_weight_update_tensor())
        self.assertFalse(manager.fp8_graph_capturing())
        for inside in (te_fl.pytorch.autocast(recipe=recipe.Float8CurrentScaling()), te_fl.pytorch.quantized_model_init()):
            with inside, self.assertRaisesRegex(te_fl.errors.FailedPrecondition, "call it after their scope"):
                manager.reset()
        manager.reset()

    def test_weights_in_captures_of_a_frameworks_own(self):
        """During a capture a flag that the framework sets, and not an argument of the call, determines whether quantised weights are reused; outside
        of capture the flag has no effect."""
        manager, device = te_fl.pytorch.FP8GlobalStateManager, "cuda" if torch.cuda.is_available() else "cpu"
        self.assertIsNone(manager.get_skip_fp8_weight_update_tensor())
        self.addCleanup(setattr, quantization.captures, "flag", None)
        x = torch.randn(16, 32, generator=torch.Generator().manual_seed(1)).to(device)
        by_tensor, by_blocks = recipe.Float8CurrentScaling(), recipe.Float8BlockScaling()
        for layer, scaling in ((te_fl.pytorch.Linear(32, 32, device=device), by_blocks), (te_fl.pytorch.LayerNormMLP(32, 64, device=device), by_tensor),
                               (te_fl.pytorch.GroupedLinear(1, 32, 32, device=device), by_tensor),
                               (te_fl.pytorch.TransformerLayer(32, 64, 4, device=device).eval(), by_tensor)):
            def output(first=None, layer=layer, scaling=scaling):
                with te_fl.pytorch.autocast(recipe=scaling):
                    rest = ([16],) if isinstance(layer, te_fl.pytorch.GroupedLinear) else ()
                    rows = x.view(8, 2, 32) if isinstance(layer, te_fl.pytorch.TransformerLayer) else x
                    return layer(rows, *rest, is_first_microbatch=first)

            def captured(skip, first, output=output):
                manager.set_skip_fp8_weight_update_tensor(skip)
                graph_state.set_capture_start()
                try:
                    self.assertTrue(manager.fp8_graph_capturing())
                    return output(first)
                finally:
                    graph_state.set_capture_end()

            before = output()
            with self.subTest(type(layer).__name__, scaling=type(scaling).__name__):
                self.assertTrue(torch.equal(captured(False, None), before))
                for p in layer.parameters():
                    p.data.mul_(2 if p.dim() == 2 else 1)  # a write that PyTorch's version counter misses
                self.assertTrue(torch.equal(captured(True, True), before))
                after = output()
                self.assertFalse(torch.equal(after, before))
                self.assertTrue(torch.equal(captured(False, False), after))
        self.assertFalse(manager.fp8_graph_capturing())
        self.assertEqual(manager.get_skip_fp8_weight_update_tensor().tolist(), [0.0])

    def test_captures_of_a_frameworks_own(self):
        """A framework that captures graphs itself restores the FP8 state from before the warm-up, and announces the capture."""
        layers = torch.nn.Sequential(te_fl.pytorch.Linear(32, 32, device="cpu"), te_fl.pytorch.GroupedLinear(2, 32, 32, device="cpu"))
        scaling, x = recipe.DelayedScaling(amax_history_len=4), torch.randn(16, 32, generator=torch.Generator().manual_seed(1))

        def step():
            with te_fl.pytorch.autocast(recipe=scaling):
                y = layers[1](layers[0](x), [4, 12])
            y.sum().backward()

        def state():
            return [t.clone() for m in layers for _, t in m._fp8_state()]

        step()
        before, saved = state(), graph_state.save_fp8_tensors([layers], scaling)
        step()
        self.assertFalse(all(map(torch.equal, state(), before)))
        self.assertRaisesRegex(InvalidArgument, "of 2 modules, and there are 1", graph_state.restore_fp8_tensors, [layers[0]], saved)
        graph_state.restore_fp8_tensors([layers], saved)
        self.assertTrue(all(map(torch.equal, state(), before)))
        self.assertIsNone(graph_state.save_fp8_tensors([layers], recipe.Float8CurrentScaling()))
        graph_state.restore_fp8_tensors([layers], None)
        self.assertFalse(graph_state.is_graph_capturing())
        graph_state.set_capture_start()
        self.assertTrue(graph_state.is_graph_capturing())
        graph_state.set_capture_end()
        self.assertFalse(graph_state.is_graph_capturing())

    def test_autocast(self):
        device = "cuda" if torch.cuda.is_available() else "cpu"
        with framework_helpers.gpu_autocast_ctx(enabled=True, dtype=torch.bfloat16):
            self.assertTrue(torch.is_autocast_enabled(device))
            with framework_helpers.gpu_autocast_ctx(enabled=False):
                self.assertFalse(torch.is_autocast_enabled(device))


class Weights(unittest.TestCase):
    def test_orders(self):
        w = torch.arange(8)[:, None]
        self.assertEqual(weights.interleave_glu_tensor(w, 2).flatten().tolist(), [0, 1, 4, 5, 2, 3, 6, 7])
        self.assertTrue(torch.equal(weights.deinterleave_glu_tensor(weights.interleave_glu_tensor(w, 2), 2), w))
        for size in (0, 3):
            with self.assertRaisesRegex(InvalidArgument, f"interleave_size is {size}"):
                weights.interleave_glu_tensor(w, size)
