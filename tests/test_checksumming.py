"""A worker that executes what the scheduler says: records of sends, receives and loads, offloaded sums, what is skipped."""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from kvstore import (
    BLOCK_CHECKSUM_BYTES,
    KVChecksumBlocks,
    KVChecksumComparison,
    KVChecksumOffload,
    KVChecksumRecord,
    KVChecksumScheduled,
    KVChecksumSide,
    KVChecksumWorker,
    PagedKVCache,
    Rank,
    block_checksum_tags,
    block_checksums,
    compare,
    decode_records,
    encode_records,
)
from kvstore.errors import (
    ConfigError,
    DuplicateBlockId,
    InvalidBlockHash,
    InvalidBlockId,
    InvalidShape,
    LengthMismatch,
    NoValidTokens,
    ProtocolError,
)
from kvstore.identity import layers_fingerprint
from tests.protocol_cases import REQUEST, random_model, random_split, records
from tests.support import block_hashes, make_cache, random_tensor

BLOCKS = KVChecksumBlocks(10, {0: (0, [5, 1, 3])})
HASHES = block_hashes(3)


def worker_of(cache: PagedKVCache, rank: Rank | None = None, **options: Any) -> KVChecksumWorker:
    return KVChecksumWorker(cache, rank or Rank(), **options)


def execute(worker: KVChecksumWorker, **requests: Any) -> KVChecksumRecord:
    """The record of a step; offload: for the offloaded."""
    offload = requests.pop("offload", None)
    return worker.execute(KVChecksumScheduled(**requests), offload).result()


# --- records ---------------------------------------------------------------------------------------------------------


def test_every_request_has_an_entry_and_groups_of_other_stages_are_left_out() -> None:
    cache = make_cache(blocks=8, tokens=4)
    elsewhere = KVChecksumBlocks(3, {4: (0, [0])})
    record = worker_of(cache, Rank(0, 1, 1, 2)).execute(
        KVChecksumScheduled(reqs_to_send={"a": BLOCKS, "b": elsewhere}, reqs_to_recv={"c": KVChecksumBlocks(9, {})})
    )
    found = record.result()
    assert {request: set(groups) for request, groups in found.checksums.items()} == {"a": {0}, "b": set(), "c": set()}
    assert (found.pp_rank, found.tp_rank) == (1, 0)
    assert found.fingerprints == {0: layers_fingerprint(layer.spec(0) for layer in cache.group(0).layers)}
    group = found.checksums["a"][0]
    assert (group.start, group.replica_keys, group.stored) == (0, [(1, 0)], None)
    assert group.values[:, 0].tolist() == block_checksums(cache, [5, 1, 3], num_tokens=10).tolist()
    assert record.result() == found


def test_positions_valid_tokens_and_shared_blocks() -> None:
    cache = make_cache(blocks=8, tokens=4)
    late = KVChecksumBlocks(13, {0: (2, [1, 5])})
    found = execute(worker_of(cache), reqs_to_send={"a": BLOCKS}, reqs_to_recv={"b": late}).checksums
    assert found["b"][0].start == 2
    assert found["b"][0].values[:, 0].tolist() == block_checksums(cache, [1, 5], 2, 13).tolist()
    assert found["a"][0].values[:, 0].tolist() == block_checksums(cache, [5, 1, 3], num_tokens=10).tolist()


def test_a_producer_reports_copies_0_alone_and_a_consumer_its_own() -> None:
    tensors = {f"layers.{n}": random_tensor((8, 1, 4, 16), torch.uint8, n) for n in range(2)}
    cache = PagedKVCache.from_tensors(
        tensors, "BHNC", kv_heads={"layers.0": 1, "layers.1": 2}, first_head={"layers.1": 0}
    )
    worker = worker_of(cache, Rank(1, 4))
    sent = execute(worker, reqs_to_send={"a": BLOCKS}).checksums["a"][0]
    assert (sent.replica_keys, sent.values.shape) == ([], (3, 0))
    got = execute(worker, reqs_to_recv={"a": BLOCKS}, reqs_to_send={"b": BLOCKS}).checksums
    assert got["a"][0].replica_keys == [(2, 1), (4, 1)]
    both = got["a"][0].values.sum(axis=1, dtype=np.uint64)
    assert both.tolist() == block_checksums(cache, [5, 1, 3], num_tokens=10).tolist()
    assert got["b"][0].values.shape == (3, 0)


def test_received_is_reported_by_the_first_worker_alone() -> None:
    cache = make_cache(blocks=2)
    for rank, expected in ((Rank(0, 2), {"a": b"x"}), (Rank(1, 2), {}), (Rank(0, 1, 1, 2), {})):
        assert worker_of(cache, rank).execute(KVChecksumScheduled(), received={"a": b"x"}).result().received == expected


def test_mla_on_every_rank_is_checked_copy_by_copy_against_records_that_came_in_a_message() -> None:
    latent = random_tensor((8, 4, 24), torch.uint8, 3)
    heads = {"kv_heads": {"layers.0": 1}}
    sent = execute(worker_of(PagedKVCache.from_tensors({"layers.0": latent}, "BNC")), reqs_to_send={"a": BLOCKS})
    message = {"a": encode_records([sent])}
    records = []
    for rank in range(4):
        copy = latent.clone()
        copy[3, 1, 20] ^= rank == 2
        worker = worker_of(PagedKVCache.from_tensors({"layers.0": copy}, "BNC", **heads), Rank(rank, 4))
        records.append(worker.execute(KVChecksumScheduled(reqs_to_recv={"a": BLOCKS}), received=message).result())
    (expected,) = [decode_records(record.received["a"]) for record in records if record.received]
    sides = {"reported_side": KVChecksumSide(4, 1, {0: 4}), "expected_side": KVChecksumSide(1, 1, {0: 4})}
    found = compare(records, expected, "a", num_tokens=10, **sides)
    assert [(p.replica, p.first_token, p.first_position, p.end_position) for p in found.mismatching] == [
        ((4, 2), 8, 2, 3)
    ]
    assert {(p.replica, p.end_token) for p in found.equal} == {((4, r), end) for r in range(4) for end in (8, 10)} - {
        ((4, 2), 10)
    }
    assert found.unverified == ()


@pytest.mark.parametrize("seed", range(20))
def test_sides_that_begin_anywhere_compare_between_their_common_boundaries(seed: int) -> None:
    rng = random.Random(seed)
    model = random_model(rng)
    ours, theirs = (random_split(rng, model) for _ in range(2))
    ours, theirs = (
        replace(s, first={g: rng.randint(0, 4 // b) for g, b in s.block_sizes.items()}) for s in (ours, theirs)
    )
    found = compare(
        *(records(model, ours, sends=False), records(model, theirs, sends=True), REQUEST),
        **{"num_tokens": model.num_tokens, "reported_side": ours.side, "expected_side": theirs.side},
    )
    assert found.mismatching == ()
    for group in model.groups:
        step = math.lcm(ours.block_sizes[group], theirs.block_sizes[group])
        begin = max(side.first[group] * side.block_sizes[group] for side in (ours, theirs))
        edge = min(model.num_tokens, -(-begin // step) * step)
        for ranges, tokens in ((found.equal, range(edge, model.num_tokens)), (found.unverified, range(edge))):
            named = {t for p in ranges if p.group == group for t in range(p.first_token, p.end_token)}
            assert named == set(tokens)


# --- what is skipped -------------------------------------------------------------------------------------------------


def test_skipped_groups_have_reasons_which_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    tensors = {
        "layers.0": torch.zeros(4, 2, 4, 16, dtype=torch.uint8),
        "layers.1": torch.zeros(4, 1, 4, 16, dtype=torch.uint8),
        "a.0.b.1": torch.zeros(4, 2, 4, 16, dtype=torch.uint8),
    }
    groups = {0: ["layers.0"], 1: ["layers.1"], 2: ["a.0.b.1"]}
    caplog.set_level(logging.WARNING)
    cache = PagedKVCache.from_tensors(tensors, "BHNC", groups, unsupported="skip")
    worker = worker_of(cache, Rank(0, 2))
    for _ in range(2):
        record = execute(worker, reqs_to_recv={"a": KVChecksumBlocks(4, {n: (0, [0]) for n in (0, 1, 2)})})
    assert set(record.checksums["a"]) == {0}
    assert record.skipped_groups == {1, 2}
    assert record.skip_reasons == dict(worker.skipped)
    assert "one KV head on each of 2 ranks" in record.skip_reasons[1]
    assert record.skip_reasons[2] == cache.skipped[2]
    for number in (1, 2):
        assert len([line for line in caplog.messages if line.startswith(f"group {number} ")]) == 1
    assert set(record.fingerprints) == {0}


def test_said_heads_keep_a_group_from_being_skipped() -> None:
    cache = PagedKVCache.from_tensors({"layers.1": torch.zeros(4, 1, 4, 16, dtype=torch.uint8)}, "BHNC")
    assert set(worker_of(cache, Rank(1, 2)).skipped) == {0}
    worker = worker_of(cache, Rank(1, 2), kv_heads={"layers.1": 1})
    assert execute(worker, reqs_to_recv={"a": KVChecksumBlocks(4, {0: (0, [0])})}).checksums["a"][0].replica_keys == [
        (2, 1)
    ]


# --- offloaded blocks ------------------------------------------------------------------------------------------------


def offloaded(worker: KVChecksumWorker, kept: torch.Tensor, hashes: Sequence[bytes] = HASHES) -> KVChecksumOffload:
    return KVChecksumOffload({0: kept}, {"a": {0: hashes}})


def moved(cache: PagedKVCache, kept: torch.Tensor, ids: Sequence[int], to: Sequence[int]) -> None:
    """What a connector does: blocks, and their checksums, from some places to others."""
    for tensor in (*cache.tensors.values(), kept):
        assert isinstance(tensor, torch.Tensor)
        tensor[list(to)] = tensor[list(ids)].clone()


def loaded(record: KVChecksumRecord, num_tokens: int = 10) -> KVChecksumComparison:
    return compare([record], None, "a", num_tokens=num_tokens, reported_side=KVChecksumSide(1, 1, {0: 4}))


@pytest.fixture
def offload() -> tuple[PagedKVCache, KVChecksumWorker, torch.Tensor]:
    """Three blocks of 10 tokens, offloaded from 5, 1 and 3 and loaded to 0, 7 and 2."""
    cache = make_cache(blocks=8, tokens=4)
    worker = worker_of(cache, fingerprints={0: 77})
    kept = worker.init_block_checksums(8)
    execute(worker, reqs_to_send={"a": BLOCKS}, offload=offloaded(worker, kept))
    moved(cache, kept, [5, 1, 3], [0, 7, 2])
    return cache, worker, kept


LOADED = KVChecksumBlocks(10, {0: (0, [0, 7, 2])})
Offloaded = tuple[PagedKVCache, KVChecksumWorker, torch.Tensor]


def test_offloaded_blocks_are_loaded_against_their_stored_checksums(offload: Offloaded) -> None:
    cache, worker, kept = offload
    assert (kept.dtype, kept.shape, kept.element_size()) == (torch.int64, (8,), BLOCK_CHECKSUM_BYTES)
    sums = block_checksums(cache, [0, 7, 2], num_tokens=10)
    assert (kept.numpy().view(np.uint64)[[0, 7, 2]] ^ sums).tolist() == block_checksum_tags(HASHES, 77).tolist()
    record = execute(worker, reqs_to_load={"a": LOADED}, offload=offloaded(worker, kept))
    stored = record.checksums["a"][0].stored
    assert stored is not None
    assert stored.tolist() == sums.tolist()
    found = loaded(record)
    assert found.ok()
    assert [(p.first_token, p.end_token, p.rank, p.replica) for p in found.equal] == [(0, 10, (0, 0), (1, 0))]


@pytest.mark.parametrize("bit", [0, 63])
def test_a_flipped_bit_of_a_loaded_block_or_checksum_is_named(offload: Offloaded, bit: int) -> None:
    cache, worker, kept = offload
    kept[7] ^= torch.tensor(1) << bit
    found = loaded(execute(worker, reqs_to_load={"a": LOADED}, offload=offloaded(worker, kept)))
    assert [(p.first_token, p.end_token, p.first_position) for p in found.mismatching] == [(4, 8, 1)]
    kept[7] ^= torch.tensor(1) << bit
    tensor = cache.tensors["model.layers.1.self_attn.attn"]
    assert isinstance(tensor, torch.Tensor)
    tensor.view(torch.uint8)[2, 1, 1, 5] ^= 1
    found = loaded(execute(worker, reqs_to_load={"a": LOADED}, offload=offloaded(worker, kept)))
    assert [(p.first_token, p.end_token, p.first_position, p.rank) for p in found.mismatching] == [(8, 10, 2, (0, 0))]
    assert not found.ok(fail_closed=False)


def test_intact_blocks_of_other_hashes_layers_or_places_mismatch(offload: Offloaded) -> None:
    cache, worker, kept = offload
    wrong = execute(worker, reqs_to_load={"a": LOADED}, offload=offloaded(worker, kept, block_hashes(3, "another")))
    other = worker_of(cache, fingerprints={0: 78})
    layers = execute(other, reqs_to_load={"a": LOADED}, offload=offloaded(other, kept))
    swapped = KVChecksumBlocks(10, {0: (0, [7, 0, 2])})
    places = execute(worker, reqs_to_load={"a": swapped}, offload=offloaded(worker, kept))
    never = execute(worker, reqs_to_load={"a": LOADED}, offload=offloaded(worker, torch.zeros_like(kept)))
    assert [len(loaded(record).mismatching) for record in (wrong, layers, places, never)] == [3, 3, 2, 3]


def test_what_was_not_loaded_is_unverified(offload: Offloaded) -> None:
    _, worker, kept = offload
    received = loaded(execute(worker, reqs_to_recv={"a": LOADED}))
    assert {p.reason for p in received.unverified} == {"no stored checksums were reported"}
    some = KVChecksumBlocks(10, {0: (0, [0, 7])})
    found = loaded(execute(worker, reqs_to_load={"a": some}, offload=offloaded(worker, kept, HASHES[:2])))
    assert [(p.first_token, p.end_token) for p in found.unverified] == [(8, 10)]
    assert [(p.first_token, p.end_token) for p in found.equal] == [(0, 8)]
    assert not found.ok()


def test_the_default_fingerprint_of_tags_is_the_workers() -> None:
    cache = make_cache(blocks=8, tokens=4)
    worker, told = worker_of(cache), worker_of(cache, fingerprints=execute(worker_of(cache)).fingerprints)
    kept = worker.init_block_checksums(8)
    execute(worker, reqs_to_send={"a": BLOCKS}, offload=offloaded(worker, kept))
    assert loaded(execute(told, reqs_to_load={"a": BLOCKS}, offload=offloaded(worker, kept))).ok()


def test_all_copies_are_stored_and_one_step_does_everything() -> None:
    tensors = {f"layers.{n}": random_tensor((8, 1, 4, 16), torch.uint8, n) for n in range(2)}
    cache = PagedKVCache.from_tensors(tensors, "BHNC", replicas={"layers.0": (2, 1)}, kv_heads={"layers.1": 1})
    worker = worker_of(cache)
    kept = worker.init_block_checksums(8)
    execute(worker, reqs_to_send={"a": BLOCKS}, offload=offloaded(worker, kept))
    other = KVChecksumBlocks(8, {0: (1, [6])})
    record = execute(
        worker,
        reqs_to_load={"a": BLOCKS},
        reqs_to_recv={"b": other},
        reqs_to_send={"c": other, "d": KVChecksumBlocks(4, {0: (0, [4])})},
        offload=KVChecksumOffload({0: kept}, {"a": {0: HASHES}, "d": {0: HASHES[:1]}}),
    )
    assert loaded(record).ok()
    keys = {request: groups[0].replica_keys for request, groups in record.checksums.items()}
    assert keys == {"a": [(1, 0), (2, 1)], "b": [(1, 0), (2, 1)], "c": [(1, 0)], "d": [(1, 0)]}
    (whole,) = block_checksums(cache, [6], 1, 8).tolist()
    assert int(record.checksums["b"][0].values.sum(dtype=np.uint64)) == whole
    assert record.checksums["c"][0].values[0, 0] == record.checksums["b"][0].values[0, 0]
    (tag,), (c,) = block_checksum_tags(HASHES[:1], worker._fingerprints[0]), block_checksums(cache, [4])
    assert kept.numpy().view(np.uint64)[4] == c ^ tag


# --- misuse ----------------------------------------------------------------------------------------------------------

SEND = {"reqs_to_send": {"a": BLOCKS}}


@pytest.mark.parametrize(
    ("error", "message", "requests", "offload"),
    [
        (
            InvalidBlockId,
            "the cache has the blocks 0 to 7",
            {"reqs_to_recv": {"a": KVChecksumBlocks(4, {0: (0, [8])})}},
            {},
        ),
        (DuplicateBlockId, "twice", {"reqs_to_recv": {"a": KVChecksumBlocks(8, {0: (0, [1, 1])})}}, {}),
        (NoValidTokens, "past the last token", {"reqs_to_recv": {"a": KVChecksumBlocks(4, {0: (0, [1, 2])})}}, {}),
        (ProtocolError, "group 0 twice in one step", {**SEND, "reqs_to_recv": {"a": BLOCKS}}, {}),
        (ProtocolError, "no block_checksums", {"reqs_to_load": {"a": BLOCKS}}, {"block_hashes": {"a": {0: HASHES}}}),
        (ProtocolError, "no block_hashes", {"reqs_to_load": {"a": BLOCKS}}, {}),
        (ProtocolError, "names the request 'b'", SEND, {"block_hashes": {"b": {}}}),
        (LengthMismatch, "2 block_hashes and 3", SEND, {"block_hashes": {"a": {0: HASHES[:2]}}}),
        (InvalidBlockHash, "3 bytes", SEND, {"block_hashes": {"a": {0: [b"abc", *HASHES[1:]]}}}),
        (InvalidShape, "float32", SEND, {"block_checksums": {0: torch.zeros(8)}, "block_hashes": {"a": {0: HASHES}}}),
        (InvalidShape, "expected int64", SEND, {"block_checksums": {0: 5}, "block_hashes": {"a": {0: HASHES}}}),
        (
            *(InvalidBlockId, "block 5 has no entry"),
            *(SEND, {"block_checksums": {0: torch.zeros(5, dtype=torch.int64)}, "block_hashes": {"a": {0: HASHES}}}),
        ),
    ],
)
def test_misuse_is_said(error: type[Exception], message: str, requests: Any, offload: dict[str, Any]) -> None:
    worker = worker_of(make_cache(blocks=8, tokens=4))
    if "no block_checksums" not in message:
        offload = {"block_checksums": {0: worker.init_block_checksums(8)}, **offload}
    with pytest.raises(error, match=message):
        execute(worker, **requests, offload=KVChecksumOffload(**offload))


@pytest.mark.parametrize("blocks", [0, -1, True, 2.0, None])
def test_a_tensor_of_no_blocks_is_refused(blocks: Any) -> None:
    with pytest.raises(ConfigError, match="expected the number of the cache's blocks"):
        worker_of(make_cache(blocks=2)).init_block_checksums(blocks)
