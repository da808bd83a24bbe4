"""KV caches for generation, with Transformer Engine's names."""

from __future__ import annotations

import inspect
import operator
from collections import OrderedDict
from typing import Any, Dict, Hashable, List, Mapping, Optional, Sequence, Tuple, Type, Union

import torch

from te_fl.errors import FailedPrecondition, InvalidArgument
from te_fl.pytorch.functions.kv_cache import of_pages, write_tokens
from te_fl.pytorch.runtime import refuse as rules
from te_fl.pytorch.runtime.device import default_device
from te_fl.pytorch.runtime.dtypes import DTYPE_NAMES
from te_fl.pytorch.runtime.refuse import checks_keywords

Steps = Mapping[Hashable, int]  # number of tokens by sequence id, in batch order
_LAYOUTS = ("bshd", "sbhd", "thd")


def _as_count(value: Any) -> Optional[int]:
    """Converts an integer of 1 or more, of any library's type, to int; None for other values."""
    try:
        count = operator.index(value)
    except (TypeError, RuntimeError):
        return None
    return None if isinstance(value, bool) or count < 1 else count


def _zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    with torch.inference_mode(False):  # tensors made in inference mode cannot be written outside of it
        return torch.zeros(shape, dtype=dtype, device=device)


class KVCacheManager:
    """Base class of cache managers. `cache`: keys and values by layer number. `sequences`: number of tokens of each sequence."""

    def __init__(self) -> None:
        self.cache: Dict[int, Tuple[Any, Any]] = {}
        self.sequences: "OrderedDict[Hashable, int]" = OrderedDict()

    def reset(self) -> None:
        """Removes all sequences; keeps the caches' memory."""
        self.sequences = OrderedDict()

    def allocate_memory(self, layer_number: int) -> None:
        """Allocates the caches of a layer."""
        self.cache[layer_number] = (None, None)

    def pre_step(self, step_dict: Steps) -> "OrderedDict[Hashable, int]":
        """Registers the number of new tokens for each sequence of the next batch, and returns `sequences`, which includes them."""
        return self.sequences

    def step(self, layer_number: int, new_k: torch.Tensor, new_v: torch.Tensor, cu_new_seqlens: torch.Tensor,
             cu_cached_seqlens: torch.Tensor, qkv_format: str) -> Tuple[torch.Tensor, torch.Tensor]:
        """Writes the new tokens' keys and values, and returns the layer's caches."""
        return self.cache[layer_number]

    def _advanced(self, step_dict: Steps) -> "OrderedDict[Hashable, int]":
        """The batch's sequences in batch order, with the new tokens counted. Sequences that the batch omits have ended."""
        return OrderedDict((name, self.sequences.get(name, 0) + new) for name, new in step_dict.items())


class NonPagedKVCacheManager(KVCacheManager):
    """Contiguous caches [max_batch_size, max_seqlen, heads, channels]; row i belongs to sequence i of the batch."""

    def __init__(self, max_batch_size: int, max_seqlen: int, num_heads: int, head_dim_k: int, dtype: torch.dtype,
                 head_dim_v: Optional[int] = None, device: Union[torch.device, str, None] = None) -> None:
        super().__init__()
        self.max_batch_size, self.max_seqlen, self.num_heads, self.dtype = max_batch_size, max_seqlen, num_heads, dtype
        self.head_dim_k, self.head_dim_v = head_dim_k, head_dim_k if head_dim_v is None else head_dim_v
        self.device = default_device() if device is None else torch.device(device)

    def allocate_memory(self, layer_number: int) -> None:
        self.cache[layer_number] = tuple(_zeros((self.max_batch_size, self.max_seqlen, self.num_heads, channels), self.dtype, self.device)
                                         for channels in (self.head_dim_k, self.head_dim_v))

    @torch.no_grad()
    def pre_step(self, step_dict: Steps) -> "OrderedDict[Hashable, int]":
        """Also moves the sequences' rows to their places in the batch, for all layers. A layer's step cannot do so, because a captured CUDA graph of
        the steps has a fixed row order.
        """
        had = {name: row for row, name in enumerate(self.sequences)}
        rows = [had.get(name) for name in step_dict]
        if any(row is not None and row != at for at, row in enumerate(rows)):
            # A new sequence's row is written before it is read, so its source is arbitrary.
            source = torch.tensor([at if row is None else row for at, row in enumerate(rows)], dtype=torch.int64, device="cpu")
            for caches in self.cache.values():
                for cache in caches:
                    cache[:len(rows)] = cache[source.to(cache.device)]
        self.sequences = self._advanced(step_dict)
        return self.sequences

    @torch.no_grad()
    def step(self, layer_number: int, new_k: torch.Tensor, new_v: torch.Tensor, cu_new_seqlens: torch.Tensor,
             cu_cached_seqlens: torch.Tensor, qkv_format: str) -> Tuple[torch.Tensor, torch.Tensor]:
        k_cache, v_cache = self.cache[layer_number]
        write_tokens((k_cache, v_cache), (new_k, new_v), qkv_format, cu_new_seqlens, cu_cached_seqlens)
        batch = self.max_batch_size if qkv_format == "thd" else new_k.shape[0 if qkv_format == "bshd" else 1]
        return k_cache[:batch], v_cache[:batch]


class PagedKVCacheManager(KVCacheManager):
    """Paged caches [total_num_pages, page_size, heads, channels]. Row i of page_table, int32 [max_batch_size, pages per sequence], lists the pages of
    sequence i of the batch.
    """

    def __init__(self, total_num_pages: int, page_size: int, num_heads: int, head_dim_k: int, dtype: torch.dtype, max_batch_size: int,
                 max_seqlen: int, head_dim_v: Optional[int] = None, device: Union[torch.device, str, None] = None) -> None:
        super().__init__()
        self.total_num_pages, self.page_size, self.num_heads, self.dtype = total_num_pages, page_size, num_heads, dtype
        self.max_batch_size, self.max_seqlen, self.max_pages_per_seq = max_batch_size, max_seqlen, max_seqlen // page_size
        self.head_dim_k, self.head_dim_v = head_dim_k, head_dim_k if head_dim_v is None else head_dim_v
        self.device = default_device() if device is None else torch.device(device)
        self.free_pages = list(range(total_num_pages))
        self.allocated_pages: Dict[Hashable, List[int]] = {}
        self.page_table = _zeros((max_batch_size, self.max_pages_per_seq), torch.int32, self.device)

    def reset(self) -> None:
        super().reset()
        self.free_pages, self.allocated_pages = list(range(self.total_num_pages)), {}
        self.page_table.zero_()

    def allocate_memory(self, layer_number: int) -> None:
        self.cache[layer_number] = tuple(_zeros((self.total_num_pages, self.page_size, self.num_heads, channels), self.dtype, self.device)
                                         for channels in (self.head_dim_k, self.head_dim_v))

    def pre_step(self, step_dict: Steps) -> "OrderedDict[Hashable, int]":
        advanced = self._advanced(step_dict)
        kept = {name: pages for name, pages in self.allocated_pages.items() if name in advanced}
        free = self.free_pages + [page for name, pages in self.allocated_pages.items() if name not in advanced for page in pages]
        wanted = {name: -(-tokens // self.page_size) - len(kept.get(name, ())) for name, tokens in advanced.items()}
        if sum(wanted.values()) > len(free):
            raise InvalidArgument(f"PagedKVCacheManager: the batch needs {sum(wanted.values())} pages more and {len(free)} are free; give a larger "
                                  "total_num_pages")
        for name, pages in wanted.items():
            kept[name] = kept.get(name, []) + free[:pages]
            free = free[pages:]
        self.free_pages, self.allocated_pages, self.sequences = free, kept, advanced
        table = torch.zeros(len(advanced), self.max_pages_per_seq, dtype=torch.int32, device="cpu")
        for row, name in enumerate(advanced):
            table[row, :len(kept[name])] = torch.tensor(kept[name], dtype=torch.int32, device="cpu")
        self.page_table[:len(advanced)].copy_(table)
        return self.sequences

    @torch.no_grad()
    def step(self, layer_number: int, new_k: torch.Tensor, new_v: torch.Tensor, cu_new_seqlens: torch.Tensor,
             cu_cached_seqlens: torch.Tensor, qkv_format: str) -> Tuple[torch.Tensor, torch.Tensor]:
        k_cache, v_cache = self.cache[layer_number]
        write_tokens((k_cache, v_cache), (new_k, new_v), qkv_format, cu_new_seqlens, cu_cached_seqlens, self.page_table)
        return k_cache, v_cache


class InferenceParams:
    """The KV caches of all layers that are called with forward(inference_params=..).

    Before each pass of the model, call pre_step() with the batch: a dict of numbers of new tokens by sequence id, in batch order. An id of the
    previous batch continues; a new id starts a sequence; an omitted id ends. Each layer needs a layer_number and a mask with padding;
    'padding_causal' is aligned to the bottom right, since the queries are the last tokens.

    max_batch_size, max_sequence_length: numbers of sequences, and of tokens per sequence. num_heads_kv, head_dim_k, head_dim_v, dtype: of this rank's
    keys and values. is_paged, page_size, total_num_pages: stores the caches in pages, which must suffice for all sequences at full length.
    qkv_format: the inputs' layout, which a call of attention may override. max_ctx_len: with 'thd', the largest number of new tokens of a sequence in
    a pass. custom_cache_manager: a class derived from KVCacheManager. device: the caches' device; the default is that of new modules. Not
    thread-safe. If pre_step() or step() raises, nothing has changed.
    """

    @checks_keywords()
    def __init__(self, max_batch_size: int, max_sequence_length: int, num_heads_kv: Optional[int] = None, head_dim_k: Optional[int] = None,
                 dtype: Optional[torch.dtype] = None, head_dim_v: Optional[int] = None, is_paged: bool = False,
                 total_num_pages: Optional[int] = None, page_size: Optional[int] = None, max_ctx_len: Optional[int] = None,
                 qkv_format: str = "bshd", custom_cache_manager: Optional[Type[KVCacheManager]] = None,
                 device: Union[torch.device, str, None] = None) -> None:
        where = "InferenceParams"
        rules.choice(where, "qkv_format", qkv_format, _LAYOUTS)
        head_dim_v = head_dim_k if head_dim_v is None else head_dim_v
        sizes = {"max_batch_size": max_batch_size, "max_sequence_length": max_sequence_length, "num_heads_kv": num_heads_kv, "head_dim_k": head_dim_k,
                 "head_dim_v": head_dim_v}
        for name, value in sizes.items():
            if _as_count(value) is None:
                raise InvalidArgument(f"{where}: {name} is {value!r}; it is an int of 1 or more")
        max_batch_size, max_sequence_length, num_heads_kv, head_dim_k, head_dim_v = map(_as_count, sizes.values())
        if dtype not in DTYPE_NAMES:
            raise rules.refuse(where, "dtype", dtype, "give the dtype of keys and values, torch.float32, torch.bfloat16 or torch.float16")
        if max_ctx_len is None and qkv_format == "thd" or max_ctx_len is not None and not 1 <= max_ctx_len <= max_sequence_length:
            raise InvalidArgument(f"{where}: max_ctx_len is {max_ctx_len} with qkv_format {qkv_format!r}; it is from 1 to max_sequence_length, "
                             f"{max_sequence_length}, and 'thd' needs it")
        self.max_batch_size, self.max_sequence_length, self.max_ctx_len = max_batch_size, max_sequence_length, max_ctx_len
        self.num_heads_kv, self.head_dim_k, self.head_dim_v, self.dtype = num_heads_kv, head_dim_k, head_dim_v, dtype
        self.is_paged, self.cache_qkv_format = bool(is_paged), "bshd"
        self.device = default_device() if device is None else torch.empty(0, dtype=torch.uint8, device=device).device
        if self.is_paged:
            self._check_pages(total_num_pages, page_size)
        elif total_num_pages is not None or page_size is not None:
            raise InvalidArgument(f"{where}: total_num_pages is {total_num_pages} and page_size {page_size} with is_paged=False; give is_paged=True, or "
                             "leave them out")
        self.total_num_pages, self.page_size = total_num_pages, page_size
        self.cache_manager = self._manager(custom_cache_manager)
        self._take_format(qkv_format)
        self.sequences_pre_step: "OrderedDict[Hashable, int]" = OrderedDict()
        self.sequences: "OrderedDict[Hashable, int]" = OrderedDict()
        self.batch_size = 0
        self._owners: Dict[int, int] = {}  # layer number -> number of the module that uses it
        self.cu_seqlens_q = _zeros((max_batch_size + 1,), torch.int32, self.device)
        self.cu_seqlens_kv = _zeros((max_batch_size + 1,), torch.int32, self.device)
        self.pre_step_seqlens = _zeros((max_batch_size,), torch.int32, self.device)

    def _check_pages(self, total: Any, size: Any) -> None:
        if not isinstance(size, int) or size < 1 or self.max_sequence_length % size != 0:
            raise InvalidArgument(f"InferenceParams: page_size is {size!r}; with is_paged it divides max_sequence_length, {self.max_sequence_length}")
        needed = self.max_batch_size * (self.max_sequence_length // size)
        if total != needed:
            raise InvalidArgument(f"InferenceParams: total_num_pages is {total!r}; it is max_batch_size * max_sequence_length / page_size, {needed}")

    def _manager(self, custom: Optional[Type[KVCacheManager]]) -> KVCacheManager:
        if custom is not None and not (isinstance(custom, type) and issubclass(custom, KVCacheManager)):
            raise TypeError(f"InferenceParams: custom_cache_manager is {custom!r}; it is a class derived from KVCacheManager")
        kind: Any = custom or (PagedKVCacheManager if self.is_paged else NonPagedKVCacheManager)
        options: Dict[str, Any] = dict(max_batch_size=self.max_batch_size, max_seqlen=self.max_sequence_length, num_heads=self.num_heads_kv,
                                       head_dim_k=self.head_dim_k, dtype=self.dtype, head_dim_v=self.head_dim_v)
        if self.is_paged:
            options.update(total_num_pages=self.total_num_pages, page_size=self.page_size)
        if custom is None or "device" in inspect.signature(kind).parameters:  # managers written for Transformer Engine have no parameter `device`
            options["device"] = self.device
        return kind(**options)

    def _take_format(self, qkv_format: str) -> None:
        self.input_qkv_format = qkv_format
        self.output_qkv_format = qkv_format if qkv_format == self.cache_qkv_format else f"{qkv_format}_2{self.cache_qkv_format}"

    def __repr__(self) -> str:
        pages = f"total_pages={self.total_num_pages}, page_size={self.page_size}"
        rows = f"max_batch_size={self.max_batch_size}, max_seqlen={self.max_sequence_length}"
        return (f"dtype={self.dtype}, is_paged={self.is_paged}, {pages if self.is_paged else rows}, num_heads={self.num_heads_kv}, "
                f"head_dim_k={self.head_dim_k}, head_dim_v={self.head_dim_v}")

    def reset(self) -> None:
        """Removes all sequences and the assignment of modules to layers; keeps the caches' memory."""
        self.sequences, self.sequences_pre_step, self.batch_size, self._owners = OrderedDict(), OrderedDict(), 0, {}
        self.cache_manager.reset()

    def allocate_memory(self, layer_number: int) -> None:
        """Allocates the caches of a layer; otherwise its first step does."""
        self.cache_manager.allocate_memory(layer_number)

    def pre_step(self, step_dict: Steps) -> None:
        """Registers the next batch: the number of new tokens (at least 1) by sequence id, in batch order."""
        step_dict = self._checked_steps(step_dict)
        sequences = self.cache_manager.pre_step(step_dict)
        if list(sequences) != list(step_dict):
            raise FailedPrecondition(f"{type(self.cache_manager).__name__}.pre_step() has returned the sequences "
                                     f"{list(sequences)} for a batch of {list(step_dict)}; they have one order")
        self.sequences = sequences
        self.batch_size = len(step_dict)
        self.sequences_pre_step = OrderedDict((name, total - step_dict[name]) for name, total in self.sequences.items())
        self.pre_step_seqlens[:self.batch_size].copy_(torch.tensor(
            list(self.sequences_pre_step.values()), dtype=torch.int32, device="cpu"))
        for sums, lengths in ((self.cu_seqlens_q, step_dict), (self.cu_seqlens_kv, self.sequences)):
            padded = [*lengths.values()] + [0] * (self.max_batch_size - self.batch_size)
            sums[1:].copy_(torch.tensor(padded, dtype=torch.int32, device="cpu").cumsum(0, dtype=torch.int32))

    def _checked_steps(self, step_dict: Steps) -> "OrderedDict[Hashable, int]":
        where = "InferenceParams.pre_step"
        if not isinstance(step_dict, Mapping) or not 1 <= len(step_dict) <= self.max_batch_size:
            raise InvalidArgument(f"{where}: step_dict is {step_dict!r}; it is a dict of 1 to max_batch_size, {self.max_batch_size}, sequences")
        steps: "OrderedDict[Hashable, int]" = OrderedDict()
        for name, count in step_dict.items():
            before, new = self.sequences.get(name, 0), _as_count(count)
            if new is None:
                raise InvalidArgument(f"{where}: sequence {name!r} has {count!r} new tokens; give an int of 1 or more, or leave the sequence out, which "
                                      "ends it")
            if before + new > self.max_sequence_length:
                raise InvalidArgument(f"{where}: sequence {name!r} has {before} tokens and gets {new} more; max_sequence_length is "
                                      f"{self.max_sequence_length}")
            if self.max_ctx_len is not None and new > self.max_ctx_len:
                raise InvalidArgument(f"{where}: sequence {name!r} gets {new} tokens; max_ctx_len is {self.max_ctx_len}")
            steps[name] = new
        return steps

    def new_tokens(self) -> List[int]:
        """The number of new tokens of each sequence of the batch."""
        return [total - self.sequences_pre_step[name] for name, total in self.sequences.items()]

    def check_owner(self, layer_number: Optional[int], module: int) -> None:
        """Refuses a module whose layer_number another module uses. module: its number in runtime/registry.py."""
        if layer_number is None:
            raise InvalidArgument("DotProductAttention: layer_number is None with inference_params; give each layer one of its own, from 1 on")
        if self._owners.get(layer_number, module) != module:
            raise InvalidArgument(f"DotProductAttention: two layers have the layer_number {layer_number}, and inference_params keeps one cache for each; give "
                             "each layer one of its own, or call reset() where one model follows another")

    def take_place(self, layer_number: int, module: int) -> None:
        """Assigns the layer to this module."""
        self._owners[layer_number] = module

    def __getstate__(self) -> dict:
        """Drops the assignment of modules: a copy is for a copied model, whose modules have other numbers."""
        return {**self.__dict__, "_owners": {}}

    def get_seqlens_pre_step(self) -> torch.Tensor:
        """The number of earlier tokens of each sequence of the batch, int32 [max_batch_size]."""
        return self.pre_step_seqlens

    def convert_paged_to_nonpaged(self, layer_number: int) -> Tuple[torch.Tensor, torch.Tensor]:
        """Copies a layer's paged caches to [batch, max_sequence_length, heads, channels]."""
        manager: Any = self.cache_manager
        pages = manager.page_table[:self.batch_size]
        k_cache, v_cache = manager.cache[layer_number]
        return of_pages(k_cache, pages), of_pages(v_cache, pages)

    def step(self, layer_number: int, new_k: torch.Tensor, new_v: torch.Tensor, qkv_format: str):
        """Writes a layer's new keys and values. A repeated call after the same pre_step() overwrites the same places.

        Returns the layer's caches, the cumulative lengths of the new tokens and of all tokens, both int32 [max_batch_size + 1], max_sequence_length,
        and a name that combines the layouts of the inputs and of the caches.
        """
        rules.choice("InferenceParams.step", "qkv_format", qkv_format, _LAYOUTS)
        self._check_tokens(new_k, new_v, qkv_format)
        if layer_number not in self.cache_manager.cache:
            self.allocate_memory(layer_number)
        self._take_format(qkv_format)
        caches = self.cache_manager.step(layer_number, new_k, new_v, self.cu_seqlens_q, self.cu_seqlens_kv, qkv_format)
        return (*caches, self.cu_seqlens_q, self.cu_seqlens_kv, self.max_sequence_length, self.output_qkv_format)

    def _check_tokens(self, new_k: torch.Tensor, new_v: torch.Tensor, layout: str) -> None:
        where = "InferenceParams.step"
        if self.batch_size == 0:
            raise FailedPrecondition(f"{where}: no batch has been given; call pre_step() before each pass of the model")
        new = self.new_tokens()
        if layout == "thd" and self.max_ctx_len is None:
            raise InvalidArgument(f"{where}: qkv_format is 'thd', and InferenceParams has no max_ctx_len; give it one")
        for name, t, channels in (("new_k", new_k, self.head_dim_k), ("new_v", new_v, self.head_dim_v)):
            if t.dtype != self.dtype or t.device != self.device:
                raise InvalidArgument(f"{where}: {name} is {t.dtype} on {t.device}; the caches are {self.dtype} on {self.device}, as InferenceParams' "
                                      "dtype and device say")
            lead = (sum(new),) if layout == "thd" else (self.batch_size, max(new)) if layout == "bshd" else (max(new), self.batch_size)
            # Tokens may be followed by padding; the batch dimension must match exactly.
            fits = t.dim() == len(layout) and t.shape[-2:] == (self.num_heads_kv, channels) and all(
                had >= needed if axis == "s" or axis == "t" else had == needed for had, needed, axis in zip(t.shape, lead, layout))
            if not fits:
                raise InvalidArgument(f"{where}: {name} has shape {tuple(t.shape)}; for the {sum(new)} tokens of the {self.batch_size} sequences of "
                                      f"pre_step() it is {[*lead, self.num_heads_kv, channels]} in {layout!r}, or longer")
        if new_k.shape[:-1] != new_v.shape[:-1]:
            raise InvalidArgument(f"{where}: new_k has shape {tuple(new_k.shape)} and new_v {tuple(new_v.shape)}; they have the same tokens")
