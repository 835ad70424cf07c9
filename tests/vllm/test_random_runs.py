"""The story: an engine serves random requests for a long time. Prompts share beginnings, the cache is too small for those
that run at one time, records are damaged, engines end and others start, and the store's process is killed. Every answer is
that of an engine without a store."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tests.support import report_campaign
from tests.vllm import models
from tests.vllm.damage import SHARD, damage_some
from tests.vllm.harness import Clean, Engines, ids, rejections, serving

REQUESTS = 200
RESTARTS = 3
ROUNDS = 5
"""In each engine."""
CASES: dict[str, tuple[str, dict[str, Any], int]] = {
    "llama": ("llama", {}, 3 * 26),
    "llama without prefix caching": ("llama", {"enable_prefix_caching": False}, 3 * 26),
    "llama in chunks": ("llama", {"max_num_batched_tokens": 96}, 3 * 26),
    "two groups": ("windowed", {}, 4 * 26),
}
"""A model, LLM's options, and how many of a layer's blocks the cache holds: little more than one long request needs."""
LONGEST = 736
LAYER_BLOCK_BYTES = 2 * 32 * 64 * 4


def requests_of(chance: random.Random, count: int) -> list[dict[str, Any]]:
    """Requests that share beginnings with one another, come at different times, and are sometimes aborted or salted."""
    bases = [ids(500, 90 + i) for i in range(6)]
    made = []
    for _ in range(count):
        prompt = chance.choice(bases)[: chance.randrange(500)] + ids(chance.randrange(1, 150), chance.randrange(2**32))
        request = {"ids": prompt, "max_tokens": chance.choice([1, 8, 24, 70])}
        request |= {"salt": "tenant"} if chance.random() < 0.15 else {}
        request["arrives"] = chance.randrange(20)
        request |= {"aborts": request["arrives"] + chance.randrange(30)} if chance.random() < 0.1 else {}
        made.append(request)
    return made


def jobs_of(chance: random.Random) -> list[list[dict[str, Any]]]:
    """The rounds of each engine. Of all requests half come a second time; two rounds have the store's process killed."""
    fresh = requests_of(chance, REQUESTS // 2)
    again = [dict(request) for request in chance.sample(fresh, len(fresh))]
    order = fresh + again
    size = REQUESTS // ((RESTARTS + 1) * ROUNDS)
    specs = [serving(order[i : i + size]) for i in range(0, REQUESTS, size)]
    for number in chance.sample(range(3, len(specs)), 2):
        specs[number]["actions"] = {str(chance.randrange(1, 12)): [["kill_io"]]}
    for number in chance.sample(range(3, len(specs)), 6):
        specs[number].setdefault("actions", {})["0"] = [["damage", chance.randrange(2**32), 6]]
    return [specs[i : i + ROUNDS] for i in range(0, len(specs), ROUNDS)]


@pytest.mark.parametrize("name", CASES)
def test_random_requests_are_answered_as_without_a_store(
    name: str, engines: Engines, clean: Clean, weights: Path, store: Path
) -> None:
    kind, options, blocks = CASES[name]
    model, chance = models.write(kind, weights / f"{kind}-float32"), random.Random(name)
    small = {**options, "kv_cache_memory_bytes": blocks * LAYER_BLOCK_BYTES, "max_model_len": LONGEST}
    wrong = answers = aborted = preemptions = skipped = loads = damaged = 0
    refused: dict[str, int] = {}
    for rounds in jobs_of(chance):
        if (store / SHARD).exists():
            damaged += len(damage_some(store / SHARD, chance, 8))
        answer = engines.run(model, rounds, store, options=small)
        for each, spec in zip(answer.rounds, rounds, strict=True):
            damaged += 6 * ("0" in spec.get("actions", {}))
            expected = clean.tokens(model, spec["requests"], **options)
            for tokens, ending, wanted, request in zip(
                each.tokens, each.endings, expected, spec["requests"], strict=True
            ):
                cut = ending == "abort"
                wrong += tokens != (wanted[: len(tokens)] if cut else wanted)
                aborted += cut
                answers += not cut
                assert cut or ending == "length", (ending, request)
            preemptions += each.preemptions
            skipped += sum(len(r["ids"]) for r in spec["requests"]) - sum(each.computed)
        for kind_of, count in rejections(answer.rounds[-1].worker).items():
            refused[kind_of] = refused.get(kind_of, 0) + count
        loads += answer.rounds[-1].scheduler["loads"]
    print(
        f"{name}: {answers} answers, {aborted} aborted, {wrong} wrong; {preemptions} preemptions, {loads} loads, "
        f"{skipped} prompt tokens not computed, {damaged} records damaged, refused: {refused}"
    )
    report_campaign(f"vllm/{name}", damaged, sum(refused.values()), wrong, repr(name))
    assert wrong == 0
    assert answers + aborted == REQUESTS
    assert preemptions > 0
    assert loads > 0
    assert sum(refused.values()) > 0
