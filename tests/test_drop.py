"""`kvstore drop`: the identities of a store, and one of them deleted, whatever became of its records."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvstore import CacheIdentity, Rank
from kvstore.identity import identity_digest
from kvstore.tools.cli import app
from kvstore.tools.drop import held, opened
from tests.support import IDENTITY, SMALL, Raw, block_hashes, index_key, make_cache, open_store, own_cache

OTHER = CacheIdentity(model="test/other", revision="2b", dtype="bfloat16")
COUNT = 6
HASHES = block_hashes(COUNT)


def invoke(*arguments: str, answer: str = "") -> Any:
    return CliRunner(env={"COLUMNS": "120", "NO_COLOR": "1"}).invoke(app, ["drop", *arguments], input=answer)


def fill(path: Path, identity: CacheIdentity = IDENTITY, count: int = COUNT) -> str:
    """Put blocks of an identity; its id in hexadecimal."""
    with open_store(path, make_cache(), identity=identity) as store:
        store.put_blocks(HASHES[:count], range(count))
        return store.identity.digest().hex()


def matches(path: Path, identity: CacheIdentity = IDENTITY) -> int:
    with open_store(path, make_cache(), identity=identity) as store:
        return store.match_prefix(HASHES)


def records(path: Path) -> dict[str, int]:
    with opened(path, writable=False) as shards:
        return {name: one.records for name, one in held(shards).items()}


@pytest.fixture
def two(tmp_path: Path) -> tuple[Path, str, str]:
    """A store of two identities, and their ids."""
    path = tmp_path / "store"
    return path, fill(path), fill(path, OTHER, 4)


def test_lists_every_identity(two: tuple[Path, str, str]) -> None:
    path, first, second = two
    ran = invoke(str(path))
    assert ran.exit_code == 0, ran.output
    lines = {line.split()[0]: line for line in ran.stdout.splitlines()}
    assert set(lines) == {first, second}
    assert "test/model  1  6 records, " in lines[first]
    assert "test/other  2b  4 records, " in lines[second]
    assert lines[first].endswith(" bytes")


@pytest.mark.both
def test_drops_one_identity_and_leaves_the_other(two: tuple[Path, str, str]) -> None:
    path, first, second = two
    ran = invoke(str(path), "--identity", first, "--yes")
    assert ran.exit_code == 0, ran.output
    assert ran.stdout == "6 records deleted\n"
    assert records(path) == {second: 4}
    assert (matches(path), matches(path, OTHER)) == (0, 4)
    with open_store(path, make_cache(), identity=OTHER) as store:
        assert len(Raw(store).payload()) == 4 * 2
        assert store.get_blocks(HASHES[:4], range(4)).verified.all()
        assert store.stats()["raw_bytes"] == 4 * 2 * 2 * 4 * 64


@pytest.mark.both
def test_the_room_of_what_is_dropped_is_free(two: tuple[Path, str, str]) -> None:
    path, first, second = two
    invoke(str(path), "--identity", first, "--yes")
    invoke(str(path), "--identity", second, "--yes")
    assert records(path) == {}
    with open_store(path, make_cache()) as store:
        assert not Raw(store).payload()
        assert store.put_blocks(HASHES, range(COUNT)).stored.all()
    assert matches(path) == COUNT


@pytest.mark.parametrize("upper", [False, True])
def test_a_prefix_of_the_id_is_enough(two: tuple[Path, str, str], upper: bool) -> None:
    path, first, second = two
    length = next(n for n in range(1, 33) if first[:n] != second[:n])
    prefix = first[:length].upper() if upper else first[:length]
    assert invoke(str(path), "--identity", prefix, "--yes").exit_code == 0
    assert records(path) == {second: 4}


def test_an_ambiguous_prefix_is_refused(tmp_path: Path) -> None:
    path, seen = tmp_path / "store", dict[str, str]()
    for number in range(17):
        found = fill(path, replace(IDENTITY, revision=str(number)), 1)
        if found[0] in seen:
            break
        seen[found[0]] = found
    ran = invoke(str(path), "--identity", found[0], "--yes")
    assert ran.exit_code == 2
    assert "begins several identity ids" in ran.stderr
    assert found in ran.stderr
    assert seen[found[0]] in ran.stderr
    assert all(records(path).values())


@pytest.mark.parametrize(("wanted", "message"), [("xyz", "hexadecimal digits"), ("", "hexadecimal digits")])
def test_what_is_no_id_is_refused(two: tuple[Path, str, str], wanted: str, message: str) -> None:
    ran = invoke(str(two[0]), "--identity", wanted, "--yes")
    assert (ran.exit_code, ran.stderr.count("\n")) == (2, 1)
    assert message in ran.stderr
    assert sum(records(two[0]).values()) == 10


def test_an_unknown_id_is_refused_and_the_known_ones_named(two: tuple[Path, str, str]) -> None:
    path, first, second = two
    ran = invoke(str(path), "--identity", "0" * 32, "--yes")
    assert (ran.exit_code, ran.stderr.count("\n")) == (2, 1)
    assert "begins no identity id" in ran.stderr
    assert first in ran.stderr
    assert second in ran.stderr


@pytest.mark.parametrize(("answer", "left"), [("y\n", 1), ("n\n", 2), ("\n", 2), ("", 2)])
def test_asks_before_it_deletes(two: tuple[Path, str, str], answer: str, left: int) -> None:
    path, first, _ = two
    ran = invoke(str(path), "--identity", first, answer=answer)
    assert "test/model" in ran.output
    assert "6 records" in ran.output
    assert ran.exit_code == (0 if left == 1 else 1)
    assert len(records(path)) == left


def test_one_shard_or_all_of_a_store(tmp_path: Path) -> None:
    path = tmp_path / "store"
    cache = own_cache()
    with open_store(path, cache) as whole:
        identity = whole.identity
    for rank in range(2):
        with open_store(path, cache, identity=identity, rank=Rank(tp_rank=rank, tp_size=2)) as store:
            store.put_blocks(HASHES[: rank + 1], range(rank + 1))
    name = identity.digest().hex()
    assert records(path) == {name: 3}
    assert invoke(str(path / "tp1of2-pp0of1"), "--identity", name, "--yes").stdout == "2 records deleted\n"
    assert records(path) == {name: 1}
    assert invoke(str(path), "--identity", name, "--yes").stdout == "1 records deleted\n"
    assert records(path) == {}


def test_a_store_that_is_being_written_is_left_alone(two: tuple[Path, str, str]) -> None:
    path, first, _ = two
    code = (
        "import sys\nfrom kvstore.tools.drop import opened\nfrom pathlib import Path\n"
        "with opened(Path(sys.argv[1]), True):\n    print('open', flush=True)\n    sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "open\n"
        ran = invoke(str(path), "--identity", first, "--yes")
        listed = invoke(str(path))
        other.communicate("")
    assert (ran.exit_code, ran.stderr.count("\n")) == (2, 1)
    assert "is being written by another process" in ran.stderr
    assert listed.stdout.startswith(min(two[1:]))
    assert records(path)[first] == COUNT


def test_no_shard_is_dropped_from_while_another_is_locked(tmp_path: Path) -> None:
    path = tmp_path / "store"
    cache = own_cache()
    with open_store(path, cache) as whole:
        identity = whole.identity
        whole.put_blocks(HASHES, range(COUNT))
    with open_store(path, cache, identity=identity, rank=Rank(tp_rank=1, tp_size=2)) as store:
        store.put_blocks(HASHES, range(COUNT))
        ran = invoke(str(path), "--identity", identity.digest().hex(), "--yes")
        assert ran.exit_code == 2
        assert "open in this process already" in ran.stderr
    assert records(path) == {identity.digest().hex(): 2 * COUNT}


def test_damaged_entries_are_counted_and_go(two: tuple[Path, str, str]) -> None:
    path, first, second = two
    with open_store(path, make_cache()) as store:
        raw = Raw(store)
        raw.put_entry(index_key(store, HASHES[0]), b"no header")
        raw.put_entry(index_key(store, HASHES[1]), b"")
        entry = raw.entry(index_key(store, HASHES[2])) or b""
        raw.put_entry(index_key(store, HASHES[2]), entry[:-1] + bytes([entry[-1] ^ 1]))
    assert "6 records (3 damaged)" in invoke(str(path)).stdout
    assert invoke(str(path), "--identity", first, "--yes").stdout == "6 records deleted\n"
    assert records(path) == {second: 4}
    assert matches(path, OTHER) == 4


@pytest.mark.parametrize("text", [None, b"", b"[]", b"{", b'{"model": "a\\u001b[2Jb"}', b"\xff", b"[" * 9000])
@pytest.mark.parametrize("consistent", [False, True])
def test_an_identity_that_is_damaged_or_missing_can_go(tmp_path: Path, text: bytes | None, consistent: bool) -> None:
    path = tmp_path / "store"
    own = identity_digest(text) if consistent and text is not None else None
    name = fill(path)
    with open_store(path, make_cache()) as store:
        Raw(store).replace("meta", b"identity:" + (own or bytes.fromhex(name)), text)
    listed = invoke(str(path))
    assert listed.exit_code == 0, listed.output
    assert "\x1b" not in listed.stdout
    wanted = own.hex() if own else name
    assert f"{wanted}  ?  ?  {0 if own else COUNT} records" in listed.stdout
    assert invoke(str(path), "--identity", wanted, "--yes").exit_code == 0
    assert wanted not in records(path)


def test_keys_that_name_no_identity_never_name_others(two: tuple[Path, str, str]) -> None:
    path, first, second = two
    with open_store(path, make_cache()) as store:
        raw = Raw(store)
        raw.replace("meta", b"identity:", b"short")
        raw.replace("meta", b"identity:" + bytes.fromhex(first[:6]), b"short")
        raw.put_entry(bytes.fromhex(first[:8]), b"short")
    assert records(path) == {first: 6, second: 4}
    invoke(str(path), "--identity", first[:8], "--yes")
    assert records(path) == {second: 4}


def test_names_are_shown_without_control_characters(tmp_path: Path) -> None:
    fill(tmp_path / "store", CacheIdentity(model="m\x1b[2J\n" + "x" * 100, revision=""))
    line = invoke(str(tmp_path / "store")).stdout
    assert "m?[2J?xxx" in line
    assert "x...  -  6 records" in line
    assert line.count("\n") == 1


def test_many_records_go_in_transactions_of_bounded_size(tmp_path: Path) -> None:
    path, hashes = tmp_path / "store", block_hashes(700)
    cache = make_cache(blocks=700, layers=1)
    with open_store(path, cache, replace(SMALL, capacity_bytes=2**20 * 8)) as store:
        assert store.put_blocks(hashes, range(700)).stored.all()
        name = store.identity.digest().hex()
    assert invoke(str(path), "--identity", name, "--yes").stdout == "700 records deleted\n"


def test_quarantine_stays(two: tuple[Path, str, str]) -> None:
    path, first, _ = two
    with open_store(path, make_cache()) as store:
        Raw(store).put_entry(index_key(store, HASHES[0]), b"no header")
        assert store.get_blocks(HASHES[:1], [0]).rejected
    invoke(str(path), "--identity", first, "--yes")
    with open_store(path, make_cache()) as store:
        assert store.stats()["quarantine_records"] == 1


@pytest.mark.parametrize("make", [Path.mkdir, Path.touch, lambda path: None])
def test_a_path_without_a_shard_is_refused(tmp_path: Path, make: Any) -> None:
    make(tmp_path / "store")
    before = sorted(tmp_path.rglob("*"))
    ran = invoke(str(tmp_path / "store"))
    assert (ran.exit_code, ran.stderr.count("\n")) == (2, 1)
    assert "expected the folder of a store, or of one of its shards" in ran.stderr
    assert sorted(tmp_path.rglob("*")) == before


def test_a_store_without_identities_says_so(tmp_path: Path) -> None:
    with open_store(tmp_path / "store", make_cache()):
        pass
    assert invoke(str(tmp_path / "store")).stdout == f"{tmp_path / 'store'} holds no identity\n"


def test_the_identity_that_is_stored_is_the_one_that_is_listed(two: tuple[Path, str, str]) -> None:
    path, first, _ = two
    with opened(path, writable=False) as shards:
        text = shards[0].identities()[bytes.fromhex(first)]
        assert json.loads(text)["model"] == IDENTITY.model
        assert identity_digest(text).hex() == first
