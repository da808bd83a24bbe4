"""Matrix product of an input and a kernel, with gradients."""

from __future__ import annotations

from typing import Optional, Sequence, Tuple

import jax

from te_fl.errors import InvalidArgument, Unsupported
from te_fl.jax._partition import in_one
from te_fl.jax._product import product
from te_fl.jax.quantize import QuantizerSet, noop_quantizer_set
from te_fl.jax.sharding import with_sharding_constraint_by_logical_axes


noop_collective_op_set = "no collectives"  # the only value of dense()'s collective_op_set besides None


def as_matrices(x: jax.Array, kernel: jax.Array, contracting_dims) -> Tuple[jax.Array, jax.Array, tuple]:
    """Returns x [.., K], the kernel [K, N] (or [K, n, N] if it has two column dimensions larger than 1), and the shape of the result."""
    of_x = [d % x.ndim for d in contracting_dims[0]]
    of_kernel = [d % kernel.ndim for d in contracting_dims[1]]
    shared = [x.shape[d] for d in of_x]
    if shared != [kernel.shape[d] for d in of_kernel]:
        raise InvalidArgument(f"contracting_dims {tuple(map(tuple, contracting_dims))} pair {shared} of x {x.shape} with "
                         f"{[kernel.shape[d] for d in of_kernel]} of kernel {kernel.shape}; they must be equal")
    rows = [d for d in range(x.ndim) if d not in of_x]
    columns = [d for d in range(kernel.ndim) if d not in of_kernel]
    result = tuple(x.shape[d] for d in rows) + tuple(kernel.shape[d] for d in columns)
    wide = [kernel.shape[d] for d in columns if kernel.shape[d] != 1]
    matrix = in_one(kernel.transpose(*of_kernel, *columns), 0, len(shared))
    matrix = matrix.reshape(matrix.shape[0], *wide) if len(wide) == 2 else in_one(matrix, 1, len(columns))
    flat = in_one(x.transpose(*rows, *of_x), len(rows), len(shared))
    return flat if rows else flat[None], matrix, result


def kernel_for(x: jax.Array, kernel: jax.Array, quantizer_set: QuantizerSet) -> jax.Array:
    """Converts the kernel to x's dtype for a high-precision product; a quantised product accepts any kernel dtype."""
    return kernel if quantizer_set.active else kernel.astype(x.dtype)


def dense(x: jax.Array, kernel: jax.Array, bias: Optional[jax.Array] = None,
          contracting_dims: Tuple[Sequence[int], Sequence[int]] = ((1,), (0,)), transpose_batch_sequence: bool = False,
          input_axes: Optional[Tuple[str, ...]] = None, kernel_axes: Optional[Tuple[str, ...]] = None,
          output_axes: Optional[Tuple[str, ...]] = None, collective_op_set=None,
          quantizer_set: QuantizerSet = noop_quantizer_set) -> jax.Array:
    """x kernel + bias, contracted over the given dimensions. The result has x's other dimensions, then the kernel's.

    The gradient with respect to quantizer_set is its state after the step (te_fl.jax.quantize). transpose_batch_sequence has no effect. *_axes:
    logical axes of te_fl.jax.sharding or of Flax's rules.
    """
    if collective_op_set not in (None, noop_collective_op_set):
        raise Unsupported("te_fl.jax: dense(collective_op_set=..) is not supported: collectives are XLA's; leave it out")
    x = with_sharding_constraint_by_logical_axes(x, input_axes)
    a, b, shape = as_matrices(x, kernel_for(x, kernel, quantizer_set), contracting_dims)
    flat = None if bias is None else bias.astype(x.dtype).reshape(b.shape[1:])
    y = product(a, b, flat, (), quantizer_set, None).reshape(shape)
    return with_sharding_constraint_by_logical_axes(y, output_axes)


def grouped_dense(*args, **kwargs):
    raise Unsupported("te_fl.jax has no grouped_dense; call dense once for each group")
