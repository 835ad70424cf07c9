"""The checksum protocol between engines: a producer's and a consumer's records of random models and splits agree, and
whatever is damaged, misplaced or missing is named. The model's sums come from docs/checksum.md alone (protocol_cases).
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvstore import (
    KVChecksumBlocks,
    KVChecksumComparison,
    KVChecksumGroup,
    KVChecksumRange,
    KVChecksumRecord,
    KVChecksumScheduled,
    KVChecksumSide,
    KVChecksumWorker,
    PagedKVCache,
    Rank,
    ReplicaKey,
    compare,
)
from kvstore.comparing import judge
from kvstore.errors import ConfigError, InvalidPosition
from tests.protocol_cases import (
    LAYOUTS,
    REQUEST,
    Cells,
    Damage,
    Layer,
    Model,
    Split,
    copy_of,
    document_sum,
    held,
    random_model,
    random_split,
    records,
    stage_layers,
)

VECTORS: dict[str, Any] = json.loads((Path(__file__).parent / "vectors" / "checksum.json").read_text())
SEEDS = range(30)


def compared(model: Model, ours: Split, theirs: Split, damage: Damage | None = None) -> KVChecksumComparison:
    """A consumer `ours` of what a producer `theirs` sent."""
    return compare(
        records(model, ours, sends=False, damage=damage, seed=2),
        records(model, theirs, sends=True),
        REQUEST,
        num_tokens=model.num_tokens,
        reported_side=ours.side,
        expected_side=theirs.side,
    )


def tokens_of(ranges: tuple[KVChecksumRange, ...], group: int, replica: ReplicaKey) -> set[int]:
    """The tokens that ranges name of a copy."""
    return {
        token
        for part in ranges
        if part.group == group and part.replica in (replica, None)
        for token in range(part.first_token, part.end_token)
    }


def copies(model: Model, split: Split, group: int) -> set[ReplicaKey]:
    """Every copy that a consumer has of a group."""
    layers = [layer for layer in model.layers if layer.group == group]
    return {ReplicaKey(*copy_of(layer.kv.shape[0], rank)) for layer in layers for rank in split.ranks}


def case(seed: int, sizes: tuple[int, ...] = (1, 2, 3, 4, 6)) -> tuple[random.Random, Model, Split, Split]:
    """A model, and two engines for it."""
    rng = random.Random(seed)
    model = random_model(rng)
    return rng, model, random_split(rng, model, sizes), random_split(rng, model, sizes)


# --- what is equal ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
def test_the_parts_of_all_ranks_add_up_to_the_document(seed: int) -> None:
    _, model, split, _ = case(seed)
    found = records(model, split, sends=True)
    for group, size in split.block_sizes.items():
        parts = [record.checksums[REQUEST][group] for record in found if group in record.checksums[REQUEST]]
        assert {key.replica_index for part in parts for key in part.replica_keys} == {0}, "a producer reports copies 0"
        for position in range(-(-model.num_tokens // size)):
            tokens = range(position * size, min(model.num_tokens, (position + 1) * size))
            total = sum(int(value) for part in parts for value in part.values[position].tolist())
            assert total % 2**64 == document_sum(model, group, tokens)


@pytest.mark.parametrize("vector", VECTORS["blocks"], ids=lambda vector: vector["name"])
def test_a_worker_sums_the_vectors(vector: dict[str, Any]) -> None:
    """Each slice is a layer of its own cache, of one head; a position that begins at the vector's first token."""
    first, tokens = vector["first_token"], max(1, *(len(part["cells"]) for part in vector["slices"]))
    size = next(n for n in range(tokens, first + tokens + 1) if first % n == 0)
    total = 0
    for part in (part for part in vector["slices"] if part["cells"]):
        cells = np.frombuffer(bytes.fromhex("".join(part["cells"])), np.uint8).reshape(len(part["cells"]), -1)
        memory = np.full((3, 1, size, cells.shape[1]), 0xA5, np.uint8)
        memory[1, 0, : len(cells)] = cells
        name = f"model.layers.{part['layer']}.attn"
        cache = PagedKVCache.from_tensors(
            {name: torch.from_numpy(memory)}, "BHNC", None, {name: part["head"]}, value_channels=0
        )
        blocks = KVChecksumBlocks(first + len(cells), {0: (first // size, [1])})
        record = KVChecksumWorker(cache, Rank()).execute(KVChecksumScheduled({"r": blocks})).result()
        total += int(record.checksums["r"][0].values[0, 0])
    assert f"{total % 2**64:016x}" == vector["checksum"]


@pytest.mark.parametrize("seed", SEEDS)
def test_any_two_engines_agree(seed: int) -> None:
    _, model, ours, theirs = case(seed)
    found = compared(model, ours, theirs)
    assert found.ok()
    assert found.mismatching == found.unverified == ()
    for group in model.groups:
        for replica in copies(model, ours, group):
            assert tokens_of(found.equal, group, replica) == set(range(model.num_tokens))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("other", ["BHNC", "BNHD"])
def test_layouts_agree(layout: str, other: str) -> None:
    model = random_model(random.Random(7))
    ours, theirs = (Split(2, 1, name, dict.fromkeys(model.groups, 4)) for name in (layout, other))
    assert compared(model, ours, theirs).ok()


def test_blocks_of_16_and_48_compare_every_48_tokens_and_at_the_end() -> None:
    layer = Layer("layers.0", 0, 0, np.random.default_rng(1).integers(0, 256, (2, 130, 2, 8), np.uint8))
    model = Model([layer], 130)
    ours, theirs = Split(1, 1, "BHNC", {0: 16}), Split(2, 1, "BNHD", {0: 48})

    def damage(rank: Rank, kv: dict[str, Cells]) -> None:
        for token in (50, 129):
            kv["layers.0"][1, token, 0, 0] ^= 1

    found = compared(model, ours, theirs, damage)
    places = [(p.first_token, p.end_token, p.first_position, p.end_position) for p in found.mismatching]
    assert places == [(48, 96, 3, 6), (96, 130, 6, 9)]
    assert [(p.first_token, p.end_token) for p in found.equal] == [(0, 48)]


# --- what is damaged -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
def test_a_flipped_bit_in_any_copy_is_named(seed: int) -> None:
    rng, model, ours, theirs = case(seed)
    rank = rng.choice(ours.ranks)
    layer = rng.choice(stage_layers(model, rank))
    kv = held(model, rank)[layer.name]
    head, token, part, byte = (rng.randrange(n) for n in kv.shape)

    def damage(there: Rank, held: dict[str, Cells]) -> None:
        if there == rank:
            held[layer.name][head, token, part, byte] ^= 1 << rng.randrange(8)

    found = compared(model, ours, theirs, damage)
    assert not found.ok()
    assert not found.ok(fail_closed=False)
    (named,) = found.mismatching
    replica = ReplicaKey(*copy_of(layer.kv.shape[0], rank))
    assert (named.group, named.replica) == (layer.group, replica)
    assert token in range(named.first_token, named.end_token)
    size = ours.block_sizes[layer.group]
    assert token // size in range(named.first_position, named.end_position)
    assert named.end_token - named.first_token <= np.lcm(size, theirs.block_sizes[layer.group])
    others = set(range(model.num_tokens)) - set(range(named.first_token, named.end_token))
    assert tokens_of(found.equal, layer.group, replica) == others
    for group in set(model.groups) - {layer.group}:
        assert all(
            tokens_of(found.equal, group, key) == set(range(model.num_tokens)) for key in copies(model, ours, group)
        )


def swap(axis: int) -> Callable[[Cells], Cells]:
    """Rotate one axis of a layer's KV by one."""
    return lambda kv: np.roll(kv, 1, axis)


@pytest.mark.parametrize("wrong", [swap(0), swap(1), swap(2)], ids=["heads", "positions", "K with V"])
@pytest.mark.parametrize("seed", range(3))
def test_what_is_misplaced_in_a_layer_shows(seed: int, wrong: Callable[[Cells], Cells]) -> None:
    bits = np.random.default_rng(seed)
    model = Model([Layer("layers.4", 4, 0, bits.integers(0, 256, (2, 9, 2, 8), np.uint8))], 9)
    ours, theirs = Split(1, 1, "BNHC", {0: 3}), Split(2, 1, "BHNC", {0: 2})
    found = compared(model, ours, theirs, lambda _, kv: kv.update({"layers.4": wrong(kv["layers.4"])}))
    assert [(p.first_token, p.end_token) for p in found.mismatching] == [(0, 6), (6, 9)]


def test_swapped_layers_and_blocks_show() -> None:
    bits = np.random.default_rng(5)
    kvs = [bits.integers(0, 256, (1, 8, 2, 8), np.uint8) for _ in range(2)]
    model = Model([Layer(f"layers.{n}", n, 0, kv) for n, kv in enumerate(kvs)], 8)
    split = Split(1, 1, "BHNC", {0: 4})
    layers = compared(model, split, split, lambda _, kv: kv.update({"layers.0": kvs[1], "layers.1": kvs[0]}))
    blocks = compared(model, split, split, lambda _, kv: kv.update({"layers.1": np.roll(kvs[1], 4, 1)}))
    assert [len(found.mismatching) for found in (layers, blocks)] == [2, 2]


PART = KVChecksumRange(0, 0, 8, 0, 2)


@pytest.mark.parametrize(
    ("off", "left", "expected"),
    [
        ({(1, 0): 0}, 5, {(1, 0): "mismatching"}),
        ({(2, 0): 0, (2, 1): 3}, 0, {(2, 0): "equal", (2, 1): "mismatching"}),
        ({(2, 0): 0, (2, 1): 3}, 3, {(2, 0): "mismatching", (2, 1): "equal"}),
        ({(2, 0): 0, (2, 1): 3}, 4, {(2, 0): "mismatching", (2, 1): "mismatching"}),
        ({(2, 0): 0, (2, 1): 0}, 4, {(2, 0): "mismatching", (2, 1): "mismatching"}),
        ({(1, 0): 0, (2, 0): 0, (2, 1): 0}, 4, {(1, 0): "mismatching", (2, 0): "unverified", (2, 1): "unverified"}),
        ({(1, 0): 0, (2, 0): 0, (2, 1): 9}, 9, {(1, 0): "equal", (2, 0): "mismatching", (2, 1): "equal"}),
        (
            {(2, 0): 0, (2, 1): 2**64 - 1, (4, 0): 0, (4, 1): 3, (4, 2): 3, (4, 3): 0},
            2,
            {
                (2, 0): "mismatching",
                (2, 1): "equal",
                (4, 0): "mismatching",
                (4, 1): "equal",
                (4, 2): "equal",
                (4, 3): "mismatching",
            },
        ),
    ],
)
def test_a_copy_is_right_if_one_of_each_count_adds_up(
    off: dict[tuple[int, int], int], left: int, expected: dict[tuple[int, int], str]
) -> None:
    found = judge(PART, {ReplicaKey(*key): value for key, value in off.items()}, left)
    assert {part.replica: kind for kind, part in found} == expected


# --- what is missing -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sides() -> tuple[Model, Split, Split, list[KVChecksumRecord], list[KVChecksumRecord]]:
    """Two stages of two ranks that received from one stage of two."""
    bits = np.random.default_rng(3)
    layers = [Layer(f"layers.{n}", n, 0, bits.integers(0, 256, (1 + n % 2, 24, 2, 8), np.uint8)) for n in range(4)]
    model, ours, theirs = Model(layers, 24), Split(2, 2, "BHNC", {0: 4}), Split(2, 1, "BHNC", {0: 6})
    return model, ours, theirs, records(model, ours, sends=False), records(model, theirs, sends=True)


def reasons(found: KVChecksumComparison) -> set[str]:
    return {part.reason for part in found.unverified}


Sides = tuple[Model, Split, Split, list[KVChecksumRecord], list[KVChecksumRecord]]


def result(
    sides: Sides, ours: list[KVChecksumRecord], theirs: list[KVChecksumRecord], **tokens: int
) -> KVChecksumComparison:
    return compare(
        *(ours, theirs, REQUEST),
        **{"num_tokens": 24, **tokens},
        reported_side=sides[1].side,
        expected_side=sides[2].side,
    )


def changed(record: KVChecksumRecord, **parts: Any) -> KVChecksumRecord:
    """The record with other parts of its group."""
    group = record.checksums[REQUEST][0]
    made = {"start": group.start, "replica_keys": group.replica_keys, "values": group.values, **parts}
    return replace(record, checksums={REQUEST: {0: KVChecksumGroup(**made)}})


@pytest.mark.parametrize("side", ["consumer", "producer"])
def test_a_missing_rank_leaves_everything_unverified(sides: Sides, side: str) -> None:
    full = {"consumer": sides[3], "producer": sides[4]}
    assert result(sides, full["consumer"], full["producer"]).ok()
    for index, record in enumerate(full[side]):
        for rest in ([], [replace(record, checksums={"another": {}})]):
            lists = {**full, side: [r for i, r in enumerate(full[side]) if i != index] + rest}
            found = result(sides, lists["consumer"], lists["producer"])
            assert (found.equal, found.mismatching) == ((), ())
            assert [(p.first_token, p.end_token) for p in found.unverified] == [(0, 24)]
            assert reasons(found) == {
                f"the {side}'s rank pp {record.pp_rank}, tp {record.tp_rank} reported nothing of the request"
            }
            assert not found.ok()
            assert found.ok(fail_closed=False)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda r: replace(r, skipped_groups=frozenset({0}), skip_reasons={0: "odd"}), "skips the group: odd"),
        (lambda r: replace(r, skipped_groups=frozenset({0})), "skips the group: no reason given"),
        (lambda r: replace(r, checksums={REQUEST: {}}), "has layers of the group, and reported no checksums of it"),
        (
            lambda r: replace(r, checksums={REQUEST: {}}, fingerprints={}),
            "has layers of the group, and reported no checks",
        ),
        (lambda r: replace(r, fingerprints={}), "reported no fingerprint of the group"),
        (lambda r: replace(r, tp_rank=2), "has a record of rank pp 1, tp 2"),
        (lambda r: changed(r, replica_keys=[ReplicaKey(1, 0), ReplicaKey(2, 0)]), "reported copy 1 of 2"),
    ],
)
def test_an_incomplete_record_is_unverified(
    sides: Sides, change: Callable[[KVChecksumRecord], KVChecksumRecord], reason: str
) -> None:
    ours = [change(record) if (record.pp_rank, record.tp_rank) == (1, 1) else record for record in sides[3]]
    if "copy 1" in reason:
        ours[1] = changed(ours[1], replica_keys=[ReplicaKey(1, 0), ReplicaKey(2, 0)])
    found = result(sides, ours, sides[4])
    assert (found.equal, found.mismatching) == ((), ())
    (text,) = reasons(found)
    assert reason in text


def test_other_layers_are_a_mismatch(sides: Sides) -> None:
    theirs = [replace(record, fingerprints={0: 5}) for record in sides[4]]
    (part,) = result(sides, sides[3], theirs).mismatching
    assert (part.first_token, part.end_token) == (0, 24)
    assert "these are other layers" in part.reason
    ours = [replace(r, fingerprints={0: 5}) if (r.pp_rank, r.tp_rank) == (1, 1) else r for r in sides[3]]
    (part,) = result(sides, ours, sides[4]).mismatching
    assert "ranks of stage 1 have different fingerprints" in part.reason


def test_what_one_rank_lacks_is_unverified_and_the_rest_is_compared(sides: Sides) -> None:
    values = sides[3][2].checksums[REQUEST][0].values
    ours = [*sides[3][:2], changed(sides[3][2], start=2, values=values[2:]), sides[3][3]]
    found = result(sides, ours, sides[4])
    assert {(p.first_token, p.end_token) for p in found.unverified} == {(0, 12)}
    assert {(p.first_token, p.end_token) for p in found.equal} == {(12, 24)}
    ours = [*sides[3][:2], changed(sides[3][2], start=3, values=values[3:]), sides[3][3]]
    assert [p.reason[:50] for p in result(sides, ours, sides[4]).unverified] == [
        "not all ranks of the consumer reported these blocks"[:50]
    ]


def test_first_positions_may_differ(sides: Sides) -> None:
    model, ours, theirs, _, _ = sides
    late = records(model, replace(ours, first={0: 1}), sends=False)
    found = result(sides, late, sides[4], first_token=4)
    assert {(p.first_token, p.end_token) for p in found.unverified} == {(4, 12)}
    assert "no boundary between them" in next(iter(reasons(found)))
    assert {(p.first_token, p.end_token) for p in found.equal} == {(12, 24)}
    sent = records(model, replace(theirs, first={0: 2}), sends=True)
    assert result(sides, late, sent, first_token=12).ok()
    assert {(p.first_token, p.end_token) for p in result(sides, late, sent).unverified} == {(0, 12)}


def test_steps_add_up_and_contradictions_are_unverified(sides: Sides) -> None:
    values = sides[3][0].checksums[REQUEST][0].values
    steps = [changed(sides[3][0], values=values[:4]), changed(sides[3][0], start=3, values=values[3:].copy())]
    assert result(sides, [*steps, *sides[3][1:]], sides[4]).ok()
    steps[1].checksums[REQUEST][0].values[0, 0] ^= np.uint64(1)
    found = result(sides, [*steps, *sides[3][1:]], sides[4])
    assert reasons(found) == {"a rank of the consumer reported these blocks twice, and differently"}
    assert {(p.first_token, p.end_token) for p in found.unverified} == {(12, 24)}


def test_blocks_past_the_end_are_not_asked_for(sides: Sides) -> None:
    far = changed(sides[3][0], start=2**61)
    found = result(sides, [*sides[3], far], sides[4], num_tokens=12)
    assert found.ok()
    assert {(p.first_token, p.end_token, p.first_position, p.end_position) for p in found.equal} == {(0, 12, 0, 3)}


def test_misuse_of_a_comparison_is_said(sides: Sides) -> None:
    side, other = KVChecksumSide(1, 1, {0: 4}), KVChecksumSide(1, 1, {1: 4})
    for expected, there in (([], None), (None, side)):
        with pytest.raises(ConfigError, match="pass both, or neither"):
            compare([], expected, "r", num_tokens=4, reported_side=side, expected_side=there)
    with pytest.raises(ConfigError, match=r"groups \[1\] and \[0\]"):
        compare([], [], "r", num_tokens=4, reported_side=side, expected_side=other)
    with pytest.raises(ConfigError, match="no block_sizes"):
        compare([], None, "r", num_tokens=4, reported_side=KVChecksumSide(1, 1, {}))
    for first, end in ((0, 0), (4, 4), (-1, 4), (0, True)):
        with pytest.raises(InvalidPosition, match="expected 0 <= first < num_tokens"):
            compare([], None, "r", num_tokens=end, reported_side=side, first_token=first)
    with pytest.raises(ConfigError, match="positive integers"):
        KVChecksumSide(0, 1, {})
