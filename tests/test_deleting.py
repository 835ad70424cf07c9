"""The story: to delete from a full or damaged store takes room and sound pages, and it may have neither."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import lmdb
import pytest

from kvstore import KVStore, StoreConfig, errors
from kvstore.environment import Environment
from tests.campaign.worlds import PREFIX_BYTES, SMALL, audit, small_config
from tests.support import MIB, Raw, flip, index_key, io_mode, shard_of

pytestmark = pytest.mark.both
FULL = small_config(SMALL, eviction="none", quarantine_bytes=64 * MIB)


def opened(path: Path, config: StoreConfig) -> KVStore:
    """A store of the small world."""
    return SMALL.open(path, config, io=io_mode())


def check_accounting(path: Path, config: StoreConfig) -> None:
    """A closed store's accounting is right."""
    with SMALL.open(path, config) as store:
        assert not audit(store)


@pytest.mark.parametrize("eviction", ["none", "hazard", "lru"])
def test_small_records_that_share_pages_are_cleared_where_few_pages_are_free(tmp_path: Path, eviction: str) -> None:
    config = small_config(SMALL, eviction=eviction)
    with opened(tmp_path, config) as store:
        for request in range(SMALL.requests):
            SMALL.put(store, SMALL.request(request))
        records = store.stats()["records"]
        assert records > 300
        assert store.clear() == records
        assert SMALL.put(store, SMALL.request(0)).stored.all()
    check_accounting(tmp_path, config)


def test_a_full_store_that_may_not_evict_can_condemn_and_be_cleared(tmp_path: Path) -> None:
    with opened(tmp_path, FULL) as store:
        while not SMALL.put(store, SMALL.request(store.stats()["records"] // SMALL.length)).failed:
            pass
        assert store.stats()["free_bytes"] >= -(32 * 4096)
        raw = Raw(store)
        for number in sorted(SMALL.number_of[key[PREFIX_BYTES:]] for key in raw.entries())[::2]:
            entry = raw.entry(index_key(store, SMALL.hashes[number])) or b""
            chunk = entry[40:48][::-1] + b"\0\1"
            raw.put_chunk(chunk, flip(raw.chunk(chunk), 7))
        SMALL.get_all(store)
        assert store.stats()["quarantine_records"] > 0
        assert store.clear() > 0
        assert SMALL.put(store, SMALL.request(0)).stored.all()
    check_accounting(tmp_path, FULL)


def test_keys_that_are_no_index_keys_are_cleared_too(tmp_path: Path) -> None:
    with opened(tmp_path, small_config(SMALL)) as store:
        SMALL.put(store, SMALL.request(0))
        Raw(store).put_entry(b"short", b"no header")
        assert store.clear() == SMALL.length + 1


@pytest.mark.inline("breaks what reads or writes the shard")
def test_an_index_that_lists_what_it_does_not_find_ends_in_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path, small_config(SMALL)) as store:
        SMALL.put(store, SMALL.request(0))
        monkeypatch.setattr(shard_of(store).db, "_delete", lambda txn, usage, start: [])
        with pytest.raises(errors.StorePathError, match="cannot be found"):
            store.clear()


@pytest.mark.inline("breaks what reads or writes the shard")
def test_the_error_of_a_damaged_tree_is_lmdbs_wherever_it_is_met(tmp_path: Path) -> None:
    """py-lmdb raises SystemError where a cursor's deletion meets it."""
    with opened(tmp_path, small_config(SMALL)) as store:
        for cause, expected in ((lmdb.CorruptedError("wrong type"), lmdb.CorruptedError), (None, SystemError)):
            with pytest.raises(expected), Environment._write(shard_of(store).db):
                raise SystemError("returned a result with an exception set") from cause
        assert SMALL.put(store, SMALL.request(0)).stored.all()


@pytest.mark.parametrize("durability", ["commit", "process"])
@pytest.mark.parametrize("remove", [True, False])
def test_a_data_file_that_was_emptied_or_removed_is_reported(tmp_path: Path, durability: str, remove: bool) -> None:
    config = replace(StoreConfig(capacity_bytes=MIB), durability=durability)
    with opened(tmp_path, config) as store:
        assert store.stats()["emptied_at_open"] == 0
        SMALL.put(store, SMALL.request(0))
        data = store.folder / "data.mdb"
    data.unlink() if remove else data.write_bytes(b"")
    with opened(tmp_path, config) as store:
        assert store.stats()["emptied_at_open"] == 1
        assert SMALL.put(store, SMALL.request(0)).stored.all()
    with opened(tmp_path, config) as store:
        assert store.stats()["emptied_at_open"] == 0
        assert SMALL.get(store, SMALL.request(0)).right == set(SMALL.request(0))
