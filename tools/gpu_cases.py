"""The GPU benchmark's proof: caches of every form, whose sums, gathers and scatters must be the plain reference's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvstore.cache import CacheGroup, PagedKVCache
from kvstore.checksum import reference_block_checksum, reference_slice_checksum
from kvstore.launches import Launches, write_rows
from kvstore.loops_numpy import NumpyLoops
from kvstore.span import MAX_TOKENS, Span, check_span
from kvstore.staging import StagingPool
from kvstore.tools.gpu_device import Mismatch, Place
from kvstore.tools.gpu_memory import Geometry

BF16, FP32, FP8, U8 = torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.uint8
POSITIONS = (0, 5, 2**33, 2**60)
"""First tokens' numbers, near and far out, one form after the other."""

Bytes = npt.NDArray[np.uint8]
UInt64s = npt.NDArray[np.uint64]


@dataclass(frozen=True)
class Form:
    """K and V of `channels` (V of `v_channels` where that is not None), or a cell of so many without heads; `padding` bytes
    lie between cells and must stay as they are."""

    layout: str
    channels: int
    dtype: torch.dtype = BF16
    v_channels: int | None = None
    padding: int = 0
    layers: int = 3
    heads: int = 3
    blocks: int = 5
    tokens: int = 16


FORMS = {
    "packed HND": Form("BHNC", 128),
    "packed NHD": Form("BNHC", 64),
    "split NHD": Form("2BNHD", 128, tokens=7),
    "split HND": Form("2BHND", 96),
    "split in the block": Form("B2NHD", 80),
    "tokens first": Form("NBHC", 64, tokens=1),
    "pairs HND": Form("BHND", 256),
    "pairs NHD fp8": Form("BNHD", 64, FP8, tokens=33),
    "pairs NHD fp32": Form("BNHD", 72, FP32),
    "K larger than V": Form("BHND", 192, v_channels=128),
    "V larger than K": Form("BHNC", 32, v_channels=48),
    "MLA 576 bf16": Form("BNC", 576, heads=1, tokens=64),
    "MLA 656 bytes": Form("BNC", 656, U8, heads=1),
    "MLA 584 bytes": Form("BNC", 584, U8, heads=1),
    "8-byte K and V": Form("2BNHD", 20, layers=9),
    "one piece each": Form("BNHD", 8, FP8, layers=1),
    "between other bytes": Form("BHNC", 64, padding=64),
}


@dataclass
class Caches:
    """One form's cache of random bytes, on the host and on the device, and all the memory that it lies in."""

    form: Form
    seed: int
    place: Place
    whole: list[torch.Tensor] = field(default_factory=list)
    whole_there: list[torch.Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        shapes = self._shapes()
        here, there = {}, {}
        for layer in range(self.form.layers):
            pairs = [self._one(shape, layer * 2 + part) for part, shape in enumerate(shapes)]
            here[f"layers.{layer}"] = _layer([pair[0] for pair in pairs])
            there[f"layers.{layer}"] = _layer([pair[1] for pair in pairs])
        values = self.form.v_channels if "C" in self.form.layout else None
        made = [PagedKVCache.from_tensors(t, self.form.layout, value_channels=values) for t in (here, there)]
        self.cache, self.cache_there = made

    def _shapes(self) -> list[list[int]]:
        """Of a layer's one or two tensors."""
        form, v = self.form, self.form.channels if self.form.v_channels is None else self.form.v_channels
        size = {"B": form.blocks, "H": form.heads, "N": form.tokens, "2": 2}
        size["C"] = form.channels + v if "H" in form.layout else form.channels
        channels = [form.channels, v] if not set(form.layout) & set("2C") else [form.channels]
        return [[(size | {"D": c})[axis] for axis in form.layout] for c in channels]

    def _one(self, shape: list[int], number: int) -> tuple[torch.Tensor, torch.Tensor]:
        random = np.random.default_rng((self.seed, number))
        nbytes, padding = shape[-1] * self.form.dtype.itemsize, self.form.padding
        whole = torch.from_numpy(random.integers(0, 256, [*shape[:-1], nbytes + 2 * padding], np.uint8))
        self.whole.append(whole)
        self.whole_there.append(whole.clone().to(self.place.device))
        here, there = (w[..., padding : padding + nbytes].view(self.form.dtype) for w in (whole, self.whole_there[-1]))
        return here, there

    def equal(self) -> bool:
        """Whether both sides have the same bytes, in and around the cache."""
        return all(torch.equal(a, b.cpu()) for a, b in zip(self.whole, self.whole_there, strict=True))


def _layer(tensors: list[torch.Tensor]) -> Any:
    return tensors[0] if len(tensors) == 1 else (tensors[0], tensors[1])


@dataclass(frozen=True)
class Reference:
    """What comes of a span's blocks by numpy alone: canonical bytes, s of each slice, c of each block."""

    blocks: Bytes
    slices: UInt64s
    sums: UInt64s


def reference(group: CacheGroup, span: Span) -> Reference:
    """By numpy, from a cache on the host."""
    blocks = np.full((len(span), group.block_bytes), 0xA5, np.uint8)
    NumpyLoops(group).gather(span.block_ids, span.valid, blocks)
    slices = np.array([_slices(group, span, i, block) for i, block in enumerate(blocks)], np.uint64)
    names = [(s.layer, s.head) for s in group.slices]
    parts = ([(*n, s) for n, s in zip(names, row, strict=True)] for row in slices.tolist())
    return Reference(blocks, slices, np.array([reference_block_checksum(p) for p in parts], np.uint64))


def _slices(group: CacheGroup, span: Span, index: int, block: Bytes) -> list[int]:
    first, tokens = int(span.first_tokens[index]), int(span.valid[index])
    runs = [block[a:b].reshape(group.block_size, -1) for a, b in zip(group.offsets, group.offsets[1:], strict=False)]
    return [reference_slice_checksum(run[:tokens], first) for run in runs]


def scattered(group: CacheGroup, first_token: int, seed: int = 0) -> Span:
    """All blocks but one in random order, the last one partly filled."""
    ids = np.random.default_rng(seed).permutation(group.num_blocks)[: group.num_blocks - 1].tolist()
    start = min(first_token, MAX_TOKENS // 2) // group.block_size
    return check_span(group, ids, start, (start + len(ids)) * group.block_size - group.block_size // 2)


def wrong(form: Form, place: Place, first_token: int) -> list[str]:
    """What of a form is not the reference's on the device; nothing where all is well."""
    source, target = Caches(form, 1, place), Caches(form, 2, place)
    span = scattered(source.cache.group(0), first_token)
    expected = reference(source.cache.group(0), span)
    untouched = [whole.clone() for whole in target.whole_there]
    NumpyLoops(target.cache.group(0)).scatter(span.block_ids, span.valid, expected.blocks)
    if found := [name for name, good in _kernels(source, target, span, expected) if not good]:
        return found
    for whole, before in zip(target.whole_there, untouched, strict=True):
        whole.copy_(before)
    return [name for name, good in _route(source, target, span, expected) if not good]


def _kernels(source: Caches, target: Caches, span: Span, expected: Reference) -> Iterator[tuple[str, bool]]:
    """Each kernel by itself, on the current stream."""
    place, group = source.place, source.cache_there.group(0)
    launches, rows, staged_rows = Launches(group, place.device), *(np.empty((len(span), 5), np.int64) for _ in range(2))
    write_rows(span, rows)
    write_rows(Span(span.start, np.arange(len(span)), span.first_tokens, span.valid), staged_rows)
    there, staged_there = (torch.from_numpy(r).to(place.device) for r in (rows, staged_rows))
    staging = place.kit.memory(expected.blocks.size).view(expected.blocks.shape).fill_(0x5A)
    sums = torch.zeros(3, len(span), dtype=torch.int64, device=place.device)
    slices = torch.zeros(len(span), launches.num_slices, dtype=torch.int64, device=place.device)

    launches.checksum_blocks(there, sums[0])
    yield "sums of blocks", same(sums[0], expected.sums)
    launches.checksum_slices(there, slices)
    yield "sums of slices", same(slices, expected.slices)
    launches.gather(there, staging)
    yield "gather", bool(np.array_equal(staging.cpu().numpy(), expected.blocks))
    launches.checksum_staged(staged_there, sums[1], torch.from_numpy(expected.blocks).to(place.device))
    yield "sums of staged blocks", same(sums[1], expected.sums)
    Launches(target.cache_there.group(0), place.device).scatter(there, staging)
    yield "scatter", target.equal()


def _route(source: Caches, target: Caches, span: Span, expected: Reference) -> Iterator[tuple[str, bool]]:
    """The way that the store takes: the same kernels on its own streams, through pinned memory."""
    put, get = source.place.route(source.cache_there), source.place.route(target.cache_there)
    staged = put.stage(put.new_buffer(expected.blocks.size), len(span))
    sums = put.begin_put().gather(span, staged).take(0, len(span))
    yield "put: sums of slices", bool(np.array_equal(sums, expected.slices))
    yield "put: bytes", bool(np.array_equal(staged.bytes, expected.blocks))
    transfer = get.begin_get()
    transfer.scatter(span, staged)
    totals = transfer.block_checksums(span, StagingPool(get.launches.block_bytes, get.new_buffer))
    yield "get: sums of blocks", bool(np.array_equal(totals, expected.sums))
    yield "get: bytes", target.equal()


def same(found: torch.Tensor, expected: UInt64s) -> bool:
    """Whether int64 sums on the device have the expected bits."""
    return bool(np.array_equal(found.cpu().numpy().view(np.uint64), expected))


def prove(place: Place, forms: dict[str, Form], done: dict[str, Any], say: Callable[[str], None]) -> None:
    """Check every form; each that is good goes to `done`. say: called with a line for each. Raises Mismatch."""
    for index, (name, form) in enumerate(forms.items()):
        first_token = POSITIONS[index % len(POSITIONS)]
        if found := wrong(form, place, first_token):
            raise Mismatch(f"{name}, first token {first_token}: not the reference's: {', '.join(found)}")
        done[name] = "ok"
        say(f"{name}: ok")


def measured_forms(geometries: Sequence[Geometry]) -> dict[str, Form]:
    """The forms of what is measured later, so that its kernels are proved, and compiled, here."""
    return {
        g.name: Form(g.layout, g.channels, layers=g.layers, heads=g.heads, blocks=4, tokens=g.tokens)
        for g in geometries
    }
