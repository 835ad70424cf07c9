"""An engine whose MultiConnector has two of kvstore's connectors; `python -m tests.vllm.multi MODEL FOLDER` prints what it
did as JSON. Its figures go to vllm's log and to Prometheus, as `vllm serve` sends them."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from tests.vllm.engine import OPTIONS
from tests.vllm.harness import prompts

REQUESTS = prompts(97, 200, max_tokens=8)


def part(folder: Path) -> dict[str, Any]:
    """One of the connectors."""
    return {
        "kv_connector": "KVStoreConnector",
        "kv_connector_module_path": "kvstore.engines.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"path": str(folder), "capacity": "64M"},
    }


def served(llm: Any) -> list[list[int]]:
    """The answers to REQUESTS."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0.0, max_tokens=8, detokenize=False, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": r["ids"]} for r in REQUESTS], sampling)
    core, deadline = llm.llm_engine.engine_core.engine_core, time.monotonic() + 30
    while core.scheduler.connector.has_pending_push_work():
        assert time.monotonic() < deadline, "saves do not end"
        llm.llm_engine.step()
    return [list(output.outputs[0].token_ids) for output in outputs]


def main(model: str, folder: str) -> None:
    """Serve the same requests twice."""
    from prometheus_client import REGISTRY
    from vllm import LLM

    parts = [part(Path(folder, name)) for name in ("one", "two")]
    transfer = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": parts},
    }
    llm = LLM(model=model, **OPTIONS, kv_transfer_config=transfer, disable_log_stats=False)
    rounds = [served(llm)]
    assert llm.reset_prefix_cache()
    rounds.append(served(llm))
    events = {
        sample.labels["event"]: sample.value
        for metric in REGISTRY.collect()
        for sample in metric.samples
        if sample.name == "vllm:kvstore_events_total"
    }
    print(json.dumps({"rounds": rounds, "events": events}), file=answers, flush=True)
    llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    main(*sys.argv[1:])
