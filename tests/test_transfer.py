"""Gather, scatter and checksums of every path, bit for bit against the plain reference, over random layouts."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore import PagedKVCache, block_checksums, hostpath, slice_checksums
from kvstore.cache import CacheGroup
from kvstore.checksum import num_valid_tokens
from kvstore.copyback import CopyBackPath
from kvstore.hostpath import HostPath, NumbaPath, NumpyPath, compiled_loops, host_path
from kvstore.span import Span, check_span
from tests.support import LAYOUTS, cells, layer_tensors, make_cache, reference_checksums

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8)


def numba_path(group: CacheGroup) -> HostPath:
    loops = compiled_loops()
    assert loops is not None, "numba must be installed where the tests run"
    return NumbaPath(group, loops)


def copy_back_path(group: CacheGroup) -> HostPath:
    """A path by way of a mirror that has room for two blocks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvstore.copyback.MIRROR_BYTES", 2 * group.block_bytes)
        return CopyBackPath(CACHES[id(group)], group)


PATHS: list[Callable[[CacheGroup], HostPath]] = [numba_path, NumpyPath, copy_back_path]


@dataclass
class Case:
    """A cache, another of the same form, and blocks of a request."""

    cache: PagedKVCache
    other: PagedKVCache
    span: Span


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Caches of any layout, dtype and size, and a span of scattered block ids that may end in a partial block."""
    layout = draw(st.sampled_from((*LAYOUTS, "BNC", "NBC", "2BND")))
    dtype = draw(st.sampled_from(DTYPES))
    form = {
        "layers": draw(st.integers(1, 3)),
        "blocks": draw(st.integers(1, 6)),
        "heads": draw(st.integers(1, 3)),
        "tokens": draw(st.integers(1, 9)),
        "head_size": draw(st.integers(1, 20)) * (8 // dtype.itemsize),
        "dtype": dtype,
    }
    cache, other = make_cache(layout, seed=1, **form), make_cache(layout, seed=2, **form)
    ids = draw(st.permutations(range(form["blocks"])))[: draw(st.integers(1, form["blocks"]))]
    start = draw(st.sampled_from([0, 1, 7, 2**20, 2**40]))
    last = draw(st.integers(1, form["tokens"]))
    tokens = (start + len(ids) - 1) * form["tokens"] + last
    return Case(cache, other, check_span(cache.group(0), ids, start, tokens))


def plain_blocks(cache: PagedKVCache, span: Span) -> np.ndarray[Any, Any]:
    """Canonical bytes by indexing one token at a time, slots past the valid tokens zero."""
    group = cache.group(0)
    out = np.zeros((len(span), group.block_bytes), np.uint8)
    for row, block in enumerate(span.block_ids.tolist()):
        for index, part in enumerate(group.slices):
            target = cells(group, out[row], index)
            for token in range(int(span.valid[row])):
                target[token] = plain_cell(cache, group.layers[part.row].name, block, part.local_head, token)
    return out


def plain_cell(cache: PagedKVCache, name: str, block: int, head: int, token: int) -> np.ndarray[Any, Any]:
    layout, tensors = cache.layout, cache.tensors[name]
    parts = tensors if isinstance(tensors, tuple) else (tensors,)
    if "2" in layout:
        parts = tuple(parts[0].select(layout.index("2"), i) for i in range(2))
    axes = layout.replace("2", "")
    at = {"B": block, "H": head, "N": token}
    found = [part[tuple(at.get(axis, slice(None)) for axis in axes)] for part in parts]
    return np.concatenate([part.contiguous().view(torch.uint8).numpy() for part in found])


CACHES: dict[int, PagedKVCache] = {}
"""Caches by the ids of their groups."""


@pytest.fixture(autouse=True)
def _remember_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    """A group does not know its cache."""
    made = PagedKVCache.from_tensors.__func__  # type: ignore[attr-defined]

    def remember(cls: type[PagedKVCache], tensors: Any, layout: str, *rest: Any, **options: Any) -> PagedKVCache:
        cache: PagedKVCache = made(cls, tensors, layout, *rest, **options)
        CACHES.update((id(group), cache) for group in cache.groups.values())
        return cache

    monkeypatch.setattr(PagedKVCache, "from_tensors", classmethod(remember))


def tensor_bytes(cache: PagedKVCache) -> list[bytes]:
    flat = [t for tensors in cache.tensors.values() for t in (tensors if isinstance(tensors, tuple) else (tensors,))]
    return [t.contiguous().view(torch.uint8).numpy().tobytes() for t in flat]


@pytest.mark.parametrize("path", PATHS)
@settings(max_examples=120, deadline=None, derandomize=True)
@given(case=cases())
def test_gather_is_the_canonical_order_and_zeroes_the_rest(path: Callable[[CacheGroup], HostPath], case: Case) -> None:
    group = case.cache.group(0)
    staging = np.full((len(case.span), group.block_bytes), 0xA5, np.uint8)
    path(group).gather(case.span, staging)
    assert np.array_equal(staging, plain_blocks(case.cache, case.span))


@pytest.mark.parametrize("path", PATHS)
@settings(max_examples=120, deadline=None, derandomize=True)
@given(case=cases())
def test_checksums_are_the_reference(path: Callable[[CacheGroup], HostPath], case: Case) -> None:
    group, blocks = case.cache.group(0), plain_blocks(case.cache, case.span)
    sums = path(group).checksum(case.span)
    assert np.array_equal(sums, path(group).staging_checksum(case.span, blocks))
    expected = reference_checksums(group, blocks, case.span.start, case.span.valid.tolist())
    tokens = int(case.span.first_tokens[-1] + case.span.valid[-1])
    got = block_checksums(case.cache, case.span.block_ids.tolist(), case.span.start, tokens)
    assert got.tolist() == expected
    assert np.array_equal(slice_checksums(case.cache, case.span.block_ids.tolist(), case.span.start, tokens), sums)


@pytest.mark.parametrize("path", PATHS)
@settings(max_examples=120, deadline=None, derandomize=True)
@given(case=cases())
def test_scatter_writes_the_valid_tokens_and_nothing_else(path: Callable[[CacheGroup], HostPath], case: Case) -> None:
    group, blocks = case.other.group(0), plain_blocks(case.cache, case.span)
    before = plain_blocks(case.other, check_span(group, range(group.num_blocks)))
    path(group).scatter(case.span, blocks)
    after = plain_blocks(case.other, check_span(group, range(group.num_blocks)))
    expected = before.copy()
    for row, block in enumerate(case.span.block_ids.tolist()):
        for index in range(len(group.slices)):
            tokens = int(case.span.valid[row])
            cells(group, expected[block], index)[:tokens] = cells(group, blocks[row], index)[:tokens]
    assert np.array_equal(after, expected)
    assert np.array_equal(plain_blocks(case.other, case.span), blocks)


@pytest.mark.parametrize("path", PATHS)
def test_strides_that_are_not_contiguous(path: Callable[[CacheGroup], HostPath]) -> None:
    """A slice of a larger allocation, and channels that are not neighbours: only numpy walks the latter."""
    big = torch.randint(0, 256, (9, 5, 7, 64), dtype=torch.uint8)
    views = {
        "layers.0": big[1:7, 1:4, 2:6, 8:40],
        "layers.1": big.permute(1, 0, 2, 3)[:, :, :, 40:64][1:4].transpose(0, 1)[:6, :, :4],
    }
    cache = PagedKVCache.from_tensors(views, "BHNC", value_channels={"layers.0": 16, "layers.1": 8})
    group = cache.group(0)
    span = check_span(group, [4, 0, 5], 3)
    staging = np.zeros((3, group.block_bytes), np.uint8)
    path(group).gather(span, staging)
    assert np.array_equal(staging, plain_blocks(cache, span))


def test_channels_that_are_not_neighbours_take_the_numpy_path() -> None:
    tensor = torch.randint(0, 256, (6, 2, 4, 64), dtype=torch.uint8)[..., ::2]
    cache = PagedKVCache.from_tensors({"layers.0": tensor}, "BHNC")
    group, span = cache.group(0), check_span(cache.group(0), [5, 2])
    assert isinstance(host_path(group), NumpyPath)
    assert isinstance(host_path(make_cache().group(0)), NumbaPath)
    blocks = plain_blocks(cache, span)
    assert block_checksums(cache, [5, 2]).tolist() == reference_checksums(group, blocks, 0, [4, 4])


def test_k_and_v_of_different_sizes_in_pairs_and_packed() -> None:
    k, v = torch.randn(3, 2, 4, 24).bfloat16(), torch.randn(3, 2, 4, 8).bfloat16()
    pair = PagedKVCache.from_tensors({"layers.3": (k, v)}, "BHND")
    packed = PagedKVCache.from_tensors({"layers.3": torch.cat([k, v], -1)}, "BHNC", value_channels=8)
    assert block_checksums(pair, [2, 0]).tolist() == block_checksums(packed, [2, 0]).tolist()
    assert [(layer.k.nbytes, layer.v.nbytes) for layer in packed.group(0).layers] == [(48, 16)]


@pytest.mark.parametrize("cell_bytes", [1152, 656, 584, 8])
def test_mla_cells_are_k_alone(cell_bytes: int) -> None:
    tensor = torch.randint(0, 256, (4, 3, cell_bytes), dtype=torch.uint8)
    cache = PagedKVCache.from_tensors({"layers.0": tensor}, "BNC")
    layer = cache.group(0).layers[0]
    assert (layer.k.nbytes, layer.v.nbytes) == (cell_bytes, 0)
    blocks = plain_blocks(cache, check_span(cache.group(0), [3, 1]))
    assert block_checksums(cache, [3, 1]).tolist() == reference_checksums(cache.group(0), blocks, 0, [3, 3])


def test_layouts_of_one_content_have_one_checksum() -> None:
    packed = layer_tensors("BHNC", heads=3)
    k_v = {name: (t[..., :16], t[..., 16:]) for name, t in packed.items()}
    made = {
        "BHNC": packed,
        "BNHC": {n: t.transpose(1, 2).contiguous() for n, t in packed.items()},
        "2BNHD": {n: torch.stack(p).transpose(2, 3).contiguous() for n, p in k_v.items()},
        "B2NHD": {n: torch.stack(p, 1).transpose(2, 3).contiguous() for n, p in k_v.items()},
        "BHND": {n: (k.clone(), v) for n, (k, v) in k_v.items()},
    }
    sums = [block_checksums(PagedKVCache.from_tensors(t, layout), [6, 2], 1).tolist() for layout, t in made.items()]
    assert all(other == sums[0] for other in sums)


def test_parts_of_ranks_and_stages_add_up() -> None:
    whole = layer_tensors("BHNC", layers=4, heads=4)
    names = list(whole)
    total = block_checksums(PagedKVCache.from_tensors(whole, "BHNC"), [3, 1], 5)
    parts = np.zeros(2, np.uint64)
    for stage in (names[:1], names[1:]):
        for first, heads in ((0, 1), (1, 3)):
            part = {name: whole[name][:, first : first + heads] for name in stage}
            cache = PagedKVCache.from_tensors(part, "BHNC", first_head=dict.fromkeys(stage, first))
            parts += block_checksums(cache, [3, 1], 5)
    assert parts.tolist() == total.tolist()


def test_block_sizes_sum_to_the_same_over_the_same_tokens() -> None:
    tensor = torch.randint(0, 256, (8, 2, 4, 32), dtype=torch.uint8)
    small = PagedKVCache.from_tensors({"layers.0": tensor}, "BHNC")
    joined = tensor.view(4, 2, 2, 4, 32).transpose(1, 2).reshape(4, 2, 8, 32).contiguous()
    large = PagedKVCache.from_tensors({"layers.0": joined}, "BHNC")
    assert [num_valid_tokens(i, 8, 30) for i in range(4)] == [8, 8, 8, 6]
    fine = block_checksums(small, range(8), 0, 30).reshape(4, 2).sum(1)
    assert fine.tolist() == block_checksums(large, range(4), 0, 30).tolist()


def test_without_numba_numpy_serves_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "numba", None)
    hostpath.compiled_loops.cache_clear()
    try:
        with caplog.at_level(logging.WARNING):
            paths = [host_path(make_cache(seed=seed).group(0)) for seed in range(3)]
        assert all(isinstance(path, NumpyPath) for path in paths)
        assert len([r for r in caplog.records if "numba" in r.message]) == 1
    finally:
        hostpath.compiled_loops.cache_clear()


def test_importing_kvstore_does_not_import_numba() -> None:
    code = "import sys, kvstore; sys.exit('numba' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
