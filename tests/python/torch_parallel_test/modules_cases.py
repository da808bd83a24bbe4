"""Cases that compare each module sharded over a group with the unsharded module on one rank: outputs, gradients of inputs and of weights."""

import copy
import pickle

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import te_fl.pytorch as te
from common import close, compare, randomise, rows, share
from te_fl.common.recipe import DelayedScaling, Float8CurrentScaling
from te_fl.errors import InvalidArgument
from te_fl.pytorch import ops
from te_fl.pytorch.distributed import collectives

CPU = dict(device="cpu")


def make_x(*shape):
    return torch.randn(*shape)


def over_groups(ranks, case):
    for size in ranks.degrees():
        for sp in (False, True):
            torch.manual_seed(1)
            case(ranks.groups[size], sp)


def _column(group, sp, **more):
    """Compares a column-parallel Linear with the unsharded one. A rank's output, and its gradient, has all rows and a part of the columns."""
    size, rank = group.size(), group.rank()
    whole = randomise(te.Linear(16, 24, **CPU, **more))
    part = share(whole, te.Linear(16, 24, parallel_mode="column", tp_group=group, sequence_parallel=sp, **CPU, **more), size, rank)
    x = make_x(8, 2, 16).requires_grad_()
    own = (x.detach().chunk(size)[rank] if sp else x.detach()).clone().requires_grad_()
    want, got = whole(x), part(own)
    if more.get("return_bias"):
        assert torch.equal(got[1], want[1].chunk(size)[rank])
        want, got = want[0], got[0]
    columns = (lambda t: torch.cat([c.chunk(size, -1)[rank] for c in t.chunk(2, -1)], -1)) if "parameters_split" in more else \
        (lambda t: t.chunk(size, -1)[rank])
    grad = torch.randn_like(want)
    from common import close, same_gradients
    close(got, columns(want), "output")
    want.backward(grad)
    got.backward(columns(grad).contiguous())
    close(own.grad, x.grad.chunk(size)[rank] if sp else x.grad, "the input's gradient")
    if not more.get("return_bias"):
        same_gradients(whole, part, group)


def case_column(ranks):
    for more in ({}, {"bias": False}, {"return_bias": True}, {"parameters_split": ("a", "b")}):
        over_groups(ranks, lambda group, sp: _column(group, sp, **more))


def case_compiled(ranks):
    """torch.compile runs sharded modules in Python and does not trace the te-fl layers that they call; the results equal the uncompiled ones bit
    for bit."""
    group = dist.group.WORLD
    options = dict(tp_group=group, **CPU)
    size = group.size()
    modules = {
        "Linear, column": (lambda sp: te.Linear(16, 24, parallel_mode="column", sequence_parallel=sp, **options), (8, 2, 16)),
        "Linear, row": (lambda sp: te.Linear(16, 24, parallel_mode="row", sequence_parallel=sp, **options), (8, 2, 16 // size)),
        "LayerNormLinear": (lambda sp: te.LayerNormLinear(16, 24, parallel_mode="column", sequence_parallel=sp, **options), (8, 2, 16)),
        "LayerNormMLP": (lambda sp: te.LayerNormMLP(16, 24, set_parallel_mode=True, sequence_parallel=sp, **options), (8, 2, 16)),
        "TransformerLayer": (lambda sp: te.TransformerLayer(16, 32, 4, set_parallel_mode=True, fuse_qkv_params=True, sequence_parallel=sp, hidden_dropout=0,
                                                            attention_dropout=0, **options), (8, 2, 16)),
    }
    for name, (make, shape) in modules.items():
        for sp in (True, False):
            module = make(sp)

            def function(x):
                return module(x * 2) + 1
            results = []
            for run in (function, torch.compile(function, backend="aot_eager"), function):
                module.zero_grad()
                x = torch.linspace(-1, 1, 8 * 2 * shape[-1]).view(shape).requires_grad_()
                y = run(x)
                y.square().sum().backward()
                results.append([y.detach(), x.grad, *(p.grad.clone() for p in module.parameters())])
            assert all(torch.equal(a, b) for a, b in zip(results[0], results[2], strict=True)), (name, sp)
            for a, b in zip(results[0], results[1], strict=True):
                if name == "TransformerLayer":  # compiled, TransformerLayer runs its submodules; otherwise it is one layer in C++
                    close(b, a, (name, sp))
                else:
                    assert torch.equal(a, b), (name, sp)
    torch._dynamo.reset()


MARKS = ("sequence_parallel", "tensor_model_parallel", "partition_dim", "partition_stride")


def find_marks(module):
    return {name: {mark: getattr(p, mark) for mark in MARKS if hasattr(p, mark)} for name, p in module.named_parameters()}


def _with_future(setter, change):
    def run(module):
        setter(True)
        try:
            return change(module)
        finally:
            setter(False)
    return run


# All the ways in which PyTorch replaces a Parameter by another one.
REPLACEMENTS = {
    "copy.deepcopy": copy.deepcopy,
    "pickle": lambda module: pickle.loads(pickle.dumps(module)),
    "a copy of a copy": lambda module: copy.deepcopy(copy.deepcopy(module)),
    "fully_shard": lambda module: fully_shard(module, mesh=init_device_mesh("cpu", (dist.get_world_size(),))),
    "to_empty": lambda module: module.to(device="meta").to_empty(device="cpu"),
    "overwritten": _with_future(torch.__future__.set_overwrite_module_params_on_conversion, lambda module: module.to(torch.bfloat16)),
    "swapped": _with_future(torch.__future__.set_swap_module_params_on_conversion, lambda module: module.to(torch.bfloat16)),
    "assigned": lambda module: (module.load_state_dict({k: v.clone() for k, v in module.state_dict().items()}, assign=True), module)[1],
}


def case_marks_stay_with_parameters(ranks):
    """Programs sum the gradients of parameters with the attribute sequence_parallel over the ranks, so a lost attribute would leave out a sum."""
    group = dist.group.WORLD
    options = dict(tp_group=group, sequence_parallel=True, **CPU)
    modules = {
        "LayerNorm": lambda: te.LayerNorm(16, sequence_parallel=True, **CPU),
        "RMSNorm": lambda: te.RMSNorm(16, sequence_parallel=True, **CPU),
        "Linear, column": lambda: te.Linear(16, 24, parallel_mode="column", **options),
        "Linear, row": lambda: te.Linear(16, 24, parallel_mode="row", **options),
        "LayerNormLinear": lambda: te.LayerNormLinear(16, 24, parallel_mode="column", **options),
        "LayerNormMLP": lambda: te.LayerNormMLP(16, 24, set_parallel_mode=True, **options),
        "GroupedLinear": lambda: te.GroupedLinear(2, 16, 24, parallel_mode="column", tp_group=group, tp_size=group.size(), bias=False, **CPU),
        "TransformerLayer": lambda: te.TransformerLayer(16, 32, 4, set_parallel_mode=True, fuse_qkv_params=True, **options),
    }
    for name, make in modules.items():
        want = find_marks(make())
        assert any(want.values()), name
        for how, replace in REPLACEMENTS.items():
            got = find_marks(replace(make()))
            assert got == want, (name, how, got, want)
    module = modules["Linear, column"]()  # Megatron replaces the bias by its own, sets the attributes on it, and asserts that they were unset
    module.bias = torch.nn.Parameter(torch.zeros(module.bias.shape))
    assert find_marks(module)["bias"] == {}, find_marks(module)


def case_row(ranks):
    for more in ({}, {"bias": False}):
        def case(group, sp):
            size, rank = group.size(), group.rank()
            features = lambda t: t.chunk(size, -1)[rank]
            whole = randomise(te.Linear(16, 24, **CPU, **more))
            part = share(whole, te.Linear(16, 24, parallel_mode="row", tp_group=group, sequence_parallel=sp, **CPU, **more), size, rank)
            from common import close, rows, same_gradients
            x = make_x(8, 2, 16).requires_grad_()
            own = features(x.detach()).clone().requires_grad_()
            want, got = whole(x), part(own)
            grad = torch.randn_like(want)
            close(got, rows(want, size, rank, sp), "output")
            want.backward(grad)
            got.backward(rows(grad, size, rank, sp))
            close(own.grad, features(x.grad), "the input's gradient")
            same_gradients(whole, part, group)
        over_groups(ranks, case)


def case_row_returns_its_bias(ranks):
    for size in ranks.degrees():
        part = te.Linear(16, 24, parallel_mode="row", tp_group=ranks.groups[size], return_bias=True, **CPU)
        out, bias = part(make_x(8, 16 // size))
        assert bias is not None and torch.equal(bias, part.bias) and out.shape == (8, 24)


def _operation(group, sp, mode):
    """te_fl.pytorch.ops.Linear over the group, and the basic operations of which it consists."""
    size, rank = group.size(), group.rank()
    whole = randomise(ops.Linear(16, 24, **CPU))
    part = ops.Linear(16, 24, tensor_parallel_mode=mode, tensor_parallel_group=group, sequence_parallel=sp, **CPU)
    features, column = (lambda t, dim=-1: t.chunk(size, dim)[rank]), mode == "column"
    with torch.no_grad():
        part.weight.copy_(features(whole.weight, 0 if column else 1))
        part.bias.copy_(features(whole.bias) if column else whole.bias / size)  # the ranks of a row-parallel Linear sum their biases
    x = make_x(8, 2, 16).requires_grad_()
    of_x = (lambda t: rows(t, size, rank, sp)) if column else features
    of_y = features if column else (lambda t: rows(t, size, rank, sp))
    own = of_x(x.detach()).clone().requires_grad_()
    want, got = whole(x), part(own)
    grad = torch.randn_like(want)
    close(got, of_y(want), "output")
    want.backward(grad)
    got.backward(of_y(grad).contiguous())
    close(own.grad, of_x(x.grad), "the input's gradient")
    close(part.weight.grad, features(whole.weight.grad, 0 if column else 1), "the weight's gradient")
    close(part.bias.grad, features(whole.bias.grad) if column else whole.bias.grad, "the bias's gradient")


def case_operations(ranks):
    for mode in ("column", "row"):
        over_groups(ranks, lambda group, sp: _operation(group, sp, mode))


def case_operations_that_are_collectives(ranks):
    for size in ranks.degrees():
        group, rank = ranks.groups[size], ranks.groups[size].rank()
        torch.manual_seed(2)
        parts = [torch.randn(2 * size, 3) for _ in range(size)]
        for op, want, gradient in ((ops.AllReduce(group), sum(parts), lambda g: g), (ops.AllGather(group), torch.cat(parts), lambda g: size * g.chunk(size)[rank]),
                                   (ops.ReduceScatter(group), sum(parts).chunk(size)[rank], lambda g: torch.cat([g] * size))):
            x = parts[rank].clone().requires_grad_()
            y = ops.Sequential(ops.ConstantScale(1.0), op)(x)
            close(y, want, type(op).__name__)
            grad = torch.randn(want.shape)
            y.backward(grad)
            close(x.grad, gradient(grad), f"the gradient of {type(op).__name__}")
            assert torch.equal(x.detach(), parts[rank])
        if size > 1:
            try:
                ops.ReduceScatter(group)(torch.ones(2 * size + 1, 3))
            except InvalidArgument as error:
                assert f"the {size} ranks divide its first dimension" in str(error), error
            else:
                raise AssertionError("nobody refused the rows")


def case_without_a_mode_nothing_is_divided(ranks):
    for size in ranks.degrees():
        collectives.reset_counts()
        part = te.Linear(16, 24, tp_group=ranks.groups[size], sequence_parallel=True, **CPU)
        assert part.weight.shape == (24, 16) and part(make_x(8, 16)).shape == (8, 24) and not collectives.counts()


def case_layernorm_linear(ranks):
    """Tests LayerNormLinear and a row-parallel Linear after it, which sums the ranks' outputs."""
    class Both(torch.nn.Module):
        def __init__(self, **parallel):
            super().__init__()
            modes = ("column", "row") if parallel else (None, None)
            norm = dict(normalization="RMSNorm", zero_centered_gamma=True) if Both.rms else {}
            self.into = te.LayerNormLinear(16, 32, parallel_mode=modes[0], return_layernorm_output=Both.returns, return_layernorm_output_gathered=Both.gathered,
                                           **norm, **CPU, **parallel)
            self.out = te.Linear(32, 16, parallel_mode=modes[1], **CPU, **parallel)

        def forward(self, x):
            y = self.into(x)
            y, normed = y if Both.returns else (y, None)
            y = self.out(torch.nn.functional.gelu(y))
            return (y, normed) if Both.returns else y

    for Both.rms, Both.returns, Both.gathered in ((False, False, False), (True, False, False), (False, True, False)):
        over_groups(ranks, lambda group, sp: compare(Both, [make_x(8, 2, 16)], group, sp))


def case_gathered_norm_output(ranks):
    for make in (lambda **k: te.LayerNormLinear(16, 32, parallel_mode="column", **k), lambda **k: te.LayerNormMLP(16, 32, set_parallel_mode=True, **k)):
        for size in ranks.degrees():
            group = ranks.groups[size]
            part = make(tp_group=group, sequence_parallel=True, return_layernorm_output=True, return_layernorm_output_gathered=True, **CPU)
            torch.manual_seed(2)
            x = make_x(8, 2, 16)
            _, normed = part(x.chunk(size)[group.rank()])
            want = torch.nn.functional.layer_norm(x, (16,))
            assert normed.shape == want.shape and (normed - want).abs().max() < 1e-5


def case_mlp(ranks):
    for activation, more in (("gelu", {}), ("swiglu", {"normalization": "RMSNorm"}), ("relu", {"bias": False}), ("gelu", {"checkpoint": True}),
                             ("gelu", {"return_bias": True}), ("gelu", {"return_layernorm_output": True})):
        def make(**parallel):
            return te.LayerNormMLP(16, 32, activation=activation, set_parallel_mode=True, **CPU, **more, **parallel)
        over_groups(ranks, lambda group, sp: compare(make, [make_x(8, 2, 16)], group, sp, gated=activation == "swiglu"))


def case_attention(ranks):
    for more in ({}, {"fuse_qkv_params": True}, {"num_gqa_groups": 4, "fuse_qkv_params": True, "input_layernorm": True, "return_bias": True},
                 {"input_layernorm": True, "return_layernorm_output": True}, {"qk_norm_type": "RMSNorm"}):
        def make(**parallel):
            return te.MultiheadAttention(32, 8, attention_dropout=0, set_parallel_mode=True, **CPU, **more, **parallel)
        over_groups(ranks, lambda group, sp: compare(make, [make_x(8, 2, 32)], group, sp, summed=("q_norm", "k_norm")))


def case_cross_attention(ranks):
    for more in ({}, {"fuse_qkv_params": True, "input_layernorm": True}):
        def make(**parallel):
            return te.MultiheadAttention(32, 4, attention_dropout=0, attention_type="cross", attn_mask_type="no_mask", set_parallel_mode=True, **CPU, **more,
                                         **parallel)
        over_groups(ranks, lambda group, sp: compare(make, [make_x(8, 2, 32), make_x(12, 2, 32)], group, sp, call=lambda m, x, y: m(x, encoder_output=y)))


def case_heads(ranks):
    """DotProductAttention has no collectives: each rank computes its share of the heads."""
    for size in ranks.degrees():
        group = ranks.groups[size]
        rank = group.rank()
        for more, call in (({}, {}), ({"num_gqa_groups": 4}, {}), ({"softmax_type": "learnable"}, {}), ({}, {"core_attention_bias_type": "alibi"})):
            whole, part = (te.DotProductAttention(8, 8, attn_mask_type="causal", **more, **k) for k in ({}, {"tp_group": group}))
            q, k, v = make_x(6, 2, 8, 8), *(make_x(6, 2, more.get("num_gqa_groups", 8), 8) for _ in range(2))
            if "softmax_type" in more:
                torch.nn.init.normal_(whole.softmax_offset)
                part.softmax_offset.data.copy_(whole.softmax_offset.chunk(size)[rank])
            want = whole(q, k, v, **call).unflatten(-1, (8, 8)).chunk(size, -2)[rank].flatten(-2)
            got = part(*(t.chunk(size, 2)[rank] for t in (q, k, v)), **call)
            assert (got - want).abs().max() < 1e-6, (more, call)


LAYERS = (dict(fuse_qkv_params=True), dict(), dict(normalization="RMSNorm", activation="swiglu", num_gqa_groups=4, bias=False),
          dict(layer_type="decoder", enc_dec_attn_mask_type="no_mask"), dict(output_layernorm=True), dict(parallel_attention_mlp=True),
          dict(apply_residual_connection_post_layernorm=True))


def _layer(dtype=torch.float32, **options):
    return lambda **parallel: te.TransformerLayer(32, 64, 8, hidden_dropout=0, attention_dropout=0, set_parallel_mode=True, params_dtype=dtype, **CPU,
                                                  **options, **parallel)


def case_transformer_layer(ranks):
    for options in LAYERS:
        decoder = "layer_type" in options
        inputs = [make_x(8, 2, 32)] + [make_x(8, 2, 32)] * decoder
        call = (lambda m, x, y: m(x, encoder_output=y)) if decoder else None
        over_groups(ranks, lambda group, sp: compare(_layer(**options), inputs, group, sp, gated="activation" in options, call=call))


def case_sequence_parallel_that_is_set_later(ranks):
    """A program may set sequence_parallel on all modules that have it, as NeMo does around generation; each module then computes as if it had been
    constructed with that value."""
    def later(make, shape):
        def made(tp_group=None, sequence_parallel=False):
            if tp_group is None:
                return make()
            module, size = make(tp_group=tp_group, sequence_parallel=not sequence_parallel), tp_group.size()
            module(make_x(shape[0] // (1 if sequence_parallel else size), *shape[1:]))
            for part in module.modules():
                if hasattr(part, "sequence_parallel"):
                    part.sequence_parallel = sequence_parallel
            for p in module.parameters():
                if hasattr(p, "sequence_parallel"):
                    p.sequence_parallel = sequence_parallel
            return module
        return made

    def mlp(**parallel):
        return te.LayerNormMLP(32, 64, set_parallel_mode=True, **CPU, **parallel)
    for make in (mlp, _layer(), _layer(fuse_qkv_params=True, output_layernorm=True)):
        over_groups(ranks, lambda group, sp: compare(later(make, (8, 2, 32)), [make_x(8, 2, 32)], group, sp))  # noqa: B023


def case_transformer_layer_with_masks(ranks):
    """Masks and ALiBi cover the whole sequence, while under sequence parallelism a rank's input is only a part of the sequence."""
    hidden = torch.ones(8, 8, dtype=torch.bool).triu(2)[None, None]
    padding = torch.zeros(2, 1, 1, 8, dtype=torch.bool)
    padding[0, ..., 6:] = True
    for options in ({"self_attn_mask_type": "causal", "attention_mask": hidden}, {"self_attn_mask_type": "no_mask", "attention_mask": hidden},
                    {"self_attn_mask_type": "padding", "attention_mask": padding},
                    {"self_attn_mask_type": "no_mask", "core_attention_bias_type": "alibi"}):
        over_groups(ranks, lambda group, sp: compare(_layer(), [make_x(8, 2, 32)], group, sp, call=lambda m, x: m(x, **options)))


def case_transformer_layer_in_bf16(ranks):
    over_groups(ranks, lambda group, sp: compare(_layer(torch.bfloat16), [make_x(8, 2, 32)], group, sp, dtype=torch.bfloat16))


def _one_step(layer, x, recipe, group):
    layer.zero_grad()
    x = x.clone().requires_grad_()
    with te.autocast(enabled=recipe is not None, recipe=recipe, amax_reduction_group=group):
        y = layer(x)
    y.backward(torch.linspace(-1, 1, y.numel()).view(y.shape))
    return y.detach(), x.grad, *(p.grad.clone() for p in layer.parameters())


def case_a_divided_layer_is_one_call(ranks):
    """A rank's shard of a TransformerLayer gives the same results as one fused call and part by part, with each recipe, and over another group."""
    size = ranks.world
    group, other = ranks.groups[size], dist.new_group(list(range(size)))
    for sp in (False, True):
        for recipe in (None, DelayedScaling(), Float8CurrentScaling()):
            torch.manual_seed(3)
            whole, make = randomise(_layer(fuse_qkv_params=True)()), _layer(fuse_qkv_params=True)
            one, parts = (share(whole, make(tp_group=group, sequence_parallel=sp), size, group.rank()) for _ in range(2))
            parts._fused = None
            x = make_x(32 // (size if sp else 1), 2, 32)
            for group_of in (group, other):
                one.set_tensor_parallel_group(group_of)
                assert not one._fused._layers or group_of is group, "layers of the group before are kept"
                want, got = _one_step(parts, x, recipe, group), _one_step(one, x, recipe, group)
                assert one._fused._layers, "the layer ran part by part"
                for i, (a, b) in enumerate(zip(got, want)):
                    close(a, b, f"{recipe}, sp {sp}: result {i}", 1e-5 if recipe is None else 2e-2)
    dropping = te.TransformerLayer(32, 64, 8, hidden_dropout=0.1, attention_dropout=0, set_parallel_mode=True, tp_group=group, **CPU)
    dropping(make_x(8, 2, 32))
    assert not dropping._fused._layers, "each rank's dropout is drawn part by part"
    dropping.eval()
    dropping(make_x(8, 2, 32))
    assert dropping._fused._layers
    dist.destroy_process_group(other)


def case_frozen_weights_and_no_gradients(ranks):
    for size in ranks.degrees():
        for sp in (False, True):
            part = _layer()(tp_group=ranks.groups[size], sequence_parallel=sp)
            part.requires_grad_(False)
            x = make_x(8 // size if sp else 8, 2, 32)
            assert not part(x).requires_grad
            part(x.requires_grad_()).sum().backward()
            assert x.grad is not None and torch.isfinite(x.grad).all()
            with torch.no_grad():
                part(x)


def case_a_group_of_one_rank_computes_as_none(ranks):
    alone = ranks.groups[1]
    torch.manual_seed(4)
    a = _layer()()
    torch.manual_seed(4)
    b = _layer()(tp_group=alone, sequence_parallel=True)
    x = make_x(4, 2, 32)
    collectives.reset_counts()
    assert torch.equal(a(x), b(x)) and not collectives.counts() and b._fused is not None
    b.set_tensor_parallel_group(dist.group.WORLD)  # a module whose weights are not sharded computes the unsharded result, as in Transformer Engine
    assert torch.equal(a(x), b(x)) and not collectives.counts()


def case_the_group_may_come_later(ranks):
    for size in ranks.degrees():
        group = ranks.groups[size]
        torch.manual_seed(4)
        a = _layer()(tp_group=group, sequence_parallel=True)
        torch.manual_seed(4)
        b = _layer()(tp_size=size, sequence_parallel=True)
        x = make_x(8 // size, 2, 32)
        try:
            b(x)
            raise AssertionError("a layer without its group computed")
        except RuntimeError as error:
            assert "set_tensor_parallel_group" in str(error), error
        b.set_tensor_parallel_group(group)
        assert torch.equal(a(x), b(x))


def case_attributes(ranks):
    """Checks the attributes of Transformer Engine 2.20.2's parameters, by which Megatron decides what to reduce and to shard."""
    for size in ranks.degrees():
        for sp in (False, True):
            layer = _layer(output_layernorm=False)(tp_group=ranks.groups[size], sequence_parallel=sp)
            marks = {n: (getattr(p, "tensor_model_parallel", None), getattr(p, "partition_dim", None), getattr(p, "partition_stride", None),
                        getattr(p, "sequence_parallel", None)) for n, p in layer.named_parameters()}
            column, row, norm = (True, 0, 1, None), (True, 1, 1, None), (None, None, None, sp)
            want = {"self_attention.proj.weight": row, "self_attention.proj.bias": norm, "layernorm_mlp.fc2_weight": row, "layernorm_mlp.fc2_bias": norm,
                    "layernorm_mlp.fc1_weight": column, "layernorm_mlp.fc1_bias": column}
            for n in marks:
                assert marks[n] == want.get(n, norm if "layer_norm" in n else column), (n, marks[n])
            assert layer.sequence_parallel is sp and layer.layernorm_mlp.tp_size == size and layer.self_attention.proj.in_features == 32 // size
