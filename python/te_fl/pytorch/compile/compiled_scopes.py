"""FP8 scopes in functions compiled by torch.compile: one op begins a scope and one ends it, in order with the layers' ops."""

from __future__ import annotations

import ast
import itertools
import threading
import weakref

import torch

from te_fl.common import recipe as recipes
from te_fl.pytorch.compile.compiled import chain, define
from te_fl.pytorch.fp8 import quantization

_running: dict = {}  # running scopes and their threads, by number
_numbers = itertools.count(1)


def parse_recipe(text: str) -> recipes.Recipe:
    """Reconstructs a recipe from the text of recipes.native_of()."""
    fields = dict(ast.literal_eval(text))
    form = recipes.Format[fields["format"].upper()]
    if fields["kind"] == "delayed":
        return recipes.DelayedScaling(margin=fields["margin"], fp8_format=form, amax_history_len=fields["amax_history_len"],
                                      amax_compute_algo=fields["amax_compute_algo"], reduce_amax=fields["reduce_amax"],
                                      fp8_dpa=fields["fp8_dpa"])
    override = fields["backward_override"]
    if fields["kind"] == "mxfp8":
        return recipes.MXFP8BlockScaling(fp8_format=form, backward_override=override, enable_2d_quantization=fields["square_weights"])
    if fields["kind"] == "nvfp4":
        return recipes.nvfp4_of(fields)
    made = (recipes.Float8CurrentScaling if fields["kind"] == "current" else recipes.Float8BlockScaling)(fp8_format=form, backward_override=override)
    options = recipes.QParams(power_2_scale=fields["pow2_scale"], amax_epsilon=fields["amax_epsilon"])
    made.fp8_quant_fwd_inp = made.fp8_quant_fwd_weight = made.fp8_quant_bwd_grad = options
    return made


def _begin(enabled, calibrating, text, after):
    scope = quantization.autocast(enabled, calibrating, parse_recipe(text))
    scope.__enter__()
    number = next(_numbers)
    _running[number] = (scope, threading.get_ident())
    token = torch.tensor([number], dtype=torch.int64, device="cpu")
    # If an exception prevents the op that ends the scope, the graph's tensors are freed, including the token, whose finaliser ends the scope.
    weakref.finalize(token, _leave, number)
    return token


def _leave(number: int) -> None:
    """Ends a scope that is still in force, after the scopes inside of it."""
    scope, thread = _running.pop(number, (None, None))
    if scope is None or thread != threading.get_ident() or scope not in quantization._state.scopes:
        return
    while quantization._state.scopes[-1] is not scope:
        quantization._state.scopes[-1].__exit__()
    scope.__exit__()


def _end(scope, differentiates, after):
    with torch.set_grad_enabled(differentiates):  # sets the gradient mode that the traced function had: an op runs without it
        _leave(int(scope))
    return torch.zeros(1, dtype=torch.int64, device="cpu")


def _token(*_):
    return torch.empty(1, dtype=torch.int64, device="cpu")


_begin_op = define("begin_autocast(bool enabled, bool calibrating, str recipe, Tensor? after) -> Tensor", _begin, _token)
_end_op = define("end_autocast(Tensor scope, bool differentiates, Tensor after) -> Tensor", _end, _token)


def begin_autocast(enabled: bool, calibrating: bool, recipe: dict) -> torch.Tensor:
    """Begins an autocast in a graph, with recipes.native_of() of its recipe. Returns the argument of end_autocast(). Dynamo traces both functions."""
    scope = _begin_op(enabled, calibrating, repr(list(recipe.items())), chain[-1] if chain else None)
    chain.append(scope)
    return scope


def end_autocast(scope: torch.Tensor) -> None:
    token = _end_op(scope, torch.is_grad_enabled(), chain.pop())
    if chain:
        chain[-1] = token
