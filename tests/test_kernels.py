"""The kernels in Triton's interpreter: bit for bit the reference, and every misplacement seen by the checksum's pass.

Triton reads TRITON_INTERPRET when a kernel is defined, and other tests need compiled ones, so this file runs itself in
a process of its own: there the tests below are collected, here the one that starts it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvstore import PagedKVCache
from kvstore.cache import CacheGroup
from kvstore.checksum import MASK64, reference_slice_checksum, reference_state_row_checksum, slice_factor
from kvstore.kernels.tables import SliceEntry, SliceTable, slice_tables
from kvstore.loops_numpy import NumpyLoops
from kvstore.span import Span, check_span
from tests.kernel_cases import CPU, FORMS, engine_entries, rows_of, staging_entries, tables
from tests.support import LAYOUTS, canonical, cells, layer_tensors, make_cache, random_tensor, reference_checksums

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
ROOT = Path(__file__).parent.parent
VECTORS = json.loads((ROOT / "tests" / "vectors" / "checksum.json").read_text())
MAX_TEST_BYTES = 200 * 1024
POSITIONS = (0, 2**33, 2**60)

if INTERPRETED:
    from kvstore.kernels.checksum import checksum_blocks, checksum_slices
    from kvstore.kernels.copy import gather, scatter
    from kvstore.kernels.state import StateAxis, StateEntry, checksum_states, merge_axes, state_table


def interpreted(test: Callable[..., None]) -> Callable[..., None] | None:
    """A test that the interpreter's process collects, and this one does not."""
    return test if INTERPRETED else None


if not INTERPRETED:

    def test_all_of_this_file_in_the_interpreter() -> None:
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(Path(__file__))]
        environment = {**os.environ, "TRITON_INTERPRET": "1"}
        run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        assert run.returncode == 0, f"{run.stdout}\n{run.stderr}"
        assert " passed" in run.stdout
        assert "skipped" not in run.stdout


# --- launches ----------------------------------------------------------------------------------------------------


def span_rows(span: Span, block_ids: Any = None) -> torch.Tensor:
    """Rows of a span's blocks, output index by place."""
    ids = span.block_ids if block_ids is None else block_ids
    return rows_of(ids, 0, span.valid, span.first_tokens, np.arange(len(span)))


def staged_rows(span: Span) -> torch.Tensor:
    return span_rows(span, np.arange(len(span)))


def block_sums(
    made: list[SliceTable], rows: torch.Tensor, outputs: int, staging: torch.Tensor | None = None
) -> list[int]:
    out = torch.zeros(outputs, dtype=torch.int64)
    for table in made:
        checksum_blocks(table, rows, out, staging)
    return unsigned(out).tolist()


def slice_sums(
    made: list[SliceTable], rows: torch.Tensor, outputs: int, staging: torch.Tensor | None = None
) -> np.ndarray[Any, Any]:
    out = torch.zeros(outputs, made[0].group_slices, dtype=torch.int64)
    for table in made:
        checksum_slices(table, rows, out, staging)
    return unsigned(out)


def unsigned(out: torch.Tensor) -> np.ndarray[Any, Any]:
    return out.numpy().view(np.uint64)


def scattered(group: CacheGroup, seed: int, start: int = 0) -> Span:
    """All blocks but one in random order, the last one partly filled."""
    ids = np.random.default_rng(seed).permutation(group.num_blocks)[: group.num_blocks - 1]
    last = group.block_size - 1 if group.block_size > 1 else 1
    return check_span(group, ids, start, (start + ids.size - 1) * group.block_size + last)


def small(cache: PagedKVCache) -> PagedKVCache:
    """The cache, if it is small enough for the interpreter."""
    group = cache.group(0)
    assert group.num_blocks * group.block_bytes <= MAX_TEST_BYTES
    return cache


def canonical_span(group: CacheGroup, span: Span) -> np.ndarray[Any, Any]:
    """A span's blocks as numpy gathers them."""
    staging = np.full((len(span), group.block_bytes), 0x5A, np.uint8)
    NumpyLoops(group).gather(span.block_ids, span.valid, staging)
    return staging


# --- checksums ---------------------------------------------------------------------------------------------------


@interpreted
@pytest.mark.parametrize("start", POSITIONS)
@pytest.mark.parametrize("form", FORMS)
def test_sums_are_the_reference(form: str, start: int) -> None:
    cache = small(FORMS[form].cache())
    group = cache.group(0)
    span = scattered(group, 1, min(start, 2**62 // group.block_size - group.num_blocks))
    blocks, rows = canonical_span(group, span), span_rows(span)
    made = tables(group, engine_entries(group))
    assert [table.vector_bytes for table in made] == [FORMS[form].vector_bytes]
    expected = reference_checksums(group, blocks, span.start, span.valid.tolist())
    assert block_sums(made, rows, len(span)) == expected
    loops = NumpyLoops(group).checksum(span.block_ids, span.first_tokens, span.valid)
    assert np.array_equal(slice_sums(made, rows, len(span)), loops)


@interpreted
@pytest.mark.parametrize("form", FORMS)
def test_staging_sums_are_the_reference(form: str) -> None:
    cache = small(FORMS[form].cache())
    group = cache.group(0)
    span = scattered(group, 2, 5)
    blocks = canonical_span(group, span)
    made, staging = tables(group, staging_entries(group)), torch.from_numpy(blocks)
    expected = reference_checksums(group, blocks, 5, span.valid.tolist())
    assert block_sums(made, staged_rows(span), len(span), staging) == expected
    loops = NumpyLoops(group).staging_checksum(blocks, span.first_tokens, span.valid)
    assert np.array_equal(slice_sums(made, staged_rows(span), len(span), staging), loops)


@interpreted
@pytest.mark.parametrize("head_size", [64, 72, 80, 96, 112, 128, 160, 192, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e5m2])
def test_head_sizes(head_size: int, dtype: torch.dtype) -> None:
    cache = small(make_cache("2BNHD", layers=1, blocks=3, tokens=5, head_size=head_size, dtype=dtype))
    group, span = cache.group(0), check_span(cache.group(0), [2, 0], 9, 54)
    expected = reference_checksums(group, canonical_span(group, span), 9, span.valid.tolist())
    assert block_sums(tables(group, engine_entries(group)), span_rows(span), 2) == expected


@interpreted
@pytest.mark.parametrize("size", [(1, 1, 1), (1, 1, 33), (2, 5, 16), (9, 1, 1), (1, 17, 3)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_counts_that_fill_no_program(layout: str, size: tuple[int, int, int]) -> None:
    layers, heads, tokens = size
    form = {"layers": layers, "heads": heads, "tokens": tokens, "blocks": 3}
    cache = small(make_cache(layout, **form))
    group, span = cache.group(0), scattered(cache.group(0), 3, 2)
    blocks, made = canonical_span(group, span), tables(group, engine_entries(group))
    expected = reference_checksums(group, blocks, 2, span.valid.tolist())
    assert block_sums(made, span_rows(span), len(span)) == expected
    staging = torch.full((len(span), group.block_bytes), 0xA5, dtype=torch.uint8)
    for table in made:
        gather(table, span_rows(span), staging)
    assert np.array_equal(staging.numpy(), blocks)


@interpreted
@pytest.mark.parametrize("byte", [0xFF, 0x80, 0x7F, 0x00])
@pytest.mark.parametrize("layout", ["BHNC", "2BNHD"])
def test_words_that_look_negative(layout: str, byte: int) -> None:
    tensors = layer_tensors(layout, layers=2, heads=2, blocks=2, tokens=4, head_size=32, dtype=torch.uint8)
    cache = PagedKVCache.from_tensors({n: torch.full_like(t, byte) for n, t in tensors.items()}, layout)
    group, span = cache.group(0), check_span(cache.group(0), [1, 0], 2**40)
    expected = reference_checksums(group, canonical(cache, [1, 0]), 2**40, [4, 4])
    assert block_sums(tables(group, engine_entries(group)), span_rows(span), 2) == expected


@interpreted
def test_layers_of_several_sizes_take_one_launch_each_and_add_up() -> None:
    tensors = {
        "layers.0": random_tensor((4, 3, 2, 64), torch.bfloat16, 1),
        "layers.7": random_tensor((4, 3, 2, 32), torch.bfloat16, 2),
        "layers.9": random_tensor((4, 3, 5, 64), torch.bfloat16, 3),
    }
    cache = PagedKVCache.from_tensors(tensors, "BNHC")
    group = cache.group(0)
    span, staging = scattered(group, 4), torch.empty(3, group.block_bytes, dtype=torch.uint8)
    made = tables(group, engine_entries(group))
    assert sorted(table.slices for table in made) == [2, 2, 5]
    blocks = canonical_span(group, span)
    assert block_sums(made, span_rows(span), 3) == reference_checksums(group, blocks, 0, span.valid.tolist())
    for table in made:
        gather(table, span_rows(span), staging)
    assert np.array_equal(staging.numpy(), blocks)


@interpreted
@pytest.mark.parametrize("number", [0, 9, 2**15, 2**31 - 1])
def test_far_layers_and_heads(number: int) -> None:
    tensors = {f"layers.{number}": random_tensor((2, 3, 4, 16), torch.bfloat16, number % 97)}
    cache = PagedKVCache.from_tensors(tensors, "BHNC", first_head={f"layers.{number}": 2**16 - 3})
    group, span = cache.group(0), check_span(cache.group(0), [1, 0])
    expected = reference_checksums(group, canonical(cache, [1, 0]), 0, [4, 4])
    assert block_sums(tables(group, engine_entries(group)), span_rows(span), 2) == expected


@interpreted
@pytest.mark.parametrize("block_size", [1, 3, 4, 6, 16])
def test_rows_cut_pages_into_blocks_of_another_size(block_size: int) -> None:
    cache = make_cache("BNHD", blocks=5, tokens=6, head_size=8)
    group, ids, first, tokens = cache.group(0), [4, 1, 3, 0], 12, 22
    rows, cells_of = [], canonical(cache, ids)
    for token in range(tokens):
        rows.append((ids[token // 6], token % 6, 1, first + token, token // block_size))
    blocks = -(-tokens // block_size)
    got = block_sums(tables(group, engine_entries(group)), torch.tensor(rows), blocks)
    for block in range(blocks):
        chosen = range(block * block_size, min(tokens, (block + 1) * block_size))
        total = 0
        for index, part in enumerate(group.slices):
            run = np.concatenate([cells(group, cells_of[t // 6], index)[t % 6][None] for t in chosen])
            total += slice_factor(part.layer, part.head) * reference_slice_checksum(run, first + chosen[0])
        assert got[block] == total & MASK64


@interpreted
def test_rows_of_no_tokens_do_nothing() -> None:
    cache = make_cache()
    group = cache.group(0)
    made, staging = tables(group, engine_entries(group)), torch.full((2, group.block_bytes), 7, dtype=torch.uint8)
    rows = rows_of([3, 5], 0, [4, 0], [8, 0], [1, 0])
    expected = reference_checksums(group, canonical(cache, [3]), 2, [4])[0]
    assert block_sums(made, rows, 2) == [0, expected]
    assert slice_sums(made, rows, 2)[0].tolist() == [0, 0, 0, 0]
    before = [t.clone() for t in cache.tensors.values()]
    for table in made:
        gather(table, rows, staging)
        scatter(table, rows[1:].contiguous(), torch.zeros_like(staging))
    assert set(staging[0].tolist()) == {7}
    assert np.array_equal(staging[1].numpy(), canonical(cache, [3])[0])
    assert all(bytes_of(t) == bytes_of(b) for t, b in zip(cache.tensors.values(), before, strict=True))
    assert block_sums(made, rows[:0], 1) == [0]


@interpreted
@pytest.mark.parametrize("block", VECTORS["blocks"], ids=lambda block: str(block["name"]))
def test_the_vectors_of_blocks(block: dict[str, Any]) -> None:
    entries, data = [], b""
    tokens = len(block["slices"][0]["cells"])
    slots = max(1, tokens)
    for number, part in enumerate(block["slices"]):
        cell = len(part["cells"][0]) // 2 if tokens else 8
        run = bytes.fromhex("".join(part["cells"])).ljust(slots * cell, b"\xff")
        factor = slice_factor(part["layer"], part["head"])
        entries.append(SliceEntry(len(data), 0, cell, cell, factor=factor, number=number, staging_offset=len(data)))
        data += run
    staging = torch.frombuffer(bytearray(data), dtype=torch.uint8)[None]
    made = slice_tables(entries, slots, len(data), CPU)
    rows = rows_of([0], 0, tokens, block["first_token"], 0)
    assert [f"{v:016x}" for v in block_sums(made, rows, 1, staging)] == [block["checksum"]]
    sums = slice_sums(made, rows, 1, staging)[0].tolist()
    assert [f"{v:016x}" for v in sums] == [part["slice_checksum"] for part in block["slices"]]


@interpreted
def test_strides_of_many_gigabytes() -> None:
    """The stride of an axis of one token is never walked; it must not overflow on the way."""
    data, entry = random_tensor((4, 64), torch.uint8, 3), SliceEntry(0, 64, 2**45, 64, factor=3)
    made = slice_tables([entry], 1, 64, CPU)
    rows = rows_of([2, 3], 0, 1, 2**33, [0, 1])
    expected = [3 * reference_slice_checksum(data[i].numpy()[None], 2**33) & MASK64 for i in (2, 3)]
    assert block_sums(made, rows, 2, data) == expected


# --- copies ------------------------------------------------------------------------------------------------------


@interpreted
@pytest.mark.parametrize("form", FORMS)
def test_gather_is_the_canonical_order_and_zeroes_the_rest(form: str) -> None:
    cache = small(FORMS[form].cache())
    group = cache.group(0)
    span = scattered(group, 5)
    staging = torch.full((len(span) + 1, group.block_bytes), 0xA5, dtype=torch.uint8)
    for table in tables(group, engine_entries(group)):
        gather(table, span_rows(span), staging)
    assert np.array_equal(staging[:-1].numpy(), canonical_span(group, span))
    assert set(staging[-1].tolist()) == {0xA5}


@interpreted
@pytest.mark.parametrize("form", FORMS)
def test_scatter_writes_the_valid_tokens_and_nothing_else(form: str) -> None:
    made, expected = (small(FORMS[form].cache(seed=1)) for _ in range(2))
    group = made.group(0)
    span, blocks = scattered(group, 6), canonical(FORMS[form].cache(seed=2), range(group.num_blocks))[:-1]
    NumpyLoops(expected.group(0)).scatter(span.block_ids, span.valid, blocks)
    for table in tables(group, engine_entries(group)):
        scatter(table, span_rows(span), torch.from_numpy(blocks))
    assert cache_bytes(made) == cache_bytes(expected)


@interpreted
def test_neighbours_of_a_view_are_left_alone() -> None:
    big = random_tensor((6, 4, 7, 96), torch.uint8, 8)
    before, view = big.clone(), big[1:5, 1:3, 2:6, 16:80]
    cache = PagedKVCache.from_tensors({"layers.0": view}, "BHNC")
    group, span = cache.group(0), check_span(cache.group(0), [3, 1], 0, 7)
    staging = torch.from_numpy(np.random.default_rng(9).integers(0, 256, (2, group.block_bytes), np.uint8))
    for table in tables(group, engine_entries(group)):
        scatter(table, span_rows(span), staging)
    before[1:5, 1:3, 2:6, 16:80][3] = staging[0].view(2, 4, 64)
    before[1:5, 1:3, 2:6, 16:80][1, :, :3] = staging[1].view(2, 4, 64)[:, :3]
    assert bytes_of(big) == bytes_of(before)


def cache_bytes(cache: PagedKVCache) -> list[bytes]:
    flat = [t for tensors in cache.tensors.values() for t in (tensors if isinstance(tensors, tuple) else (tensors,))]
    return [bytes_of(t) for t in flat]


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


# --- states ------------------------------------------------------------------------------------------------------


@interpreted
@pytest.mark.parametrize("state", VECTORS["states"], ids=lambda state: str(state["name"]))
def test_the_vectors_of_states(state: dict[str, Any]) -> None:
    data = torch.frombuffer(bytearray.fromhex("".join(state["rows"])), dtype=torch.uint8)
    rows, elements = len(state["rows"]), len(state["rows"][0]) // 2 // state["itemsize"]
    axes = [StateAxis(rows, elements, 1, 0), StateAxis(elements, 1, 0, 1)]
    entry = StateEntry(data.data_ptr(), 0, slice_factor(state["layer"], state["first_row"]))
    out = torch.zeros(1, dtype=torch.int64)
    checksum_states(state_table([entry], axes, state["itemsize"], CPU), rows_of([0], 0), out)
    assert [f"{v:016x}" for v in unsigned(out).tolist()] == [state["checksum"]]


STATES = {
    "conv, rows outside": ((5, 37, 4), 0),
    "conv, rows inside": ((5, 3, 48), 1),
    "recurrent": ((4, 3, 10, 16), 0),
    "recurrent, rows in the middle": ((4, 3, 10, 16), 1),
    "recurrent, rows inside": ((4, 3, 10, 16), 2),
    "one element": ((3, 1, 1), 0),
    "many tiles": ((2, 70, 150), 0),
}


@interpreted
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("transposed", [False, True])
def test_states_are_the_reference(state: str, dtype: torch.dtype, transposed: bool) -> None:
    shape, split = STATES[state]
    layers = {number: random_tensor(shape, dtype, number) for number in (2, 11)}
    if transposed:
        layers = {n: t.transpose(1, -1).contiguous().transpose(1, -1) for n, t in layers.items()}
    slots, first_row, first_index = [shape[0] - 1, 0], 6, 0
    item = dtype.itemsize
    entries = [
        StateEntry(t.data_ptr(), t.stride(0) * item, slice_factor(n, first_row), first_index) for n, t in layers.items()
    ]
    out = torch.zeros(3, dtype=torch.int64)
    table = state_table(entries, state_axes(layers[2], split), item, CPU)
    checksum_states(table, rows_of(slots, [2, 0]), out)
    expected = [state_sum(layers, slot, split, first_row) for slot in slots]
    assert unsigned(out).tolist() == [expected[1], 0, expected[0]]


@interpreted
def test_several_states_of_one_slice_follow_each_other() -> None:
    """A layer whose split is not known is one slice: the second state's elements are numbered after the first's."""
    conv, recurrent = random_tensor((3, 5, 4), torch.bfloat16, 1), random_tensor((3, 2, 8), torch.bfloat16, 2)
    out, factor, first = torch.zeros(1, dtype=torch.int64), slice_factor(4, 1), 0
    for state in (conv, recurrent):
        entry = StateEntry(state.data_ptr(), state.stride(0) * 2, factor, first)
        axes = [StateAxis(state.shape[1], state.stride(1), 0, state.shape[2]), StateAxis(state.shape[2], 1, 0, 1)]
        checksum_states(state_table([entry], axes, 2, CPU), rows_of([2], 0), out)
        first += state[0].numel()
    whole = torch.cat([conv[2].flatten(), recurrent[2].flatten()])
    assert unsigned(out).tolist() == [factor * reference_state_row_checksum(elements_of(whole)) & MASK64]


def state_axes(state: torch.Tensor, split: int) -> list[Any]:
    """The axes of a state (slots, *axes) whose rows are its axis `split`."""
    axes, index = [], 1
    for axis in reversed(range(state.ndim - 1)):
        size, stride = state.shape[axis + 1], state.stride(axis + 1)
        axes.append(StateAxis(size, stride, int(axis == split), 0 if axis == split else index))
        index *= 1 if axis == split else size
    return axes


def state_sum(layers: dict[int, torch.Tensor], slot: int, split: int, first_row: int) -> int:
    total = 0
    for number, state in layers.items():
        for row, elements in enumerate(state[slot].movedim(split, 0)):
            total += slice_factor(number, first_row + row) * reference_state_row_checksum(elements_of(elements))
    return total & MASK64


def elements_of(tensor: torch.Tensor) -> Any:
    unsigned_type = np.uint16 if tensor.itemsize == 2 else np.uint32
    return np.frombuffer(bytes_of(tensor.flatten()), unsigned_type)


@interpreted
def test_axes_merge_where_one_stands_for_both() -> None:
    assert merge_axes([StateAxis(4, 8, 0, 8), StateAxis(8, 1, 0, 1)]) == (StateAxis(32, 1, 0, 1),)
    assert len(merge_axes([StateAxis(4, 8, 1, 0), StateAxis(8, 1, 0, 1)])) == 2
    assert len(merge_axes([StateAxis(4, 16, 0, 8), StateAxis(8, 1, 0, 1)])) == 2
    assert merge_axes([StateAxis(1, 5, 1, 0), StateAxis(1, 1, 0, 1)]) == ()


# --- misuse ------------------------------------------------------------------------------------------------------


@interpreted
def test_wrappers_refuse_other_dtypes_shapes_and_strides() -> None:
    cache = make_cache()
    group = cache.group(0)
    (table,) = tables(group, engine_entries(group))
    rows, out = rows_of([1, 2], 0, 4, 0, [0, 1]), torch.zeros(2, dtype=torch.int64)
    staging = torch.zeros(2, group.block_bytes, dtype=torch.uint8)
    for bad in (rows.int(), rows[:, :4].contiguous(), rows.t(), rows.repeat(1, 2)[:, ::2], rows.to("meta")):
        with pytest.raises(AssertionError):
            checksum_blocks(table, bad, out)
        with pytest.raises(AssertionError):
            gather(table, bad, staging)
    for bad_out in (out.int(), out[None], torch.zeros(4, dtype=torch.int64)[::2], out.to("meta")):
        with pytest.raises(AssertionError):
            checksum_blocks(table, rows, bad_out)
    with pytest.raises(AssertionError):
        checksum_slices(table, rows, out)
    odd = torch.zeros(2 * group.block_bytes + 1, dtype=torch.uint8)[1:].view(2, -1)
    for bad_staging in (staging.int(), staging[:, :-8].contiguous(), staging[:, :-8], odd, staging.to("meta")):
        with pytest.raises(AssertionError):
            scatter(table, rows, bad_staging)


@interpreted
def test_tables_refuse_what_is_not_aligned_or_empty() -> None:
    for entry in (
        SliceEntry(4, 64, 16, 16),
        SliceEntry(0, 64, 12, 16),
        SliceEntry(0, 64, 16, 12),
        SliceEntry(0, 0, 0, 0),
    ):
        with pytest.raises(AssertionError):
            slice_tables([entry], 4, 64, CPU)
    with pytest.raises(AssertionError):
        slice_tables([SliceEntry(0, 64, 16, 16, number=1)], 4, 64, CPU)
    with pytest.raises(AssertionError):
        state_table([StateEntry(1, 2, 1)], [StateAxis(4, 1, 0, 1)], 2, CPU)
    with pytest.raises(AssertionError):
        state_table([StateEntry(0, 2, 1)], [StateAxis(4, 1, 0, 1)], 8, CPU)


# --- faults ------------------------------------------------------------------------------------------------------


@dataclass
class Trip:
    """Blocks of a request on their way from one cache to another, and what the checksum's passes say of them."""

    caches: list[PagedKVCache]
    span: Span
    targets: list[int]
    staging: torch.Tensor

    @classmethod
    def of(cls, form: str) -> Trip:
        caches = [small(FORMS[form].cache(seed, blocks=4)) for seed in (1, 2)]
        group = caches[0].group(0)
        staging = torch.zeros(3, group.block_bytes, dtype=torch.uint8)
        return cls(caches, check_span(group, [2, 0, 3], 7, 7 * 3 + 8), [1, 3, 0], staging)

    @property
    def source(self) -> CacheGroup:
        return self.caches[0].group(0)

    @property
    def target(self) -> CacheGroup:
        return self.caches[1].group(0)

    def take(self, ids: Any = None) -> list[int]:
        """Sum the source by the request's table, gather by `ids`; the stored checksums."""
        for table in tables(self.source, engine_entries(self.source)):
            gather(table, span_rows(self.span, ids), self.staging)
        return block_sums(tables(self.source, engine_entries(self.source)), span_rows(self.span), 3)

    def staged(self) -> list[int]:
        return block_sums(tables(self.source, staging_entries(self.source)), staged_rows(self.span), 3, self.staging)

    def put(self, ids: Any = None, staged: Any = (0, 1, 2)) -> None:
        """Scatter by `ids`, from the staged rows."""
        rows = span_rows(self.span, self.targets if ids is None else ids)
        rows[:, 4] = torch.as_tensor(staged)
        for table in tables(self.target, engine_entries(self.target)):
            scatter(table, rows, self.staging)

    def found(self) -> list[int]:
        """Sum the target by the request's own table."""
        return block_sums(tables(self.target, engine_entries(self.target)), span_rows(self.span, self.targets), 3)


TRIPS = ("packed HND", "split NHD", "K larger than V", "MLA 584 bytes")


def differ(one: list[int], two: list[int]) -> list[int]:
    return [i for i, (a, b) in enumerate(zip(one, two, strict=True)) if a != b]


@interpreted
@pytest.mark.parametrize("form", TRIPS)
def test_a_trip_without_a_fault_verifies(form: str) -> None:
    trip = Trip.of(form)
    stored = trip.take()
    trip.put()
    assert trip.staged() == stored == trip.found()


@interpreted
@pytest.mark.parametrize("form", TRIPS)
def test_a_wrong_block_id_when_gathering_is_seen_in_staging(form: str) -> None:
    trip = Trip.of(form)
    stored = trip.take([2, 1, 3])
    assert differ(trip.staged(), stored) == [1]


@interpreted
@pytest.mark.parametrize("form", TRIPS)
@pytest.mark.parametrize(
    ("ids", "seen"),
    [
        ([1, 2, 0], {1}),
        ([3, 1, 0], {0, 1}),
        ([1, 1, 0], {1}),
        ([0, 3, 0], {0}),
    ],
    ids=["wrong id", "two exchanged", "two into one", "last into first"],
)
def test_a_wrong_block_id_when_scattering_is_seen(form: str, ids: list[int], seen: set[int]) -> None:
    trip = Trip.of(form)
    stored = trip.take()
    trip.put(ids)
    assert set(differ(trip.found(), stored)) >= seen


@interpreted
@pytest.mark.parametrize("form", TRIPS)
@pytest.mark.parametrize(("staged", "seen"), [((1, 0, 2), [0, 1]), ((0, 0, 2), [1])], ids=["exchanged", "one twice"])
def test_wrong_staged_rows_are_seen(form: str, staged: tuple[int, ...], seen: list[int]) -> None:
    trip = Trip.of(form)
    stored = trip.take()
    trip.put(staged=staged)
    assert differ(trip.found(), stored) == seen


@interpreted
@pytest.mark.parametrize("form", TRIPS)
def test_a_copy_that_copies_nothing_is_seen(form: str) -> None:
    trip = Trip.of(form)
    stored = trip.take()
    assert differ(trip.found(), stored) == [0, 1, 2]
    trip.staging.zero_()
    assert differ(trip.staged(), stored) == [0, 1, 2]


@interpreted
@pytest.mark.parametrize("form", TRIPS)
@pytest.mark.parametrize("bit", [0, 5, -1])
def test_a_bit_flipped_in_staging_is_seen(form: str, bit: int) -> None:
    trip = Trip.of(form)
    stored = trip.take()
    trip.staging[1, bit] ^= 1 << bit % 8
    trip.put()
    assert differ(trip.staged(), stored) == [1] == differ(trip.found(), stored)


@interpreted
@pytest.mark.parametrize("form", TRIPS)
def test_a_block_overwritten_after_the_copy_is_seen(form: str) -> None:
    trip = Trip.of(form)
    stored = trip.take()
    trip.put()
    late = replace(trip, span=trip.span.take([0]), targets=[trip.targets[2]])
    rows = span_rows(late.span, late.targets)
    for table in tables(trip.target, engine_entries(trip.target)):
        scatter(table, rows, trip.staging)
    assert differ(trip.found(), stored) == [2]
