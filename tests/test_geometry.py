"""A record's geometry: its compact form, and the chunks that it implies."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvstore.cache import CacheGroup, LayerCache
from kvstore.errors import UnsupportedCache
from kvstore.geometry import (
    CHUNK_BYTES,
    MAX_CHUNKS,
    MAX_RUNS,
    RUN,
    LayerShape,
    chunk_plan,
    decode_geometry,
    encode_geometry,
)
from kvstore.layout import Plane
from tests.test_format import Row, constant, document_chunks, document_layers, table

EXACT = settings(max_examples=120, deadline=None, derandomize=True)
SIZES = st.lists(
    st.one_of(
        st.integers(1, 4000).map(lambda pieces: pieces * 8),
        st.sampled_from([CHUNK_BYTES // 2, CHUNK_BYTES - 8, CHUNK_BYTES, CHUNK_BYTES + 8, 2 * CHUNK_BYTES]),
        st.integers(1, 200_000).map(lambda pieces: pieces * 8),
    ),
    min_size=1,
    max_size=40,
)


def plane(nbytes: int) -> Plane:
    return Plane(0, 0, 0, 0, 1, nbytes, 1)


def layer(shape: LayerShape) -> LayerCache:
    name = f"model.layers.{shape.layer}.attn"
    return LayerCache(
        name, shape.layer, "full", "uint8", shape.first_head, shape.heads, plane(shape.k_bytes), plane(shape.v_bytes)
    )


def encode(shapes: Sequence[LayerShape]) -> bytes:
    return encode_geometry(CacheGroup(0, tuple(map(layer, shapes)), 16, 8))


@st.composite
def geometries(draw: st.DrawFn) -> list[LayerShape]:
    """Layers of a few shapes under distinct numbers, evenly spaced or not."""
    shape = st.tuples(st.integers(0, 9), st.integers(1, 9), st.integers(1, 4), st.integers(0, 4))
    kinds = draw(st.lists(shape, min_size=1, max_size=3))
    spaced = draw(st.tuples(st.integers(0, 50), st.integers(1, 9), st.integers(1, 60)))
    numbers = {spaced[0] + i * spaced[1] for i in range(spaced[2])}
    numbers |= draw(st.sets(st.sampled_from([0, 1, 2, 3, 5, 70_000, 70_001, 200_000, 2**31 - 1]), max_size=6))
    picks = {number: draw(st.sampled_from(kinds)) for number in sorted(numbers)}
    return [LayerShape(n, head, heads, 8 * k, 8 * v) for n, (head, heads, k, v) in picks.items()]


# --- the compact form --------------------------------------------------------------------------------------------


@EXACT
@given(geometries())
def test_decoding_gives_back_the_layers(shapes: list[LayerShape]) -> None:
    try:
        data = encode(shapes)
    except UnsupportedCache:
        return
    assert decode_geometry(data) == sorted(shapes)
    assert len(data) <= MAX_RUNS * RUN.size


@EXACT
@given(geometries(), st.integers(0, 2**32))
def test_equal_geometry_gives_equal_bytes_in_any_order_of_layers(shapes: list[LayerShape], seed: int) -> None:
    shuffled = random.Random(seed).sample(shapes, len(shapes))
    assert encode(shuffled) == encode(shapes)


@EXACT
@given(geometries(), geometries())
def test_different_geometry_gives_different_bytes(one: list[LayerShape], two: list[LayerShape]) -> None:
    assert (encode(one) == encode(two)) == (sorted(one) == sorted(two))


@EXACT
@given(geometries(), st.data())
def test_a_change_of_any_one_field_changes_the_bytes(shapes: list[LayerShape], data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(shapes) - 1))
    changes = {"first_head": 1, "heads": 1, "k_bytes": 8, "v_bytes": 8}
    name = data.draw(st.sampled_from(sorted(changes)))
    changed = shapes[at]._replace(**{name: getattr(shapes[at], name) + changes[name]})
    assert encode([*shapes[:at], changed, *shapes[at + 1 :]]) != encode(shapes)


def test_an_evenly_spaced_stack_of_layers_is_one_run() -> None:
    for step in (1, 2, 7, 2**16 - 1):
        shapes = [LayerShape(3 + i * step, 4, 8, 256, 256) for i in range(90)]
        assert encode(shapes) == RUN.pack(3, 90, step, 4, 7, 256, 256)


def test_the_largest_values_of_a_layer_round_trip() -> None:
    shapes = [LayerShape(2**31 - 1, 0, 2**16, 2**31, 2**31), LayerShape(0, 2**16 - 1, 1, 8, 0)]
    assert decode_geometry(encode(shapes)) == sorted(shapes)


def test_a_step_of_more_than_16_bits_begins_a_new_run() -> None:
    near, far = (encode([LayerShape(0, 0, 1, 8, 8), LayerShape(n, 0, 1, 8, 8)]) for n in (2**16 - 1, 2**16))
    assert (len(near), len(far)) == (RUN.size, 2 * RUN.size)


def test_a_run_has_at_most_as_many_layers_as_its_count_can_say() -> None:
    shapes = [LayerShape(i, 0, 1, 8, 8) for i in range(2**16 + 4)]
    data = encode(shapes)
    assert [run[1] for run in RUN.iter_unpack(data)] == [2**16 - 1, 5]
    assert decode_geometry(data) == shapes


def test_more_runs_than_a_header_has_room_for_are_refused() -> None:
    shapes = [LayerShape(i, 0, i + 1, 8, 8) for i in range(MAX_RUNS + 1)]
    assert len(encode(shapes[:-1])) == MAX_RUNS * RUN.size
    with pytest.raises(UnsupportedCache, match=f"{MAX_RUNS + 1} runs.*room for {MAX_RUNS}"):
        encode(shapes)


@pytest.mark.parametrize("row", table("Geometry examples"), ids=lambda row: row["layers"])
def test_the_documents_examples_are_what_the_code_writes(row: Row) -> None:
    shapes = [LayerShape(*numbers) for numbers in document_layers(row["layers"])]
    assert encode(shapes).hex() == row["geometry"].strip("`")


def test_the_documents_limits_are_the_codes() -> None:
    limits = {"CHUNK_BYTES": CHUNK_BYTES, "MAX_CHUNKS": MAX_CHUNKS, "MAX_RUNS": MAX_RUNS}
    assert {name: constant(name) for name in limits} == limits


# --- the chunks --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cut:
    """A chunk's raw bytes, and the slices that it holds bytes of."""

    start: int
    end: int
    slices: list[int]


def cuts(sizes: Sequence[int]) -> list[Cut]:
    plan = chunk_plan(sizes)
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return [
        Cut(a, b, [i for i, start in enumerate(starts) if start < b and start + sizes[i] > a])
        for a, b in zip(plan.bounds, plan.bounds[1:], strict=False)
    ]


@EXACT
@given(SIZES)
@example([CHUNK_BYTES, 8])
@example([8, CHUNK_BYTES + 8, 8])
@example([2 * CHUNK_BYTES, 2 * CHUNK_BYTES])
def test_bounds_cover_the_block_exactly_in_chunks_of_bounded_size(sizes: list[int]) -> None:
    plan = chunk_plan(sizes)
    assert (plan.bounds[0], plan.bounds[-1], plan.raw_length) == (0, sum(sizes), sum(sizes))
    assert plan.num_slices == len(sizes)
    assert plan.lengths.tolist() == [cut.end - cut.start for cut in cuts(sizes)]
    assert plan.num_chunks == len(plan.lengths)
    assert 1 <= plan.lengths.min() <= plan.lengths.max() <= CHUNK_BYTES


@EXACT
@given(SIZES)
def test_a_chunk_holds_whole_slices_or_a_part_of_one(sizes: list[int]) -> None:
    for cut in cuts(sizes):
        held = [sizes[i] for i in cut.slices]
        if max(held) <= CHUNK_BYTES:
            assert cut.end - cut.start == sum(held)
        else:
            assert len(held) == 1


@EXACT
@given(SIZES)
def test_a_chunk_of_whole_slices_has_no_room_for_the_next(sizes: list[int]) -> None:
    for one, two in zip(cuts(sizes), cuts(sizes)[1:], strict=False):
        following = sizes[two.slices[0]]
        if one.slices[-1] != two.slices[0] and max(sizes[i] for i in one.slices) <= CHUNK_BYTES >= following:
            assert one.end - one.start + following > CHUNK_BYTES


@EXACT
@given(SIZES)
def test_chunks_are_those_of_the_document(sizes: list[int]) -> None:
    assert chunk_plan(sizes).lengths.tolist() == document_chunks(sizes)


@EXACT
@given(SIZES)
def test_slice_places_point_at_each_slices_bytes(sizes: list[int]) -> None:
    plan = chunk_plan(sizes)
    assert plan.whole_slices == (max(sizes) <= CHUNK_BYTES)
    if plan.whole_slices:
        chunks, offsets = plan.slice_places
        places = [plan.bounds[c] + int(o) for c, o in zip(chunks.tolist(), offsets.tolist(), strict=True)]
        assert places == [sum(sizes[:i]) for i in range(len(sizes))]


@pytest.mark.parametrize("row", table("Chunk examples"), ids=lambda row: row["slices"])
def test_the_documents_chunk_examples_are_what_the_code_cuts(row: Row) -> None:
    assert chunk_plan(map(int, row["slices"].split())).lengths.tolist() == list(map(int, row["chunks"].split()))


def test_more_chunks_than_a_payload_key_can_number_are_refused() -> None:
    assert chunk_plan([CHUNK_BYTES] * MAX_CHUNKS).num_chunks == MAX_CHUNKS
    with pytest.raises(UnsupportedCache, match=f"at most {MAX_CHUNKS}"):
        chunk_plan([CHUNK_BYTES] * (MAX_CHUNKS + 1))
