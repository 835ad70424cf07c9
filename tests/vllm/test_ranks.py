"""The story: an engine of two tensor-parallel ranks, each a process with a shard of its own; a block is there once both
have it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.vllm.damage import Records
from tests.vllm.harness import Answer, Clean, Engines, left, prompts, rejections, serving, wholly

REQUESTS = prompts(70, 130, 190, 250, max_tokens=12)
TWO: dict[str, Any] = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
SHARDS = ("tp0of2-pp0of1", "tp1of2-pp0of1")


@pytest.fixture(scope="module")
def expected(engines: Engines, llama: Path) -> list[list[int]]:
    """What two ranks without a store answer: they add in another order than one."""
    return engines.run(llama, [serving(REQUESTS)], options=TWO).rounds[0].tokens


def show(name: str, answer: Answer) -> None:
    """Print what was computed, and what each rank loaded and saved."""
    for each in answer.rounds:
        counts = [
            {key: n for key, n in rank.items() if n and key.startswith(("blocks", "get_", "put_"))}
            for rank in each.ranks
        ]
        print(f"{name}: {each.computed} tokens computed, {counts}")


def test_two_ranks_store_and_two_load(
    expected: list[list[int]], engines: Engines, clean: Clean, llama: Path, store: Path
) -> None:
    for computed in (wholly(REQUESTS), left(REQUESTS)):
        answer = engines.run(llama, [serving(REQUESTS)], store, options=TWO)
        show("two ranks", answer)
        assert answer.rounds[0].tokens == expected
        assert answer.rounds[0].computed == computed
    assert {folder.name for folder in store.iterdir()} >= set(SHARDS)
    # What the ranks of another split stored lies in heads of their own.
    answer = engines.run(llama, [serving(REQUESTS)], store)
    show("one rank, from what two stored", answer)
    assert answer.rounds[0].tokens == clean.tokens(llama, REQUESTS)
    assert rejections(answer.rounds[0].worker) == {}


def test_a_block_that_one_rank_refuses_is_computed_by_both(
    expected: list[list[int]], engines: Engines, llama: Path, store: Path
) -> None:
    engines.run(llama, [serving(REQUESTS)], store, options=TWO)
    records = Records(store / SHARDS[1])
    records.flip_content(records.headers()[5], 77)
    answer = engines.run(llama, [serving(REQUESTS), serving(REQUESTS)], store, options=TWO)
    show("one rank's block damaged", answer)
    assert [each.tokens for each in answer.rounds] == [expected, expected]
    assert [rejections(rank) for rank in answer.rounds[0].ranks] == [{}, {"content": 1}]
    assert sum(answer.rounds[0].computed) > sum(left(REQUESTS))
    assert answer.rounds[1].computed == left(REQUESTS)
