"""Rows of FP8 codes: a rank's shard of a weight, the whole weight that FSDP gathers from the shards, and slices of either."""

from __future__ import annotations

from typing import Any, List, Optional, Tuple

import torch

from te_fl.pytorch.distributed import collectives
from te_fl.pytorch.fp8.codes import BLOCK, Codes, Rules


def divides(rules: Rules, rows: int, each: int) -> bool:
    """True if shards of `each` rows can be quantised separately: with per-tensor scaling always, and with block scaling if no block of 128 rows is
    split.
    """
    if rules.scaling == "mxfp8":  # its column-wise codes have scales of 32 rows
        return False
    return rules.scaling == "tensor" or each >= rows or (each % BLOCK == 0 and rows % each == 0)


def apart(rules: Rules, rows: int, start: int, stop: int) -> bool:
    """True if the row range [start, stop) of codes with `rows` rows splits no block."""
    return rules.scaling == "tensor" or rules.scaling != "mxfp8" and (start % BLOCK == 0 and (stop % BLOCK == 0 or stop == rows))


class Rows(Codes):
    """A row slice, from row `start` on, that shares the memory of another Codes object, `whole`. Writing values changes the scale of `whole`, so the
    write rewrites all rows. alone: the remaining rows of `whole` are padding.
    """

    __slots__ = ("whole", "start", "alone")

    def __init__(self, whole: Codes, start: int, stop: int, alone: bool = False):
        blocks = whole.rules.scaling != "tensor"
        super().__init__(whole.rules, whole.data[start:stop], whole.scale_inv[start // BLOCK:-(-stop // BLOCK)] if blocks else whole.scale_inv,
                         whole.amax)
        self.whole, self.start, self.alone = whole, start, alone

    def in_whole(self, values: torch.Tensor) -> torch.Tensor:
        """The values of the whole, with these rows replaced."""
        all_values = self.whole.read(torch.float32)
        all_values[self.start:self.start + self.data.shape[0]] = values
        return all_values

    def write(self, values: torch.Tensor, amax: Optional[torch.Tensor] = None) -> None:
        self.whole.write(self.in_whole(values), amax)

    def copy_(self, other: Codes) -> None:
        """Copies codes unchanged. Unless `alone`, the remaining rows must receive codes with the same scale by further copies."""
        super().copy_(other)
        if isinstance(self.whole, Shard):
            self.whole.unrounded = None

    def to(self, device: torch.device, non_blocking: bool = False, always: bool = False) -> Codes:
        return Rows(self.whole.to(device, non_blocking, always), self.start, self.start + self.data.shape[0], self.alone)


class Flat(Codes):
    """Other codes viewed as a vector. FSDP keeps one for each shard."""

    __slots__ = ("whole",)

    def __init__(self, whole: Codes):
        super().__init__(whole.rules, whole.data.view(-1), whole.scale_inv, whole.amax)
        self.whole = whole

    def read(self, dtype: torch.dtype) -> torch.Tensor:
        return self.whole.read(dtype).view(-1)

    def write(self, values: torch.Tensor, amax: Optional[torch.Tensor] = None) -> None:
        self.whole.write(values.expand(self.data.shape).reshape(self.whole.data.shape), amax)

    def to(self, device: torch.device, non_blocking: bool = False, always: bool = False) -> Codes:
        return Flat(self.whole.to(device, non_blocking, always))


class Shard(Codes):
    """One rank's shard of a weight's rows, with the same number of rows on every rank; the last rows may be zero padding.

    With per-tensor scaling, one scale is common to all ranks: each write of values reduces its amax over `group`, so every rank must make the same
    writes. Before the first all-gather the group is unknown; values written until then are kept unquantised, and quantised at that point.
    """

    __slots__ = ("group", "device", "unrounded", "source")

    def __init__(self, rules: Rules, data: torch.Tensor, scale_inv: torch.Tensor, amax: Optional[torch.Tensor]):
        super().__init__(rules, data, scale_inv, amax)
        self.group: Any = None
        self.device: Optional[torch.device] = None  # the device of the group's collectives
        self.unrounded: Optional[torch.Tensor] = None
        self.source: Optional["Shard"] = None  # the shard that this one is a copy of, for one all-gather of a shard in host memory

    @classmethod
    def like(cls, other: Codes, rows: int) -> "Shard":
        """A shard of zeros for `rows` rows of other codes, with their scale and the same group."""
        made = cls.empty(other.rules, torch.Size((rows, other.data.shape[1])), other.data.device)
        made.data.zero_()
        if made.rules.scaling == "tensor":
            made.scale_inv.copy_(other.scale_inv)
            made.amax.copy_(other.amax)
        source = other.whole if isinstance(other, Rows) else other
        if isinstance(source, Shard):
            made.group, made.device = source.group, source.device
            made.unrounded = source.unrounded if source.data.shape == made.data.shape else None
        return made

    def write(self, values: torch.Tensor, amax: Optional[torch.Tensor] = None) -> None:
        if self.rules.scaling != "tensor" or amax is not None:
            super().write(values, amax)
        elif self.group is not None:
            write_all([(self, values)])
        else:
            super().write(values)
            self.unrounded = values.detach().to(self.data.device, copy=True)

    def copy_(self, other: Codes) -> None:
        super().copy_(other)
        self.unrounded = None

    def join(self, mesh: Any) -> None:
        """Learns the ranks that hold the other shards from FSDP's mesh. Makes the ranks' scales equal, since each rank may have initialised or loaded
        its own rows. All ranks call it, before each all-gather.
        """
        if self.group is not None or self.rules.scaling != "tensor":
            return
        if self.source is not None:
            self.source.join(mesh)
            super().copy_(self.source)
            self.group, self.device = self.source.group, self.source.device
            return
        self.group, self.device = mesh.get_group(), torch.device(mesh.device_type)
        mine = torch.cat([self.scale_inv, self.amax, -self.scale_inv, -self.amax, torch.full_like(self.amax, self.unrounded is not None)])
        ends = mine.to(self.device)
        collectives.all_reduce(ends, self.group, "max")
        ends = ends.cpu()
        if ends[4] or not torch.equal(ends[:2], -ends[2:4]):
            values, self.unrounded = self.read(torch.float32) if self.unrounded is None else self.unrounded, None
            write_all([(self, values)])

    def to(self, device: torch.device, non_blocking: bool = False, always: bool = False) -> Codes:
        parts = (None if part is None else part.to(device, non_blocking=non_blocking, copy=always)
                 for part in (self.data, self.scale_inv, self.amax))
        made = Shard(self.rules, *parts)
        made.group, made.device, made.unrounded = self.group, self.device, self.unrounded
        return made


class Gathered(Codes):
    """The full weight gathered from all ranks' shards, in memory that FSDP frees after use. The transpose, which FSDP lists in `memory`, is freed
    too.
    """

    __slots__ = ("memory",)

    def __init__(self, rules: Rules, data: torch.Tensor, scale_inv: torch.Tensor, amax: Optional[torch.Tensor], memory: List[torch.Tensor]):
        super().__init__(rules, data, scale_inv, amax)
        self.memory = memory

    def add_columns(self) -> None:
        is_first = self.columns is None
        super().add_columns()
        if is_first:
            self.memory += [part for part in (self.columns, self.columns_scale_inv) if part is not None]

    def drop_columns(self) -> None:
        super().drop_columns()
        self.memory.clear()


def write_all(pairs: List[Tuple[Codes, torch.Tensor]]) -> None:
    """Writes values into the codes of several weights. Shards with a known group share one collective."""
    together: dict = {}
    for codes, values in pairs:
        whole = codes.whole if isinstance(codes, Rows) else codes
        if isinstance(whole, Shard) and whole.group is not None and whole.rules.scaling == "tensor":
            together.setdefault(id(whole.group), []).append((whole, values if whole is codes else codes.in_whole(values)))
        else:
            codes.write(values)
    for several in together.values():
        first = several[0][0]
        amaxes = torch.cat([whole.largest(values).to(first.device) for whole, values in several])
        collectives.all_reduce(amaxes, first.group, "max")
        for (whole, values), amax in zip(several, amaxes.split(1)):
            whole.write(values, amax.to(whole.data.device))
