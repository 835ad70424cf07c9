"""The story: an engine ends, another one starts, and goes on from what the first one stored: the same tokens, the prefill
skipped."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from kvstore.tools.demo_text import STORY
from kvstore.tools.model import smollm2_folder
from tests.vllm import models
from tests.vllm.damage import SHARD, Records
from tests.vllm.harness import Answer, Clean, Engines, Round, left, loadable, prompts, serving, wholly

Model = tuple[Path, dict[str, Any], int]
"""A model's folder, LLM's options, and the tokens of a block."""


def tiny(name: str, dtype: str = "float32", block: int = 32, **options: Any) -> Callable[[Path], Model]:
    """Makes one of the tiny models."""
    return lambda folder: (
        models.write(name, folder / f"{name}-{dtype}", dtype=getattr(torch, dtype)),
        {"dtype": dtype, **options},
        block,
    )


MODELS: dict[str, Callable[[Path], Model]] = {
    "llama": tiny("llama"),
    "llama in bfloat16": tiny("llama", "bfloat16"),
    "llama with an fp8 cache": tiny("llama", "bfloat16", kv_cache_dtype="fp8"),
    "two groups": tiny("windowed"),
    "smollm2": lambda folder: (
        smollm2_folder(progress=False),
        {"dtype": "bfloat16", "kv_cache_memory_bytes": 64 << 20},
        32,
    ),
}
FRESH = ("llama", "smollm2")
"""Whose second engine has nothing in common with the first one; the others are forked from one process."""
REQUESTS = prompts(33, 64, 97, 250, 400, max_tokens=12)


def requests_for(name: str) -> list[dict[str, Any]]:
    """Prompts that a model has different answers to: a real one wants text."""
    if name != "smollm2":
        return REQUESTS
    tokens = AutoTokenizer.from_pretrained(smollm2_folder(progress=False))(STORY)["input_ids"]
    return [{"ids": tokens[i * 70 : i * 70 + len(r["ids"])], "max_tokens": 12} for i, r in enumerate(REQUESTS)]


def report(name: str, answer: Answer) -> None:
    """Print what was computed, and the ranks' counts that are not 0."""
    for number, each in enumerate(answer.rounds):
        counts = {key: n for key, n in (each.worker | each.scheduler).items() if n and not key.endswith("_s")}
        print(f"{name}, round {number}: {sum(each.computed)} prompt tokens computed; {counts}")


@pytest.mark.parametrize("name", MODELS)
def test_a_second_process_answers_the_same_and_skips_the_prefill(
    name: str, engines: Engines, clean: Clean, weights: Path, store: Path
) -> None:
    model, options, block = MODELS[name](weights)
    requests = requests_for(name)
    expected = clean.tokens(model, requests, **options)
    assert len({tuple(tokens) for tokens in expected}) == len(expected)
    for computed in (wholly(requests), left(requests, block)):
        if name in FRESH:
            engines.fresh()
        answer = engines.run(model, [serving(requests)], store, options=options)
        report(name, answer)
        assert answer.rounds[0].tokens == expected
        assert answer.rounds[0].computed == computed


def test_latent_attention_on_a_cpu_is_refused(engines: Engines, weights: Path, store: Path) -> None:
    """vLLM's reference backend there computes the rest of a prompt as if nothing came before it."""
    model = models.write("deepseek", weights / "deepseek-float32")
    answer = engines.ask(model, [serving(REQUESTS)], store)
    assert answer.error is not None
    assert "latent attention (MLA)" in answer.output.read_text(errors="replace")


def test_latent_attention_goes_on_from_what_was_loaded(
    engines: Engines, clean: Clean, weights: Path, store: Path
) -> None:
    """Answers of a clean engine, cut behind a token that begins a block: what is left to compute of that prompt is a step of
    decoding, which reads the cache on a CPU too, and from there on the rest of the same answer follows, bit by bit where both
    are alone in their batches."""
    model, options = models.write("deepseek", weights / "deepseek-float32"), {"max_num_seqs": 1}
    first = prompts(32, 64, 96, max_tokens=53)
    said = clean.tokens(model, first, **options)
    second = [{"ids": r["ids"] + tokens[:33], "max_tokens": 20} for r, tokens in zip(first, said, strict=True)]
    rest = [tokens[33:] for tokens in said]
    assert len({tuple(tokens) for tokens in rest}) == len(rest)

    def serve(requests: list[dict[str, Any]]) -> Round:
        answer = engines.run(model, [serving(requests)], store, options=options, before=[["allow_latent_attention"]])
        report("latent attention", answer)
        return answer.rounds[0]

    assert serve(first).tokens == said
    loaded = serve(second)
    assert (loaded.tokens, loaded.computed) == (rest, left(second))
    records = Records(store / SHARD)
    for chain in records.requests():
        records.flip_content(chain[0], 4321)
    assert serve(second).computed == wholly(second)


def test_the_next_round_of_one_engine_loads_what_the_last_one_stored(
    engines: Engines, clean: Clean, llama: Path, store: Path
) -> None:
    answer = engines.run(llama, [serving(REQUESTS), serving(REQUESTS), serving(REQUESTS, reset=False)], store)
    report("rounds", answer)
    assert [each.tokens for each in answer.rounds] == 3 * [clean.tokens(llama, REQUESTS)]
    assert [each.computed for each in answer.rounds] == [wholly(REQUESTS), left(REQUESTS), left(REQUESTS)]
    assert answer.rounds[2].scheduler["loads"] == answer.rounds[1].scheduler["loads"]


@pytest.mark.parametrize(
    "options",
    [{"enable_prefix_caching": False}, {"max_num_batched_tokens": 64}, {"max_num_seqs": 1}],
    ids=["no prefix caching", "chunked prefill", "one at a time"],
)
def test_however_the_engine_schedules_answers_are_the_same(
    options: dict[str, Any], engines: Engines, clean: Clean, llama: Path, store: Path
) -> None:
    expected = clean.tokens(llama, REQUESTS)
    answer = engines.run(llama, [serving(REQUESTS), serving(REQUESTS)], store, options=options)
    report(str(options), answer)
    assert [each.tokens for each in answer.rounds] == [expected, expected]
    assert [each.computed for each in answer.rounds] == [wholly(REQUESTS), left(REQUESTS)]


def test_answers_are_stored_and_loaded_as_part_of_the_next_turn(
    engines: Engines, clean: Clean, llama: Path, store: Path
) -> None:
    first = prompts(50, 90, max_tokens=80)
    said = clean.tokens(llama, first)
    second = [{"ids": r["ids"] + tokens + [7, 8, 9], "max_tokens": 12} for r, tokens in zip(first, said, strict=True)]
    answer = engines.run(llama, [serving(first), serving(second)], store)
    assert answer.rounds[1].tokens == clean.tokens(llama, second)
    # The last token of an answer is never computed.
    stored = [(len(r["ids"]) + 80 - 1) // 32 * 32 for r in first]
    assert answer.rounds[1].computed == [len(r["ids"]) - n for r, n in zip(second, stored, strict=True)]


def test_a_cache_salt_keeps_tenants_apart(engines: Engines, clean: Clean, llama: Path, store: Path) -> None:
    salted = {name: [{**request, "salt": name} for request in REQUESTS] for name in ("one", "two")}
    rounds = [serving(salted["one"]), serving(salted["two"]), serving(REQUESTS), serving(salted["one"])]
    answer = engines.run(llama, rounds, store)
    assert [each.tokens for each in answer.rounds] == 4 * [clean.tokens(llama, REQUESTS)]
    assert [each.computed for each in answer.rounds] == [*3 * [wholly(REQUESTS)], left(REQUESTS)]


def test_aborted_requests_leave_nothing_behind(engines: Engines, clean: Clean, llama: Path, store: Path) -> None:
    """Aborted while they wait, load, compute their prompt, or answer."""
    requests = prompts(*8 * [300], max_tokens=40)
    aborted = [{**request, "aborts": at} for at, request in enumerate(requests[:6])]
    options = {"max_num_batched_tokens": 128, "enable_prefix_caching": False}
    rounds = [serving(aborted + requests[6:]), serving(aborted + requests[6:]), serving(requests)]
    answer = engines.run(llama, rounds, store, options=options)
    expected = clean.tokens(llama, requests)
    report("aborted", answer)
    for each in answer.rounds:
        pairs = list(zip(each.tokens, expected, each.endings, strict=True))
        assert all(tokens == wanted[: len(tokens)] for tokens, wanted, _ in pairs)
        assert all(tokens == wanted for tokens, wanted, ending in pairs if ending != "abort")
    assert [ending for ending in answer.rounds[0].endings if ending == "abort"] == 6 * ["abort"]
    assert answer.rounds[2].endings == 8 * ["length"]
    assert sum(answer.rounds[2].computed) < sum(answer.rounds[0].computed)


def test_requests_that_share_blocks_load_them_while_others_use_them(
    engines: Engines, clean: Clean, llama: Path, store: Path
) -> None:
    [shared] = prompts(256)
    requests = [{"ids": shared["ids"] + tail["ids"], "arrives": i} for i, tail in enumerate(prompts(*6 * [40], seed=1))]
    rounds = [serving(requests), serving(requests), serving(requests, reset=False)]
    answer = engines.run(llama, rounds, store)
    report("shared", answer)
    assert [each.tokens for each in answer.rounds] == 3 * [clean.tokens(llama, requests)]
    assert answer.rounds[1].computed == left(requests)
    assert loadable(requests[0]) == 288


def test_saves_in_flight_at_shutdown_are_finished(engines: Engines, clean: Clean, llama: Path, store: Path) -> None:
    engines.run(llama, [serving(REQUESTS, settle=False)], store)
    answer = engines.run(llama, [serving(REQUESTS)], store)
    assert answer.rounds[0].tokens == clean.tokens(llama, REQUESTS)
    assert answer.rounds[0].computed == left(REQUESTS)
