"""Tests offloading of activations to the host between forward and backward (get_cpu_offload_context): gradients are the same, and device memory is
freed and restored, by saved-tensor hooks for PyTorch's tensors and in C++ for te-fl's layers. On a machine without GPUs, host memory is used for the
device memory too."""

import gc
import unittest
import warnings
from unittest import mock

import torch

import te_fl.pytorch as te
from te_fl import _native
from te_fl.common.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling
from te_fl.pytorch.autograd import offload
from te_fl.pytorch.autograd.offload import get_cpu_offload_context, is_cpu_offload_enabled, mark_activation_offload, mark_not_offload

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
RECIPES = (None, DelayedScaling(amax_history_len=4), Float8CurrentScaling(), Float8BlockScaling())
torch.set_num_threads(1)


class Plain(torch.nn.Module):
    """A layer made of PyTorch's modules only."""

    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(64, 64, device=DEVICE)

    def forward(self, x):
        return torch.nn.functional.gelu(self.inner(x)) * x


LAYERS = {
    "plain": Plain,
    "Linear": lambda: te.Linear(64, 64, device=DEVICE),
    "LayerNormLinear": lambda: te.LayerNormLinear(64, 64, device=DEVICE),
    "LayerNormMLP": lambda: te.LayerNormMLP(64, 128, activation="swiglu", device=DEVICE),
    "RMSNorm": lambda: te.RMSNorm(64, device=DEVICE),
    "GroupedLinear": lambda: Experts(),
    "TransformerLayer": lambda: te.TransformerLayer(64, 128, 2, hidden_dropout=0.0, attention_dropout=0.0, device=DEVICE),
    "TransformerLayer in parts": lambda: te.TransformerLayer(64, 128, 2, hidden_dropout=0.1, attention_dropout=0.1, drop_path_rate=0.1, device=DEVICE),
}


class Experts(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = te.GroupedLinear(2, 64, 64, device=DEVICE)

    def forward(self, x):
        return self.inner(x, [x.numel() // 128] * 2)


def make_model(name, count=4):
    torch.manual_seed(3)
    return [LAYERS[name]() for _ in range(count)]


def run(layers, recipe, context=None, sync=None, after=None, dtype=torch.float32, batches=1):
    """Returns losses and gradients of two steps."""
    seen = []
    for step in range(2):
        torch.manual_seed(step)
        outputs, inputs = [], []
        for batch in range(batches):
            x = torch.randn(32, 2, 64, device=DEVICE).to(dtype).requires_grad_()
            inputs.append(x)
            with te.autocast(enabled=recipe is not None, recipe=recipe):
                for i, layer in enumerate(layers):
                    with context or mock.MagicMock():
                        x = layer(x)
                    x = sync(x) if sync else x
                    if after:
                        after(i)
            outputs.append(x)
        for x in outputs:
            x.float().square().mean().backward()
        seen += [x.detach() for x in outputs] + [x.grad for x in inputs]
        seen += [p.grad.clone() for layer in layers for p in layer.parameters()]
        for layer in layers:
            layer.zero_grad()
    return seen


class Offload(unittest.TestCase):
    def setUp(self):
        for context in (mock.patch.object(offload, "LEAST_BYTES", 256), warnings.catch_warnings()):
            context.__enter__()
            self.addCleanup(context.__exit__, None, None, None)
        warnings.simplefilter("ignore", UserWarning)

    def same(self, got, want):
        for i, (a, b) in enumerate(zip(got, want, strict=True)):
            self.assertTrue(torch.equal(a, b), f"{i}: {(a - b).abs().max()}")

    def test_gradients_are_the_same(self):
        for name in LAYERS:
            for recipe in RECIPES[:1] if name in ("plain", "RMSNorm") else RECIPES:
                for count in (3, 1):
                    with self.subTest(layer=name, recipe=type(recipe).__name__, count=count):
                        context, sync = get_cpu_offload_context(True, num_layers=count, model_layers=4)
                        sizes = []
                        got = run(make_model(name), recipe, context, sync, lambda i: sizes.append(context._synchronizer.get_offloaded_total_size_mb()))  # noqa: B023
                        self.same(got, run(make_model(name), recipe))
                        self.assertGreater(max(sizes), count * 32 * 2 * 64 / 2 ** 20)  # at least one FP8 byte for each element

    def check_moved(self, state, before):
        for forward in state._forwards:
            now = {m.data_ptr() for m, _ in _native.saved_memory(forward._token)}
            self.assertEqual({s.host.data_ptr() for s in forward._segments} - now, set())
            self.assertEqual(before & now, set())

    def test_the_devices_memory_goes(self):
        """While a layer's activations are offloaded to the host, no object keeps their device memory alive."""
        for name in LAYERS:
            for recipe in RECIPES[:2]:
                with self.subTest(layer=name, recipe=type(recipe).__name__):
                    context, sync, controller = get_cpu_offload_context(True, model_layers=2, manual_synchronization=True)
                    layers, x = make_model(name, 2), torch.randn(32, 2, 64, device=DEVICE, requires_grad=True)
                    with te.autocast(enabled=recipe is not None, recipe=recipe):
                        with context:
                            y = layers[0](x * 1.0)
                        y = sync(y)
                    state = controller.layers[0]
                    before = [s.memory.data_ptr() for s in state._segments.values()]
                    self.assertTrue(before)
                    controller.start_offload_layer(0)
                    controller.release_activation_forward_gpu_memory(0)
                    gc.collect()
                    self.check_moved(state, set(before))
                    controller.start_reload_layer(0)
                    y.sum().backward()
                    self.assertTrue(x.grad.isfinite().all())
                    del y
                    gc.collect()
                    self.assertEqual(len(state._segments), 0)  # only the autograd graph kept the segments alive

    def test_manual_and_late(self):
        """Activations of a layer that the program does not reload explicitly are reloaded when the layer's backward needs them."""
        for brings in (True, False):
            context, sync, controller = get_cpu_offload_context(True, model_layers=3, manual_synchronization=True, retain_pinned_cpu_buffers=True)

            def after(i):
                if i < 2:
                    controller.start_offload_layer(i)  # noqa: B023
                else:
                    for layer in range(2):
                        controller.release_activation_forward_gpu_memory(layer)  # noqa: B023
                        if brings:  # noqa: B023
                            controller.start_reload_layer(layer)  # noqa: B023
            self.same(run(make_model("LayerNormMLP", 3), RECIPES[2], context, sync, after), run(make_model("LayerNormMLP", 3), RECIPES[2]))
            self.assertRaisesRegex(RuntimeError, "layer 2 are kept; they are to be offloading", controller.release_activation_forward_gpu_memory, 2)

    def test_several_batches_in_flight(self):
        context, sync = get_cpu_offload_context(True, num_layers=2, model_layers=3, retain_pinned_cpu_buffers=True)
        self.same(run(make_model("Linear", 3), None, context, sync, batches=3), run(make_model("Linear", 3), None, batches=3))

    def test_graphs_that_are_kept_and_dropped(self):
        context, sync = get_cpu_offload_context(True, num_layers=1, model_layers=2)
        layers, x = make_model("LayerNormLinear", 2), torch.randn(32, 2, 64, device=DEVICE, requires_grad=True)
        grads = []
        for step in range(3):
            y = x
            for layer in layers:
                with context:
                    y = layer(y)
                y = sync(y)
            if step == 0:
                continue  # the backward of this autograd graph is not run
            for retain in (True, False):
                x.grad = None
                y.sum().backward(retain_graph=retain)
                grads.append(x.grad)
        self.same(grads[1:], grads[:-1])

    def test_writes_between_forward_and_backward(self):
        """PyTorch's version check does not cover tensors saved by hooks. Without a check of te-fl's own, a write between forward and backward would
        give silently wrong gradients."""
        for name in ("plain", "LayerNormMLP"):
            for least in (256, 2 ** 30):  # offloads all tensors, or none
                for when in ("in the layer", "before the next", "behind the next"):
                    for wrote in ("input", "weight"):
                        with self.subTest(name, least=least, when=when, wrote=wrote), mock.patch.object(offload, "LEAST_BYTES", least):
                            layers = make_model(name, 2)
                            context, sync = get_cpu_offload_context(True, num_layers=1, model_layers=2)
                            x = torch.randn(32, 64, device=DEVICE).requires_grad_() * 2
                            written = (x if wrote == "input" else next(p for p in layers[0].parameters() if p.dim() == 2)).detach()
                            with context:
                                y = layers[0](x)
                                if when == "in the layer":
                                    written.mul_(2)
                            if when == "before the next":
                                written.mul_(2)
                            y = sync(y)
                            with context:
                                y = layers[1](y)
                            if when == "behind the next":
                                written.mul_(2)
                            loss = sync(y).sum()
                            if when == "behind the next" and least == 256 and wrote == "input":
                                loss.backward()  # the host copy has the values from before the write
                            else:
                                self.assertRaisesRegex(RuntimeError, "was written after the forward had saved it", loss.backward)

    def test_storages_that_are_emptied_before_they_are_copied(self):
        """A program empties and later refills the storage of an offloaded layer's input, as Megatron's checkpoint without output does. The offload
        leaves the empty storage alone, and the backward reads the refilled one."""
        for name in LAYERS:
            for recipe in RECIPES[:2]:
                with self.subTest(layer=name, recipe=type(recipe).__name__):
                    grads = []
                    for offloads in (False, True):
                        context, sync, controller = get_cpu_offload_context(True, model_layers=2, manual_synchronization=True)
                        layer, source = make_model(name, 1)[0], torch.linspace(-1, 1, 4096, device=DEVICE).view(32, 2, 64).requires_grad_()
                        torch.manual_seed(5)
                        with te.autocast(enabled=recipe is not None, recipe=recipe), context if offloads else mock.MagicMock():
                            x = source * 1
                            y = layer(x)
                        if offloads:
                            kept = x.untyped_storage().clone()
                            x.untyped_storage().resize_(0)
                            junk = [torch.full_like(source, 7) for _ in range(9)]
                            controller.start_offload_layer(0)
                            controller.release_activation_forward_gpu_memory(0)
                            x.untyped_storage().resize_(kept.nbytes()).copy_(kept)
                            junk += [torch.full_like(source, 7) for _ in range(9)]
                            controller.start_reload_layer(0)
                        y.square().sum().backward()
                        grads.append([source.grad, *(p.grad for p in layer.parameters())])
                    self.same(*grads)

    def test_writes_before_a_layer_and_aliases_that_count_none(self):
        context, sync = get_cpu_offload_context(True, num_layers=1, model_layers=2)
        grads = []
        for offloads in (False, True):
            layers = make_model("plain", 2)
            leaf = torch.linspace(-1, 1, 2048, device=DEVICE).view(32, 64).requires_grad_()
            x = leaf * 1
            x.add_(1)
            alias = x.data  # The alias has the same memory and its own version counter.
            y = x
            for layer in layers:
                with context if offloads else mock.MagicMock():
                    y = layer(y) * alias * x
                y = sync(y) if offloads else y
            y.sum().backward()
            grads.append([leaf.grad, *(p.grad for layer in layers for p in layer.parameters())])
        self.same(*grads)

    def test_forwards_that_fail_or_have_fewer_layers(self):
        context, sync = get_cpu_offload_context(True, num_layers=2, model_layers=4)
        want = run(make_model("LayerNormMLP"), None)
        for fails in range(4):
            y = torch.randn(32, 2, 64, device=DEVICE, requires_grad=True)
            with self.assertRaises(KeyError):
                for i, layer in enumerate(make_model("LayerNormMLP")):
                    with context:
                        if i == fails:
                            raise KeyError
                        y = layer(y)
                    y = sync(y)
            self.same(run(make_model("LayerNormMLP"), None, context, sync), want)
        self.same(run(make_model("LayerNormMLP", 3), None, context, sync), run(make_model("LayerNormMLP", 3), None))
        self.same(run(make_model("LayerNormMLP"), None, context, sync), want)

    def test_marks(self):
        layer, x = te.Linear(64, 64, device=DEVICE), torch.randn(64, 64, device=DEVICE) * torch.ones(1, device=DEVICE, requires_grad=True)
        for marks, offloaded in (((), True), ((mark_not_offload,), False), ((mark_not_offload, mark_activation_offload), True)):
            for mark in marks:
                mark(x, None)
            context, _, controller = get_cpu_offload_context(True, model_layers=1, manual_synchronization=True)
            with context:
                self.assertTrue(is_cpu_offload_enabled())
                y = layer(x)
            self.assertFalse(is_cpu_offload_enabled())
            controller.start_offload_layer(0)
            self.assertEqual(controller.get_offloaded_total_size_mb() > 0, offloaded)
            y.sum().backward(retain_graph=True)
        for mark in (mark_not_offload, mark_activation_offload):
            self.assertRaisesRegex(TypeError, f"{mark.__name__}: it marks tensors, and Linear is none", mark, x, layer)

    def test_arguments(self):
        for words, error, arguments in (("nothing to offload", ValueError, dict(offload_activations=False)), ("num_layers is 2", ValueError, dict(num_layers=2, model_layers=2)),
                                        ("manual_synchronization=True", ValueError, dict(offload_stream=1)),
                                        ("model_layers is 0", ValueError, dict(model_layers=0, manual_synchronization=True))):
            with self.subTest(words), self.assertRaisesRegex(error, words):
                get_cpu_offload_context(True, **arguments)
        self.assertEqual(len(get_cpu_offload_context(manual_synchronization=True)), 3)
        with self.assertWarnsRegex(FutureWarning, "offload_weights"):
            context, sync = get_cpu_offload_context(True, offload_activations=False, offload_weights=True)
        x = torch.zeros(2)
        with context:
            self.assertIs(sync(x), x)
        context, sync = get_cpu_offload_context(True, num_layers=1, model_layers=2)
        self.assertRaisesRegex(RuntimeError, "has been left", sync, x)
        with context:
            self.assertRaisesRegex(RuntimeError, "inside of itself", context.__enter__)
        self.assertRaisesRegex(ValueError, "needs no gradient", sync, x)


if __name__ == "__main__":
    unittest.main()
