"""What the tests of vLLM share: processes that run jobs (tests.vllm.engine), requests, and what a clean engine answers."""

from __future__ import annotations

import json
import os
import random
import select
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.vllm.models import VOCABULARY

ROOT = Path(__file__).parent.parent.parent
BLOCK = 32
PATIENCE_S = 240.0
"""What takes longer hangs: an engine that asks a store for ever does not come back by itself."""
CAPACITY = "256M"


class EngineHangs(AssertionError):
    """An engine gave no answer in time."""


@dataclass(frozen=True)
class Round:
    """What a round came to; fields as `tests.vllm.engine.Engine.serve` returns them."""

    tokens: list[list[int]]
    endings: list[str | None]
    first_s: list[float | None]
    computed: list[int]
    scheduled: int
    preemptions: int
    steps: int
    seconds: float
    scheduler: dict[str, int]
    ranks: list[dict[str, int]]

    @property
    def worker(self) -> dict[str, int]:
        """The counts of the only rank."""
        [counts] = self.ranks
        return counts


@dataclass(frozen=True)
class Answer:
    """What a job came to. error: how the engine itself failed, None if it did not. output: all that it printed."""

    error: str | None
    rounds: list[Round]
    log: list[str]
    output: Path

    def checked(self) -> Answer:
        """Itself, where the engine did not fail."""
        ending = self.output.read_text(errors="replace")[-4000:] if self.error else ""
        assert self.error is None, f"{self.error}\n{ending}"
        return self


@dataclass
class Engines:
    """Runs jobs, each in a process that is forked from one that has imported vLLM; `fresh` ones start from nothing."""

    folder: Path
    _server: subprocess.Popen[str] | None = None
    _jobs: int = 0

    def run(self, model: Path, rounds: Sequence[dict[str, Any]], store: Path | None = None, **job: Any) -> Answer:
        """Run an engine over rounds of requests; the answer of one that did not fail. store: the connector's path. job:
        further fields, as `tests.vllm.engine` names them; connector: further options of it."""
        return self.ask(model, rounds, store, **job).checked()

    def ask(self, model: Path, rounds: Sequence[dict[str, Any]], store: Path | None = None, **job: Any) -> Answer:
        """As `run`, of one that may fail."""
        connector = None
        if store is not None:
            connector = {"path": str(store), "capacity": CAPACITY} | job.pop("connector", {})
        return self._ask(json.dumps(job | {"model": str(model), "rounds": list(rounds), "connector": connector}))

    def fresh(self) -> None:
        """Let the next job's process have nothing in common with those before it."""
        self.close()

    def close(self) -> None:
        """End the process that has imported vLLM."""
        if self._server is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._server.pid, signal.SIGKILL)
            self._server.communicate()
            self._server = None

    def _ask(self, job: str) -> Answer:
        self._jobs += 1
        output = self.folder / f"engine-{self._jobs}.log"
        server = self._server or self._start()
        assert server.stdin is not None
        assert server.stdout is not None
        server.stdin.write(json.dumps([json.loads(job), str(output)]) + "\n")
        server.stdin.flush()
        if not select.select([server.stdout], [], [], PATIENCE_S)[0]:
            self.close()
            raise EngineHangs(f"no answer after {PATIENCE_S:.0f} s\n{output.read_text(errors='replace')[-4000:]}")
        answer = json.loads(server.stdout.readline())
        return Answer(answer["error"], [Round(**each) for each in answer["rounds"]], answer["log"], output)

    def _start(self) -> subprocess.Popen[str]:
        self._server = subprocess.Popen(
            [sys.executable, "-m", "tests.vllm.engine"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=(self.folder / "server.log").open("w"),
            text=True,
            cwd=ROOT,
            start_new_session=True,
        )
        return self._server


@dataclass
class Clean:
    """What an engine without a store answers: the tokens that everything is compared with. In float32 and greedily they
    do not depend on how requests are batched, chunked or preempted; the tests' bfloat16 jobs leave all that as it is."""

    engines: Engines
    _known: dict[str, list[int]] = field(default_factory=dict)

    def tokens(self, model: Path, requests: Sequence[dict[str, Any]], **options: Any) -> list[list[int]]:
        """The answers to requests. options: LLM's."""
        names = [json.dumps([str(model), options, r["ids"], plain(r)]) for r in requests]
        new = {
            name: {"ids": r["ids"]} | plain(r)
            for name, r in zip(names, requests, strict=True)
            if name not in self._known
        }
        if new:
            answer = self.engines.run(model, [serving(list(new.values()))], options=options)
            self._known |= dict(zip(new, answer.rounds[0].tokens, strict=True))
        return [self._known[name] for name in names]


def plain(request: dict[str, Any]) -> dict[str, Any]:
    """Of a request, what its answer depends on beside its ids."""
    return {key: request[key] for key in ("max_tokens", "lora") if key in request}


def serving(requests: Sequence[dict[str, Any]], **options: Any) -> dict[str, Any]:
    """A round."""
    return {"requests": list(requests), **options}


def ids(count: int, seed: int = 0) -> list[int]:
    """Random token ids of a prompt."""
    chance = random.Random(seed)
    return [chance.randrange(3, VOCABULARY) for _ in range(count)]


def prompts(*lengths: int, seed: int = 0, **options: Any) -> list[dict[str, Any]]:
    """Requests of random tokens that have nothing in common."""
    return [{"ids": ids(length, 1000 * seed + i), **options} for i, length in enumerate(lengths)]


def loadable(request: dict[str, Any], block: int = BLOCK) -> int:
    """Tokens of a prompt that a store can bring: full blocks, and at least one token is left to compute."""
    return (len(request["ids"]) - 1) // block * block


def left(requests: Sequence[dict[str, Any]], block: int = BLOCK) -> list[int]:
    """Tokens of each prompt that are computed where everything else is in the store."""
    return [len(request["ids"]) - loadable(request, block) for request in requests]


def wholly(requests: Sequence[dict[str, Any]]) -> list[int]:
    """Tokens of each prompt."""
    return [len(request["ids"]) for request in requests]


def rejections(counts: dict[str, int]) -> dict[str, int]:
    """Of a rank's counts, the blocks that were rejected, by kind."""
    head = "get_rejected_"
    return {name.removeprefix(head): n for name, n in counts.items() if name.startswith(head) and n}


def children_of(pid: int) -> Iterator[int]:
    """Processes that a process has started."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        yield from map(int, (task / "children").read_text().split())
