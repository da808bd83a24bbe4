"""Cases of TE_FL_TP_OVERLAP=1: GEMMs split into chunks that overlap with the transfers before or after them, here by sends and receives of the
host."""

import contextlib
import os
from unittest import mock

import torch

import te_fl
import te_fl.pytorch as te
from common import close, randomise
from te_fl.common.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling
from te_fl.errors import FailedPrecondition, InvalidArgument
from te_fl.pytorch.distributed import overlap, same_overlap

ROWS, HIDDEN, WIDE = 256, 128, 512


@contextlib.contextmanager
def _on(value="1"):
    with mock.patch.dict(os.environ, {"TE_FL_TP_OVERLAP": value}), contextlib.suppress(InvalidArgument):
        te_fl.reload()
    try:
        yield
    finally:
        te_fl.reload()


def _modules(group, **more):
    more.update(tp_group=group, sequence_parallel=True, device="cpu")
    return {"column": te.Linear(HIDDEN, WIDE, parallel_mode="column", **more), "row": te.Linear(WIDE, HIDDEN, parallel_mode="row", **more),
            "normed": te.LayerNormLinear(HIDDEN, WIDE, parallel_mode="column", return_layernorm_output=True, **more),
            "mlp": te.LayerNormMLP(HIDDEN, WIDE, set_parallel_mode=True, **more),
            "gated": te.LayerNormMLP(HIDDEN, WIDE, set_parallel_mode=True, activation="swiglu", bias=False, **more),
            "layer": te.TransformerLayer(HIDDEN, WIDE, 4, set_parallel_mode=True, attention_dropout=0, hidden_dropout=0, **more)}


def _shape(kind, size):
    if kind == "row":
        return (ROWS, WIDE // size)
    return (ROWS // size, 2, HIDDEN) if kind == "layer" else (ROWS // size, HIDDEN)


def _steps(group, kind, recipe, **more):
    """Returns outputs and gradients of two steps, and the output of a forward without gradients."""
    torch.manual_seed(5 + group.rank())
    module = randomise(_modules(group, **more)[kind], 0.05)
    results = []
    for step in range(3):
        torch.manual_seed(50 + step + group.rank())
        x = torch.randn(_shape(kind, group.size()), dtype=more.get("params_dtype", torch.float32)).requires_grad_(step < 2)
        module.zero_grad()
        with te.autocast(recipe=recipe(), amax_reduction_group=group) if recipe is not None else contextlib.nullcontext():
            with contextlib.nullcontext() if step < 2 else torch.no_grad():
                ys = module(x)
        ys = ys if isinstance(ys, tuple) else (ys,)
        results += [y.detach() for y in ys]
        if step < 2:
            sum((y * torch.randn_like(y)).sum() for y in ys).backward()
            results += [x.grad, *(p.grad.clone() for p in module.parameters())]
    return results


def case_results_are_those_without(ranks):
    """Outputs and gradients equal those without overlap, in F32, BF16 and with every recipe, on two and more ranks."""
    for size in ranks.degrees():
        group = ranks.groups[size]
        for recipe in (None, DelayedScaling, Float8CurrentScaling, Float8BlockScaling):
            for kind in ("column", "row", "normed", "mlp", "gated", "layer"):
                more = {"params_dtype": torch.bfloat16} if kind == "mlp" and recipe is None else {}
                want = _steps(group, kind, recipe, **more)
                with _on(), mock.patch.object(overlap.HostOverlap, "scatter", autospec=True, side_effect=overlap.HostOverlap.scatter) as scatter:
                    got = _steps(group, kind, recipe, **more)
                assert scatter.call_count > 0, (kind, recipe)
                for i, (a, b) in enumerate(zip(got, want)):
                    close(a, b, f"{kind}, {recipe}, {size} ranks, result {i}", 3e-2 if more else 2e-6)


def case_delayed_weight_gradients_and_recomputing(ranks):
    """Tests delay_wgrad_compute, for which the gathered gradient must be complete at the end of the backward, and checkpoints, whose recomputed
    forward sends its rows again."""
    group = ranks.groups[ranks.world]
    results = []
    for value in ("0", "1"):
        with _on(value):
            torch.manual_seed(5 + group.rank())
            module = randomise(te.LayerNormMLP(HIDDEN, WIDE, set_parallel_mode=True, delay_wgrad_compute=True, tp_group=group, sequence_parallel=True,
                                               device="cpu"), 0.05)
            x = torch.randn(_shape("mlp", group.size()), requires_grad=True)
            with te.autocast(recipe=DelayedScaling(), amax_reduction_group=group):
                y = te.checkpoint(module, x)
            y.square().sum().backward()
            module.backward_dw()
            results.append([y.detach(), x.grad, *(p.grad for p in module.parameters())])
    for i, (a, b) in enumerate(zip(*results)):
        close(b, a, f"result {i}", 2e-6)


def case_a_product_that_fails_on_all_ranks(ranks):
    """If a GEMM fails on all ranks, no rank waits for another rank's rows, and the group works afterwards."""
    group = ranks.groups[ranks.world]
    with _on():
        module = _modules(group)["row"]
        x = torch.randn(_shape("row", group.size()))
        want = module(x).detach()
        with te_fl.policy(per_op={"generic_gemm": ["vendor:NVIDIA"]}, strict=True):
            try:
                module(x)
            except te_fl.errors.Error:
                pass
            else:
                raise AssertionError("nobody refused the product")
        close(module(x).detach(), want, "the call after it", 0)


def case_a_setting_of_one_rank_alone(ranks):
    """Ranks with different settings all raise an error that lists each rank's setting; an invalid value is refused too."""
    group = torch.distributed.new_group(list(range(ranks.world)))
    with _on("1" if ranks.rank == 1 else "0"):
        try:
            same_overlap.agree(group)
        except FailedPrecondition as error:
            assert "rank 1: TE_FL_TP_OVERLAP=1" in str(error) and "rank 0: TE_FL_TP_OVERLAP=0;" in str(error), error
        else:
            raise AssertionError("nobody refused")
    with _on("maybe"):
        try:
            overlap.of(group, torch.device("cpu"))
        except InvalidArgument as error:
            assert "TE_FL_TP_OVERLAP=maybe is not accepted" in str(error), error
        else:
            raise AssertionError("nobody refused")
    torch.distributed.destroy_process_group(group)
