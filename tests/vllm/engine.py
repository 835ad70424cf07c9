"""One vLLM engine, in a process of its own: it takes a job, serves rounds of requests, and says what it did.

A job: {"model": folder, "options": LLM's own over OPTIONS, "connector": kv_connector_extra_config or None, "policy":
kv_load_failure_policy, "rounds": [round, ...], "before": [action, ...] before the engine starts}.
A round: {"requests": [request, ...], "actions": {step: [action, ...]}, "reset": whether vLLM's prefix cache is emptied
first (default true), "settle": whether its end waits until saves ended (default true)}.
A request: {"ids": token ids, "max_tokens": n, "salt": cache salt, "lora": [name, number, folder], "in_place": whether vLLM
reads it again, "arrives": step at which it comes, "aborts": step at which it is aborted}.
An action: [name of a function of tests.vllm.actions, arguments, ...].

Importing vLLM takes ten times as long as starting an engine of a tiny model, so `python -m tests.vllm.engine` imports it
once and forks for each job, a line of JSON on its standard input; the answer is a line on its standard output.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}

OPTIONS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "enforce_eager": True,
    "max_model_len": 1024,
    "max_num_seqs": 8,
    "dtype": "float32",
    "seed": 0,
    "block_size": 32,
    "kv_cache_memory_bytes": 32 << 20,
    "distributed_executor_backend": "uni",
}
PATIENCE_S = 30.0
MAX_STEPS = 20_000
"""Of a round; a hundred times what any takes. An engine that steps on without an end livelocks."""
WARNINGS_KEPT = 200


class Engine:
    """vLLM over a job's options. Its scheduler's steps are counted as they are planned: what they compute is work that no
    store has saved, whatever vLLM's own figures say."""

    def __init__(self, job: dict[str, Any]) -> None:
        from vllm import LLM

        self.llm = LLM(model=job["model"], **OPTIONS | job.get("options", {}), **transfer(job))
        self.core = self.llm.llm_engine.engine_core.engine_core  # type: ignore[attr-defined]
        self.scheduler: Any = self.core.scheduler
        self.computed: dict[str, int] = {}
        self.scheduled = self.preemptions = self.steps = 0
        self._plan, self._preempt = self.scheduler.schedule, self.scheduler._preempt_request
        self.scheduler.schedule, self.scheduler._preempt_request = self._counted_plan, self._counted_preempt

    def _counted_plan(self, *arguments: Any, **options: Any) -> Any:
        planned = self._plan(*arguments, **options)
        for name, tokens in planned.num_scheduled_tokens.items():
            request = self.scheduler.requests[name]
            after = request.num_computed_tokens
            prompt = min(after, request.num_prompt_tokens) - min(after - tokens, request.num_prompt_tokens)
            asked = name.rpartition("-")[0]  # vLLM adds a part of its own
            self.computed[asked] = self.computed.get(asked, 0) + prompt
            self.scheduled += tokens
        return planned

    def _counted_preempt(self, *arguments: Any, **options: Any) -> Any:
        self.preemptions += 1
        return self._preempt(*arguments, **options)

    @property
    def connector(self) -> Any:
        """The scheduler's side of the connector, or None."""
        return self.scheduler.connector

    @property
    def worker(self) -> Any:
        """The rank's side of the connector, or None."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

        return get_kv_transfer_group() if has_kv_transfer_group() else None

    def serve(self, number: int, spec: dict[str, Any]) -> dict[str, Any]:
        """One round; what became of it."""
        if spec.get("reset", True):
            assert self.llm.reset_prefix_cache(), "the prefix cache was not emptied: blocks are in use"
        self.computed, self.scheduled, self.preemptions, self.steps = {}, 0, 0, 0
        names = [f"{number}-{i}" for i in range(len(spec["requests"]))]
        served = Served(self, dict(zip(names, spec["requests"], strict=True)), spec.get("actions", {}))
        began = time.monotonic()
        served.run()
        if spec.get("settle", True):
            self.settle()
        return {
            "tokens": [served.tokens.get(name, []) for name in names],
            "endings": [served.endings.get(name) for name in names],
            "first_s": [served.first_s.get(name) for name in names],
            "computed": [self.computed.get(name, 0) for name in names],
            "scheduled": self.scheduled,
            "preemptions": self.preemptions,
            "steps": self.steps,
            "seconds": time.monotonic() - began,
            "scheduler": stats(self.connector),
            "ranks": self.core.model_executor.collective_rpc(rank_stats),
        }

    def described(self) -> str:
        """The requests that have not ended, and who has the cache's blocks."""
        pool, requests = self.scheduler.kv_cache_manager.block_pool, self.scheduler.requests.values()
        lines = [f"{r.request_id}: {r.status.name}, {r.num_computed_tokens} of {r.num_tokens} tokens" for r in requests]
        planned = 0 if self.connector is None else len(self.connector._scheduler._held)
        used = [block.block_id for block in pool.blocks if block.ref_cnt]
        lines.append(
            f"{pool.get_num_free_blocks()} of {pool.num_gpu_blocks} blocks free, {planned} saves; in use: {used}"
        )
        return "\n".join(lines)

    def settle(self) -> None:
        """Wait until no save is in flight: vLLM takes steps without requests for that."""
        deadline = time.monotonic() + PATIENCE_S
        while self.connector is not None and self.connector.has_pending_push_work():
            assert time.monotonic() < deadline, "saves do not end"
            self.llm.llm_engine.step()

    def close(self) -> None:
        """Shut down as vLLM does."""
        self.core.shutdown()


class Served:
    """A round that is served: requests that arrive, answer and are aborted at given steps."""

    def __init__(self, engine: Engine, requests: dict[str, Any], actions: dict[str, Any]) -> None:
        self.engine, self.requests, self.actions = engine, requests, {int(step): do for step, do in actions.items()}
        self.tokens: dict[str, list[int]] = {}
        self.endings: dict[str, str | None] = {}
        self.first_s: dict[str, float] = {}
        self._came: dict[str, float] = {}
        self._waiting = sorted(requests, key=lambda name: requests[name].get("arrives", 0))

    def run(self) -> None:
        """Serve until every request has ended."""
        step, llm = 0, self.engine.llm.llm_engine
        while self._waiting or llm.has_unfinished_requests() or any(at >= step for at in self.actions):
            for action in self.actions.get(step, ()):
                act(action, self.engine)
            self._arrive(step)
            self._abort(step)
            for output in llm.step():
                self._take(output)
            assert step < MAX_STEPS, f"no end after {step} steps: {self.engine.described()}"
            self.engine.steps += 1
            step += 1

    def _arrive(self, step: int) -> None:
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest

        while self._waiting and self.requests[self._waiting[0]].get("arrives", 0) <= step:
            name = self._waiting.pop(0)
            request = self.requests[name]
            prompt = {"prompt_token_ids": request["ids"]}
            prompt |= {"cache_salt": request["salt"]} if request.get("salt") else {}
            options = {"temperature": 0.0, "detokenize": False, "ignore_eos": True}
            self._came[name] = time.monotonic()
            self.engine.llm.llm_engine.add_request(
                name,
                prompt,
                SamplingParams(max_tokens=request.get("max_tokens", 12), **options),
                lora_request=LoRARequest(*request["lora"], load_inplace=request.get("in_place", False))
                if "lora" in request
                else None,
            )

    def _abort(self, step: int) -> None:
        due = [name for name, request in self.requests.items() if request.get("aborts") == step]
        for name in due:
            self.endings[name] = "abort"
        if due:
            self.engine.llm.llm_engine.abort_request(due)

    def _take(self, output: Any) -> None:
        name, answer = output.request_id, output.outputs[0]
        self.tokens[name] = list(answer.token_ids)
        if answer.token_ids:
            self.first_s.setdefault(name, time.monotonic() - self._came[name])
        if output.finished:
            self.endings.setdefault(name, answer.finish_reason)


def transfer(job: dict[str, Any]) -> dict[str, Any]:
    """LLM's option for the job's connector."""
    if job.get("connector") is None:
        return {}
    named = {"kv_connector": "KVStoreConnector", "kv_connector_module_path": "kvstore.engines.vllm"}
    named |= {"kv_role": job.get("role", "kv_both"), "kv_load_failure_policy": job.get("policy", "recompute")}
    return {"kv_transfer_config": named | {"kv_connector_extra_config": job["connector"]}}


def rank_stats(worker: Any) -> dict[str, int]:
    """What a rank's connector has counted; runs in the rank's process."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    return dict(get_kv_transfer_group().stats()) if has_kv_transfer_group() else {}  # type: ignore[attr-defined]


def stats(connector: Any) -> dict[str, int]:
    """What a side of the connector has counted since it started."""
    return {} if connector is None else dict(connector.stats())


def act(action: list[Any], engine: Any) -> None:
    """Do what a test asks for between two steps."""
    from tests.vllm import actions

    getattr(actions, action[0])(engine, *action[1:])


class Heard(logging.Handler):
    """Keeps what kvstore says from warnings on."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if len(self.lines) < WARNINGS_KEPT:
            self.lines.append(f"{record.levelname} {record.getMessage()}")


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Do a job in this process. What went wrong outside of requests is told as "error"."""
    heard, rounds = Heard(), []
    logging.getLogger("kvstore").addHandler(heard)
    try:
        for action in job.get("before", ()):
            act(action, None)
        engine = Engine(job)
        for number, spec in enumerate(job["rounds"]):
            rounds.append(engine.serve(number, spec))
        engine.close()
    except BaseException as error:
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}", "rounds": rounds, "log": heard.lines}
    return {"error": None, "rounds": rounds, "log": heard.lines}


def in_child(job: dict[str, Any], log: Path) -> dict[str, Any]:
    """Do a job in a forked process, whose output goes to a file. A process that dies tells so as "error"."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        with log.open("wb") as out:
            os.dup2(out.fileno(), 1)
            os.dup2(out.fileno(), 2)
        with os.fdopen(writing, "w") as answer:
            answer.write(json.dumps(run(job)))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as answer:
        text = answer.read()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if not text:
        return {"error": f"the engine's process ended with status {status}", "rounds": [], "log": []}
    return dict(json.loads(text))


def main() -> None:
    """Serve jobs: [job, file for the output] a line."""
    import vllm.entrypoints.llm
    import vllm.model_executor.models.llama
    import vllm.v1.engine.core
    import vllm.v1.worker.cpu_worker  # noqa: F401

    import kvstore.store  # noqa: F401

    for line in sys.stdin:
        job, log = json.loads(line)
        answers.write(json.dumps(in_child(job, Path(log))) + "\n")
        answers.flush()


if __name__ == "__main__":
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    main()
