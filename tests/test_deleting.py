"""The story: to delete from a full or damaged store takes room and sound pages, and it may have neither."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import lmdb
import pytest

from kvstore import StoreConfig, errors
from kvstore.environment import Environment
from tests.campaign.worlds import SMALL, audit, small_config
from tests.support import MIB, Raw, flip, index_key

FULL = small_config(SMALL, eviction="none", quarantine_bytes=64 * MIB)


@pytest.mark.parametrize("eviction", ["none", "hazard", "lru"])
def test_small_records_that_share_pages_are_cleared_where_few_pages_are_free(tmp_path: Path, eviction: str) -> None:
    with SMALL.open(tmp_path, small_config(SMALL, eviction=eviction)) as store:
        for request in range(SMALL.requests):
            SMALL.put(store, SMALL.request(request))
        records = store.stats()["records"]
        assert records > 300
        assert store.clear() == records
        assert SMALL.put(store, SMALL.request(0)).stored.all()
        assert not audit(store)


def test_a_full_store_that_may_not_evict_can_condemn_and_be_cleared(tmp_path: Path) -> None:
    with SMALL.open(tmp_path, FULL) as store:
        while not SMALL.put(store, SMALL.request(store.stats()["records"] // SMALL.length)).failed:
            pass
        assert store.stats()["free_bytes"] >= -(32 * 4096)
        raw = Raw(store)
        for number in SMALL.present(store)[::2]:
            entry = raw.entry(index_key(store, SMALL.hashes[number])) or b""
            chunk = entry[40:48][::-1] + b"\0\1"
            raw.put_chunk(chunk, flip(raw.chunk(chunk), 7))
        SMALL.get_all(store)
        assert store.stats()["quarantine_records"] > 0
        assert store.clear() > 0
        assert SMALL.put(store, SMALL.request(0)).stored.all()
        assert not audit(store)


def test_keys_that_are_no_index_keys_are_cleared_too(tmp_path: Path) -> None:
    with SMALL.open(tmp_path, small_config(SMALL)) as store:
        SMALL.put(store, SMALL.request(0))
        Raw(store).put_entry(b"short", b"no header")
        assert store.clear() == SMALL.length + 1


def test_an_index_that_lists_what_it_does_not_find_ends_in_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with SMALL.open(tmp_path, small_config(SMALL)) as store:
        SMALL.put(store, SMALL.request(0))
        monkeypatch.setattr(store._shard.db, "_delete", lambda txn, usage, start: [])
        with pytest.raises(errors.StorePathError, match="cannot be found"):
            store.clear()


def test_the_error_of_a_damaged_tree_is_lmdbs_wherever_it_is_met(tmp_path: Path) -> None:
    """py-lmdb raises SystemError where a cursor's deletion meets it."""
    with SMALL.open(tmp_path, small_config(SMALL)) as store:
        for cause, expected in ((lmdb.CorruptedError("wrong type"), lmdb.CorruptedError), (None, SystemError)):
            with pytest.raises(expected), Environment._write(store._shard.db):
                raise SystemError("returned a result with an exception set") from cause
        assert SMALL.put(store, SMALL.request(0)).stored.all()


@pytest.mark.parametrize("durability", ["commit", "process"])
@pytest.mark.parametrize("remove", [True, False])
def test_a_data_file_that_was_emptied_or_removed_is_reported(tmp_path: Path, durability: str, remove: bool) -> None:
    config = replace(StoreConfig(capacity_bytes=MIB), durability=durability)
    with SMALL.open(tmp_path, config) as store:
        assert store.stats()["emptied_at_open"] == 0
        SMALL.put(store, SMALL.request(0))
        data = store.folder / "data.mdb"
    data.unlink() if remove else data.write_bytes(b"")
    with SMALL.open(tmp_path, config) as store:
        assert store.stats()["emptied_at_open"] == 1
        assert SMALL.put(store, SMALL.request(0)).stored.all()
    with SMALL.open(tmp_path, config) as store:
        assert store.stats()["emptied_at_open"] == 0
        assert SMALL.get(store, SMALL.request(0)).right == set(SMALL.request(0))
