"""What lets vLLM's OffloadingConnector run on a machine without a GPU: an OffloadingSpec whose worker copies between two
host memories, and a runner for one engine over it.

vLLM's own worker needs streams of a device and refuses the CPU backend; all else here is vLLM's: connector, scheduler,
primary tier and the manager of the tiers.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import traceback
from pathlib import Path
from typing import Any

from tests.vllm import engine  # first: it sets vLLM's environment

# isort: split
import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

OPTIONS: dict[str, Any] = engine.OPTIONS | {"max_model_len": 512, "max_num_seqs": 4, "kv_cache_memory_bytes": 16 << 20}
HOST_BYTES = 8 << 20


class HostWorker(OffloadingWorker):
    """Copies whole blocks between the engine's tensors and rows of a region, at once. One block a chunk."""

    def __init__(self, kv_caches: Any, region: Any) -> None:
        self._region, self._done = region, list[Any]()
        sizes = [t.page_size_bytes for t in kv_caches.tensors]
        self._blocks = [t.tensor.view(-1).view(torch.int8).view(-1, t.page_size_bytes) for t in kv_caches.tensors]
        self._rows = [region.create_next_worker_view(size) for size in sizes]
        self._members = [sorted({ref.tensor_idx for ref in refs}) for refs in kv_caches.group_data_refs]

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """From blocks to rows."""
        for tensor, block, row in self._pairs(src_spec, dst_spec):
            self._rows[tensor][row] = self._blocks[tensor][block]
        return self._end(job_id)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any, expedited: bool = False) -> bool:
        """From rows to blocks."""
        for tensor, block, row in self._pairs(dst_spec, src_spec):
            self._blocks[tensor][block] = self._rows[tensor][row]
        return self._end(job_id)

    def _pairs(self, blocks: Any, rows: Any) -> list[tuple[int, int, int]]:
        groups = [group for group, size in enumerate(blocks.group_sizes) for _ in range(size)]
        moved = zip(groups, blocks.block_ids.tolist(), rows.block_ids.tolist(), strict=True)
        return [(tensor, block, row) for group, block, row in moved for tensor in self._members[group]]

    def _end(self, job_id: int) -> bool:
        self._done.append(TransferResult(job_id=job_id, success=True))
        return True

    def get_finished(self) -> list[Any]:
        """The transfers since the last call."""
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: set[int]) -> None:
        """Nothing: a transfer ends when it is submitted."""

    def shutdown(self) -> None:
        """Give the region back."""
        self._rows.clear()
        self._region.cleanup()


class HostTieringSpec(TieringOffloadingSpec):
    """vLLM's tiers over a HostWorker."""

    def get_worker(self, kv_caches: Any) -> Any:
        """The worker, made once."""
        if not self._worker:
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=0,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._worker = HostWorker(kv_caches, region)
        return self._worker


def transfer(tier: dict[str, Any]) -> dict[str, Any]:
    """The kv_transfer_config of vLLM's OffloadingConnector over a tier's options."""
    extra = {
        "spec_name": "HostTieringSpec",
        "spec_module_path": "tests.vllm.cpu_spec",
        "cpu_bytes_to_use": HOST_BYTES,
        "secondary_tiers": [{"type": "KVStoreTier", "module_path": "kvstore.engines.vllm", **tier}],
    }
    return {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Serve a job's prompts one after the other: {"model": folder, "tier": options or None, "prompts": token ids, "options":
    LLM's own over OPTIONS}. Tells the tokens, and what the tier counted."""
    from vllm import LLM, SamplingParams

    options = OPTIONS | job.get("options", {})
    if job["tier"] is not None:
        options["kv_transfer_config"] = transfer(job["tier"])
    llm = LLM(model=job["model"], **options)
    core = llm.llm_engine.engine_core.engine_core  # type: ignore[attr-defined]
    sampling = SamplingParams(temperature=0.0, max_tokens=12, detokenize=False, ignore_eos=True)
    tokens = []
    for ids in job["prompts"]:
        [answer] = llm.generate([{"prompt_token_ids": ids}], sampling, use_tqdm=False)
        tokens.append(list(answer.outputs[0].token_ids))
    counts = {} if job["tier"] is None else settle(core)
    core.shutdown()
    return {"tokens": tokens, "counts": counts}


def settle(core: Any) -> dict[str, int]:
    """Let jobs end; what the tier counted."""
    manager = core.scheduler.connector.connector_scheduler.manager
    while core.scheduler.connector.has_pending_push_work():
        core.step()
    [tier] = manager.secondary_tiers
    return dict(tier.counts())


def in_child(job: dict[str, Any], log: Path) -> dict[str, Any]:
    """Do a job in a fork of this process, whose output goes to a file. What went wrong is told as "error"."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        with log.open("wb") as out:
            os.dup2(out.fileno(), 1)
            os.dup2(out.fileno(), 2)
        try:
            logging.basicConfig(level=logging.INFO)
            answer = run(job)
        except BaseException as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        os.write(writing, json.dumps(answer).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as told:
        text = told.read()
    os.waitpid(child, 0)
    return dict(json.loads(text or '{"error": "the process of the engine died"}'))


def main() -> None:
    """Serve jobs: [job, file for the output] a line. Importing vLLM takes longer than an engine of a tiny model."""
    import vllm.entrypoints.llm
    import vllm.model_executor.models.llama
    import vllm.v1.engine.core
    import vllm.v1.worker.cpu_worker  # noqa: F401

    import kvstore.store  # noqa: F401

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        job, log = json.loads(line)
        answers.write(json.dumps(in_child(job, Path(log))) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
