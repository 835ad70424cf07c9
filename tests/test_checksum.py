"""The checksum's definition: kvstore.checksum against independent vectors, its algebra and record classes.

tests/vectors/checksum.json was written by another implementation in plain integers.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.checksum import (
    BLOCK_CHECKSUM_BYTES,
    MASK64,
    MAX_HASH_BYTES,
    MAX_KV_HEADS_PER_LAYER,
    MIN_HASH_BYTES,
    PIECE_BYTES,
    KVChecksumBlocks,
    KVChecksumGroup,
    KVChecksumRecord,
    KVChecksumScheduled,
    ReplicaKey,
    block_checksum_tags,
    check_block_hash,
    num_valid_tokens,
    reference_block_checksum,
    reference_slice_checksum,
    reference_state_row_checksum,
    slice_factor,
    slice_factors,
    weighted_sums,
)
from kvstore.errors import InvalidBlockHash, InvalidPosition, KVStoreError

ROOT = Path(__file__).parent.parent
VECTORS: dict[str, Any] = json.loads((ROOT / "tests" / "vectors" / "checksum.json").read_text())
Cells = npt.NDArray[np.uint8]
Row = dict[str, str]
EXACT = settings(max_examples=60, deadline=None, derandomize=True)


def names(vectors: list[dict[str, Any]]) -> list[str]:
    return [vector["name"] for vector in vectors]


def as_cells(cells: list[str]) -> Cells:
    """(tokens, cell bytes); no cell at all is (0, 16)."""
    flat = np.frombuffer(b"".join(bytes.fromhex(cell) for cell in cells), np.uint8)
    return flat.reshape(len(cells), -1) if cells else flat.reshape(0, 16)


# --- the vectors -------------------------------------------------------------------------------------------------


def test_vectors_are_all_there() -> None:
    assert {key: len(value) for key, value in VECTORS.items() if isinstance(value, list)} == {
        "blocks": 14,
        "states": 3,
        "tags": 4,
        "num_valid_tokens": 7,
    }


def test_constants() -> None:
    assert MAX_KV_HEADS_PER_LAYER == VECTORS["MAX_KV_HEADS_PER_LAYER"] == 65536
    assert (BLOCK_CHECKSUM_BYTES, PIECE_BYTES, MIN_HASH_BYTES, MAX_HASH_BYTES) == (8, 8, 8, 64)


@pytest.mark.parametrize("vector", VECTORS["blocks"], ids=names(VECTORS["blocks"]))
def test_block_vector(vector: dict[str, Any]) -> None:
    parts = []
    for part in vector["slices"]:
        s = reference_slice_checksum(as_cells(part["cells"]), vector["first_token"])
        assert f"{s:016x}" == part["slice_checksum"]
        parts.append((part["layer"], part["head"], s))
    assert f"{reference_block_checksum(parts):016x}" == vector["checksum"]


@pytest.mark.parametrize("vector", VECTORS["blocks"], ids=names(VECTORS["blocks"]))
def test_block_vector_by_arrays(vector: dict[str, Any]) -> None:
    """The array forms, slice_factors and weighted_sums, give the same checksum, here for two equal blocks."""
    slices = vector["slices"]
    sums = np.array([[int(part["slice_checksum"], 16) for part in slices]] * 2, np.uint64)
    factors = slice_factors([part["layer"] for part in slices], [part["head"] for part in slices])
    assert [f"{c:016x}" for c in weighted_sums(sums, factors).tolist()] == [vector["checksum"]] * 2


@pytest.mark.parametrize("vector", VECTORS["states"], ids=names(VECTORS["states"]))
def test_state_vector(vector: dict[str, Any]) -> None:
    dtype = f"<u{vector['itemsize']}"
    sums = [reference_state_row_checksum(np.frombuffer(bytes.fromhex(row), dtype)) for row in vector["rows"]]
    assert [f"{s:016x}" for s in sums] == vector["row_checksums"]
    rows = [(vector["layer"], vector["first_row"] + i, s) for i, s in enumerate(sums)]
    assert f"{reference_block_checksum(rows):016x}" == vector["checksum"]


@pytest.mark.parametrize("vector", VECTORS["tags"])
def test_tag_vector(vector: dict[str, str]) -> None:
    tags = block_checksum_tags([bytes.fromhex(vector["block_hash"])], int(vector["fingerprint"], 16))
    assert [f"{tag:016x}" for tag in tags.tolist()] == [vector["tag"]]


@pytest.mark.parametrize("vector", VECTORS["num_valid_tokens"])
def test_num_valid_tokens_vector(vector: dict[str, int]) -> None:
    assert num_valid_tokens(vector["position"], vector["block_size"], vector["num_tokens"]) == vector["valid"]


# --- the algebra -------------------------------------------------------------------------------------------------

Model = tuple[Cells, int]
"""KV of a request, (layers, heads, tokens, cell bytes), and the number of its first layer."""


@st.composite
def models(draw: st.DrawFn) -> Model:
    layers, heads, tokens = draw(st.integers(1, 4)), draw(st.integers(1, 4)), draw(st.integers(1, 14))
    cell = PIECE_BYTES * draw(st.integers(1, 4))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    kv = rng.integers(0, 256, (layers, heads, tokens, cell), np.uint8)
    return kv, draw(st.integers(0, 100))


def block_sum(kv: Cells, first_token: int, first_layer: int = 0, first_head: int = 0) -> int:
    """c of the layers, heads and tokens of kv, which are the global ones from the three numbers on."""
    return reference_block_checksum(
        (first_layer + layer, first_head + head, reference_slice_checksum(kv[layer, head], first_token))
        for layer in range(kv.shape[0])
        for head in range(kv.shape[1])
    )


def blocks(num_tokens: int, block_size: int) -> Iterator[tuple[int, int]]:
    """(first token, token after the last) of each block of a request."""
    for position in range(-(-num_tokens // block_size)):
        first = position * block_size
        yield first, first + num_valid_tokens(position, block_size, num_tokens)


def partition(size: int, cuts: set[int]) -> Iterator[tuple[int, int]]:
    edges = [0, *sorted(cut for cut in cuts if 0 < cut < size), size]
    yield from itertools.pairwise(edges)


@EXACT
@given(models(), st.integers(1, 6))
def test_blocks_of_any_size_add_up(model: Model, block_size: int) -> None:
    kv, layer = model
    parts = [block_sum(kv[:, :, first:end], first, layer) for first, end in blocks(kv.shape[2], block_size)]
    assert sum(parts) & MASK64 == block_sum(kv, 0, layer)


@EXACT
@given(models(), st.integers(1, 3), st.integers(1, 3))
def test_block_sizes_agree_at_common_boundaries(model: Model, small: int, times: int) -> None:
    kv, layer = model
    for first, end in blocks(kv.shape[2], small * times):
        parts = [
            block_sum(kv[:, :, first + start : first + stop], first + start, layer)
            for start, stop in blocks(end - first, small)
        ]
        assert sum(parts) & MASK64 == block_sum(kv[:, :, first:end], first, layer)


@EXACT
@given(models(), st.sets(st.integers(1, 3)), st.sets(st.integers(1, 3)), st.integers(0, 10**9))
def test_ranks_and_stages_add_up(model: Model, head_cuts: set[int], layer_cuts: set[int], first_token: int) -> None:
    kv, layer = model
    parts = [
        block_sum(kv[low:high, first:end], first_token, layer + low, first)
        for low, high in partition(kv.shape[0], layer_cuts)
        for first, end in partition(kv.shape[1], head_cuts)
    ]
    assert sum(parts) & MASK64 == block_sum(kv, first_token, layer)


@EXACT
@given(models(), st.sampled_from([2, 4]))
def test_replica_takes_the_place_of_replica_zero(model: Model, copies: int) -> None:
    """Layer 0 has `copies` copies, the last one damaged; the other layers have one copy."""
    kv, layer = model
    damaged = kv[:1].copy()
    damaged[0, 0, 0, 0] ^= 1
    values = {ReplicaKey(copies, r): block_sum(kv[:1], 0, layer) for r in range(copies - 1)}
    values[ReplicaKey(copies, copies - 1)] = block_sum(damaged, 0, layer)
    values[ReplicaKey(1, 0)] = block_sum(kv[1:], 0, layer + 1)
    total = sum(value for key, value in values.items() if key.replica_index == 0)
    checked = [total - values[ReplicaKey(copies, 0)] + values[ReplicaKey(copies, r)] for r in range(copies)]
    matches = [value & MASK64 == block_sum(kv, 0, layer) for value in checked]
    assert matches == [True] * (copies - 1) + [False]


@EXACT
@given(models())
def test_memory_layout_does_not_matter(model: Model) -> None:
    """Head-major and token-major memory hold the same slices."""
    kv, layer = model
    token_major = np.ascontiguousarray(kv.transpose(2, 0, 1, 3)).transpose(1, 2, 0, 3)
    assert block_sum(token_major, 3, layer) == block_sum(kv, 3, layer)


@EXACT
@given(models())
def test_reference_is_the_formula(model: Model) -> None:
    kv, layer = model
    pieces, total = kv.shape[3] // PIECE_BYTES, 0
    for (number, head, token, piece), x in np.ndenumerate(kv.view("<u8")):
        weight = (2 * ((layer + number) * 65536 + head) + 1) * (2 * ((7 + token) * pieces + piece) + 1)
        total += int(x) * weight
    assert block_sum(kv, 7, layer) == total % 2**64


@EXACT
@given(models())
def test_misplaced_tokens_heads_and_layers_show(model: Model) -> None:
    """Seeded random KV: a rotation along any axis that has two entries changes the sum."""
    kv, layer = model
    for axis in (axis for axis in range(3) if kv.shape[axis] > 1):
        assert block_sum(np.roll(kv, 1, axis), 0, layer) != block_sum(kv, 0, layer)


@EXACT
@given(st.integers(0, 2**31 - 1), st.integers(0, MAX_KV_HEADS_PER_LAYER - 1))
def test_factors_are_odd_and_tell_slices_apart(layer: int, head: int) -> None:
    factor = slice_factor(layer, head)
    assert factor % 2 == 1
    assert divmod((factor - 1) // 2, MAX_KV_HEADS_PER_LAYER) == (layer, head)
    assert slice_factors(layer, head).tolist() == factor
    assert slice_factors([[layer], [layer]], [head, 0]).tolist() == [[factor, slice_factor(layer, 0)]] * 2


def sum_without_multiplying(pieces: list[int], first: int, lanes: int) -> tuple[list[int], list[int], list[int]]:
    """A, B and the term of each lane, after section 7 of docs/checksum.md."""
    padded = pieces + [0] * (-len(pieces) % lanes)
    n, a, b = len(padded) // lanes, [0] * lanes, [0] * lanes
    for k in range(n):
        for lane in range(lanes):
            a[lane] += padded[k * lanes + lane]
            b[lane] += a[lane]
    terms = [(2 * (first + i) + 1 + 2 * lanes * n) * a[i] - 2 * lanes * b[i] for i in range(lanes)]
    return [v & MASK64 for v in a], [v & MASK64 for v in b], [v & MASK64 for v in terms]


@EXACT
@given(models(), st.integers(1, 5), st.integers(0, 10**9))
def test_multiply_free_form_is_exact(model: Model, lanes: int, first_token: int) -> None:
    cells = model[0][0, 0]
    first = first_token * cells.shape[1] // PIECE_BYTES
    _, _, terms = sum_without_multiplying(cells.view("<u8").reshape(-1).tolist(), first, lanes)
    assert sum(terms) & MASK64 == reference_slice_checksum(cells, first_token)


@EXACT
@given(st.integers(0, 50), st.integers(1, 20), st.integers(0, 500))
def test_valid_tokens_cover_the_request_once(position: int, block_size: int, num_tokens: int) -> None:
    assert sum(num_valid_tokens(p, block_size, num_tokens) for p in range(num_tokens + 1)) == num_tokens
    valid = num_valid_tokens(position, block_size, num_tokens)
    assert 0 <= valid <= block_size
    assert (valid > 0) == (position * block_size < num_tokens)


# --- tags and hashes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [8, 9, 32, 64])
@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_block_hash_accepted(size: int, kind: type[bytes | bytearray | memoryview]) -> None:
    value = bytes(range(size))
    checked = check_block_hash(kind(value))
    assert checked == value
    assert type(checked) is bytes


@pytest.mark.parametrize("size", [0, 7, 65, 100])
def test_block_hash_of_wrong_length(size: int) -> None:
    with pytest.raises(InvalidBlockHash, match=rf"block_hashes\[4\] has {size} bytes: expected 8 to 64"):
        check_block_hash(bytes(size), 4)


@pytest.mark.parametrize("value", [None, 12345678, "12345678", [1, 2, 3, 4, 5, 6, 7, 8]], ids=repr)
def test_block_hash_of_wrong_type(value: object) -> None:
    with pytest.raises(InvalidBlockHash, match=rf"block_hashes\[0\] is a {type(value).__name__}: expected bytes"):
        check_block_hash(value, 0)
    with pytest.raises(InvalidBlockHash, match=f"parent is a {type(value).__name__}: expected bytes"):
        check_block_hash(value)


def test_tags_name_the_bad_hash() -> None:
    with pytest.raises(InvalidBlockHash, match=r"block_hashes\[2\] has 3 bytes"):
        block_checksum_tags([bytes(8), bytes(64), b"abc", b"d"], 0)


def test_tags_are_one_uint64_a_block() -> None:
    tags = block_checksum_tags([bytes(8), b"\xff" * 9, bytes(8)], 2**64 + 5)
    assert tags.dtype == np.uint64
    assert tags.tolist() == [5, MASK64 ^ 5, 5]
    assert block_checksum_tags([], 5).shape == (0,)


# --- positions and record classes --------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [(-1, 16, 5), (0, 0, 5), (0, -16, 5), (0, 16, -1), (True, 16, 5), (0, 16, 5.5)])
def test_num_valid_tokens_refuses(arguments: tuple[Any, Any, Any]) -> None:
    position, block_size, num_tokens = arguments
    text = f"position {position}, block_size {block_size}, num_tokens {num_tokens}: expected"
    with pytest.raises(InvalidPosition, match=text):
        num_valid_tokens(*arguments)


def test_exceptions_are_kvstore_errors_and_value_errors() -> None:
    for error in (InvalidBlockHash, InvalidPosition):
        assert issubclass(error, KVStoreError)
        assert issubclass(error, ValueError)


KEYS = [ReplicaKey(1, 0), ReplicaKey(4, 2)]


def test_group_accepts_rows_of_replica_columns() -> None:
    group = KVChecksumGroup(3, KEYS, np.zeros((5, 2), np.uint64), np.zeros(5, np.uint64))
    assert group.start == 3
    assert KVChecksumGroup(0, [], np.zeros((0, 0), np.uint64)).stored is None


@pytest.mark.parametrize(
    ("start", "values", "stored", "message"),
    [
        (-1, (5, 2), None, "start is -1"),
        (0, (5, 3), None, r"values has the shape \(5, 3\): expected \(positions, 2\)"),
        (0, (10,), None, r"values has the shape \(10,\)"),
        (0, (5, 2, 1), None, r"values has the shape \(5, 2, 1\)"),
        (0, (5, 2), (4,), r"stored has the shape \(4,\): expected \(5,\)"),
        (0, (5, 2), (5, 1), r"stored has the shape \(5, 1\): expected \(5,\)"),
    ],
)
def test_group_refuses(start: int, values: tuple[int, ...], stored: tuple[int, ...] | None, message: str) -> None:
    old = None if stored is None else np.zeros(stored, np.uint64)
    with pytest.raises(InvalidPosition, match=message):
        KVChecksumGroup(start, KEYS, np.zeros(values, np.uint64), old)


def test_group_refuses_other_dtypes() -> None:
    for values, stored in ((np.int64, np.uint64), (np.uint64, np.int64)):
        with pytest.raises(InvalidPosition, match="expected uint64"):
            KVChecksumGroup(0, KEYS, np.zeros((5, 2), values), np.zeros(5, stored))  # type: ignore[arg-type]


def test_record_classes_default_to_nothing() -> None:
    assert KVChecksumScheduled() == KVChecksumScheduled({}, {}, {})
    record = KVChecksumRecord(pp_rank=1, tp_rank=2)
    assert record == KVChecksumRecord(1, 2, {}, frozenset(), {}, {})


RECORDS = [
    KVChecksumBlocks(40, {0: (0, [7, 3, 9])}),
    KVChecksumScheduled(),
    KVChecksumGroup(0, KEYS, np.zeros((1, 2), np.uint64)),
    KVChecksumRecord(0, 0),
]


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: type(record).__name__)
def test_record_classes_are_frozen(record: Any) -> None:
    for field in dataclasses.fields(record):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(record, field.name, None)


def test_replica_key_is_a_pair() -> None:
    assert ReplicaKey(4, 2) == (4, 2)
    assert ReplicaKey(4, 2)._fields == ("replicas", "replica_index")
