"""Agreement of a group's ranks before they exchange data: where one rank refuses a call, all refuse it with the same words.

Without it a rank that refuses (a wrong length, no memory) would leave the others waiting for data that never comes.
"""

from __future__ import annotations

import weakref
from typing import Any, Callable, Optional, Sequence, Set, TypeVar

import torch

from te_fl import _native, errors
from te_fl.pytorch.distributed import collectives

T = TypeVar("T")
_BYTES = 2048  # of each rank's text
_OF_GROUP = " ranks of cp_group)"
_BUILTIN = {kind.__name__: kind for kind in (TypeError, ValueError, NotImplementedError)}

# Calls that a group's ranks have agreed upon, for groups of devices.
_agreed: "weakref.WeakKeyDictionary[Any, Set[str]]" = weakref.WeakKeyDictionary()


def _kind_of(error: BaseException) -> str:
    if isinstance(error, errors.Error):
        return error.code
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return errors.OutOfMemory.code
    return next((name for name, kind in _BUILTIN.items() if type(error) is kind), "")


def _words_of(error: BaseException) -> str:
    text = str(error)
    code = error.code if isinstance(error, errors.Error) else ""
    return text.removeprefix(f"{code}: ") if code else text


def _made(kind: str, text: str) -> BaseException:
    known = errors.BY_CODE.get(kind) or _BUILTIN.get(kind) or RuntimeError
    return known(text)


def _exchanged(text: str, group: Any, device: torch.device) -> list:
    """The texts of all ranks."""
    raw = text.encode()[:_BYTES - 2]
    own = torch.zeros(_BYTES, dtype=torch.uint8)
    own[:2 + len(raw)] = torch.frombuffer(bytearray(len(raw).to_bytes(2, "little") + raw), dtype=torch.uint8)
    ranks = collectives.size_of(group)
    every = torch.empty(ranks * _BYTES, dtype=torch.uint8, device=device)
    collectives.all_gather_into(every, own.to(device), group)
    rows = [bytes(row.tolist()) for row in every.cpu().view(ranks, _BYTES)]
    return [row[2:2 + int.from_bytes(row[:2], "little")].decode(errors="replace") for row in rows]


def needed(group: Any, device: torch.device, words: str) -> bool:
    """True if the ranks compare this call. On a device that costs a wait for the device, so there it happens once for each different call, and at
    every call under TE_FL_VALIDATE=1; during the capture of a graph never, since a capture cannot wait.
    """
    if device.type == "cpu":
        return True
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return False
    return bool(_native.setting("TE_FL_VALIDATE")) or words not in _agreed.get(group, ())


def agree_over(where: str, groups: Sequence[Any], device: torch.device, words: str, prepare: Callable[[], T]) -> T:
    """agree() in each of several groups in turn. Where they are the rows and the columns of one larger group, all its ranks agree."""
    if len(groups) == 1:
        return agree(where, groups[0], device, words, prepare)
    return agree(where, groups[-1], device, words, lambda: agree_over(where, groups[:-1], device, words, prepare))


def agree(where: str, group: Any, device: torch.device, words: str, prepare: Callable[[], T]) -> T:
    """Runs prepare() on this rank and returns its result, if it succeeds on all ranks and `words`, which describe the call, are the same on all of
    them. Otherwise every rank raises the same error: that of the lowest rank whose prepare() failed, or the list of what the ranks call.
    """
    result: Optional[T] = None
    failed: Optional[BaseException] = None
    try:
        result = prepare()
    except Exception as error:
        # torch.utils.checkpoint ends a recomputation, on all ranks at the same place, by an exception.
        if type(error).__module__ == "torch.utils.checkpoint":
            raise
        failed = error
    if not needed(group, device, words):
        if failed is not None:
            raise failed
        return result  # type: ignore[return-value]
    own = f"0{words}" if failed is None else f"1{_kind_of(failed)}\0{_words_of(failed)}"
    every = _exchanged(own, group, device)
    for rank, text in enumerate(every):
        if text.startswith("1"):
            kind, _, words_there = text[1:].partition("\0")
            if not words_there.endswith(_OF_GROUP):
                words_there += f" (rank {rank} of the {len(every)}{_OF_GROUP}"
            raise _made(kind, words_there) from failed
    if any(text != every[0] for text in every):
        calls = "; ".join(f"rank {rank}: {text[1:]}" for rank, text in enumerate(every))
        raise errors.InvalidArgument(f"{where}: the ranks of cp_group make different calls; give all of them the same arguments and equal lengths: {calls}")
    _agreed.setdefault(group, set()).add(words)
    return result  # type: ignore[return-value]
