"""Row-parallel products whose output features are cut into stripes, as TE_FL_STRIPES_FILE says, and the rules of that file."""

import contextlib
import importlib.util
import json
import os
import pathlib
import sys
import tempfile
from unittest import mock

import torch

import te_fl
import te_fl.pytorch as te
from common import close, randomise
from te_fl import _native
from te_fl.common.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling
from te_fl.errors import FailedPrecondition, InvalidArgument, NotFound
from te_fl.pytorch.distributed import collectives, same_stripes

ROWS, IN, OUT = 256, 256, 512
OPERANDS = {None: "f32", DelayedScaling: "fp8", Float8CurrentScaling: "fp8", Float8BlockScaling: "fp8_block"}


def _entry(size, **more):
    return {"device": _native.device_name("cpu"), "ranks": size, "operands": "f32", "output": "f32", "rows": ROWS, "in": IN // size, "out": OUT,
            "stripes": 2, **more}


@contextlib.contextmanager
def _file(content):
    """TE_FL_STRIPES_FILE is a file of this text or these entries; None: it is unset."""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "stripes.json")
        if content is not None:
            path.write_text(content if isinstance(content, str) else json.dumps({"te_fl_stripes": 1, "entries": content}))
        with mock.patch.dict(os.environ, {} if content is None else {"TE_FL_STRIPES_FILE": str(path)}):
            te_fl.reload()
            yield
    te_fl.reload()


def _modules(group, **more):
    torch.manual_seed(5 + group.rank())
    more.update(tp_group=group, sequence_parallel=True, device="cpu")
    return {"row": randomise(te.Linear(IN, OUT, parallel_mode="row", **more)),
            "mlp": randomise(te.LayerNormMLP(OUT, IN, set_parallel_mode=True, **more), 0.05)}


def _steps(group, kind, recipe, **more):
    """Outputs and gradients of two steps, and the reduce_scatters of a forward."""
    module = _modules(group, **more)[kind]
    results = []
    for step in range(2):
        torch.manual_seed(50 + step + group.rank())
        x = torch.randn(ROWS, IN // group.size()) if kind == "row" else torch.randn(ROWS // group.size(), OUT)
        x.requires_grad_()
        module.zero_grad()
        with te.autocast(recipe=recipe(), amax_reduction_group=group) if recipe is not None else contextlib.nullcontext():
            collectives.reset_counts()
            y = module(x)
            calls = sum(count.calls for (name, _), count in collectives.counts().items() if name == "reduce_scatter")
        y.backward(torch.randn_like(y))
        results += [y.detach(), x.grad, *(p.grad.clone() for p in module.parameters())]
    return results, calls


def case_results_are_those_of_one_piece(ranks):
    """Outputs and gradients in F32 and by every recipe; each stripe has a collective."""
    for size in ranks.degrees():
        group = ranks.groups[size]
        for stripes in (2, 4):
            for recipe, operands in OPERANDS.items():
                entry = _entry(size, operands=operands, stripes=stripes)
                with _file([entry]):
                    got = {kind: _steps(group, kind, recipe) for kind in ("row", "mlp")}
                with _file(None):
                    want = {kind: _steps(group, kind, recipe) for kind in ("row", "mlp")}
                for kind, (results, calls) in got.items():
                    assert calls == stripes and want[kind][1] == 1, (kind, recipe, calls)
                    for i, (a, b) in enumerate(zip(results, want[kind][0])):
                        close(a, b, f"{kind}, {recipe}, result {i}", 1e-6)


def case_other_products_are_whole(ranks):
    """Other sizes, ranks, dtypes and devices than the file's are computed in one piece."""
    group = ranks.groups[ranks.world]
    size = group.size()
    for other in ({"rows": 2 * ROWS}, {"in": 2 * IN}, {"out": 2 * OUT}, {"ranks": 2 * size}, {"operands": "bf16"}, {"output": "bf16"},
                  {"device": "another chip"}, {"stripes": 1}):
        with _file([_entry(size, **other)]):
            assert _steps(group, "row", None)[1] == 1, other
    with _file([_entry(size, out=2 * OUT), _entry(size)]):
        assert _steps(group, "row", None)[1] == 2


def case_checkpoints_and_weights_of_codes(ranks):
    """A recomputed forward comes to the same collectives again, and weights of codes alone are cut as others are."""
    for size in ranks.degrees():
        group = ranks.groups[size]
        x = torch.randn(ROWS, IN // size, requires_grad=True)
        for recipe in (Float8CurrentScaling(), Float8BlockScaling()):
            results = []
            for content in (None, [_entry(size, operands="fp8"), _entry(size, operands="fp8_block")]):
                torch.manual_seed(7 + group.rank())
                with _file(content), te.quantized_model_init(recipe=recipe):
                    module = te.Linear(IN, OUT, parallel_mode="row", sequence_parallel=True, tp_group=group, device="cpu")
                    collectives.reset_counts()
                    with te.autocast(recipe=recipe, amax_reduction_group=group):
                        y = te.checkpoint(module, x)
                    x.grad = None
                    y.square().sum().backward()
                    results.append([y.detach(), x.grad])
                    scatters = sum(c.calls for (name, _), c in collectives.counts().items() if name == "reduce_scatter")
                    assert scatters == (4 if content else 2), scatters
            for a, b in zip(*results):
                close(b, a, f"{recipe}", 1e-6)


def _refused(group, kind, words):
    try:
        _steps(group, "row", None)
    except kind as error:
        for word in words:
            assert word in str(error), (word, str(error))
    else:
        raise AssertionError(f"nobody refused: {words}")


def case_a_file_of_one_rank_alone(ranks):
    """Every rank says what each has, and the next file, that all have, serves."""
    group = torch.distributed.new_group(list(range(ranks.world)))
    entry = _entry(ranks.world)
    with _file([entry] if ranks.rank == 1 else None):
        _refused(group, FailedPrecondition, ["rank 0: no file", "rank 1: a file of contents", "TE_FL_STRIPES_FILE"])
    with _file([entry] if ranks.rank == 1 else [{**entry, "stripes": 4}]):
        _refused(group, FailedPrecondition, ["rank 0: a file of contents", "rank 1: a file of contents"])
    with _file("nonsense" if ranks.rank == 0 else [entry]):
        _refused(group, InvalidArgument if ranks.rank == 0 else FailedPrecondition, ["it is not JSON"])
    with _file([entry]):
        assert _steps(group, "row", None)[1] == 2
    torch.distributed.destroy_process_group(group)


def case_mistakes_in_the_file(ranks):
    """Each is refused when the file is read, before a collective, with what is wrong and where."""
    group, good = ranks.groups[ranks.world], _entry(ranks.world)
    for content, words in (
            ("[1]", ["the file must be an object"]), ('{"te_fl_stripes": 2, "entries": []}', ['"te_fl_stripes": 1']),
            ('{"te_fl_stripes": 1}', ['the list "entries"']), ([{**good, "rows": None}], ['entries[0] needs the whole number "rows"']),
            ([good, {**good, "stripes": 3}], ["entries[1]: out is 512, which must be a multiple of 3"]), ([{**good, "stripes": 0}], ['"stripes", from 1']),
            ([{**good, "operands": "fp8_block", "stripes": 8}], ["out / stripes with operands fp8_block is 64, which must be a multiple of 128"]),
            ([{**good, "operands": "fp4"}], ['operands is "fp4"; it must be one of f32, bf16, f16, fp8, fp8_block']),
            ([{**good, "rows": ROWS + 1}], [f"rows is {ROWS + 1}"]), ([good, {**good, "stripes": 4}], ["the same product as an earlier one"]),
            ([{**good, "stripe": 2}], ['unknown key "stripe"', "stripes"])):
        with _file(content):
            _refused(group, InvalidArgument, ["TE_FL_STRIPES_FILE", "stripes.json", *words])
    with mock.patch.dict(os.environ, {"TE_FL_STRIPES_FILE": "/nonexistent/stripes.json"}):
        te_fl.reload()
        _refused(group, NotFound, ["/nonexistent/stripes.json"])
    te_fl.reload()


def case_a_rank_that_does_not_come(ranks):
    """is named, in time."""
    group = torch.distributed.new_group(list(range(ranks.world)))
    if ranks.rank == 0:
        with mock.patch.dict(os.environ, {"TE_FL_COMM_TIMEOUT_MS": "300"}):
            try:
                same_stripes.agree(group)
            except RuntimeError as error:
                assert "rank 1 did not come within 300 ms" in str(error) and "no file" in str(error), error
            else:
                raise AssertionError("rank 0 went on alone")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group(group)


def _tuner():
    path = pathlib.Path(__file__).resolve().parents[3] / "bench/gpu/tune_stripes.py"
    spec = importlib.util.spec_from_file_location("tune_stripes", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["tune_stripes"] = module
    spec.loader.exec_module(module)
    return module


def case_the_tuner_writes_what_is_read(ranks):
    """With a margin that every cut meets, its entries are taken; with one that none meets there are none. Measured ones replace the file's."""
    tuner, group = _tuner(), ranks.groups[ranks.world]
    args = ([(ROWS, IN, OUT)], ["f32", "fp8_block"], [2, 8], group, torch.device("cpu"), 3, 2)
    with mock.patch.object(tuner, "choose", lambda times, margin: (max(times), dict.fromkeys(times, 0.5))):
        taken, measured = tuner.tune(*args, say=lambda text: None)
    assert [(e["operands"], e["stripes"]) for e in taken] == [("f32", 8), ("fp8_block", 2)], taken
    with _file(tuner.merged([_entry(ranks.world, stripes=4)], taken, measured)):
        assert _steps(group, "row", None)[1] == 8
    assert tuner.tune(*args[:-2], 3, 1, margin=1, say=lambda text: None)[0] == []
    assert "TE_FL_STRIPES_FILE" not in os.environ


def case_the_tuner_takes_no_noise(ranks):
    tuner = _tuner()
    one = [100.0] * 8
    assert tuner.choose({1: one, 2: [97.0] * 8, 4: [95.0] * 8}, 0.01)[0] == 4
    assert tuner.choose({1: one, 2: [99.5] * 8}, 0.01)[0] == 1
    assert tuner.choose({1: one, 2: [90.0] * 5 + [101.0] * 3}, 0.01)[0] == 1
    assert tuner.choose({1: one}, 0.01) == (1, {1: 1.0})
