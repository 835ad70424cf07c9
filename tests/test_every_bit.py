"""The story: one bit of what is stored flips, anywhere. However it is laid out, no wrong block is ever served.

Every single bit of one stored record is flipped in turn: index entry, index key, directory, chunk and their keys.
After each flip the block must be refused or missing, never verified with other bytes; the engine must get no exception; and
a block stored anew must be good again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from kvstore import GetResult, KVStore
from tests.support import (
    Raw,
    block_hashes,
    canonical,
    flip,
    index_key,
    io_mode,
    make_cache,
    open_store,
    report_campaign,
)

pytestmark = pytest.mark.both

TINY = {"layers": 2, "blocks": 2, "heads": 1, "tokens": 2, "head_size": 8}
HASHES = block_hashes(1)


class Target:
    """A store with one record in block 0 of one cache, to be loaded into block 1 of another."""

    def __init__(self, path: Path, layout: str) -> None:
        self.source, self.engine = make_cache(layout, **TINY), make_cache(layout, seed=1, **TINY)
        self.store: KVStore = open_store(path, self.source)
        self.loader = self.store.attach(self.engine)
        self.raw = Raw(self.store)
        self.key = index_key(self.store, HASHES[0])
        self.good = canonical(self.source, [0])
        self.layout = layout

    def put(self) -> dict[bytes, bytes]:
        """Store the block anew; its chunks by their keys."""
        result = self.store.put_blocks(HASHES, [0])
        assert result.stored.all(), result
        return dict(sorted(self.raw.payload().items())[-2:])

    def bits(self, count: int) -> Sequence[int]:
        """The bits to flip of so many: all of them where the shard is open in this process."""
        return range(0, count, 1 if io_mode() == "inline" else 5)

    def report(self, what: str, counts: Counter[str]) -> None:
        """Note the campaign: what was not verified was detected; `load` has compared the bytes of the rest."""
        faults, wrong = counts.total(), counts["verified"]
        report_campaign(f"every-bit/{what}/{self.layout}/{io_mode()}", faults, faults - wrong, wrong)

    def load(self) -> GetResult:
        """Get the block; a verified one must have the bytes that were stored."""
        result = self.loader.get_blocks(HASHES, [1])
        if result.verified[0]:
            assert np.array_equal(canonical(self.engine, [1]), self.good), "wrong bytes were served as good"
        return result


@pytest.fixture(params=["BHNC", "2BNHD"])
def target(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Target]:
    made = Target(tmp_path / "store", request.param)
    yield made
    made.store.close()


def outcome(result: GetResult) -> str:
    """verified, missing or the kind of the rejection."""
    if result.verified[0]:
        return "verified"
    return "missing" if result.missing[0] else result.rejected[0].kind


def check_refused_then_good(target: Target, counts: Counter[str], where: str) -> None:
    counts[found := outcome(target.load())] += 1
    assert found != "verified", f"{where}: a damaged record was verified"
    assert target.store.match_prefix(HASHES) == 0, f"{where}: still reported as present"
    assert outcome(target.load()) == "missing"


def test_every_bit_of_the_index_entry(target: Target) -> None:
    counts: Counter[str] = Counter()
    target.put()
    size = len(target.raw.entry(target.key) or b"")
    bits = target.bits(size * 8)
    for bit in bits:
        if target.store.match_prefix(HASHES) == 0:
            target.put()
        entry = target.raw.entry(target.key)
        assert entry is not None
        target.raw.put_entry(target.key, flip(entry, bit))
        check_refused_then_good(target, counts, f"index entry, bit {bit}")
    assert counts == {"header": len(bits)}
    target.report("index-entry", counts)
    assert target.store.stats()["get_rejected_header"] == len(bits)


def test_every_bit_of_the_payload(target: Target) -> None:
    counts: Counter[str] = Counter()
    sizes = [len(chunk) for chunk in target.put().values()]
    target.store.get_blocks(HASHES, [1])
    for number, size in enumerate(sizes):
        for bit in target.bits(size * 8):
            chunks = target.put() if target.store.match_prefix(HASHES) == 0 else None
            key, chunk = sorted((chunks or dict(sorted(target.raw.payload().items())[-2:])).items())[number]
            target.raw.put_chunk(key, flip(chunk, bit))
            check_refused_then_good(target, counts, f"chunk {number}, bit {bit}")
    assert counts == {"storage_hash": sum(len(target.bits(size * 8)) for size in sizes)}
    target.report("payload", counts)


def test_every_bit_of_the_keys(target: Target) -> None:
    counts: Counter[str] = Counter()
    for bit in target.bits(len(target.key) * 8):
        if target.store.match_prefix(HASHES) == 0:
            target.put()
        entry = target.raw.entry(target.key)
        target.raw.put_entry(target.key, None)
        target.raw.put_entry(flip(target.key, bit), entry)
        counts[found := outcome(target.load())] += 1
        assert found == "missing"
        target.raw.put_entry(flip(target.key, bit), None)
    for number in range(2):
        for bit in target.bits(10 * 8):
            chunks = (
                target.put()
                if target.store.match_prefix(HASHES) == 0
                else dict(list(target.raw.payload().items())[-2:])
            )
            key, chunk = sorted(chunks.items())[number]
            target.raw.put_chunk(key, None)
            target.raw.put_chunk(flip(key, bit), chunk)
            counts[found := outcome(target.load())] += 1
            assert found == "storage_hash"
            target.raw.put_chunk(flip(key, bit), None)
    target.report("keys", counts)


def test_every_bit_of_the_bytes_on_their_way(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bit that flips after the storage hash was checked is seen where the bytes land, and the record is kept."""
    target.put()
    counts: Counter[str] = Counter()
    route = target.loader._views[0].route
    path, land = route.path, route.path.scatter_from
    # What another process reads is staged then, and scattered from there.
    monkeypatch.setattr(route, "direct", io_mode() == "inline")
    for bit in target.bits(target.good.size * 8):
        changed = np.frombuffer(flip(target.good.tobytes(), bit), np.uint8).reshape(target.good.shape)
        monkeypatch.setattr(path, "scatter_from", lambda span, _, c=changed: land(span, path._staged(span, c)))
        result = target.loader.get_blocks(HASHES, [1])
        counts[outcome(result)] += 1
        assert outcome(result) == "content"
        assert not result.rejected[0].condemned
        target.put()
    monkeypatch.undo()
    assert outcome(target.load()) == "verified"
    assert target.raw.quarantined() == []
    target.report("in-flight", counts)
