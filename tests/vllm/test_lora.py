"""The story: adapters over one model. Each has KV of its own, also after it was trained again and written where it was, of
which vLLM's block hashes do not tell."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.vllm.harness import Clean, Engines, left, prompts, serving, wholly
from tests.vllm.models import write_adapter
from tests.vllm.test_restart import report

OPTIONS = {"enable_lora": True, "max_loras": 3, "max_lora_rank": 8}
"""A slot more than adapters: vLLM on a CPU answers requests without an adapter by the last slot's."""
REQUESTS = prompts(33, 97, 250, max_tokens=12)


def of(folder: Path, number: int = 1) -> list[dict[str, Any]]:
    """The requests, of an adapter."""
    return [{**request, "lora": [folder.name, number, str(folder)]} for request in REQUESTS]


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    """Where an adapter is written, again and again."""
    return tmp_path / "adapter"


def expected_of(clean: Clean, model: Path, folder: Path, seed: int) -> list[list[int]]:
    """What an engine without a store answers by such an adapter."""
    return clean.tokens(model, of(write_adapter(folder / f"reference-{seed}", seed)), **OPTIONS)


def test_adapters_are_loaded_each_with_its_own_kv(
    engines: Engines, clean: Clean, llama: Path, weights: Path, store: Path
) -> None:
    sql, chat = (write_adapter(weights / name, seed) for seed, name in enumerate(("sql", "chat"), start=1))
    requests = [*of(sql, 1), *of(chat, 2), *REQUESTS]
    expected = clean.tokens(llama, requests, **OPTIONS)
    assert len({tuple(tokens) for tokens in expected}) == len(requests)
    assert expected[6:] == clean.tokens(llama, REQUESTS)
    for computed in (wholly(requests), [*left(requests[:6]), *wholly(REQUESTS)]):
        answer = engines.run(llama, [serving(requests)], store, options=OPTIONS)
        report("adapters", answer)
        assert answer.rounds[0].tokens == expected
        assert answer.rounds[0].computed == computed


def test_an_adapter_that_was_trained_again_finds_nothing_of_the_former_one(
    engines: Engines, clean: Clean, llama: Path, tmp_path: Path, adapter: Path, store: Path
) -> None:
    for seed in (1, 2):
        write_adapter(adapter, seed)
        for computed in (wholly(REQUESTS), left(REQUESTS)):
            [served] = engines.run(llama, [serving(of(adapter))], store, options=OPTIONS).rounds
            assert served.tokens == expected_of(clean, llama, tmp_path, seed)
            assert served.computed == computed


def test_an_adapter_that_is_written_while_it_is_served_is_left_out_and_spoils_nothing(
    engines: Engines, clean: Clean, llama: Path, tmp_path: Path, adapter: Path, store: Path
) -> None:
    """vLLM goes on with what it has loaded: an engine that starts with the new files must not be given KV of the old ones."""
    write_adapter(adapter, 1)
    rounds = [serving(of(adapter)), serving(of(adapter), actions={"0": [["write_adapter", str(adapter), 2]]})]
    answer = engines.run(llama, rounds, store, options=OPTIONS)
    report("written while served", answer)
    assert [each.tokens for each in answer.rounds] == 2 * [expected_of(clean, llama, tmp_path, 1)]
    assert answer.rounds[1].computed == wholly(REQUESTS)
    assert any("its files changed while the engine ran" in line for line in answer.log)
    [served] = engines.run(llama, [serving(of(adapter))], store, options=OPTIONS).rounds
    assert served.tokens == expected_of(clean, llama, tmp_path, 2)
    assert served.computed == wholly(REQUESTS)


def test_an_adapter_that_is_added_while_the_engine_runs_is_served(
    engines: Engines, clean: Clean, llama: Path, tmp_path: Path, adapter: Path, store: Path
) -> None:
    late = [serving(of(adapter), actions={"0": [["write_adapter", str(adapter), 1]]}), serving(of(adapter))]
    for computed in (wholly(REQUESTS), left(REQUESTS)):
        answer = engines.run(llama, late, store, options=OPTIONS)
        assert [each.tokens for each in answer.rounds] == 2 * [expected_of(clean, llama, tmp_path, 1)]
        assert [each.computed for each in answer.rounds] == [computed, left(REQUESTS)]


def both(folder: Path) -> list[Path]:
    """Two adapters."""
    return [write_adapter(folder / name, seed) for seed, name in enumerate(("sql", "chat"), start=1)]


def spoiled(engines: Engines, clean: Clean, model: Path, store: Path, requests: list[dict[str, Any]]) -> None:
    """Serve requests in an engine that starts after another: it must not have been given KV of other weights."""
    [served] = engines.run(model, [serving(requests)], store, options=OPTIONS).rounds
    assert served.tokens == clean.tokens(model, requests, **OPTIONS)
    assert served.computed == wholly(requests)


def test_a_number_that_means_two_adapters_spoils_nothing(
    engines: Engines, clean: Clean, llama: Path, tmp_path: Path, store: Path
) -> None:
    """vLLM answers the second by the first's weights, under hashes of the second, and finds these blocks in its own cache
    where the second comes under a number of its own."""
    sql, chat = both(tmp_path)
    rounds = [serving(of(sql, 1)), serving(of(chat, 1)), serving(of(chat, 2), reset=False)]
    answer = engines.run(llama, rounds, store, options=OPTIONS)
    wrong = clean.tokens(llama, of(sql, 1), **OPTIONS)
    assert [each.tokens for each in answer.rounds[:2]] == [wrong, wrong]
    spoiled(engines, clean, llama, store, of(chat, 2))


@pytest.mark.parametrize("step", [0, 5], ids=["that wait", "that run"])
def test_requests_whose_adapter_is_replaced_in_place_spoil_nothing(
    step: int, engines: Engines, clean: Clean, llama: Path, tmp_path: Path, store: Path
) -> None:
    """They have the former path, and are computed with the new weights."""
    old, new = both(tmp_path)
    load = [["load_adapter", "sql", 1, str(old)]] if step else []
    asked = [{**each, "max_tokens": 120} for each in of(old)]
    replaced = {"0": load, str(step): [["load_adapter", "sql", 1, str(new), True]]}
    answer = engines.run(llama, [serving(of(old)[:1]), serving(asked, actions=replaced)], store, options=OPTIONS)
    report("replaced", answer)
    assert any("other weights were loaded under its number" in line for line in answer.log)
    follow = [
        {**each, "ids": each["ids"] + tokens, "max_tokens": 12}
        for each, tokens in zip(asked, answer.rounds[1].tokens, strict=True)
    ]
    [served] = engines.run(llama, [serving(follow)], store, options=OPTIONS).rounds
    assert served.tokens == clean.tokens(llama, follow, **OPTIONS)


def test_requests_that_have_their_adapter_read_again_in_every_step_store_nothing(
    engines: Engines, clean: Clean, llama: Path, tmp_path: Path, adapter: Path, store: Path
) -> None:
    write_adapter(adapter, 1)
    asked = [{**each, "in_place": True} for each in of(adapter)]
    answer = engines.run(llama, [serving(asked), serving(asked)], store, options=OPTIONS)
    assert [each.tokens for each in answer.rounds] == 2 * [expected_of(clean, llama, tmp_path, 1)]
    spoiled(engines, clean, llama, store, of(adapter))


def test_an_adapter_that_is_written_after_it_was_loaded_is_not_taken_for_the_new_one(
    engines: Engines, clean: Clean, llama: Path, tmp_path: Path, adapter: Path, store: Path
) -> None:
    """Loaded when it is registered, written over before its first request."""
    write_adapter(adapter, 1)
    before = [["load_adapter", "adapter", 1, str(adapter)], ["write_adapter", str(adapter), 2]]
    answer = engines.run(llama, [serving(of(adapter), actions={"0": before})], store, options=OPTIONS)
    assert answer.rounds[0].tokens == expected_of(clean, llama, tmp_path, 1)
    spoiled(engines, clean, llama, store, of(adapter))
