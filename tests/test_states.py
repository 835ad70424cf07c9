"""Mamba states described, summed, gathered and scattered: what docs/checksum.md section 5 says, in plain Python."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvstore import KVChecksumWorker, PagedKVCache, Rank, StateTensor, block_checksums, slice_checksums, statepath
from kvstore.errors import InvalidCache, InvalidShape, UnknownGroup, UnsupportedCache
from kvstore.loops_states_numpy import NumpyStates
from kvstore.runs import MAX_RUNS
from kvstore.shape import GroupShape
from kvstore.span import check_span
from kvstore.stategeometry import (
    MAX_RANGES,
    STATE_RUN,
    STATES,
    UNSPLIT,
    StateRows,
    canonical,
    decode_states,
    describe_states,
    encode_states,
    grid_of,
    rows_twice,
    segments_of,
    slice_bytes,
    sound_states,
    state_extent,
)
from kvstore.statepath import shape_sums, state_path
from kvstore.states import StateGroup
from tests.state_cases import (
    FORMS,
    GROUP,
    MASK,
    SLOTS,
    TOKENS,
    cache_of,
    canonical_bytes,
    mamba,
    pages,
    ranks_part,
    reference_sum,
    snapshot,
    split,
    unknown,
    with_tensors,
)
from tests.support import layer_tensors, random_tensor

VECTORS = json.loads((Path(__file__).parent / "vectors" / "checksum.json").read_text())
IDS = [3, 0, 4]


@pytest.fixture(params=["compiled", "numpy"])
def loops(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Which loops move and sum states."""
    if request.param == "numpy":
        monkeypatch.setattr(statepath, "_compiled_states", lambda: None)
    return str(request.param)


def group_of(cache: PagedKVCache) -> StateGroup:
    return cache.state_groups[GROUP]


def shape_of(group: StateGroup) -> GroupShape:
    return GroupShape(group.block_size, encode_states(group.entries), 7, b"prefix", STATES)


# --- sums --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", VECTORS["states"], ids=lambda state: str(state["name"]))
def test_the_vectors_of_states(state: dict[str, Any], loops: str) -> None:
    rows, item = [bytes.fromhex(row) for row in state["rows"]], state["itemsize"]
    dtype = {2: torch.bfloat16, 4: torch.float32}[item]
    tensor = torch.frombuffer(bytearray(b"".join(rows)), dtype=dtype).view(1, len(rows), -1)
    first = state["first_row"]
    given = {f"layers.{state['layer']}": [StateTensor(tensor, 1, [(first, len(rows))], first + len(rows))]}
    cache = PagedKVCache.from_tensors({}, "BNC", states=given, state_block_size={0: 4})
    assert [f"{c:016x}" for c in block_checksums(cache, [0]).tolist()] == [state["checksum"]]
    factors = [2 * (state["layer"] * 65536 + first + i) + 1 for i in range(len(rows))]
    expected = [m * int(s, 16) & MASK for m, s in zip(factors, state["row_checksums"], strict=True)]
    assert slice_checksums(cache, [0])[0].tolist() == expected, "each of so few rows is a range of its own"


@pytest.mark.parametrize("form", FORMS)
def test_sums_are_the_reference(form: str, loops: str) -> None:
    states = FORMS[form](1)
    cache = cache_of(states, tp_rank=3)
    expected = [reference_sum(states, slot, tp_rank=3) for slot in IDS]
    assert block_checksums(cache, IDS, group=GROUP).tolist() == expected
    assert slice_checksums(cache, IDS, group=GROUP).sum(axis=1, dtype=np.uint64).tolist() == expected


def tiny(seed: int = 1) -> dict[str, list[StateTensor]]:
    return {
        "layers.1.mixer": [
            StateTensor(random_tensor((2, 4, 3), torch.bfloat16, seed), 1),
            StateTensor(random_tensor((2, 4, 2, 2), torch.float32, seed + 1), 1),
        ]
    }


def test_every_bit_of_a_state_changes_its_sum_and_no_other_ones(loops: str) -> None:
    states = tiny()
    cache = PagedKVCache.from_tensors({}, "BNC", states=states, state_block_size={0: 1})
    before, flips = block_checksums(cache, [0, 1]).tolist(), 0
    for state in states["layers.1.mixer"]:
        data = state.tensor[1].view(-1).view(torch.uint8)
        for at in range(data.numel()):
            for bit in range(8):
                data[at] ^= 1 << bit
                first, second = block_checksums(cache, [0, 1]).tolist()
                assert (first, second != before[1]) == (before[0], True)
                data[at] ^= 1 << bit
                flips += 1
    assert flips == 8 * cache.state_groups[0].block_bytes
    assert block_checksums(cache, [0, 1]).tolist() == before


def test_any_two_rows_exchanged_change_the_sum() -> None:
    states = tiny(7)
    cache = PagedKVCache.from_tensors({}, "BNC", states=states, state_block_size={0: 1})
    before = block_checksums(cache, [0]).tolist()
    for state in states["layers.1.mixer"]:
        for one, other in combinations(range(4), 2):
            state.tensor[0, [one, other]] = state.tensor[0, [other, one]]
            assert block_checksums(cache, [0]).tolist() != before
            state.tensor[0, [one, other]] = state.tensor[0, [other, one]]
    assert block_checksums(cache, [0]).tolist() == before


def test_numba_that_does_not_compile_leaves_the_work_to_numpy(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(name: str) -> None:
        raise RuntimeError(f"{name} does not compile")

    statepath._compiled_states.cache_clear()
    monkeypatch.setattr(statepath.importlib, "import_module", broken)
    states = mamba(1)
    found = block_checksums(cache_of(states), IDS, group=GROUP).tolist()
    monkeypatch.undo()
    statepath._compiled_states.cache_clear()
    assert found == [reference_sum(states, slot) for slot in IDS]
    assert "kvstore.loops_states does not compile" in caplog.text


def test_position_and_valid_tokens_are_in_no_sum() -> None:
    cache = cache_of(mamba())
    plain = block_checksums(cache, IDS, group=GROUP).tolist()
    assert block_checksums(cache, IDS, start=9, num_tokens=9 * TOKENS + 2 * TOKENS + 1, group=GROUP).tolist() == plain


@pytest.mark.parametrize("form", FORMS)
def test_staged_blocks_are_canonical_bytes_and_have_the_sums_of_the_engines(form: str, loops: str) -> None:
    states = FORMS[form](2)
    cache = cache_of(states, tp_rank=1)
    group, span = group_of(cache), check_span(group_of(cache), IDS)
    path, staging = state_path(group), np.full((len(IDS), group.block_bytes), 0xEE, np.uint8)
    path.gather(span, staging)
    assert np.array_equal(staging, snapshot(states)[IDS])
    sums = path.checksum(span)
    assert np.array_equal(path.staging_checksum(span, staging), sums)
    assert np.array_equal(shape_sums(shape_of(group))(span, staging), sums)
    assert shape_of(group).plan.slice_bytes == group.slice_bytes


@pytest.mark.parametrize("form", FORMS)
def test_scattered_blocks_are_the_gathered_ones_and_other_slots_stay(form: str, loops: str) -> None:
    source, target = FORMS[form](3), FORMS[form](4)
    caches = [cache_of(states) for states in (source, target)]
    groups = [group_of(cache) for cache in caches]
    before, staging = snapshot(target), np.empty((2, groups[0].block_bytes), np.uint8)
    state_path(groups[0]).gather(check_span(groups[0], [3, 0]), staging)
    state_path(groups[1]).scatter(check_span(groups[1], [1, 4]), staging)
    after = snapshot(target)
    assert np.array_equal(after[[1, 4]], snapshot(source)[[3, 0]])
    assert np.array_equal(after[[0, 2, 3]], before[[0, 2, 3]])


def test_bytes_between_states_are_not_touched(loops: str) -> None:
    source, target = pages(1), pages(2)
    whole = target["model.layers.0.mixer"][0].tensor.untyped_storage()
    before = bytes(whole.tolist())
    groups = [group_of(cache_of(states)) for states in (source, target)]
    staging = np.empty((1, groups[0].block_bytes), np.uint8)
    state_path(groups[0]).gather(check_span(groups[0], [1]), staging)
    state_path(groups[1]).scatter(check_span(groups[1], [2]), staging)
    after = bytes(whole.tolist())
    assert after[: 2 * 2000 + 16] == before[: 2 * 2000 + 16]
    assert after[2 * 2000 + 1216 :] == before[2 * 2000 + 1216 :]
    assert after[2 * 2000 + 16 : 2 * 2000 + 1216] != before[2 * 2000 + 16 : 2 * 2000 + 1216]


def test_both_loops_agree_on_a_long_state() -> None:
    states = {"layers.0": [StateTensor(random_tensor((2, 70, 3000), torch.bfloat16, 5), 1)]}
    group = PagedKVCache.from_tensors({}, "BNC", states=states, state_block_size={0: 1}).state_groups[0]
    ids = np.array([1, 0])
    assert np.array_equal(state_path(group).checksum(check_span(group, ids)), NumpyStates(group).checksum(ids))
    assert type(state_path(group)).__name__ == "NumbaStatePath"


# --- splits ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("parts", [2, 4])
def test_the_parts_of_tensor_parallel_ranks_add_up_to_the_whole(parts: int) -> None:
    whole = wide()
    expected = block_checksums(cache_of(whole), IDS, group=GROUP)
    ranks = [cache_of(split(whole, parts, part), tp_rank=part) for part in range(parts)]
    sums = [block_checksums(cache, IDS, group=GROUP) for cache in ranks]
    assert np.array_equal(np.sum(sums, axis=0, dtype=np.uint64), expected)
    assert not any(np.array_equal(one, expected) for one in sums)


def wide(seed: int = 1) -> dict[str, list[StateTensor]]:
    """Rows whose quarters are whole ranges of the grid."""
    return {
        f"layers.{layer}.mixer": [
            StateTensor(random_tensor((SLOTS, 512, 3), torch.bfloat16, seed + layer), 1),
            StateTensor(random_tensor((SLOTS, 16, 5, 6), torch.float32, seed + layer + 10), 1),
        ]
        for layer in (0, 4)
    }


def test_ranks_cut_their_ranges_where_the_whole_does() -> None:
    """So that a table's sum of a range serves whoever has these rows."""
    known = table_of(cache_of(wide()))
    for part in range(4):
        own = table_of(cache_of(split(wide(), 4, part)))
        assert own
        assert own.items() <= known.items()


def table_of(cache: PagedKVCache) -> dict[tuple[int, int, int], int]:
    """The sum of each range of slot 3 by layer, first row and rows."""
    sums = slice_checksums(cache, [3], group=GROUP)[0].tolist()
    return {(s.layer, s.head, s.rows): sums[i] for i, s in enumerate(shape_of(group_of(cache)).slices)}


def test_a_rank_whose_rows_are_not_aligned_cuts_at_its_ends_and_at_the_grid() -> None:
    part = {"layers.0": [StateTensor(random_tensor((1, 300, 2), torch.float16, 1), 1, [(5, 290), (700, 10)], 1024)]}
    cache = PagedKVCache.from_tensors({}, "BNC", states=part, state_block_size={0: 1})
    cuts = [(s.head, s.head + s.rows) for s in shape_of(cache.state_groups[0]).slices]
    assert cuts[0] == (5, 16)
    assert cuts[1:-2] == [(16 * i, 16 * i + 16) for i in range(1, 18)] + [(288, 295)]
    assert cuts[-2:] == [(700, 704), (704, 710)]


@pytest.mark.parametrize(("rows", "states"), [(8192, 1), (8192, 2), (65536, 1), (16384, 3), (65, 1), (1, 2), (640, 10)])
def test_a_table_has_at_most_64_ranges_a_layer(rows: int, states: int) -> None:
    own = [StateTensor(random_tensor((1, rows, 1), torch.bfloat16, i), 1) for i in range(states)]
    group = PagedKVCache.from_tensors({}, "BNC", states={"layers.2": own}, state_block_size={0: 1}).state_groups[0]
    assert states <= len(group.slice_bytes) <= MAX_RANGES
    if rows * states >= 8192:
        assert len(group.slice_bytes) > MAX_RANGES // 3, "and not many fewer"
    grid = 1 << grid_of(rows, states)
    assert -(-rows // grid) <= MAX_RANGES // states
    assert grid == 1 or -(-rows // (grid // 2)) > MAX_RANGES // states, "the finest that serves"


# --- geometry ----------------------------------------------------------------------------------------------------


def rows_lists() -> st.SearchStrategy[list[StateRows]]:
    state = st.tuples(st.integers(1, 200), st.integers(1, 9), st.sampled_from([2, 4]))
    layer = st.tuples(st.booleans(), st.lists(state, min_size=1, max_size=3), st.integers(0, 5))
    return st.dictionaries(st.integers(0, 9), layer, min_size=1, max_size=6).map(entries_of)


def entries_of(layers: dict[int, tuple[bool, list[tuple[int, int, int]], int]]) -> list[StateRows]:
    found = []
    for number, (known, states, rank) in layers.items():
        origin = 0
        for index, (rows, elements, itemsize) in enumerate(states):
            if not known:
                found.append(StateRows(number, index, rank, 1, elements, itemsize, UNSPLIT))
                continue
            grid, cut = grid_of(rows, len(states)), rows // 3
            found += [StateRows(number, origin, origin + cut, rows - cut, elements, itemsize, grid)]
            origin += rows
    return sorted(found, key=canonical)


@given(rows_lists(), st.randoms())
def test_a_geometry_decodes_to_what_was_encoded_whatever_the_order(entries: list[StateRows], random: Any) -> None:
    shuffled = list(entries)
    random.shuffle(shuffled)
    data = encode_states(shuffled)
    assert data == encode_states(entries)
    assert decode_states(data) == entries
    segments = segments_of(entries)
    assert state_extent(data) == (segments[-1].slice + 1, sum(slice_bytes(segments)))
    assert sound_states(data)
    assert not rows_twice(data)
    shape = GroupShape(4, data, 5, b"prefix", STATES)
    assert GroupShape.decode(shape.encode()) == shape
    assert len(shape.slices) == len(shape.factors) == shape.plan.num_slices


def test_layers_of_one_shape_are_one_run_a_range() -> None:
    states = {f"layers.{2 * i}.mixer": next(iter(mamba().values())) for i in range(1)}
    entries = group_of(cache_of(states)).entries
    many = [replace_layer(e, 3 + 2 * i) for i in range(40) for e in entries]
    assert len(encode_states(many)) == 2 * STATE_RUN.size
    assert decode_states(encode_states(many)) == sorted(many, key=canonical)


def replace_layer(entry: StateRows, layer: int) -> StateRows:
    return entry._replace(layer=layer)


def test_a_group_of_too_many_forms_is_refused() -> None:
    entries = [StateRows(i, 0, 0, i + 1, 2, 2, 0) for i in range(MAX_RUNS + 1)]
    assert len(encode_states(entries[:-1])) == MAX_RUNS * STATE_RUN.size
    with pytest.raises(UnsupportedCache, match=f"{MAX_RUNS + 1} runs .* split the group"):
        encode_states(entries)


def run(**changes: int) -> bytes:
    fields = {
        "layer": 1,
        "count": 2,
        "step": 1,
        "first": 4,
        "more": 3,
        "elements": 6,
        "origin": 4,
        "item": 2,
        "grid": 1,
    }
    return STATE_RUN.pack(*(fields | changes).values())


@pytest.mark.parametrize(
    "crafted",
    [
        run(count=0),
        run(elements=0),
        run(item=3),
        run(item=8),
        run(origin=5),
        run(first=65535, origin=65535, more=1),
        run(grid=17),
        run(grid=UNSPLIT, more=1),
        run(grid=UNSPLIT, more=0, origin=64),
        run(count=65535) + run(layer=9, count=2),
    ],
)
def test_runs_that_no_writer_gives_are_not_sound(crafted: bytes) -> None:
    assert sound_states(run())
    assert not sound_states(crafted)


UNKNOWN = {"grid": UNSPLIT, "more": 0, "first": 2}


@pytest.mark.parametrize(
    "crafted",
    [
        run() + run(first=6, more=0),
        run() + run(first=7, more=9),
        run() + run(layer=2, count=1, step=0),
        run(**UNKNOWN, origin=1),
        run(**UNKNOWN, origin=0) + run(**UNKNOWN, origin=2),
        run(**UNKNOWN, origin=0) + run(grid=UNSPLIT, more=0, first=3, origin=1),
        run(**UNKNOWN, origin=0) + run(**UNKNOWN, origin=0),
        run(**UNKNOWN, origin=0) + run(first=9, origin=9),
        run(origin=0, first=0) + run(grid=UNSPLIT, more=0, first=9, origin=0),
    ],
)
def test_rows_that_are_named_twice_are_found(crafted: bytes) -> None:
    assert sound_states(crafted)
    assert rows_twice(crafted)
    assert not rows_twice(run() + run(first=8, more=9))
    assert not rows_twice(run(**UNKNOWN, origin=0) + run(**UNKNOWN, origin=1))


def test_a_crafted_geometry_is_counted_without_being_expanded() -> None:
    bomb = run(count=65535, more=65535, elements=2**32 - 1, first=0, origin=0, grid=0) * MAX_RUNS
    assert state_extent(bomb) == (81 * 65535 * 65536, 81 * 65535 * 65536 * (2**32 - 1) * 2)
    assert not sound_states(bomb)
    assert len(describe_states(bomb)) < 10_000


# --- what a cache is told -----------------------------------------------------------------------------------------


def test_states_and_tokens_lie_side_by_side() -> None:
    cache = cache_of(mamba())
    assert (set(cache.groups), set(cache.state_groups), set(cache.all_groups)) == ({0}, {GROUP}, {0, GROUP})
    assert cache.any_group(GROUP) is group_of(cache)
    assert (group_of(cache).block_size, group_of(cache).num_blocks) == (TOKENS, SLOTS)
    spec = group_of(cache).layers[0].spec(GROUP)
    assert (spec.type, spec.dtype, spec.kv_heads) == ("mamba", "bfloat16,float32", 48)
    assert [tuple(state) for state in spec.states] == [(40, 3, 2), (8, 30, 4)]
    with pytest.raises(UnknownGroup):
        cache.group(GROUP)
    with pytest.raises(UnknownGroup):
        cache.any_group(5)


def test_rows_of_caches_of_one_layer_number_follow_each_other() -> None:
    first, second = mamba().values()
    cache = cache_of({"layers.0.b": list(second), "layers.0.a": list(first)})
    one, other = group_of(cache).layers
    assert (one.name, one.heads_before, other.heads_before) == ("layers.0.a", 0, 48)
    alone = block_checksums(cache_of({"layers.0.a": list(first)}), IDS, group=GROUP)
    shifted = [StateTensor(second[0].tensor, 1, [(48, 24)], 72), second[1]]
    behind = block_checksums(cache_of({"layers.0.b": shifted}), IDS, group=GROUP)
    assert np.array_equal(block_checksums(cache, IDS, group=GROUP), alone + behind)


def one_state(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return random_tensor(shape or (3, 8, 2), dtype, 1)


def made(*states: StateTensor, name: str = "layers.0.mixer", **options: Any) -> PagedKVCache:
    given = {"states": {name: list(states)}, "state_block_size": {0: 4}} | options
    return PagedKVCache.from_tensors({}, "BNC", **given)


BAD: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "elements of 1 byte": (
        lambda: made(StateTensor(one_state(dtype=torch.uint8), 1)),
        UnsupportedCache,
        "uint8: .* 2 or 4 bytes",
    ),
    "elements of 8 bytes": (lambda: made(StateTensor(torch.zeros(3, 8, 2).double(), 1)), UnsupportedCache, "float64"),
    "no tensor": (lambda: made(StateTensor([1], 1)), InvalidCache, "a state is a list"),  # type: ignore[arg-type]
    "one axis": (lambda: made(StateTensor(one_state(8), 1)), InvalidShape, r"shape \(8,\)"),
    "elements in one place": (
        lambda: made(StateTensor(one_state(3, 1, 2).expand(3, 8, 2), 1)),
        InvalidShape,
        "several elements to one place",
    ),
    "the axis of the slots": (lambda: made(StateTensor(one_state(), 0)), InvalidCache, "split_axis is 0.* 1 to 2"),
    "no such axis": (lambda: made(StateTensor(one_state(), 3)), InvalidCache, "split_axis is 3"),
    "rows that are no pairs": (
        lambda: made(StateTensor(one_state(), 1, [1, 2])),  # type: ignore[list-item]
        InvalidCache,
        r"rows is \[1, 2\]",
    ),
    "a row twice": (lambda: made(StateTensor(one_state(), 1, [(0, 5), (4, 3)])), InvalidCache, "row 4 is named twice"),
    "too few rows": (lambda: made(StateTensor(one_state(), 1, [(0, 7)])), InvalidCache, "names 7 rows, .* has 8"),
    "a part, of what is not said": (
        lambda: made(StateTensor(one_state(), 1, [(8, 8)])),
        InvalidCache,
        "say model_rows",
    ),
    "too few model rows": (
        lambda: made(StateTensor(one_state(), 1, [(8, 8)], 15)),
        InvalidCache,
        "model_rows is 15: expected 16 or more",
    ),
    "rows of what is not split": (
        lambda: made(StateTensor(one_state(), None, [(0, 8)])),
        InvalidCache,
        "split of one of its states is not known",
    ),
    "too many rows": (
        lambda: made(*[StateTensor(one_state(1, 40000, 1), 1)] * 2),
        UnsupportedCache,
        "80000 rows: .* 65536 a layer",
    ),
    "ranges": (
        lambda: made(StateTensor(one_state(1, 70, 1), 1, [(3 * i, 1) for i in range(70)], 210)),
        UnsupportedCache,
        "in 70 ranges: .* at most 64",
    ),
    "too many states": (
        lambda: made(*[StateTensor(one_state(1, 2, 1), 1)] * 65),
        UnsupportedCache,
        "65 states: at most 64",
    ),
    "no states": (lambda: made(), InvalidCache, "expected a list of StateTensor"),
    "other slots": (
        lambda: made(StateTensor(one_state(), 1), StateTensor(one_state(4, 8, 2), 1)),
        UnsupportedCache,
        "has 4 slots, another state 3",
    ),
    "the same memory twice": (
        lambda: made(*[StateTensor(one_state_kept(), 1)] * 2),
        UnsupportedCache,
        "layers.0.mixer and layers.0.mixer share memory",
    ),
    "pages that overlap": (lambda: made(*page_views(5)), UnsupportedCache, "share memory"),
    "a state that reaches into the next slot": (
        lambda: made(*[StateTensor(flat().as_strided((3, 3, 2), (12, 2, 1), at), 1) for at in (0, 7)]),
        UnsupportedCache,
        "share memory",
    ),
    "no block size": (
        lambda: made(StateTensor(one_state(), 1), state_block_size={}),
        InvalidCache,
        r"groups of states, \[0\]",
    ),
    "a wrong block size": (
        lambda: made(StateTensor(one_state(), 1), state_block_size={0: 0}),
        InvalidCache,
        r"state_block_size\[0\] is 0",
    ),
    "a rank": (lambda: made(StateTensor(one_state(), 1), tp_rank=-1), InvalidCache, "tp_rank is -1"),
    "a name without a number": (
        lambda: made(StateTensor(one_state(), 1), name="mixer"),
        UnsupportedCache,
        "0 numbers in its name",
    ),
    "no mapping": (
        lambda: PagedKVCache.from_tensors({}, "BNC", states=[1], state_block_size={0: 1}),  # type: ignore[arg-type]
        InvalidCache,
        r"states is \[1\]",
    ),
    "nothing": (lambda: PagedKVCache.from_tensors({}, "BNC"), InvalidCache, "empty"),
}
_KEPT: list[torch.Tensor] = []
_FLAT: list[torch.Tensor] = []


def one_state_kept() -> torch.Tensor:
    _KEPT.append(one_state())
    return _KEPT[-1]


def flat() -> torch.Tensor:
    """Always the same memory."""
    if not _FLAT:
        _FLAT.append(random_tensor((40,), torch.bfloat16, 1))
    return _FLAT[0]


def page_views(first: int) -> list[StateTensor]:
    """Two states in pages of 12 elements: the first has 6 of them, the second those from `first` on."""
    page = random_tensor((3, 12), torch.bfloat16, 1)
    return [StateTensor(page[:, :6].view(3, 3, 2), 1), StateTensor(page[:, first : first + 6].view(3, 3, 2), 1)]


@pytest.mark.parametrize("case", BAD)
def test_what_is_no_state_is_refused_with_the_reason(case: str) -> None:
    call, error, words = BAD[case]
    with pytest.raises(error, match=words):
        call()


def test_pages_whose_states_follow_each_other_share_nothing() -> None:
    assert made(*page_views(6)).state_groups[0].block_bytes == 24
    apart = [StateTensor(flat().as_strided((3, 3, 2), (12, 2, 1), at), 1) for at in (0, 6)]
    assert made(*apart).state_groups[0].block_bytes == 24


def test_a_group_has_one_kind_of_layers() -> None:
    tensors, states = layer_tensors("BHNC"), mamba()
    groups = {0: list(tensors)[:1], 1: [*list(tensors)[1:], *states]}
    with pytest.raises(UnsupportedCache, match="group 1 has layers with states and layers of tokens"):
        PagedKVCache.from_tensors(tensors, "BHNC", groups, states=states, state_block_size={1: 4})
    skipping = PagedKVCache.from_tensors(
        tensors, "BHNC", groups, states=states, state_block_size={1: 4}, unsupported="skip"
    )
    assert "one kind" in skipping.skipped[1]
    assert set(skipping.all_groups) == {0}
    with pytest.raises(InvalidCache, match=r"windows\[1\] is 8: expected a group of tokens"):
        PagedKVCache.from_tensors(
            *(tensors, "BHNC", {0: list(tensors), 1: list(states)}),
            **{"states": states, "state_block_size": {1: 4}, "windows": {1: 8}},
        )
    with pytest.raises(InvalidCache, match="states and tensors both have"):
        PagedKVCache.from_tensors(tensors, "BHNC", states={name: [] for name in tensors}, state_block_size={0: 4})


def test_layers_of_one_number_whose_split_is_not_known_are_refused() -> None:
    states = {f"layers.1.{i}": [StateTensor(one_state_kept(), None)] for i in "ab"}
    with pytest.raises(UnsupportedCache, match="have one layer number"):
        PagedKVCache.from_tensors({}, "BNC", states=states, state_block_size={0: 4})


def test_what_a_cache_holds_of_a_layer() -> None:
    whole = [layer.whole for layer in group_of(cache_of(unknown())).layers]
    assert whole == [True, True]
    assert not any(layer.whole for layer in group_of(cache_of(unknown(), tp_rank=2)).layers if layer.rank is not None)
    assert [layer.whole for layer in group_of(cache_of(ranks_part())).layers] == [False, True]


def test_a_row_of_a_rank_has_the_bytes_of_the_whole() -> None:
    """The helper that splits states is what the tests of ranks rest on."""
    whole = wide()
    parts = [canonical_bytes(split(whole, 2, part), 1) for part in range(2)]
    assert sorted(b"".join(parts)) == sorted(canonical_bytes(whole, 1))
    assert with_tensors(whole, 3)["layers.0.mixer"][0].tensor.shape == whole["layers.0.mixer"][0].tensor.shape
    assert replace(whole["layers.0.mixer"][0], model_rows=600).model_rows == 600


def test_the_protocols_worker_sums_states() -> None:
    assert not KVChecksumWorker(cache_of(mamba()), Rank()).skipped
