"""`kvstore stat`, `ls`, `show`, `verify`, `export`, `import` and `quarantine` as an operator types them, on stores that are
empty, full, damaged, locked or none."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvstore import CacheIdentity, Rank
from kvstore.errors import ConfigError
from kvstore.record import Header, chunk_key, parse_header
from kvstore.tools.cli import app
from kvstore.tools.commands import age, moment, nbytes, table, when
from tests.support import IDENTITY, MIB, Raw, block_hashes, flip, index_key, make_cache, open_store, own_cache

COUNT = 6
HASHES = block_hashes(COUNT)
COMMANDS = ("stat", "ls", "show", "verify", "export", "import", "quarantine list", "quarantine show", "quarantine drop")
DAMAGE, FAILED, USAGE = 4, 8, 16
ROOT = Path(__file__).parent.parent


def run(*arguments: object, answer: str | bytes = "") -> Any:
    words = [
        word for argument in arguments for word in (str(argument).split() if argument in COMMANDS else [str(argument)])
    ]
    return CliRunner(env={"COLUMNS": "120", "NO_COLOR": "1"}).invoke(app, words, input=answer)


def lines(*arguments: object) -> list[Any]:
    """What a command prints as JSON, a line each."""
    ran = run(*arguments, "--json")
    assert ran.stderr == "", ran.output
    return [json.loads(line) for line in ran.stdout.splitlines()]


def failed(ran: Any, status: int) -> str:
    """The one line of a command that ended with this status."""
    assert ran.exit_code == status, ran.output
    assert ran.stderr.startswith("error: ")
    assert ran.stderr.count("\n") == 1
    assert re.search(r"\(see `\S+( \w+)+ --help`\)\n$", ran.stderr), ran.stderr
    return str(ran.stderr)


@pytest.fixture
def full(tmp_path: Path) -> Path:
    """A store of COUNT blocks."""
    with open_store(tmp_path / "full", make_cache(), io="inline") as store:
        assert store.put_blocks(HASHES, range(COUNT)).stored.all()
    return tmp_path / "full"


@pytest.fixture
def empty(tmp_path: Path) -> Path:
    """A store without a record."""
    open_store(tmp_path / "empty", make_cache(), io="inline").close()
    return tmp_path / "empty"


@pytest.fixture
def damaged(full: Path) -> Path:
    """A store whose first record's entry is damaged, its second's chunk, its third is of a newer version."""
    with open_store(full, make_cache(), io="inline") as store:
        raw, keys = Raw(store), [index_key(store, h) for h in HASHES]
        raw.put_entry(keys[0], flip(raw.entry(keys[0]) or b"", 600))
        header = parse_header(raw.entry(keys[1]) or b"")
        assert isinstance(header, Header)
        raw.put_chunk(chunk_key(header.sequence, 1), flip(raw.chunk(chunk_key(header.sequence, 1)), 7))
        header = parse_header(raw.entry(keys[2]) or b"")
        assert isinstance(header, Header)
        raw.put_entry(keys[2], replace(header, flags=2).encode(header.sequence, header.written))
    return full


@pytest.fixture
def quarantined(full: Path) -> Path:
    """A store with a damaged chunk and a damaged header in quarantine."""
    with open_store(full, make_cache(), io="inline") as store:
        raw = Raw(store)
        header = parse_header(raw.entry(index_key(store, HASHES[0])) or b"")
        assert isinstance(header, Header)
        raw.put_chunk(chunk_key(header.sequence, 1), flip(raw.chunk(chunk_key(header.sequence, 1)), 7))
        raw.put_entry(index_key(store, HASHES[1]), b"no header")
        assert len(store.get_blocks(HASHES, range(COUNT)).rejected) == 2
    return full


@contextmanager
def engine(path: Path) -> Iterator[None]:
    """An engine in another process that has the store open for writing."""
    code = (
        "import sys\nfrom pathlib import Path\nfrom tests.support import *\n"
        "with open_store(Path(sys.argv[1]), make_cache(), io='inline') as store:\n"
        "    print('open', flush=True)\n    sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", code, str(path)]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "open\n"
        yield
        other.communicate("")


# --- stat --------------------------------------------------------------------------------------------------------


def test_stat_says_what_the_store_says_of_itself(full: Path) -> None:
    with open_store(full, make_cache(), io="inline") as store:
        stats = store.stats()
    (found,) = lines("stat", full)
    (shard,) = found["shards"]
    same = (
        "records",
        "raw_bytes",
        "stored_bytes",
        "quarantine_records",
        "quarantine_bytes",
        "capacity_bytes",
        "free_bytes",
    )
    assert {name: shard[name] for name in same} == {name: stats[name] for name in same}
    assert shard["file_bytes"] == (full / "tp0of1-pp0of1" / "data.mdb").stat().st_size
    assert (shard["clean"], shard["settled"], shard["accounts_differ"]) == (True, True, [])
    ((identity,), total) = found["identities"], found["total"]
    assert (identity["model"], identity["revision"], identity["layers"]) == (IDENTITY.model, "1", 2)
    assert identity["groups"][0]["records"] == total["records"] == COUNT
    assert identity["groups"][0]["codecs"] == {"raw": COUNT}
    text = run("stat", full).stdout
    assert f"1 shard, {COUNT} records, " in text
    assert "test/model, revision 1, bfloat16, 2 layers" in text
    assert "clean" in text


def test_stat_adds_ranks_up(full: Path) -> None:
    with open_store(full, make_cache(), io="inline") as store:
        identity = store.identity
    with open_store(full, own_cache(), identity=identity, rank=Rank(1, 2), io="inline") as store:
        store.put_blocks(HASHES[:2], range(2))
    (found,) = lines("stat", full)
    assert [shard["records"] for shard in found["shards"]] == [COUNT, 2]
    assert found["total"]["records"] == COUNT + 2
    (one,) = lines("stat", full / "tp1of2-pp0of1")
    assert one["total"]["records"] == 2


def test_stat_of_an_empty_store(empty: Path) -> None:
    (found,) = lines("stat", empty)
    assert (found["total"]["records"], found["identities"]) == (0, [])
    assert "1 shard, 0 records" in run("stat", empty).stdout


def test_stat_of_a_damaged_store_says_so(damaged: Path) -> None:
    (found,) = lines("stat", damaged)
    (group,) = found["identities"][0]["groups"]
    assert (group["records"], group["damaged"], group["unknown"]) == (COUNT, 1, 1)
    text = run("stat", damaged).stdout
    assert "1 (+1 newer)" in text
    assert "1 damaged index entry: run kvstore-fsck" in text


def test_stat_tells_quarantine_by_kind(quarantined: Path) -> None:
    (found,) = lines("stat", quarantined)
    assert found["shards"][0]["quarantine"] == {"header": 1, "storage_hash": 1}
    assert "in quarantine: header 1, storage_hash 1" in run("stat", quarantined).stdout


def test_names_are_shown_without_control_characters(tmp_path: Path) -> None:
    identity = CacheIdentity(model="m\x1b[2J\u202e\n" + "x" * 1000, revision="[red]", dtype="\x07")
    with open_store(tmp_path, make_cache(), identity=identity, io="inline") as store:
        store.put_blocks(HASHES, range(COUNT))
    for ran in (run("stat", tmp_path), run("show", tmp_path, HASHES[0].hex()), run("stat", tmp_path, "--json")):
        assert ran.exit_code == 0, ran.output
        assert not set(ran.output) & {"\x1b", "\x07", "\u202e"}
    assert "revision [red]" in run("stat", tmp_path).stdout
    assert "m\\x1b[2J\\u202e\\nxxx" in run("stat", tmp_path).stdout
    assert len(max(run("stat", tmp_path).stdout.splitlines(), key=len)) < 250


# --- ls ----------------------------------------------------------------------------------------------------------


def test_ls_lists_every_record(full: Path) -> None:
    found = lines("ls", full)
    assert [one["block_hash"] for one in found] == sorted(h.hex() for h in HASHES)
    with open_store(full, make_cache(), io="inline") as store:
        for one in found:
            header = parse_header(Raw(store).entry(bytes.fromhex(one["key"])) or b"")
            assert isinstance(header, Header)
            for name in ("raw_length", "stored_length", "position", "valid_tokens", "written", "sequence", "accesses"):
                assert one[name] == getattr(header, name)
            assert (one["codec"], one["parent"]) == ("raw", header.parent.hex())
            assert int(one["tagged_checksum"], 16) == header.tagged_checksum
    text = run("ls", full).stdout.splitlines()
    assert len(text) == COUNT + 1
    assert [line[:16] for line in text[1:]] == sorted(h.hex()[:16] for h in HASHES)


def test_ls_filters(full: Path) -> None:
    identity = lines("ls", full)[0]["identity"]
    for options, expected in (
        (["--limit", "2"], 2),
        (["--limit", "0"], 0),
        (["--identity", identity[:5]], COUNT),
        (["--identity", "0" * 32], 0),
        (["--group", "0"], COUNT),
        (["--group", "1"], 0),
        (["--prefix", HASHES[0].hex()[:6].upper()], 1),
        (["--older", "1h"], 0),
        (["--newer", "1h"], COUNT),
        (["--older", "2030-01-01T00:00+01:00", "--newer", "2020-01-01"], COUNT if time.time() < 1_890_000_000 else 0),
        (["--min-bytes", "2K"], 0),
        (["--min-bytes", "500"], COUNT),
        (["--codec", "bf16-planes"], 0),
    ):
        assert len(lines("ls", full, *options)) == expected, options


def test_ls_of_an_empty_store_is_empty(empty: Path) -> None:
    assert lines("ls", empty) == []
    assert run("ls", empty).stdout == ""


def test_ls_shows_damaged_entries_for_what_they_are(damaged: Path) -> None:
    found = {one["block_hash"]: one for one in lines("ls", damaged)}
    assert found[HASHES[0].hex()]["wrong"]["kind"] == "header"
    assert found[HASHES[2].hex()]["wrong"]["kind"] == "version"
    assert "wrong" not in found[HASHES[1].hex()], "the index does not show it"
    ran = run("ls", damaged)
    assert ran.exit_code == 0
    assert "  header: magic" in ran.stdout


def test_ls_into_a_pipe_that_is_closed_ends_quietly(full: Path) -> None:
    command = f"{sys.executable} -m kvstore.tools.cli ls {full} --json | head -1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert (done.stdout.count("\n"), done.stderr) == (1, "")


# --- show and verify ---------------------------------------------------------------------------------------------


def test_show_explains_a_record(full: Path) -> None:
    text = run("show", full, HASHES[2].hex()[:12])
    assert text.exit_code == 0, text.output
    for said in (
        f"record {HASHES[2].hex()}",
        "test/model, revision 1",
        "its hash is right",
        "valid_tokens      4 tokens",
        "layers 0 to 1 (2), heads 0 to 1: K of 32 and V of 32 bytes a token and head",
        "directory and 1 chunk: every length and hash is right",
        "intact   tp0of1-pp0of1",
    ):
        assert said in text.stdout
    (found,) = lines("show", full, HASHES[2].hex())
    assert found["fields"]["position"] == found["position"] == 2
    assert found["parent"] == HASHES[1].hex()
    assert [chunk["right"] for chunk in found["chunks"]] == [True, True]
    assert found["checked"]["status"] == "intact"


@pytest.mark.parametrize(("index", "status", "said"), [(0, 4, "WRONG: nothing"), (1, 4, "1 WRONG"), (2, 8, "version:")])
def test_show_of_a_record_that_is_not_intact(damaged: Path, index: int, status: int, said: str) -> None:
    ran = run("show", damaged, HASHES[index].hex())
    assert ran.exit_code == status, ran.output
    assert said in ran.stdout
    assert run("show", damaged, HASHES[index].hex(), "--json").exit_code == status


def test_verify_says_what_is_intact_and_what_is_not(damaged: Path) -> None:
    every = [h.hex() for h in HASHES]
    ran = run("verify", damaged, *every)
    assert ran.exit_code == DAMAGE | FAILED
    words = [line.split()[0] for line in ran.stdout.splitlines()]
    assert words == ["damaged", "damaged", "unknown", *["intact"] * (COUNT - 3)]
    found = [json.loads(line) for line in run("verify", damaged, *every, "--json").stdout.splitlines()]
    assert [one["status"] for one in found] == words
    assert [one["wrong"]["kind"] for one in found[:3]] == ["header", "storage_hash", "version"]
    assert run("verify", damaged, *every[3:]).exit_code == 0
    assert run("verify", damaged, every[1]).exit_code == DAMAGE
    assert run("verify", damaged, every[2]).exit_code == FAILED


def test_verify_takes_what_ls_lists(full: Path) -> None:
    keys = [one["key"] for one in lines("ls", full)]
    ran = run("verify", full, *keys)
    assert (ran.exit_code, ran.stdout.count("intact")) == (0, COUNT)


@pytest.mark.parametrize("command", ["show", "verify"])
def test_keys_that_name_no_record(full: Path, command: str) -> None:
    assert "no record has this key" in failed(run(command, full, "00" * 32), FAILED)
    assert "hexadecimal" in failed(run(command, full, "nothing"), USAGE)
    assert "hexadecimal" in failed(run(command, full, ""), USAGE)
    candidates = [h.hex() for h in block_hashes(200, "many")]
    with open_store(full, make_cache(blocks=200), io="inline") as store:
        store.put_blocks(block_hashes(200, "many"), range(200))
    said = failed(run(command, full, candidates[0][:1]), USAGE)
    assert "several blocks' hashes begin so" in said
    assert said.count(", ") >= 8


# --- export and import -------------------------------------------------------------------------------------------


def test_export_and_import(full: Path, tmp_path: Path) -> None:
    file = tmp_path / "records.kvx"
    ran = run("export", full, file)
    assert (ran.exit_code, ran.stdout) == (0, f"{COUNT} records exported, {ran.stdout.split(', ')[1]}")
    assert file.stat().st_mode & 0o777 == 0o600
    assert not list(tmp_path.glob("*.partial"))
    assert "give --create" in failed(run("import", file, tmp_path / "other"), FAILED)
    assert not (tmp_path / "other").exists()
    ran = run("import", file, tmp_path / "other", "--create", "--capacity", "32M")
    assert ran.exit_code == 0, ran.output
    assert ran.stdout.startswith(f"{COUNT} records imported")
    assert lines("stat", tmp_path / "other")[0]["shards"][0]["capacity_bytes"] == 32 * MIB
    assert f"{COUNT} records not written" in run("import", file, tmp_path / "other").stdout
    (found,) = lines("import", file, tmp_path / "other", "--replace")
    assert (found["imported"], found["kept"], found["damaged"], found["problem"]) == (COUNT, 0, 0, None)
    with open_store(tmp_path / "other", make_cache(seed=3), io="inline") as store:
        assert store.get_blocks(HASHES, range(COUNT)).verified.all()


def test_export_of_an_empty_store(empty: Path, tmp_path: Path) -> None:
    assert run("export", empty, tmp_path / "file").stdout == "0 records exported, 0 B (0 bytes)\n"
    assert run("import", tmp_path / "file", empty).stdout == "0 records imported, 0 B (0 bytes)\n"


def test_export_leaves_damaged_records_out_and_says_so(damaged: Path, tmp_path: Path) -> None:
    ran = run("export", damaged, tmp_path / "file")
    assert ran.exit_code == DAMAGE | FAILED
    assert "3 records left out: header 1, storage_hash 1, version 1" in ran.stdout
    assert run("import", tmp_path / "file", tmp_path / "b", "--create").stdout.startswith(
        f"{COUNT - 3} records imported"
    )


def test_a_damaged_and_a_torn_file_are_told(full: Path, tmp_path: Path) -> None:
    run("export", full, tmp_path / "file")
    data = (tmp_path / "file").read_bytes()
    (tmp_path / "flipped").write_bytes(flip(data, 8 * (len(data) - 200)))
    ran = run("import", tmp_path / "flipped", tmp_path / "a", "--create")
    assert ran.exit_code == DAMAGE
    assert "1 record left out: storage_hash 1" in ran.stdout
    (tmp_path / "torn").write_bytes(data[:-100])
    ran = run("import", tmp_path / "torn", tmp_path / "b", "--create")
    assert "cut short" in failed(ran, DAMAGE)
    assert ran.stdout.startswith(f"{COUNT - 1} records imported")
    (tmp_path / "no").write_bytes(b"text")
    assert "not those that" in failed(run("import", tmp_path / "no", tmp_path / "c", "--create"), DAMAGE)


def test_a_full_store_says_so(full: Path, tmp_path: Path) -> None:
    cache = make_cache(blocks=400, layers=8, tokens=16)
    with open_store(tmp_path / "large", cache, io="inline") as store:
        store.put_blocks(block_hashes(400), range(400))
    run("export", tmp_path / "large", tmp_path / "file")
    ran = run("import", tmp_path / "file", tmp_path / "small", "--create", "--capacity", "2M")
    assert "is full" in failed(ran, FAILED)
    assert 0 < int(ran.stdout.split()[0]) < 400


def test_export_makes_no_file_where_it_cannot(full: Path, tmp_path: Path) -> None:
    (tmp_path / "there").write_text("mine")
    assert "exists" in failed(run("export", full, tmp_path / "there"), FAILED)
    assert (tmp_path / "there").read_text() == "mine"
    failed(run("export", full, tmp_path / "nowhere" / "file"), FAILED)
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    failed(run("export", full, tmp_path / "link"), FAILED)
    assert not (tmp_path / "elsewhere").exists()
    failed(run("import", tmp_path / "missing", full), FAILED)
    failed(run("import", tmp_path, full), FAILED)


def test_an_export_that_fails_leaves_nothing(full: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(fd: int) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr("kvstore.tools.carry.os.fsync", no_room)
    assert "No space left" in failed(run("export", full, tmp_path / "file"), FAILED)
    assert [path.name for path in tmp_path.iterdir()] == ["full"]


def test_from_one_process_to_another(full: Path, tmp_path: Path) -> None:
    kvstore = f"{sys.executable} -m kvstore.tools.cli"
    command = f"set -o pipefail; {kvstore} export {full} - --limit 4 | {kvstore} import - {tmp_path / 'b'} --create"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout[:18]) == (0, "4 records imported"), done.stderr
    assert done.stderr.startswith("4 records exported")
    assert len(lines("ls", tmp_path / "b")) == 4


def test_a_new_shard_beside_others_needs_a_capacity(full: Path, tmp_path: Path) -> None:
    with open_store(tmp_path / "two", make_cache(), io="inline") as store:
        identity = store.identity
    with open_store(tmp_path / "two", own_cache(), identity=identity, rank=Rank(1, 2), io="inline") as store:
        store.put_blocks(HASHES, range(COUNT))
    run("export", tmp_path / "two", tmp_path / "file")
    assert "--capacity" in failed(run("import", tmp_path / "file", full, "--create"), USAGE)
    assert run("import", tmp_path / "file", full, "--create", "--capacity", "64M").exit_code == 0
    assert len(lines("ls", full)) == 2 * COUNT


# --- quarantine --------------------------------------------------------------------------------------------------


def test_quarantine_is_listed_and_shown(quarantined: Path) -> None:
    found = lines("quarantine list", quarantined)
    assert {(one["kind"], one["block_hash"]) for one in found} == {
        ("storage_hash", HASHES[0].hex()),
        ("header", HASHES[1].hex()),
    }
    text = run("quarantine list", quarantined).stdout.splitlines()
    assert len(text) == 3
    assert text[1].split()[0] == str(found[0]["number"])
    for one in found:
        for name in (one["number"], one["block_hash"][:10], one["key"]):
            ran = run("quarantine show", quarantined, name)
            assert ran.exit_code == 0, ran.output
            assert f"quarantine {one['number']}: condemned " in ran.stdout
            assert f"damaged  tp0of1-pp0of1 group 0 {one['block_hash']}: {one['kind']}: " in ran.stdout
        (shown,) = lines("quarantine show", quarantined, one["number"])
        assert (shown["kind"], shown["checked"]["status"]) == (one["kind"], "damaged")
    failed(run("quarantine show", quarantined, HASHES[3].hex()), FAILED)


@pytest.mark.parametrize(("answer", "left"), [("y\n", 1), ("n\n", 2), ("", 2)])
def test_quarantine_drop_asks(quarantined: Path, answer: str, left: int) -> None:
    name = lines("quarantine list", quarantined)[0]["number"]
    ran = run("quarantine drop", quarantined, name, answer=answer)
    assert "Delete 1 record in quarantine" in ran.output
    assert len(lines("quarantine list", quarantined)) == left
    assert lines("stat", quarantined)[0]["shards"][0]["quarantine_records"] == left


def test_quarantine_drop_all(quarantined: Path) -> None:
    assert "--all" in failed(run("quarantine drop", quarantined), USAGE)
    assert "--all" in failed(run("quarantine drop", quarantined, "1", "--all"), USAGE)
    assert run("quarantine drop", quarantined, "--all", "--yes").stdout == "2 records deleted\n"
    assert run("quarantine drop", quarantined, "--all", "--yes").stdout == "0 records deleted\n"
    assert "nothing is in quarantine" in run("quarantine list", quarantined).stdout
    assert len(lines("ls", quarantined)) == COUNT - 2


def test_quarantine_of_an_empty_store(empty: Path) -> None:
    assert run("quarantine list", empty).stdout == f"{empty}: nothing is in quarantine\n"
    assert lines("quarantine list", empty) == []


# --- a store in use, no store, a store that cannot be opened -----------------------------------------------------


def test_a_store_in_use_is_looked_into_and_not_changed(quarantined: Path, tmp_path: Path) -> None:
    key = HASHES[4].hex()
    with engine(quarantined):
        assert lines("stat", quarantined)[0]["total"]["records"] == COUNT - 2
        assert len(lines("ls", quarantined)) == COUNT - 2
        assert run("show", quarantined, key).exit_code == run("verify", quarantined, key).exit_code == 0
        assert run("export", quarantined, tmp_path / "file").exit_code == 0
        assert len(lines("quarantine list", quarantined)) == 2
        assert run("quarantine show", quarantined, HASHES[0].hex()).exit_code == 0
        for changing in (
            run("import", tmp_path / "file", quarantined),
            run("quarantine drop", quarantined, "--all", "--yes"),
        ):
            assert "is being written by another process" in failed(changing, FAILED)
    assert len(lines("quarantine list", quarantined)) == 2


def cases(path: Path, file: Path) -> list[list[object]]:
    """Every command, on the store at a path."""
    key = HASHES[0].hex()
    return [
        ["stat", path],
        ["ls", path],
        ["show", path, key],
        ["verify", path, key],
        ["export", path, f"{file}.out"],
        ["quarantine list", path],
        ["quarantine show", path, key],
        ["quarantine drop", path, "--all", "--yes"],
        ["import", file, path],
    ]


def test_what_is_no_store_is_refused_and_left_alone(full: Path, tmp_path: Path) -> None:
    run("export", full, tmp_path / "file")
    (tmp_path / "folder").mkdir()
    (tmp_path / "text").write_text("text")
    before = sorted(tmp_path.rglob("*"))
    for path in (tmp_path / "folder", tmp_path / "text", tmp_path / "missing"):
        for case in cases(path, tmp_path / "file"):
            failed(run(*case), FAILED)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_truncated_store_is_damage_and_a_newer_one_is_not(full: Path, tmp_path: Path) -> None:
    run("export", full, tmp_path / "file")
    shard = full / "tp0of1-pp0of1"
    data, store = (shard / "data.mdb").read_bytes(), (shard / "STORE").read_bytes()
    (shard / "data.mdb").write_bytes(data[: len(data) // 2])
    for case in cases(full, tmp_path / "file"):
        assert "the file is damaged" in failed(run(*case), DAMAGE)
    (shard / "data.mdb").write_bytes(data)
    (shard / "STORE").write_bytes(store.replace(b"\x89kvstore\x01", b"\x89kvstore\x02"))
    for case in cases(full, tmp_path / "file"):
        assert "format version 2" in failed(run(*case), FAILED)
    assert (shard / "data.mdb").read_bytes() == data


# --- what is typed -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_examples(command: str) -> None:
    ran = run(command, "--help")
    assert ran.exit_code == 0, ran.output
    assert "Example" in ran.stdout
    assert f"kvstore {command} " in ran.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_misuse_is_one_line_with_a_hint_and_status_16(command: str) -> None:
    assert "Missing argument" in failed(run(command), USAGE)
    assert "--nothing" in failed(run(command, "store", "--nothing"), USAGE)


@pytest.mark.parametrize(
    "options",
    [
        ["--older", "soon"],
        ["--newer", "1y"],
        ["--older", "2026-13-01"],
        ["--min-bytes", "many"],
        ["--min-bytes", "-1"],
        ["--codec", "zip"],
        ["--identity", "xyz"],
        ["--prefix", "0x1"],
        ["--group", "-1"],
        ["--group", "65536"],
        ["--limit", "-1"],
    ],
)
def test_options_that_mean_nothing(full: Path, tmp_path: Path, options: list[str]) -> None:
    failed(run("ls", full, *options), USAGE)
    failed(run("export", full, tmp_path / "file", *options), USAGE)
    assert not (tmp_path / "file").exists()


@pytest.mark.parametrize("capacity", ["0", "1", "1000P", "much"])
def test_a_capacity_that_cannot_be(full: Path, tmp_path: Path, capacity: str) -> None:
    run("export", full, tmp_path / "file")
    failed(run("import", tmp_path / "file", tmp_path / "new", "--create", "--capacity", capacity), USAGE)
    assert not (tmp_path / "new").exists()


def test_an_unknown_subcommand(full: Path) -> None:
    assert "No such command" in failed(run("quarantine", "empty"), USAGE)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_shell_completes_commands_options_and_paths(shell: str) -> None:
    """What `--install-completion` writes calls the command with these variables."""
    environment = {
        **os.environ,
        "_TYPER_COMPLETE_ARGS": "kvstore quarantine ",
        "_KVSTORE_COMPLETE": f"complete_{shell}",
    }
    environment |= {"COMP_WORDS": "kvstore quarantine ", "COMP_CWORD": "2", "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
    kvstore = Path(sys.executable).with_name("kvstore")
    done = subprocess.run([kvstore], env=environment, capture_output=True, text=True, check=False)
    assert {"list", "show", "drop"} <= set(re.findall(r"\w+", done.stdout)), done.stderr


def test_completion_is_installed(tmp_path: Path) -> None:
    environment = {**os.environ, "HOME": str(tmp_path), "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    kvstore = Path(sys.executable).with_name("kvstore")
    command = [kvstore, "--install-completion", "bash"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "complete" in "".join(file.read_text() for file in tmp_path.rglob("kvstore.sh"))


def test_the_commands_that_look_do_without_torch() -> None:
    code = "import sys, kvstore.tools.cli; print([n for n in ('torch', 'transformers', 'numba') if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0", 0),
        ("4096", 4096),
        ("64K", 65536),
        ("64k", 65536),
        ("1.5MiB", 3 * 2**19),
        ("20 G", 20 * 2**30),
        ("1TB", 2**40),
    ],
)
def test_sizes(text: str, expected: int) -> None:
    assert nbytes(text) == expected


@pytest.mark.parametrize("text", ["", "K", "1X", "-1", "1e9", "0x10", "\u0661", "9" * 40])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ConfigError):
        nbytes(text)


def test_times() -> None:
    assert moment("2026-01-31") == moment("2026-01-31T00:00Z") == moment("2026-01-31T01:00+01:00")
    assert when(moment("2026-01-31T12:30")) == "2026-01-31 12:30:00"
    assert moment("1900-01-01") == 0
    assert abs(moment("2h") - (time.time() - 7200) * 1e6) < 5e6
    assert (when(0), when(2**64 - 1), age(0), age(2**64 - 1)) == ("-", "no time", "-", "in the future")
    now = time.time_ns() // 1000
    assert [age(now - seconds * 10**6) for seconds in (5, 300, 9000, 864_000)] == [
        "5 s ago",
        "5 min ago",
        "2 h ago",
        "10 d ago",
    ]
    with pytest.raises(ConfigError):
        moment("yesterday")


def test_tables_are_aligned() -> None:
    assert table([["a", "number"], ["long name", "1"]], " r") == ["a          number", "long name       1"]
