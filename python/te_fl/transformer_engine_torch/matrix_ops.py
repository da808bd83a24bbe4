"""The ops of te_fl.ops on tensors as the package gives them. Where an op takes a matrix, or any dimensions before the last, a contiguous tensor
is seen as the matrix over its last dimension, an input that is not contiguous is copied first, and a storage of the package is read by its parts
(schemes.py) when the op is called: what it holds now, with no view made and nothing kept.
"""

from te_fl import _native


def __getattr__(name: str):
    if name.startswith("_"):
        raise AttributeError(name)
    try:
        op = _native.matrix_op(name)
    except LookupError as error:
        raise AttributeError(str(error)) from None
    globals()[name] = op
    return op
