"""What kvstore brings and costs in the real vLLM on the CPU: ``python tools/bench_vllm.py --json FILE`` in .venv-vllm.

Time to first token with all of a prompt's full blocks in the store, against computing it; what the connector costs steps
whose blocks are not in the store; and what the scheduler's look-up of 1,000 blocks costs. SmolLM2-135M in bfloat16, greedily;
each engine has a process of its own, and only one of them works at a time. Figures hold for this machine: a CPU computes so
slowly that loading wins by far more than on a GPU, and costs of the connector weigh less.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any, Final

LENGTHS: Final = (256, 512, 1024, 2048, 4096)
BLOCK: Final = 32
FIRST_TOKEN_ROUNDS: Final = 3
STEP_ROUNDS: Final = 12
BATCH, PROMPT, ANSWER = 4, 480, 65
"""Requests of a round that measures steps, the tokens of their prompts and of their answers."""
LOOKUPS: Final = 50
LOOKUP_BLOCKS: Final = 1000
VOCABULARY: Final = 40_000
ENVIRONMENT: Final = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
}
OPTIONS: Final[dict[str, Any]] = {
    "skip_tokenizer_init": True,
    "enforce_eager": True,
    "max_num_batched_tokens": 8192,
    "max_num_seqs": BATCH,
    "dtype": "bfloat16",
    "seed": 0,
    "block_size": BLOCK,
    "kv_cache_memory_bytes": 512 << 20,
    "distributed_executor_backend": "uni",
}
LIMITS: Final = {"steps": 1.03, "lookup_ms": 2.0}
"""What the connector may cost a step, and a warm look-up of 1,000 blocks."""


# --- in an engine's process ------------------------------------------------------------------------------------------


class Subject:
    """An engine."""

    def __init__(self, model: str, connector: dict[str, Any] | None, role: str) -> None:
        from vllm import LLM

        named = {
            "kv_connector": "KVStoreConnector",
            "kv_connector_module_path": "kvstore.engines.vllm",
            "kv_role": role,
        }
        named |= {"kv_load_failure_policy": "recompute"}
        transfer = (
            {} if connector is None else {"kv_transfer_config": {**named, "kv_connector_extra_config": connector}}
        )
        self._llm: Any = LLM(model=model, **OPTIONS, **transfer)
        self._engine = self._llm.llm_engine
        self._core = self._engine.engine_core.engine_core
        self._connector = self._core.scheduler.connector
        self._number = 0
        self._hashes: list[bytes] = []

    def first_token(self, ids: list[int]) -> tuple[float, int]:
        """Seconds to the first token of a prompt of which vLLM itself has nothing, and the prompt's tokens computed."""
        self._llm.reset_prefix_cache()
        seconds, computed = self._serve([ids], 1)
        return sum(seconds), sum(computed)

    def steps(self, prompts: list[list[int]], answer: int, connected: bool) -> tuple[float, list[float]]:
        """Seconds of the steps that compute prompts, all together, and of each step that answers. connected: whether vLLM
        knows of the connector meanwhile."""
        self._llm.reset_prefix_cache()
        with nullcontext() if connected else self._disconnected():
            seconds, computed = self._serve(prompts, answer)
        prefill = sum(s for s, n in zip(seconds, computed, strict=True) if n > len(prompts))
        return prefill, [s for s, n in zip(seconds, computed, strict=True) if n == len(prompts)]

    def lookup(self, blocks: int, times: int) -> list[float]:
        """Seconds of looking a request of so many blocks up, all of which are in the store."""
        hashes = self._hashes[:blocks]
        found = []
        for number in range(times):
            request = SimpleNamespace(
                request_id=f"lookup-{number}",
                block_hashes=hashes,
                num_tokens=BLOCK * blocks + 1,
                num_computed_tokens=0,
                num_preemptions=0,
                num_prompt_tokens=BLOCK * blocks + 1,
                lora_request=None,
            )
            began = time.perf_counter()
            tokens, _ = self._connector.get_num_new_matched_tokens(request, 0)
            found.append(time.perf_counter() - began)
            self._connector.request_finished(request, [])
            if tokens != BLOCK * blocks:
                raise SystemExit(
                    f"a look-up found {tokens} of {BLOCK * blocks} tokens: not all blocks are in the store"
                )
        return found

    def close(self) -> None:
        """Shut down."""
        self._core.shutdown()

    @contextmanager
    def _disconnected(self) -> Iterator[None]:
        """Let vLLM work as one that has no connector, in its scheduler and its rank."""
        from vllm.distributed.kv_transfer import kv_transfer_state as rank

        scheduler, kept = self._core.scheduler, (self._core.scheduler.connector, rank._KV_CONNECTOR_AGENT)
        scheduler.connector = rank._KV_CONNECTOR_AGENT = None
        try:
            yield
        finally:
            scheduler.connector, rank._KV_CONNECTOR_AGENT = kept

    def _serve(self, prompts: Sequence[list[int]], answer: int) -> tuple[list[float], list[int]]:
        """Serve requests, then let saves end. Seconds, and tokens scheduled, of each step until the last answer."""
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0.0, max_tokens=answer, detokenize=False, ignore_eos=True)
        for ids in prompts:
            self._number += 1
            self._engine.add_request(str(self._number), {"prompt_token_ids": ids}, sampling)
        for request in self._core.scheduler.requests.values():
            self._hashes += [bytes(each) for each in request.block_hashes]
        seconds, scheduled, plan = list[float](), list[int](), self._core.scheduler.schedule

        def counted(*arguments: Any, **options: Any) -> Any:
            planned = plan(*arguments, **options)
            scheduled.append(planned.total_num_scheduled_tokens)
            return planned

        self._core.scheduler.schedule = counted
        while self._engine.has_unfinished_requests():
            began = time.perf_counter()
            self._engine.step()
            seconds.append(time.perf_counter() - began)
        self._core.scheduler.schedule = plan
        while self._connector is not None and self._connector.has_pending_push_work():
            self._engine.step()
        return seconds, scheduled


def serve(pipe: Connection, threads: int, *arguments: Any) -> None:
    """An engine's process: answer calls of Subject's methods until the pipe ends."""
    os.environ |= ENVIRONMENT | {"OMP_NUM_THREADS": str(threads)}
    subject = Subject(*arguments)
    pipe.send(None)
    while (call := pipe.recv()) is not None:
        name, given = call
        pipe.send(getattr(subject, name)(*given))
    subject.close()
    pipe.send(None)


# --- what is measured ------------------------------------------------------------------------------------------------

Call = Callable[..., Any]


@contextmanager
def engine(
    threads: int, model: Path, store: Path | None = None, role: str = "kv_both", **options: Any
) -> Iterator[Call]:
    """An engine in a process of its own, as a function: name of a method of Subject, arguments. store: the connector's."""
    here, there = multiprocessing.Pipe()
    connector = None if store is None else {"path": str(store), "capacity": "4G", **options}
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=serve, args=(there, threads, str(model), connector, role))
    process.start()
    there.close()

    def call(name: str, *arguments: Any) -> Any:
        here.send((name, arguments))
        return here.recv()

    try:
        here.recv()
        yield call
        here.send(None)
        here.recv()
    except EOFError:
        raise SystemExit("an engine ended; what it said stands above") from None
    finally:
        here.close()
        process.join()


def ids(chance: random.Random, count: int) -> list[int]:
    """A prompt of random tokens."""
    return [chance.randrange(10, VOCABULARY) for _ in range(count)]


def first_tokens(threads: int, model: Path, folder: Path) -> list[dict[str, Any]]:
    """Time to first token by length of the prompt, without a store and with all its full blocks in one."""
    chance, rows = random.Random(1), list[dict[str, Any]]()
    with engine(threads, model) as plain, engine(threads, model, folder / "first") as stored:
        for length in LENGTHS:
            prompt = ids(chance, length)
            stored("first_token", prompt)
            for call in (plain, stored):
                call("first_token", ids(chance, length))
            cold, hit = list[float](), list[float]()
            for _ in range(FIRST_TOKEN_ROUNDS):
                cold.append(plain("first_token", prompt)[0])
                seconds, computed = stored("first_token", prompt)
                hit.append(seconds)
            rows.append({"tokens": length, "cold_s": median(cold), "hit_s": median(hit), "computed": computed})
    return rows


ARMS: Final = {"connector": "kv_both", "look-ups alone": "kv_consumer"}
"""What is measured: the connector that saves all it computes, and one that never does."""


def overhead(threads: int, model: Path, folder: Path) -> dict[str, dict[str, float]]:
    """What steps cost with a connector that never finds anything, over what they cost without one: the medians of rounds.

    Both are measured in one engine, from which the connector is taken for every other round: steps of two engines alike
    differ by up to 5% for as long as they live.
    """
    chance, medians = random.Random(2), dict[str, dict[str, float]]()
    for arm, role in ARMS.items():
        ratios: dict[str, list[float]] = {"prefill": [], "decode": []}
        with engine(threads, model, folder / role, role) as call:
            for number in range(-1, STEP_ROUNDS):
                prompts = [ids(chance, PROMPT) for _ in range(BATCH)]
                found = {each: call("steps", prompts, ANSWER, each) for each in (number % 2 == 0, number % 2 == 1)}
                if number >= 0:
                    ratios["prefill"].append(found[True][0] / found[False][0])
                    ratios["decode"].append(sum(found[True][1]) / sum(found[False][1]))
        medians[arm] = {name: median(each) for name, each in ratios.items()}
    return medians


def lookup(threads: int, folder: Path) -> list[float]:
    """Seconds of warm look-ups of one request's 1,000 blocks; of a model so small that its prompt is soon computed, since a
    block counts at its own position alone."""
    with engine(threads, tiny(folder / "tiny"), folder / "lookup") as call:
        call("first_token", [10 + n % 80 for n in ids(random.Random(3), LOOKUP_BLOCKS * BLOCK + 1)])
        return sorted(call("lookup", LOOKUP_BLOCKS, LOOKUPS)[LOOKUPS // 5 :])


def tiny(folder: Path) -> Path:
    """Write a Llama of one layer and one head that takes long prompts; return its folder."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 32}
    longest = LOOKUP_BLOCKS * BLOCK + 64
    heads = {"num_attention_heads": 1, "num_key_value_heads": 1, "max_position_embeddings": longest}
    LlamaForCausalLM(LlamaConfig(**sizes, **heads)).bfloat16().save_pretrained(folder)
    return folder


def measure(threads: int, model: Path, folder: Path) -> dict[str, Any]:
    """Everything; the report."""
    seconds = lookup(threads, folder)
    return {
        "machine": {"cores": os.cpu_count(), "threads_of_the_engine": threads},
        "model": model.name,
        "first_token": first_tokens(threads, model, folder),
        "steps": overhead(threads, model, folder),
        "lookup": {"blocks": LOOKUP_BLOCKS, "median_ms": 1e3 * median(seconds), "slowest_ms": 1e3 * seconds[-1]},
    }


def show(report: dict[str, Any]) -> None:
    """Print the report."""
    machine = report["machine"]
    print(f"\n{report['model']}; {machine['cores']} cores, {machine['threads_of_the_engine']} thread(s) of the engine")
    print(f"\n{'prompt':>8} {'computed':>10} {'loaded':>10}  {'faster':>6}   tokens computed with the store")
    for row in report["first_token"]:
        times = f"{1e3 * row['cold_s']:7.0f} ms {1e3 * row['hit_s']:7.0f} ms  {row['cold_s'] / row['hit_s']:5.1f}x"
        print(f"{row['tokens']:>8} {times}   {row['computed']}")
    print("\nsteps without a hit, over those of the same engine without the connector")
    for arm, both in report["steps"].items():
        print(
            f"  {arm:<16} prefill {both['prefill']:.3f}   decode {both['decode']:.3f}   (at most {LIMITS['steps']:.2f})"
        )
    found = report["lookup"]
    times = f"median {found['median_ms']:.2f} ms, slowest {found['slowest_ms']:.2f} ms"
    print(f"\nlook-up of {found['blocks']} blocks: {times}   (at most {LIMITS['lookup_ms']:.0f} ms)")


def main() -> None:
    """Measure, print, and write the report as JSON where that is asked for."""
    from kvstore.tools.model import smollm2_folder

    parser = argparse.ArgumentParser(description="kvstore in the real vLLM, on the CPU")
    parser.add_argument("--json", type=Path, help="write the report there")
    parser.add_argument("--path", type=Path, help="folder for the stores, some 2 GB (default: the system's)")
    parser.add_argument("--threads", type=int, default=max(1, (os.cpu_count() or 2) - 1), help="threads of an engine")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.path) as folder:
        report = measure(given.threads, smollm2_folder(), Path(folder))
    show(report)
    if given.json:
        given.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
