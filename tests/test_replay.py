"""`kvstore replay`: a trace against a store serves what LRU by hand serves, and what the policies alone say."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from kvstore import GetResult, KVStore, PutResult
from kvstore.eviction import POLICIES, policy_named
from kvstore.tools import replay
from kvstore.tools.cli import app
from kvstore.tools.replay import ReplayError, Request
from tests import policy_simulation
from tests.policy_traces import chats, scans, together, zipf_documents
from tests.support import shard_of

CAPACITY = 200
SHORT = [Request(0, [1, 2, 3]), Request(10, [1, 2, 4]), Request(10, [1, 2, 3, 5]), Request(2000.5, [9])]
SHORT_SERVED = 2 + 3
FIGURES = {
    *("policy", "capacity_blocks", "hit_ratio", "requests", "references", "verified_gets", "blocks_written"),
    *("resident_blocks", "file_bytes", "capacity_bytes", "calls", "seconds"),
}


def invoke(*arguments: str) -> Any:
    return CliRunner(env={"COLUMNS": "80", "NO_COLOR": "1"}).invoke(app, ["replay", *arguments])


def write_trace(path: Path, requests: Iterable[Request]) -> Path:
    lines = [json.dumps({"timestamp": r.timestamp, "input_length": 1, "hash_ids": r.hash_ids}) for r in requests]
    path.write_text("\n".join(lines) + "\n")
    return path


def random_requests(count: int, seed: int) -> list[Request]:
    """Chains that branch: a request is a path in a tree of 4 ** 5 leaves, the first branches more often."""
    rng, ids, requests = np.random.default_rng(seed), dict[tuple[int, ...], int](), list[Request]()
    for number in range(count):
        path = tuple(np.minimum(rng.geometric(0.4, int(rng.integers(1, 6))), 4).tolist())
        steps = [path[: depth + 1] for depth in range(len(path))]
        requests.append(Request(number * 700, [ids.setdefault(step, len(ids)) for step in steps]))
    return requests


def lru(requests: Sequence[Request], capacity: int) -> int:
    """How many blocks a dict in the order of use serves: of a request the tail is older than the head."""
    held, served = OrderedDict[int, None](), 0
    for request in requests:
        missing = [place for place, one in enumerate(request.hash_ids) if one not in held]
        served += missing[0] if missing else len(request.hash_ids)
        for one in reversed(request.hash_ids):
            held[one] = None
            held.move_to_end(one)
        while len(held) > capacity:
            held.popitem(last=False)
    return served


def by_keys(requests: Iterable[policy_simulation.Request]) -> list[Request]:
    return [Request(1000 * (now - 1.7e9), keys.tolist()) for now, keys in requests]


# --- what is served ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
def test_leading_blocks_that_were_seen_before_are_served(policy: str, tmp_path: Path) -> None:
    report = replay.run(SHORT, CAPACITY, policy, tmp_path)
    assert report["references"] == 11
    assert report["requests"] == 4
    assert report["verified_gets"] == SHORT_SERVED == lru(SHORT, CAPACITY)
    assert report["hit_ratio"] == SHORT_SERVED / 11
    assert report["blocks_written"] == report["resident_blocks"] == 6
    assert not list(tmp_path.iterdir())


def test_a_loop_longer_than_the_store_serves_nothing_by_lru(tmp_path: Path) -> None:
    loop = [Request(1000 * number, [number % (2 * CAPACITY)]) for number in range(5 * CAPACITY)]
    report = replay.run(loop, CAPACITY, "lru", tmp_path)
    assert report["verified_gets"] == lru(loop, CAPACITY) == 0
    assert report["blocks_written"] == 5 * CAPACITY


def test_a_loop_shorter_than_the_store_is_served(tmp_path: Path) -> None:
    loop = [Request(1000 * number, [number % (CAPACITY - 5)]) for number in range(5 * CAPACITY)]
    report = replay.run(loop, CAPACITY, "lru", tmp_path)
    assert report["verified_gets"] == lru(loop, CAPACITY) == 5 * CAPACITY - (CAPACITY - 5)


@pytest.mark.parametrize("seed", range(3))
def test_lru_serves_what_a_dict_serves(seed: int, tmp_path: Path) -> None:
    requests = random_requests(2000, seed)
    report = replay.run(requests, CAPACITY, "lru", tmp_path)
    assert lru(requests, CAPACITY - 5) <= report["verified_gets"] <= lru(requests, CAPACITY + 5)
    assert abs(report["resident_blocks"] - CAPACITY) <= 5


@pytest.mark.parametrize("policy", POLICIES)
def test_a_store_serves_what_its_policy_alone_serves(policy: str, tmp_path: Path) -> None:
    capacity, trace = 2000, list(together(chats(1200), zipf_documents(700), scans(100)))
    alone = policy_simulation.replay(trace, policy_named(policy), capacity)
    report = replay.run(by_keys(trace), capacity, policy, tmp_path)
    assert report["references"] == alone.references
    assert report["hit_ratio"] == pytest.approx(alone.hit_ratio, abs=0.003)
    assert report["blocks_written"] == pytest.approx(alone.blocks_written, rel=0.03)
    assert report["resident_blocks"] == pytest.approx(capacity, rel=0.01)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_same_trace_gives_the_same_figures(policy: str, tmp_path: Path) -> None:
    requests = random_requests(800, 7)
    reports = [replay.run(requests, CAPACITY, policy, tmp_path) for _ in range(2)]
    for report in reports:
        del report["seconds"]
        report["calls"] = {name: (cost["calls"], cost["blocks"]) for name, cost in report["calls"].items()}
    assert reports[0] == reports[1]


def test_the_trace_is_the_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    class Clocked(KVStore):
        def touch(self, *arguments: Any, **options: Any) -> None:
            keeper = shard_of(self).keeper
            assert keeper is not None
            seen.append(keeper.clock())
            super().touch(*arguments, **options)

    monkeypatch.setattr(replay, "KVStore", Clocked)
    replay.run(SHORT, CAPACITY, "lru", tmp_path)
    assert seen == [replay.EPOCH_S + request.timestamp / 1000 for request in SHORT]


# --- what is noticed ---------------------------------------------------------------------------------------------


def test_blocks_have_bytes_of_their_own() -> None:
    words = replay.contents([0, 1, 2, 2**64 - 1])
    assert np.unique(words).size == words.size == 4 * replay.BLOCK_BYTES // 8
    assert len({replay.block_hash(one) for one in range(1000)}) == 1000


def test_a_load_that_copies_nothing_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Liar(KVStore):
        def get_blocks(self, block_hashes: Sequence[bytes], *arguments: Any, **options: Any) -> GetResult:
            count = len(block_hashes)
            return GetResult(np.ones(count, bool), np.zeros(count, bool))

    monkeypatch.setattr(replay, "KVStore", Liar)
    with pytest.raises(ReplayError, match="block 1: wrong bytes were loaded although verified"):
        replay.run(SHORT, CAPACITY, "lru", tmp_path)
    assert not list(tmp_path.iterdir())


def test_bytes_that_are_not_the_blocks_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    true = replay.contents

    def once_wrong(hash_ids: Sequence[int]) -> replay.Words:
        words = true(hash_ids)
        words[1:2, -1] ^= np.uint64(hash_ids == [1, 2, 3])
        return words

    monkeypatch.setattr(replay, "contents", once_wrong)
    with pytest.raises(ReplayError, match="block 2: wrong bytes"):
        replay.run(SHORT, CAPACITY, "lru", tmp_path)


def test_a_block_that_is_promised_and_missing_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KVStore, "match_prefix", lambda self, hashes, group=0: len(hashes))
    with pytest.raises(ReplayError, match="3 blocks are here by match_prefix, 3 are missing by get_blocks"):
        replay.run(SHORT, CAPACITY, "lru", tmp_path)


def test_a_put_that_fails_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: KVStore, hashes: Sequence[bytes], *arguments: Any, **options: Any) -> PutResult:
        none = np.zeros(len(hashes), bool)
        return PutResult(none, none, dict.fromkeys(range(len(hashes)), "disk_full"))

    monkeypatch.setattr(KVStore, "put_blocks", full)
    with pytest.raises(ReplayError, match="disk_full: choose a --path"):
        replay.run(SHORT, CAPACITY, "lru", tmp_path)


# --- the command -------------------------------------------------------------------------------------------------


def test_json_has_every_figure(tmp_path: Path) -> None:
    ran = invoke(str(write_trace(tmp_path / "trace.jsonl", SHORT)), "--capacity-blocks", "200", "--json")
    assert ran.exit_code == 0, ran.output
    assert ran.stderr == ""
    report = json.loads(ran.stdout)
    assert set(report) == FIGURES
    assert (report["policy"], report["capacity_blocks"], report["verified_gets"]) == ("hazard", 200, SHORT_SERVED)
    assert report["file_bytes"] <= report["capacity_bytes"]
    assert report["seconds"] > 0
    assert list(report["calls"]) == ["touch", "match", "get", "put"]
    assert report["calls"]["touch"]["calls"] == 4
    assert report["calls"]["get"]["blocks"] == SHORT_SERVED
    assert all(set(cost) == {"calls", "blocks", "us_per_call", "us_per_block"} for cost in report["calls"].values())


def test_words_for_people(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "trace.jsonl", SHORT)
    ran = invoke(str(trace), "--capacity-blocks", "200", "--policy", "lru", "--path", str(tmp_path))
    assert ran.exit_code == 0, ran.output
    assert ran.stdout.startswith("lru, 200 blocks: hit_ratio 0.4545\n")
    for word in ("4 requests for 11 blocks", "5 loaded and verified, 6 written", "us a block"):
        assert word in ran.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["trace.jsonl"]


def test_ticks_once_a_request(tmp_path: Path) -> None:
    ticks: list[None] = []
    replay.run(SHORT, CAPACITY, "lru", tmp_path, lambda: ticks.append(None))
    assert len(ticks) == len(SHORT)


GOOD = '{"timestamp": 5, "hash_ids": [1]}'


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "expected {"),
        ("{", "expected {"),
        ("\udcff", "expected {"),
        ("[1]", "expected {"),
        ("[" * 100_000, "expected {"),
        ("{}", "timestamp None"),
        ('{"timestamp": "5", "hash_ids": []}', "timestamp '5'"),
        ('{"timestamp": true, "hash_ids": []}', "timestamp True"),
        ('{"timestamp": -1, "hash_ids": []}', "timestamp -1"),
        ('{"timestamp": NaN, "hash_ids": []}', "timestamp nan"),
        ('{"timestamp": 1e999, "hash_ids": []}', "timestamp inf"),
        (f'{{"timestamp": 1{"0" * 4000}, "hash_ids": []}}', "timestamp 1000"),
        ('{"timestamp": 4, "hash_ids": [1]}', "timestamp 4 after 5: expected times in order"),
        ('{"timestamp": 5}', "hash_ids None"),
        ('{"timestamp": 5, "hash_ids": 1}', "hash_ids 1"),
        ('{"timestamp": 5, "hash_ids": ["1"]}', "hash_ids ['1']"),
        ('{"timestamp": 5, "hash_ids": [1.0]}', "hash_ids [1.0]"),
        ('{"timestamp": 5, "hash_ids": [true]}', "hash_ids [True]"),
        ('{"timestamp": 5, "hash_ids": [-1]}', "hash_ids [-1]"),
        ('{"timestamp": 5, "hash_ids": [18446744073709551616]}', "hash_ids [18446744073709551616]"),
        ('{"timestamp": 5, "hash_ids": [1, 2, 1]}', "expected each block of a request once"),
    ],
)
def test_a_malformed_line_is_refused_by_its_number(line: str, message: str, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_bytes(f"{GOOD}\n{line}\n{GOOD}\n".encode(errors="surrogateescape"))
    ran = invoke(str(trace), "--capacity-blocks", "200", "--path", str(tmp_path))
    assert (ran.exit_code, ran.stdout, ran.stderr.count("\n")) == (2, "", 1)
    assert "trace.jsonl, line 2: " in ran.stderr
    assert message in ran.stderr
    assert len(ran.stderr) < 400 + len(str(trace))
    assert list(tmp_path.iterdir()) == [trace]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--capacity-blocks", "0"], "expected 100 to about"),
        (["--capacity-blocks", "99"], "expected 100 to about"),
        (["--capacity-blocks", str(10**15)], "expected 100 to about"),
        (["--capacity-blocks", str(10**9)], "fewer --capacity-blocks"),
        (["--capacity-blocks", "200", "--policy", "fifo"], "expected one of hazard, lru"),
        (["--capacity-blocks", "200", "--path", "nowhere/at/all"], "expected a folder that is there already"),
    ],
)
def test_misuse_is_one_line_with_a_hint(options: list[str], message: str, tmp_path: Path) -> None:
    ran = invoke(str(write_trace(tmp_path / "trace.jsonl", SHORT)), "--path", str(tmp_path), *options)
    assert (ran.exit_code, ran.stdout, ran.stderr.count("\n")) == (2, "", 1)
    assert message in ran.stderr
    assert "replay --help" in ran.stderr


@pytest.mark.parametrize("text", [None, "", '{"timestamp": 0, "hash_ids": []}\n'])
def test_a_file_without_blocks_is_refused(text: str | None, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    if text is not None:
        trace.write_text(text)
    ran = invoke(str(trace), "--capacity-blocks", "200")
    assert (ran.exit_code, ran.stderr.count("\n")) == (2, 1)
    assert "expected a trace, a file of JSON lines" in ran.stderr


def test_a_request_without_blocks_counts_as_one(tmp_path: Path) -> None:
    report = replay.run([*SHORT, Request(3000, [])], CAPACITY, "hazard", tmp_path)
    assert (report["requests"], report["references"]) == (5, 11)


@pytest.mark.parametrize("blocks", [100, 1000, 10**5, 10**9])
def test_capacity_grows_with_the_blocks(blocks: int) -> None:
    assert 1.0 <= replay.capacity_bytes(blocks) / (blocks * 25_000) < 1.4
