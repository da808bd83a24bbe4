"""Cases of sequence parallelism's transfers: which tensors are kept for a backward, how many bytes are sent and when, and that the FP8 codes equal
those of the unsharded tensor."""

import contextlib
import ctypes
import gc
import os
from unittest import mock

import torch
import torch.distributed as dist

import te_fl
import te_fl.pytorch as te
from common import randomise
from te_fl.common.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling
from te_fl.pytorch.distributed import collectives

KINDS = {"column": lambda **k: te.Linear(128, 128, parallel_mode="column", **k),
         "row": lambda **k: te.Linear(256, 128, parallel_mode="row", **k),
         "norm": lambda **k: te.LayerNormLinear(128, 128, parallel_mode="column", **k),
         "mlp": lambda **k: te.LayerNormMLP(128, 256, set_parallel_mode=True, **k)}


def _made(kind, group, **more):
    torch.manual_seed(11 + group.rank())
    return randomise(KINDS[kind](tp_group=group, sequence_parallel=True, device="cpu", **more))


def _input(kind, group, rows=32):
    """Makes this rank's rows; for a row-parallel Linear all rows of the rank's columns. The last rank's values are larger."""
    size = group.size()
    torch.manual_seed(21 + group.rank())
    x = torch.randn(rows if kind == "row" else rows // size, 256 // size if kind == "row" else 128)
    return (x * (1 + 9 * group.rank())).requires_grad_()


def _around(module):
    """Makes the module call PyTorch's collectives outside of its C++ layer: it then gathers high-precision values, keeps them, and quantises them
    after the transfer. Returns the module."""
    module.__class__ = type("Around", (type(module),), {"_layer_moves_rows": False})
    return module


def _bytes(name):
    return sum(count.bytes for (kind, _), count in collectives.counts().items() if kind == name)


def _calls(name):
    return sum(count.calls for (kind, _), count in collectives.counts().items() if kind == name)


def _step(module, x, recipe=None, group=None):
    """Runs a forward and a backward whose output gradient differs between ranks; returns (output, gradients)."""
    module.zero_grad()
    x.grad = None
    with te.autocast(enabled=recipe is not None, recipe=recipe, amax_reduction_group=group) if recipe is not None else contextlib.nullcontext():
        y = module(x)
    torch.manual_seed(31 + torch.distributed.get_rank())
    y.backward(torch.randn_like(y) * (1 + torch.distributed.get_rank()))
    return [y.detach(), x.grad.clone(), *(p.grad.clone() for p in module.parameters())]


def case_results_are_those_of_collectives_around_the_layer(ranks):
    """Results equal those of _around() bit for bit, in F32 and with every recipe, for three steps; with numbers of rows that are
    multiples of the scaling block and others."""
    for size in ranks.degrees():
        group = ranks.groups[size]
        recipes = [(None, 32), (Float8CurrentScaling(), 32), (DelayedScaling(), 32), (Float8BlockScaling(), 128 * size), (Float8BlockScaling(), 32 * size)]
        for recipe, rows in recipes:
            for kind in KINDS:
                x = _input(kind, group, rows)
                a, b = _made(kind, group), _around(_made(kind, group))
                for step in range(3):
                    for got, want in zip(_step(a, x, recipe, group), _step(b, x, recipe, group)):
                        assert torch.equal(got, want), (kind, recipe, step, (got - want).abs().max())


def case_scales_stay_with_their_rank(ranks):
    """If delayed scaling's amaxes are local to a rank, high-precision values are transferred instead of FP8 codes, since the ranks' codes would have
    different scales."""
    for size in ranks.degrees():
        group, own = ranks.groups[size], ranks.groups[1]
        for kind in ("column", "row"):
            x = _input(kind, group)
            a, b = _made(kind, group), _around(_made(kind, group))
            for _ in range(3):
                collectives.reset_counts()
                got = _step(a, x, DelayedScaling(), own)
                sent = _bytes("all_gather")
                assert all(map(torch.equal, got, _step(b, x, DelayedScaling(), own))) and sent == 4 * 32 * 128, (kind, sent)


def case_codes_travel(ranks):
    """Counts a rank's bytes of all-gathers in a BF16 forward and backward with the same input: the FP8 codes are gathered twice, and their scales."""
    for size in ranks.degrees():
        group = ranks.groups[size]
        for kind, recipe, forward, backward in (
                ("column", None, 2, 2), ("column", Float8CurrentScaling(), 1, 1), ("column", DelayedScaling(), 1, 1),
                ("column", Float8BlockScaling(), 1 + 1 / 32, 1 + 1 / 32), ("row", None, 0, 2), ("row", Float8CurrentScaling(), 0, 1),
                ("row", DelayedScaling(), 0, 1), ("row", Float8BlockScaling(), 0, 2)):
            rows = 128 * size
            module, x = _made(kind, group, params_dtype=torch.bfloat16), _input(kind, group, rows).detach().bfloat16().requires_grad_()
            with te.autocast(recipe=recipe, amax_reduction_group=group) if recipe is not None else contextlib.nullcontext():
                collectives.reset_counts()
                y = module(x)
            assert _bytes("all_gather") == rows * 128 * forward, (kind, recipe, collectives.counts())
            collectives.reset_counts()
            y.sum().backward()
            assert _bytes("all_gather") == rows * 128 * backward, (kind, recipe, collectives.counts())
            if isinstance(recipe, Float8CurrentScaling) and kind == "row":
                assert _calls("all_reduce") == 1 and _bytes("all_reduce") == 4, collectives.counts()


def case_a_rank_keeps_its_rows(ranks):
    """The tensors saved for the backward are the rank's rows and the parameters; none has the gathered input's size."""
    for size in ranks.degrees():
        group = ranks.groups[size]
        for kind in ("column", "norm", "mlp"):
            module, x = _made(kind, group), _input(kind, group)
            saved = []
            with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
                y = module(x)
            kept = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in saved if not isinstance(t, torch.nn.Parameter)}
            assert max(kept.values()) == x.numel() * 4, (kind, kept)
            y.sum().backward()


def _resident():
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def case_a_rank_keeps_its_codes(ranks):
    """Between forward and backward the layer holds only the codes of the rank's rows, of 16 MiB of codes in all; they are freed with the output."""
    for size in ranks.degrees():
        group = ranks.groups[size]
        for recipe in (Float8CurrentScaling(), DelayedScaling(), Float8BlockScaling()):
            module = te.Linear(4096, 16 * size, parallel_mode="column", tp_group=group, sequence_parallel=True, device="cpu")
            x = torch.randn(4096 // size, 4096)
            held = []
            for _ in range(2):
                with te.autocast(recipe=recipe, amax_reduction_group=group):
                    y = module(x)
                before = _resident()
                del y
                held.append((before - _resident()) / 2**20)
            assert 0.7 * 16 / size < held[1] < 16 / size + 4, (size, recipe, held)


def case_unneeded_gathers(ranks):
    """The backward of a layer with a frozen weight gathers no input, and a forward in eval mode keeps no input; the gradient of x is reduce-scattered
    nevertheless."""
    for size in ranks.degrees():
        group = ranks.groups[size]
        for recipe in (None, Float8CurrentScaling()):
            module, x = _made("column", group), _input("column", group)
            want = _step(module, x, recipe)[1]
            module.weight.requires_grad_(False)
            module.bias.requires_grad_(False)
            with te.autocast(enabled=recipe is not None, recipe=recipe):
                y = module(x)
            collectives.reset_counts()
            x.grad = None
            torch.manual_seed(31 + torch.distributed.get_rank())
            y.backward(torch.randn_like(y) * (1 + torch.distributed.get_rank()))
            assert _calls("all_gather") == 0 and _calls("reduce_scatter") == 1, collectives.counts()
            assert torch.equal(x.grad, want)
            module.eval()
            with torch.no_grad(), te.autocast(enabled=recipe is not None, recipe=recipe):
                assert torch.equal(module(x), y)


def _products():
    return sum(row["calls"] for row in te_fl.usage() if row["op"] == "generic_gemm")


def case_unneeded_gradients(ranks):
    """A layer whose input needs no gradient computes no input gradient and calls no collective for it, sharded or not; its parameters' gradients stay
    the same. A norm before a product makes the product's input need a gradient, unless the norm is frozen."""
    for size in ranks.degrees():
        for sp in (False, True):
            for kind, products in (("column", 1), ("row", 1), ("norm", 1), ("mlp", 3)):
                for group in (ranks.groups[size], ranks.groups[1]):
                    torch.manual_seed(11 + group.rank())
                    module = randomise(KINDS[kind](tp_group=group, sequence_parallel=sp, device="cpu"))
                    for name, p in module.named_parameters():
                        p.requires_grad_("layer_norm" not in name)
                    columns = {"row": 256 // group.size()}.get(kind, 128)
                    rows = 32 // (group.size() if sp and kind != "row" else 1)
                    found = []
                    for wanted in (True, False):
                        x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(5 + group.rank())).requires_grad_(wanted)
                        module.zero_grad()
                        y = module(x)
                        collectives.reset_counts()
                        before = _products()
                        y.square().sum().backward()
                        found.append(([p.grad for p in module.parameters() if p.requires_grad], _products() - before, _calls("all_reduce") + _calls("reduce_scatter")))
                    with_it, without = found
                    assert all(map(torch.equal, with_it[0], without[0])), (kind, sp)
                    assert (with_it[1], without[1]) == (products + 1, products), (kind, sp, group.size(), with_it[1:], without[1:])
                    assert with_it[2] == (kind != "row" and group.size() > 1) and without[2] == 0, (kind, sp, group.size(), with_it[2], without[2])


def case_two_forwards_before_a_backward(ranks):
    for size in ranks.degrees():
        group = ranks.groups[size]
        for recipe in (None, Float8CurrentScaling()):
            for kind in KINDS:
                results = []
                for module in (_made(kind, group), _around(_made(kind, group))):
                    x, other = _input(kind, group), (_input(kind, group) * 3).detach().requires_grad_()
                    with te.autocast(enabled=recipe is not None, recipe=recipe):
                        y, z = module(x), module(other)
                    (2 * y).sum().backward()
                    z.square().sum().backward(retain_graph=True)
                    z.square().sum().backward()
                    results.append([x.grad, other.grad, *(p.grad for p in module.parameters())])
                assert all(map(torch.equal, *results)), (kind, recipe)


def case_recomputed_and_delayed(ranks):
    """Tests FP8 under checkpoint(), and with weight gradients delayed to backward_dw()."""
    for size in ranks.degrees():
        group = ranks.groups[size]
        for recipe in (Float8CurrentScaling(), DelayedScaling()):
            for kind in KINDS:
                modules = _made(kind, group), _made(kind, group), _made(kind, group, delay_wgrad_compute=True)
                x, results = _input(kind, group), []
                for way, module in enumerate(modules):
                    module.zero_grad()
                    x.grad = None
                    with te.autocast(recipe=recipe, amax_reduction_group=group):
                        y = te.checkpoint(module, x) if way == 1 else module(x)
                    y.square().sum().backward()
                    module.backward_dw()
                    results.append([y.detach(), x.grad.clone(), *(p.grad.clone() for p in module.parameters())])
                for other in results[1:]:
                    assert all(map(torch.equal, results[0], other)), (kind, recipe)


def case_collectives_run_beside_products(ranks):
    """In a backward the input's all-gather starts before the GEMM of the data gradient, and the reduce-scatter of the data gradient starts before the
    GEMM of the weight gradient; a transfer is waited for only when its result is read."""
    for size in ranks.degrees():
        group = ranks.groups[size]
        for kind in ("column", "mlp"):
            module, x, events = _made(kind, group), _input(kind, group), []

            def noted(name, begin):
                def call(*arguments, **options):
                    work = begin(*arguments, **options)
                    if work is None:
                        events.append(f"{name} now")
                        return None
                    events.append(f"begin {name}")
                    return mock.Mock(wait=lambda: (events.append(f"wait {name}"), work.wait()))
                return call
            with mock.patch.object(dist, "all_gather_into_tensor", noted("gather", dist.all_gather_into_tensor)), \
                    mock.patch.object(dist, "reduce_scatter_tensor", noted("scatter", dist.reduce_scatter_tensor)):
                y = module(x)
                assert events == {"column": ["gather now"], "mlp": ["gather now", "scatter now"]}[kind], (kind, events)
                events.clear()
                y.sum().backward()
            first = ["gather now"] if kind == "mlp" else []  # the gather for fc2's gradient
            assert events == first + ["begin gather", "begin scatter", "wait gather", "wait scatter"], (kind, events)


def case_another_group(ranks):
    """After set_tensor_parallel_group() between forwards the next forward uses the new group; the backward of the previous forward uses its own."""
    size = ranks.world
    group = ranks.groups[size]
    other = torch.distributed.new_group(list(range(size)))
    module, x = _made("column", group), _input("column", group)
    want = _step(module, x)
    y = module(x)
    module.set_tensor_parallel_group(other)
    module.zero_grad()
    x.grad = None
    torch.manual_seed(31 + torch.distributed.get_rank())
    y.backward(torch.randn_like(y) * (1 + torch.distributed.get_rank()))
    assert torch.equal(x.grad, want[1])
    assert all(map(torch.equal, _step(module, x), want))
    torch.distributed.destroy_process_group(other)
    try:
        module(x)
    except RuntimeError as error:
        assert "destroyed" in str(error) and "new group" in str(error), error
    else:
        raise AssertionError("a destroyed group computed")
