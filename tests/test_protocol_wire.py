"""Messages of the checksum protocol as bytes: what was encoded is decoded, by the document too, and malformed bytes raise
ProtocolError alone, and make nothing large.
"""

from __future__ import annotations

import hashlib
import random
import struct
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvstore import (
    KVChecksumBlocks,
    KVChecksumGroup,
    KVChecksumRecord,
    KVChecksumScheduled,
    ReplicaKey,
    decode_records,
    encode_records,
)
from kvstore.errors import InvalidPosition, KVStoreError, ProtocolError
from kvstore.protocol_wire import FRAME_BYTES, HASH_BYTES, HEAD, MAGIC, MAX_MESSAGE_BYTES, VERSION, seal

Message = KVChecksumBlocks | KVChecksumScheduled | KVChecksumGroup | KVChecksumRecord
SEEDS = range(25)
OBJECT_BYTES = 64
"""What decoding may allocate for each byte of a message: Python's objects are larger than the few bytes that name them."""
BASE_BYTES = 64 * 1024


def sealed(kind: int, body: bytes, version: int = VERSION, length: int | None = None, magic: bytes = MAGIC) -> bytes:
    """A message whose hash is right, whatever is in it."""
    head = HEAD.pack(magic, version, kind, len(body) if length is None else length)
    return head + hashlib.blake2b(head + body, digest_size=HASH_BYTES).digest() + body


# --- random messages -------------------------------------------------------------------------------------------------


def random_group(rng: random.Random) -> KVChecksumGroup:
    """Any shape, with an empty one now and then."""
    every = [ReplicaKey(r, i) for r in (1, 2, 8) for i in range(r)]
    keys, positions = rng.sample(every, rng.randint(0, 3)), rng.choice([0, 1, 5])
    words = np.random.default_rng(rng.getrandbits(32)).integers(0, 2**64, (positions, len(keys) + 1), np.uint64)
    stored = words[:, -1].copy() if rng.random() < 0.5 else None
    return KVChecksumGroup(rng.choice([0, 3, 2**40]), keys, words[:, :-1].copy(), stored)


def random_blocks(rng: random.Random) -> KVChecksumBlocks:
    groups = rng.sample(range(2**16), rng.randint(0, 3))
    return KVChecksumBlocks(
        rng.choice([0, 7, 2**62 - 1]),
        {g: (rng.randrange(2**40), [rng.randrange(2**63) for _ in range(rng.choice([0, 1, 9]))]) for g in groups},
    )


def random_names(rng: random.Random) -> list[str]:
    return rng.sample(["", "r", "r/1", "é\n☃", "x" * 70, "z"], rng.randint(0, 4))


def random_scheduled(rng: random.Random) -> KVChecksumScheduled:
    return KVChecksumScheduled(*({name: random_blocks(rng) for name in random_names(rng)} for _ in range(3)))


def random_record(rng: random.Random) -> KVChecksumRecord:
    skipped = rng.sample(range(9), rng.randint(0, 3))
    return KVChecksumRecord(
        rng.randrange(2**16),
        rng.randrange(2**16),
        {n: {g: random_group(rng) for g in rng.sample(range(9), rng.randint(0, 3))} for n in random_names(rng)},
        frozenset(skipped),
        {g: rng.getrandbits(64) for g in rng.sample(range(2**16), rng.randint(0, 3))},
        {name: rng.randbytes(rng.randint(0, 20)) for name in random_names(rng)},
        {g: rng.choice(["", "a reason"]) for g in skipped if rng.random() < 0.5},
    )


MAKERS: dict[int, tuple[type[Any], Callable[[random.Random], Message]]] = {
    1: (KVChecksumBlocks, random_blocks),
    2: (KVChecksumScheduled, random_scheduled),
    3: (KVChecksumGroup, random_group),
    4: (KVChecksumRecord, random_record),
}


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("seed", SEEDS)
def test_what_was_encoded_is_decoded(kind: int, seed: int) -> None:
    form, make = MAKERS[kind]
    message = make(random.Random(seed))
    data = message.encode()
    for given in (data, bytearray(data), memoryview(data)):
        found = form.decode(given)
        assert found == message
        assert found.encode() == data


def test_equal_messages_have_equal_bytes_in_whatever_order_they_were_made() -> None:
    record = random_record(random.Random(3))
    turned = KVChecksumRecord(
        *(record.pp_rank, record.tp_rank, dict(reversed(record.checksums.items())), record.skipped_groups),
        *(dict(reversed(record.fingerprints.items())), dict(reversed(record.received.items())), record.skip_reasons),
    )
    assert len(record.checksums) > 1
    assert turned.encode() == record.encode()


def test_groups_are_equal_by_their_numbers() -> None:
    def group(start: int = 0, value: int = 5, stored: int | None = 6) -> KVChecksumGroup:
        kept = None if stored is None else np.array([stored], np.uint64)
        return KVChecksumGroup(start, [ReplicaKey(1, 0)], np.array([[value]], np.uint64), kept)

    assert group() == group()
    assert all(group() != other for other in (group(1), group(0, 4), group(0, 5, 7), group(0, 5, None), "group"))


def test_records_follow_each_other() -> None:
    records = [random_record(random.Random(seed)) for seed in range(5)]
    data = encode_records(records)
    assert decode_records(data) == records
    assert decode_records(b"") == []
    for cut in (1, len(data) - 1, len(records[0].encode()) + 5):
        with pytest.raises(ProtocolError):
            decode_records(data[:cut])
    with pytest.raises(ProtocolError, match="pass each message by itself"):
        KVChecksumRecord.decode(data)


# --- by the document alone -------------------------------------------------------------------------------------------


def test_a_record_is_read_by_docs_protocol_md() -> None:
    values = np.array([[1, 2], [3, 2**64 - 1]], np.uint64)
    group = KVChecksumGroup(7, [ReplicaKey(1, 0), ReplicaKey(4, 2)], values, np.array([9, 8], np.uint64))
    record = KVChecksumRecord(1, 2, {"é": {5: group}}, frozenset({3, 4}), {5: 77}, {"r": b"xyz"}, {4: "odd"})
    data = record.encode()
    body = data[32:]
    assert data[:8] == bytes.fromhex("934b5653554d0d0a")
    assert struct.unpack("<HHI", data[8:16]) == (1, 4, len(body))
    assert data[16:32] == hashlib.blake2b(data[:16] + body, digest_size=16).digest()
    expected = struct.pack("<III", 1, 2, 1) + struct.pack("<I", 2) + "é".encode() + struct.pack("<I", 1)
    expected += struct.pack("<HQIIB", 5, 7, 2, 2, 1) + struct.pack("<IIII", 1, 0, 4, 2)
    expected += struct.pack("<4Q2Q", 1, 2, 3, 2**64 - 1, 9, 8)
    expected += struct.pack("<IHBHBI", 2, 3, 0, 4, 1, 3) + b"odd"
    expected += struct.pack("<IHQ", 1, 5, 77) + struct.pack("<II", 1, 1) + b"r" + struct.pack("<I", 3) + b"xyz"
    assert body == expected


def test_a_schedule_is_read_by_docs_protocol_md() -> None:
    blocks = KVChecksumBlocks(40, {2: (1, [7, 3])})
    body = struct.pack("<QIHQI2Q", 40, 1, 2, 1, 2, 7, 3)
    assert blocks.encode() == sealed(1, body)
    expected = struct.pack("<II", 0, 1) + struct.pack("<I", 1) + b"a" + body + struct.pack("<I", 0)
    assert KVChecksumScheduled(reqs_to_recv={"a": blocks}).encode() == sealed(2, expected)


# --- what is malformed -----------------------------------------------------------------------------------------------


def attempt(form: type[Any], data: bytes) -> Message | None:
    """The message, or None where it was refused; nothing but ProtocolError may come."""
    try:
        found: Message = form.decode(data)
    except ProtocolError:
        return None
    return found


def damaged(rng: random.Random, body: bytes) -> bytes:
    """One of many ways to change a message's body: some of them make another message."""
    at = rng.randrange(len(body) + 1)
    way = rng.randrange(7)
    if way == 0:
        return body[:at]
    if way == 1:
        return body + rng.randbytes(rng.randint(1, 9))
    if way == 2:
        return body[:at] + rng.randbytes(rng.randint(1, 9)) + body[at:]
    if way == 3:
        return body[:at] + rng.choice([b"\xff", b"\0", b"\x7f"]) * rng.choice([1, 4, 8]) + body[at + 4 :]
    if way == 4:
        return body[:at] + struct.pack("<d", rng.choice([float("nan"), float("inf"), -1.0])) + body[at + 8 :]
    if way == 5:
        return body[:at] + body[max(0, at - 40) : at] + body[at:]
    bit = rng.randrange(8 * len(body))
    return body[: bit // 8] + bytes([body[bit // 8] ^ 1 << bit % 8]) + body[bit // 8 + 1 :]


@pytest.mark.parametrize("kind", MAKERS)
def test_malformed_bytes_under_a_right_hash_raise_one_error_and_make_nothing_large(kind: int) -> None:
    form, make = MAKERS[kind]
    rng, refused = random.Random(kind), 0
    tracemalloc.start()
    try:
        for seed in range(600):
            body = damaged(rng, make(random.Random(seed % 50)).encode()[FRAME_BYTES:])
            data = sealed(kind, body)
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            found = attempt(form, data)
            assert tracemalloc.get_traced_memory()[1] - before <= OBJECT_BYTES * len(data) + BASE_BYTES
            refused += found is None
            assert found is None or found.encode() == data, "what is accepted has one form"
    finally:
        tracemalloc.stop()
    assert refused > 280


MANY = 20_000
REQUESTS = (struct.pack("<I4sI", 4, b"%04x" % n, 0) for n in range(MANY))


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (4, struct.pack("<IIII", 0, 0, 0, MANY) + b"".join(struct.pack("<HB", n, 0) for n in range(MANY)) + bytes(8)),
        (
            4,
            bytes(16)
            + struct.pack("<I", MANY)
            + b"".join(struct.pack("<HQ", n, 2**63) for n in range(MANY))
            + bytes(4),
        ),
        (4, struct.pack("<III", 0, 0, MANY) + b"".join(REQUESTS) + bytes(12)),
        (
            4,
            struct.pack("<IIIII", 0, 0, 1, 0, MANY)
            + b"".join(struct.pack("<HQIIB", n, 2**61, 0, 0, 1) for n in range(MANY))
            + bytes(12),
        ),
        (3, struct.pack("<QIIB", 0, 0, MANY, 0) + b"".join(struct.pack("<II", 2**31, n) for n in range(MANY))),
        (1, bytes(8) + struct.pack("<I", MANY) + b"".join(struct.pack("<HQI", n, 2**61, 0) for n in range(MANY))),
    ],
    ids=["skipped groups", "fingerprints", "requests", "groups", "replica keys", "blocks"],
)
def test_the_densest_messages_make_nothing_large(kind: int, body: bytes) -> None:
    data = sealed(kind, body)
    tracemalloc.start()
    try:
        assert MAKERS[kind][0].decode(data).encode() == data
        assert tracemalloc.get_traced_memory()[1] <= OBJECT_BYTES * len(data)
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("kind", MAKERS)
def test_random_bytes_of_every_length_raise_one_error(kind: int) -> None:
    form, rng = MAKERS[kind][0], random.Random(kind)
    for length in range(120):
        attempt(form, sealed(kind, rng.randbytes(length)))
        assert attempt(form, rng.randbytes(length)) is None


@pytest.mark.parametrize("kind", MAKERS)
def test_every_flipped_bit_and_every_truncation_of_a_message_is_refused(kind: int) -> None:
    form, make = MAKERS[kind]
    data = make(random.Random(3)).encode()
    for bit in range(8 * len(data)):
        assert attempt(form, data[: bit // 8] + bytes([data[bit // 8] ^ 1 << bit % 8]) + data[bit // 8 + 1 :]) is None
    for length in range(len(data)):
        assert attempt(form, data[:length]) is None


HUGE = struct.pack("<I", 2**32 - 1)
ONE = struct.pack("<I", 1)


@pytest.mark.parametrize(
    ("kind", "body", "message"),
    [
        (1, struct.pack("<Q", 2**62) + bytes(4), "num_tokens is 4611686018427387904: expected 0 to"),
        (1, bytes(8) + HUGE, "4294967295 groups cannot lie in the 0 bytes"),
        (1, bytes(8) + ONE + bytes(10) + HUGE + bytes(16), "4294967295 block ids cannot lie in the 16 bytes"),
        (1, bytes(8) + ONE + bytes(10) + ONE + b"\xff" * 8, "a block id is 18446744073709551615"),
        (1, bytes(8) + struct.pack("<I", 2) + bytes(28), "group 0 behind group 0"),
        (1, bytes(13), "1 bytes follow"),
        (2, struct.pack("<I", 2) + (bytes(4) + bytes(12)) * 2 + bytes(8), "'' out of place"),
        (2, ONE + struct.pack("<I", 1) + b"\xff" + bytes(20), "no UTF-8"),
        (3, struct.pack("<QIIB", 0, 2**32 - 1, 1, 0), "1 replica keys cannot lie"),
        (3, struct.pack("<QIIBIIII", 0, 2**32 - 1, 2, 0, 1, 0, 2, 0), "2 replica keys cannot lie"),
        (3, struct.pack("<QIIBII", 0, 0, 1, 0, 4, 4), "expected different"),
        (3, struct.pack("<QIIBIIII", 0, 0, 2, 0, 1, 0, 1, 0), "expected different"),
        (3, struct.pack("<QIIB", 0, 0, 0, 2), "flags is 2"),
        (3, struct.pack("<QIIB", 0, 2**32 - 1, 0, 1), "stored takes 34359738360 bytes"),
        (4, struct.pack("<II", 2**16, 0), "pp_rank is 65536"),
    ],
)
def test_what_is_wrong_is_said(kind: int, body: bytes, message: str) -> None:
    with pytest.raises(ProtocolError, match=message):
        MAKERS[kind][0].decode(sealed(kind, body))


def test_a_group_without_columns_may_have_any_number_of_positions() -> None:
    found = KVChecksumGroup.decode(sealed(3, struct.pack("<QIIB", 5, 2**32 - 1, 0, 0)))
    assert found.values.shape == (2**32 - 1, 0)


def test_frames_that_are_none_are_said() -> None:
    body = bytes(12)
    for data, message in (
        (sealed(1, body, version=2), "version 2: this kvstore reads version 1; use the same release"),
        (sealed(1, body, version=0), "version 0"),
        (sealed(2, body), "kind 2: expected kind 1"),
        (sealed(1, body, magic=b"\x93KVSUMxx"), "no kvstore checksum message"),
        (sealed(1, body, length=13), "says that it has 45 bytes, 44 are there"),
        (sealed(1, body, length=11), "44 bytes where a message of 43 was expected"),
        (sealed(1, body, length=2**32 - 1), "expected at most 67108864"),
        (sealed(1, body)[:-1] + b"\1", "the hash it names"),
        (b"", "0 bytes: a message has at least 32"),
    ):
        with pytest.raises(ProtocolError, match=message):
            KVChecksumBlocks.decode(data)
    assert KVChecksumBlocks.decode(sealed(1, body)) == KVChecksumBlocks(0, {})


@pytest.mark.parametrize(
    "data", [None, "text", 5, [1], memoryview(bytes(64))[::2], np.zeros(4)], ids=lambda d: type(d).__name__
)
def test_what_is_no_bytes_is_refused(data: Any) -> None:
    with pytest.raises(ProtocolError, match="expected"):
        KVChecksumRecord.decode(data)


def test_a_message_that_is_too_long_is_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    assert MAX_MESSAGE_BYTES == 64 * 2**20
    monkeypatch.setattr("kvstore.protocol_wire.MAX_MESSAGE_BYTES", 100)
    assert len(seal(1, bytes(68))) == 100
    with pytest.raises(ProtocolError, match="spread the requests over several records"):
        seal(1, bytes(69))


@pytest.mark.parametrize(
    "message",
    [
        KVChecksumBlocks(-1, {}),
        KVChecksumBlocks(True, {}),
        KVChecksumBlocks(float("nan"), {}),  # type: ignore[arg-type]
        KVChecksumBlocks(1, {2**16: (0, [])}),
        KVChecksumBlocks(1, {"0": (0, [])}),  # type: ignore[dict-item]
        KVChecksumBlocks(1, {0: (0, [-1])}),
        KVChecksumBlocks(1, {0: (0, [1.0])}),  # type: ignore[list-item]
        KVChecksumScheduled({5: KVChecksumBlocks(1, {})}),  # type: ignore[dict-item]
        KVChecksumScheduled({"\ud800": KVChecksumBlocks(1, {})}),
        KVChecksumRecord(0, 2**16),
        KVChecksumRecord(0, 0, fingerprints={0: 2**64}),
        KVChecksumRecord(0, 0, received={"r": "text"}),  # type: ignore[dict-item]
    ],
    ids=repr,
)
def test_what_a_message_cannot_hold_is_not_encoded(message: Message) -> None:
    with pytest.raises(ProtocolError, match="expected"):
        message.encode()


def test_what_does_not_fit_together_is_refused() -> None:
    with pytest.raises(ProtocolError, match=r"skip_reasons names \[3\]"):
        KVChecksumRecord(0, 0, skip_reasons={3: "odd"})
    for keys in ([ReplicaKey(2, 2)], [ReplicaKey(0, 0)], [ReplicaKey(2, -1)]):
        with pytest.raises(InvalidPosition, match="expected different"):
            KVChecksumGroup(0, keys, np.zeros((1, 1), np.uint64))
    assert issubclass(ProtocolError, KVStoreError)
    assert issubclass(ProtocolError, ValueError)
