"""Overlap of sequence parallelism's transfers with the matrix products that consume or produce their data, with TE_FL_TP_OVERLAP=1.

A GEMM of all-gathered rows starts with this rank's rows while the other ranks' rows arrive. A GEMM whose result is reduce-scattered computes this
rank's rows last, while the other ranks' rows are being sent. Between GPUs of one host, copy engines move the data (peer_copies), so the SMs stay free
for the products. On CPUs, the group's own sends and receives move the data; this is meant for tests, since the transfers compete with the products
for cores.
"""

from __future__ import annotations

import socket
import warnings
import weakref
from typing import Any, Dict, List, Optional

import torch
import torch.distributed as dist

from te_fl import _native
from te_fl.pytorch.distributed import communicator, peer_copies
from te_fl.pytorch.distributed.same_overlap import exchanged

_LEAST = 1 << 20  # bytes of a shard below which the group's own collective is faster than starting copies
_STEP = 32 << 20  # granularity in bytes of the memory for copies
_TAG = 0x7EF1  # tag of sends and receives, unlikely to match a program's own


class HostOverlap:
    """Transfers of CPU tensors by the group's own sends and receives."""

    chunked_from = 1

    def __init__(self, group: Any):
        self._group, self._number = weakref.ref(group), 0

    def gathers(self, part: torch.Tensor) -> bool:
        return False  # the group's own gather is asynchronous

    def scatters(self, whole: torch.Tensor) -> bool:
        return True

    def scatter(self, whole: torch.Tensor, part: torch.Tensor) -> "_HostScatter":
        self._number += 1
        return _HostScatter(self._group(), whole, part, _TAG + self._number % (1 << 20))


class _HostScatter:
    """A reduce-scatter in chunks. Each has its own tag, so that rows of an abandoned one are not received by the next."""

    def __init__(self, group: Any, whole: torch.Tensor, part: torch.Tensor, tag: int):
        self._group, self._part, self._rank, self._tag = group, part, dist.get_rank(group), tag
        self._rows = whole.view(dist.get_world_size(group), *part.shape)
        self._works: List[Any] = []

    def rows_done(self, rank: int) -> None:
        if rank != self._rank:
            self._works.append(dist.isend(self._rows[rank], group=self._group, group_dst=rank, tag=self._tag))

    def abandon(self) -> None:
        """Ends the transfers when the product that computes the remaining rows has failed."""

    def wait(self) -> None:
        came = {other: torch.empty_like(self._part) for other in range(len(self._rows)) if other != self._rank}
        for other, part in came.items():
            self._works.append(dist.irecv(part, group=self._group, group_src=other, tag=self._tag))
        for work in self._works:
            work.wait()
        parts = [came.get(rank, self._rows[self._rank]) for rank in range(len(self._rows))]
        self._part.copy_(torch.stack(parts).to(torch.float32).sum(0) if len(parts) > 2 else parts[0] + parts[1])


class DeviceOverlap:
    """Transfers between the GPUs of one host, by copies into each other's memory."""

    chunked_from = _LEAST

    def __init__(self, group: Any, device: torch.device):
        self._group, self._device = weakref.ref(group), device
        self._memory: Optional[peer_copies.PeerMemory] = None
        self._kept: List[peer_copies.PeerMemory] = []  # kept alive for CUDA graphs that use it, or for copies that were abandoned

    def gathers(self, part: torch.Tensor) -> bool:
        return self._has(part)

    def scatters(self, whole: torch.Tensor) -> bool:
        return self._has(whole)

    def gather(self, part: torch.Tensor, whole: torch.Tensor) -> peer_copies.Gather:
        return peer_copies.Gather(self._memory, part, whole)

    def scatter(self, whole: torch.Tensor, part: torch.Tensor) -> peer_copies.Scatter:
        return peer_copies.Scatter(self._memory, whole, part)

    def _has(self, tensor: torch.Tensor) -> bool:
        """True if copy memory for such a tensor exists or can be allocated. All ranks ask for the same sizes in the same order, so they allocate at
        the same time. Allocation is impossible during graph capture; the graph then uses the group's own collective.
        """
        size, capturing = tensor.numel() * tensor.element_size(), torch.cuda.is_current_stream_capturing()
        if tensor.device != self._device:
            return False
        if self._memory is not None and self._memory.broken:
            self._kept.append(self._memory)
            self._memory = None
        if self._memory is None or self._memory.size < size:
            if capturing:
                return False
            torch.cuda.synchronize(self._device)
            self._memory = None
            self._memory = peer_copies.PeerMemory(self._group(), self._device, -(-size // _STEP) * _STEP)
        if capturing and self._memory not in self._kept:
            self._kept.append(self._memory)
        return True


_known: "weakref.WeakKeyDictionary[Any, Dict[torch.device, Any]]" = weakref.WeakKeyDictionary()


def of(group: Any, device: torch.device) -> Optional[Any]:
    """Returns the object that transfers the group's rows of tensors on the device in overlap with products. None without TE_FL_TP_OVERLAP, or if the
    group's own collectives must be used. All ranks get the same kind of result. The first call for a group and device must be made by all ranks,
    after same_overlap.agree() has compared their settings.
    """
    group = communicator.member(group)
    if not _native.setting("TE_FL_TP_OVERLAP"):
        return None
    devices = _known.setdefault(group, {})
    if device not in devices:
        devices[device] = _made(group, device, len(devices))
    return devices[device]


def _made(group: Any, device: torch.device, number: int) -> Optional[Any]:
    backend = communicator.find_backend(group, device)
    if device.type == "cpu":
        return HostOverlap(group) if "gloo" in backend else None
    if device.type != "cuda" or "nccl" not in backend:
        return None
    uuid = torch.cuda.get_device_properties(device).uuid
    places = exchanged(group, f"overlap/{number}/places", f"{socket.gethostname()} {uuid}")
    if places is None:
        return None
    refusals = exchanged(group, f"overlap/{number}/refusals", _refusal(places, device, dist.get_rank(group)))
    told = "; ".join(f"rank {rank}: {why}" for rank, why in enumerate(refusals) if why)
    if not told:
        return DeviceOverlap(group, device)
    if dist.get_rank(group) == 0:
        warnings.warn(f"TE_FL_TP_OVERLAP=1 has no effect on group {group.group_name!r}, whose collectives NCCL does: {told}", stacklevel=2)
    return None


def _refusal(places: List[str], device: torch.device, own: int) -> str:
    """The reason why this rank cannot copy to the other ranks' GPUs; empty if it can."""
    if len(places) > peer_copies.MOST_RANKS:
        return f"the group has {len(places)} ranks, and copies support {peer_copies.MOST_RANKS}"
    here = socket.gethostname()
    visible: Dict[str, int] = {str(torch.cuda.get_device_properties(i).uuid): i for i in range(torch.cuda.device_count())}
    for rank, place in enumerate(places):
        host, uuid = place.rsplit(" ", 1)
        if host != here:
            return f"rank {rank} is on another host, {host}"
        if uuid not in visible:
            return f"rank {rank}'s GPU is not among those that CUDA_VISIBLE_DEVICES shows here"
        if rank != own and visible[uuid] == device.index:
            return f"rank {rank} has the same GPU"
        if visible[uuid] != device.index and not torch.cuda.can_device_access_peer(device, visible[uuid]):
            return f"its GPU cannot reach that of rank {rank}"
    return ""
