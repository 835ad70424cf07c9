"""KVStoreTier below vLLM's own OffloadingConnector, with the tiering manager, in the real engine."""

from __future__ import annotations

import json
import os
import random
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import lmdb
import pytest

from kvstore.environment import DATABASES, LMDB_ENGINE
from kvstore.record import chunk_key, parse_header
from tests.support import flip
from tests.vllm.harness import BLOCK, PATIENCE_S, ROOT
from tests.vllm.models import VOCABULARY, write


class Server:
    """Runs engines, each in a process of its own (tests.vllm.cpu_spec)."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._jobs = folder, 0
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.vllm.cpu_spec"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=(folder / "server.log").open("w"),
            text=True,
            cwd=ROOT,
            start_new_session=True,
        )

    def run(self, model: Path, prompts: list[list[int]], tier: dict[str, Any] | None, **options: Any) -> dict[str, Any]:
        """Serve prompts; tokens, and what the tier counted."""
        answer = self.ask(model, prompts, tier, **options)
        assert "error" not in answer, (answer["error"], answer["log"][-4000:])
        return answer

    def ask(self, model: Path, prompts: list[list[int]], tier: dict[str, Any] | None, **options: Any) -> dict[str, Any]:
        """As `run`, of an engine that may fail. options: LLM's."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._jobs += 1
        log = self._folder / f"{self._jobs}.log"
        job = {"model": str(model), "prompts": prompts, "tier": tier, "options": options}
        self._process.stdin.write(json.dumps([job, str(log)]) + "\n")
        self._process.stdin.flush()
        came = select.select([self._process.stdout], [], [], PATIENCE_S)[0]
        answer = json.loads(self._process.stdout.readline()) if came else {"error": "no answer"}
        return {**answer, "log": log.read_text(errors="replace")}

    def close(self) -> None:
        """End the server, and what it has started."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    made = Server(tmp_path_factory.mktemp("engines"))
    yield made
    made.close()


def prompts_of(seed: int) -> list[list[int]]:
    """Three prompts of five to seven blocks, four of which they share."""
    chosen = random.Random(seed)
    shared = [chosen.randrange(3, VOCABULARY) for _ in range(4 * BLOCK)]
    return [shared + [chosen.randrange(3, VOCABULARY) for _ in range(40 + BLOCK * i)] for i in range(3)]


def damage_store(folder: Path, position: int, bit: int = 4321) -> None:
    """Flip a bit in the record of the block at a position; the store is not open."""
    names = [name.decode() for name in DATABASES]
    options = {"map_size": 0, "max_dbs": len(names), "lib_version": LMDB_ENGINE, "sync": False}
    with lmdb.open(str(folder), create=False, **options) as env:
        index, payload = (env.open_db(name, create=False) for name in (b"index", b"payload"))
        with env.begin(write=True) as txn:
            headers = [parse_header(bytes(v), bytes(k)) for k, v in txn.cursor(db=index)]
            [sequence] = [h.sequence for h in headers if getattr(h, "position", None) == position]
            key = chunk_key(sequence, 1)
            txn.put(key, flip(bytes(txn.get(key, db=payload)), bit), db=payload)


def test_an_engine_loads_what_another_stored_and_recovers_from_damage(tmp_path: Path, server: Server) -> None:
    model, prompts, tier = write("llama", tmp_path / "llama"), prompts_of(7), {"path": str(tmp_path / "store")}
    clean = server.run(model, prompts, None)["tokens"]
    first, second = server.run(model, prompts, tier), server.run(model, prompts, tier)
    assert first["tokens"] == second["tokens"] == clean
    assert second["counts"]["promoted"] == first["counts"]["stored"] > 0
    assert second["counts"]["rejected"] == second["counts"]["stored"] == 0
    [shard] = (tmp_path / "store").iterdir()
    damage_store(shard, position=1)
    third, fourth = server.run(model, prompts, tier), server.run(model, prompts, tier)
    assert third["tokens"] == fourth["tokens"] == clean
    assert third["counts"]["rejected"] == 1
    assert third["counts"]["stored"] == 1, "the damaged one"
    assert fourth["counts"] == second["counts"], "nothing was poisoned"


def test_two_groups_of_an_engine_are_loaded(tmp_path: Path, server: Server) -> None:
    model, prompts, tier = write("windowed", tmp_path / "model"), prompts_of(9), {"path": str(tmp_path / "store")}
    clean, first, second = (server.run(model, prompts, each) for each in (None, tier, tier))
    assert clean["tokens"] == first["tokens"] == second["tokens"]
    assert second["counts"]["promoted"] > 0
    assert second["counts"]["rejected"] == 0


def test_an_engine_finds_nothing_of_other_weights(tmp_path: Path, server: Server) -> None:
    tier, prompts = {"path": str(tmp_path / "store")}, prompts_of(8)[:1]
    stored = [server.run(write("llama", tmp_path / f"{seed}", seed), prompts, tier)["counts"] for seed in range(2)]
    assert [counts["promoted"] for counts in stored] == [0, 0]
    assert stored[0]["stored"] == stored[1]["stored"] > 0


def test_adapters_are_served_where_they_are_declared_fixed(tmp_path: Path, server: Server) -> None:
    """vLLM does not tell a tier which adapter a request has."""
    model, prompts, tier = write("llama", tmp_path / "llama"), prompts_of(10)[:1], {"path": str(tmp_path / "store")}
    options = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
    refused = server.ask(model, prompts, tier, **options)
    assert "ConfigError: LoRA is enabled, and a tier cannot see" in refused["error"]
    fixed = tier | {"adapters": "fixed"}
    first, second = (server.run(model, prompts, fixed, **options) for _ in range(2))
    plain = server.run(model, prompts, tier)
    assert first["tokens"] == second["tokens"] == plain["tokens"]
    assert second["counts"]["promoted"] == first["counts"]["stored"] > 0
    assert plain["counts"]["promoted"] == 0
