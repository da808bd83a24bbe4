"""Cases for layers that are sharded over a group: checkpoints, copies, compiled graphs and other uses by programs, and the errors."""

import copy
import io
import re
import pathlib

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import te_fl.pytorch as te
from common import close, cut, randomise, share
from te_fl.common.recipe import Float8CurrentScaling
from te_fl.pytorch.distributed import collectives
from te_fl.pytorch.runtime.rng import CudaRNGStatesTracker


def _layer(activation="gelu", **parallel):
    return te.TransformerLayer(32, 64, 8, hidden_dropout=0, attention_dropout=0, set_parallel_mode=True, activation=activation, device="cpu", **parallel)


def _results(call, module, x):
    x = x.detach().clone().requires_grad_()
    module.zero_grad()
    y = call(x)
    y.sum().backward()
    return y.detach(), x.grad, *[p.grad.clone() for p in module.parameters()]


def case_checkpoint(ranks):
    """Recomputed forwards call the same collectives again, and the results are bitwise equal."""
    for size in ranks.degrees():
        for sp in (False, True):
            part = _layer(tp_group=ranks.groups[size], sequence_parallel=sp)
            x = torch.randn(8 // size if sp else 8, 2, 32)
            want = _results(part, part, x)
            for call in (lambda x: torch.utils.checkpoint.checkpoint(part, x, use_reentrant=False, context_fn=te.recompute_contexts),
                         lambda x: torch.utils.checkpoint.checkpoint(part, x, use_reentrant=True), lambda x: te.checkpoint(part, x)):
                assert all(map(torch.equal, _results(call, part, x), want))


def case_compile(ranks):
    """A compiled graph cannot contain te-fl's collectives: fullgraph=True raises an error that says so; otherwise the layer runs outside of the
    graph."""
    for size in ranks.degrees():
        part = te.Linear(16, 16, parallel_mode="row", tp_group=ranks.groups[size], device="cpu")
        x = torch.randn(8, 16 // size)
        want = torch.relu(part(x))
        assert torch.equal(torch.compile(lambda x: torch.relu(part(x)), backend="eager")(x), want)
        torch._dynamo.reset()
        try:
            torch.compile(part, backend="eager", fullgraph=True)(x)
        except Exception as error:
            assert "tp_size" in str(error) and "collectives" in str(error), error
        else:
            raise AssertionError("a graph took collectives")


def case_copies_and_files(ranks):
    """A copy of a module has no group, because process groups cannot be copied; it has the module's state."""
    for size in ranks.degrees():
        group = ranks.groups[size]
        part = _layer(tp_group=group)
        x = torch.randn(8, 2, 32)
        file = io.BytesIO()
        torch.save(part, file)
        file.seek(0)
        for other in (copy.deepcopy(part), torch.load(file, weights_only=False)):
            try:
                other(x)
                raise AssertionError("a copy had a group")
            except RuntimeError as error:
                assert "set_tensor_parallel_group" in str(error), error
            other.set_tensor_parallel_group(group)
            assert torch.equal(other(x), part(x))
        assert part.state_dict().keys() == _layer().state_dict().keys()


def _documented():
    """The function of docs/ranks-pytorch.md, read from the page."""
    page = (pathlib.Path(__file__).resolve().parents[3] / "docs" / "ranks-pytorch.md").read_text()
    names = {}
    exec(compile(re.search(r"```python\n(.*?)```", page, re.S).group(1), "docs/ranks-pytorch.md", "exec"), names)
    return names["sharded"]


def case_a_checkpoint_loads_at_another_degree(ranks):
    for activation in ("gelu", "swiglu"):
        whole = randomise(_layer(activation))
        for p in whole.parameters():
            dist.broadcast(p.data, 0)
        folder = pathlib.Path(ranks.folder, f"checkpoint-{activation}")
        wrote, sharded = 2, _documented()
        part = share(whole, _layer(activation, tp_group=ranks.groups[wrote]), wrote, ranks.groups[wrote].rank(), activation == "swiglu")
        dcp.save(sharded(part, ranks.groups[wrote], activation == "swiglu"), checkpoint_id=folder)
        for size, group in ranks.groups.items():
            other = _layer(activation, tp_group=group)
            dcp.load(sharded(other, group, activation == "swiglu"), checkpoint_id=folder)
            named = dict(other.named_parameters())
            for name, p in whole.named_parameters():
                assert torch.equal(named[name], cut(p, name, named[name], size, group.rank(), activation == "swiglu")), (activation, size, name)


def case_weights_are_drawn_by_the_tracker(ranks):
    """The ranks of a group draw initial weights from generators of their own (get_rng_state_tracker); the default generator, which is equal on all
    ranks, is left unchanged."""
    for size in ranks.degrees():
        group = ranks.groups[size]
        tracker = CudaRNGStatesTracker()
        tracker.add("model-parallel-rng", 100 + group.rank())
        torch.manual_seed(7)
        part = te.Linear(16, 16, parallel_mode="column", tp_group=group, get_rng_state_tracker=lambda: tracker, device="cpu")
        after = torch.rand(1)
        torch.manual_seed(7)
        assert torch.equal(after, torch.rand(1))
        everybody = torch.empty(16, 16)
        collectives.all_gather_into(everybody, part.weight.detach(), group)
        parts = everybody.chunk(size)
        assert not any(torch.equal(parts[0], p) for p in parts[1:])
        torch.manual_seed(7)
        plain = te.Linear(16, 16, parallel_mode="column", tp_group=group, device="cpu")
        collectives.all_gather_into(everybody, plain.weight.detach(), group)
        assert all(torch.equal(everybody.chunk(size)[0], p) for p in everybody.chunk(size))


def _refused(call, *words):
    try:
        call()
    except Exception as error:
        for word in words:
            assert re.search(word, str(error)), f"{error!r} does not say {word!r}"
    else:
        raise AssertionError(f"nothing refused; expected {words}")


def case_refusals(ranks):
    size = ranks.world
    world = ranks.groups[size]
    parallel = dict(tp_group=world, device="cpu")
    _refused(lambda: te.Linear(32, 33, parallel_mode="column", **parallel), "out_features is 33", f"the {size} ranks", "multiple")
    _refused(lambda: te.Linear(33, 32, parallel_mode="row", **parallel), "in_features is 33")
    _refused(lambda: te.Linear(32, 32 + 2, parallel_mode="column", parameters_split={"a": 33, "b": 1}, **parallel), "'a'", "33")
    _refused(lambda: te.LayerNormLinear(32, 32, parallel_mode="row", **parallel), "parallel_mode = 'row'", "Linear")
    _refused(lambda: te.LayerNormMLP(32, 33, set_parallel_mode=True, **parallel), "ffn_hidden_size is 33")
    _refused(lambda: te.LayerNormMLP(32, 64, sequence_parallel=True, **parallel), "sequence_parallel", "set_parallel_mode=True")
    _refused(lambda: te.MultiheadAttention(32, 8, **parallel), "set_parallel_mode=True")
    _refused(lambda: te.MultiheadAttention(33, 3, set_parallel_mode=True, **parallel), "num_attention_heads is 3")
    _refused(lambda: te.MultiheadAttention(32, 8, num_gqa_groups=1, set_parallel_mode=True, **parallel), "num_gqa_groups is 1")
    _refused(lambda: te.Linear(32, 32, tp_size=0), "tp_size is 0")
    _refused(lambda: te.Linear(32, 32, parallel_mode="row", tp_size=size + 1), "in_features is 32")
    _refused(lambda: te.Linear(32, 32 * 3, parallel_mode="column", tp_size=3).set_tensor_parallel_group(world), f"{size} ranks", "tp_size = 3")
    _refused(lambda: te.Linear(32, 32, parallel_mode="column", sequence_parallel=True, ub_overlap_ag=True, **parallel), "ub_overlap_ag = True", "Userbuffers")
    _refused(lambda: _layer(tp_group=world, sequence_parallel=True, ub_tp_comm_overlap=True), "ub_", "Userbuffers")
    _refused(lambda: te.Linear(32, 32, symmetric_ar_type="multimem_all_reduce", **parallel), "symmetric_ar_type")
    _refused(lambda: te.Linear(32, 32, parallel_mode="row", sequence_parallel=True, **parallel)(torch.randn(size + 1, 32 // size)),
             "first dimension", f"{size} ranks")
    layer = te.TransformerLayer(32, 64, 8, set_parallel_mode=True, sequence_parallel=True, seq_length=16, **parallel)
    _refused(lambda: layer(torch.randn(16, 2, 32)), "seq_length = 16", "hidden_states has 16 rows")
    y = te.Linear(32, 32, parallel_mode="row", **parallel)(torch.randn(8, 32 // size).requires_grad_())
    te.Linear(32, 32, parallel_mode="column", sequence_parallel=True, ub_name="qkv", **parallel)(y)
    x = torch.randn(8, 32, requires_grad=True)
    group = dist.new_group()
    part = te.Linear(32, 32, parallel_mode="row", tp_group=group, device="cpu")
    dist.destroy_process_group(group)
    _refused(lambda: part(torch.randn(8, 32 // size)), "destroyed", "new group")
    grad, = torch.autograd.grad(te.Linear(32, 32, parallel_mode="column", **parallel)(x).square().sum(), x, create_graph=True)
    _refused(lambda: grad.sum().backward(), "second derivative")


def case_gradients_of_weights_go_elsewhere(ranks):
    """delay_wgrad_compute and fuse_wgrad_accumulation give the gradients of an ordinary backward, computed by backward_dw() or written to
    main_grad."""
    kinds = (lambda **k: te.Linear(32, 32, parallel_mode="column", **k), lambda **k: te.Linear(32, 32, parallel_mode="row", **k),
             lambda **k: te.LayerNormLinear(32, 32, parallel_mode="column", **k), lambda **k: te.LayerNormMLP(32, 64, set_parallel_mode=True, **k))
    for size in ranks.degrees():
        for make in kinds:
            for more in ({"delay_wgrad_compute": True}, {"fuse_wgrad_accumulation": True}):
                modules = []
                for options in ({}, more):
                    torch.manual_seed(3)
                    module = randomise(make(tp_group=ranks.groups[size], sequence_parallel=True, device="cpu", **options))
                    row = getattr(module, "parallel_mode", None) == "row"
                    for p in module.parameters():
                        p.main_grad = torch.zeros_like(p)
                    x = torch.randn(8 if row else 8 // size, 32 // size if row else 32)
                    module(x).square().sum().backward()
                    if "delay_wgrad_compute" in options:
                        assert all(p.grad is None for p in module.parameters() if p.dim() == 2)
                        module.backward_dw()
                    modules.append(module)
                for (name, p), q in zip(modules[0].named_parameters(), modules[1].parameters()):
                    got = q.main_grad if "fuse_wgrad_accumulation" in more and q.dim() == 2 else q.grad
                    assert torch.allclose(got, p.grad, rtol=1e-5, atol=1e-5), (name, more)


def case_weights_of_codes(ranks):
    """With quantized_model_init a rank's shard of a weight exists only as FP8 codes; the output is the sum over the ranks of the products with the
    dequantised shards."""
    for size in ranks.degrees():
        group = ranks.groups[size]
        with te.quantized_model_init(recipe=Float8CurrentScaling()):
            part = te.Linear(32, 32, parallel_mode="row", tp_group=group, device="cpu")
        torch.manual_seed(9)
        x = torch.randn(8, 32).chunk(size, -1)[group.rank()]
        with te.autocast(recipe=Float8CurrentScaling()):
            got = part(x)
        want = x @ part.weight.dequantize().float().T
        collectives.all_reduce(want, group)
        close(got, want + part.bias, "output", 0.05)
        assert part.weight.partition_dim == 1 and part.weight.tensor_model_parallel
