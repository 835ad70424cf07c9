"""The story: what lies in the store is not what was stored. The engine's answers are those of an engine without a store,
what was refused is counted by kind, stored again, and good the next time."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvstore.record import Header
from tests.support import report_campaign
from tests.vllm import models
from tests.vllm.damage import SHARD, Records, damage_some
from tests.vllm.harness import Answer, Clean, Engines, left, prompts, rejections, serving, wholly

LENGTH = 400
BLOCKS = LENGTH // 32
THREE = prompts(*3 * [LENGTH], max_tokens=12)
PLACES = (0, BLOCKS // 2, BLOCKS - 1)
"""A first, a middle and a last block."""
SOME = prompts(70, 130, 190, 250, 310, max_tokens=12)


@pytest.fixture(scope="module")
def stored(engines: Engines, llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with all full blocks of THREE."""
    path = tmp_path_factory.mktemp("stored") / "store"
    engines.run(llama, [serving(THREE)], path)
    return path


def recovered(engines: Engines, clean: Clean, model: Path, store: Path, requests: list[dict[str, Any]]) -> list[Answer]:
    """Two engines, one after another, over a damaged store: both answer as without one, and the second finds all that the
    first one could not use."""
    expected = clean.tokens(model, requests)
    answers = [engines.run(model, [serving(requests)], store) for _ in range(2)]
    assert [answer.rounds[0].tokens for answer in answers] == [expected, expected]
    assert answers[1].rounds[0].computed == left(requests)
    assert rejections(answers[1].rounds[0].worker) == {}
    return answers


FAULTS: dict[str, tuple[Callable[[Records, Header], None], str]] = {
    "a bit": (lambda records, header: records.flip_bit(header, 4711), "storage_hash"),
    "a bit under right hashes": (lambda records, header: records.flip_content(header, 4711), "content"),
    "a bit of the index": (lambda records, header: records.flip_header(header, 4711), "header"),
    "a chunk is gone": (lambda records, header: records.lose_chunk(header), "storage_hash"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_damaged_block_is_computed_again_and_stored_again(
    fault: str, stored: Path, engines: Engines, clean: Clean, llama: Path, store: Path
) -> None:
    """The first, a middle, and the last one of a request each."""
    shutil.copytree(stored, store)
    damage, kind = FAULTS[fault]
    records = Records(store / SHARD)
    for place, headers in zip(PLACES, records.requests(), strict=True):
        damage(records, headers[place])
    first, _ = recovered(engines, clean, llama, store, THREE)
    print(f"{fault}: {first.rounds[0].computed} tokens computed, {rejections(first.rounds[0].worker)}")
    assert rejections(first.rounds[0].worker) == {kind: 3}
    assert sorted(first.rounds[0].computed) == sorted(LENGTH - 32 * place for place in PLACES)
    assert first.rounds[0].worker["blocks_saved"] >= 3


@pytest.mark.parametrize("way", ["records", "chunks"])
def test_two_exchanged_blocks_are_refused_both(
    way: str, stored: Path, engines: Engines, clean: Clean, llama: Path, store: Path
) -> None:
    """In one request, and in two at the same position."""
    shutil.copytree(stored, store)
    records = Records(store / SHARD)
    exchange = records.exchange if way == "records" else records.exchange_chunks
    one, two, three = records.requests()
    exchange(one[2], one[7])
    exchange(two[4], three[4])
    first, _ = recovered(engines, clean, llama, store, THREE)
    print(f"exchanged {way}: {first.rounds[0].computed} tokens computed, {rejections(first.rounds[0].worker)}")
    assert rejections(first.rounds[0].worker) == {"key" if way == "records" else "storage_hash": 4}
    assert sorted(first.rounds[0].computed) == sorted(LENGTH - 32 * place for place in (2, 4, 4))


def test_a_store_of_other_weights_has_nothing_for_this_model(
    engines: Engines, clean: Clean, llama: Path, weights: Path, store: Path
) -> None:
    other = models.write("llama", weights / "llama-other", seed=1)
    assert clean.tokens(llama, SOME) != clean.tokens(other, SOME)
    for model, computed in ((other, wholly(SOME)), (llama, wholly(SOME)), (other, left(SOME)), (llama, left(SOME))):
        answer = engines.run(model, [serving(SOME)], store)
        assert answer.rounds[0].tokens == clean.tokens(model, SOME)
        assert answer.rounds[0].computed == computed


def test_other_weights_in_the_same_folder_are_told_apart(
    engines: Engines, clean: Clean, weights: Path, store: Path, tmp_path: Path
) -> None:
    """A fine-tuned model that was saved over the one before it."""
    answers = []
    for seed in (2, 3):
        shutil.rmtree(tmp_path / "model", ignore_errors=True)
        model = models.write("llama", tmp_path / "model", seed=seed)
        # By another name, so that what is known of the first is not taken for the second.
        named = models.write("llama", tmp_path / f"reference {seed}", seed=seed)
        answers.append(engines.run(model, [serving(SOME)], store).rounds[0])
        assert answers[-1].tokens == clean.tokens(named, SOME)
    assert answers[0].tokens != answers[1].tokens
    assert [each.computed for each in answers] == [wholly(SOME), wholly(SOME)]


@pytest.mark.parametrize(
    "others",
    [{"dtype": "bfloat16"}, {"dtype": "bfloat16", "kv_cache_dtype": "fp8"}, {"block_size": 64}],
    ids=["bfloat16", "fp8", "blocks of 64"],
)
def test_a_store_of_other_kv_is_not_used(
    others: dict[str, Any], engines: Engines, clean: Clean, llama: Path, store: Path
) -> None:
    """Whatever it is used for: no answer may tell. Where an arrangement of the bytes is shared it may be loaded."""
    engines.run(llama, [serving(SOME)], store, options=others)
    answer = engines.run(llama, [serving(SOME), serving(SOME)], store)
    assert [each.tokens for each in answer.rounds] == 2 * [clean.tokens(llama, SOME)]
    assert [each.computed for each in answer.rounds] == [wholly(SOME), left(SOME)]


def test_whatever_is_damaged_answers_are_right(engines: Engines, clean: Clean, llama: Path, store: Path) -> None:
    """Several records at a time, in each way, between the rounds of an engine whose store is open all the while."""
    expected, chance = clean.tokens(llama, SOME), random.Random(11)
    rounds = [serving(SOME)] + [
        serving(SOME, actions={"0": [["damage", chance.randrange(2**32), chance.randrange(1, 5)]]}) for _ in range(30)
    ]
    answer = engines.run(llama, [*rounds, serving(SOME), serving(SOME)], store)
    wrong = sum(a != b for each in answer.rounds for a, b in zip(each.tokens, expected, strict=True))
    refused = rejections(answer.rounds[-1].worker)
    print(f"damaged 30 times: {wrong} wrong answers, {refused} refused")
    report_campaign("vllm/damage", 30, sum(refused.values()), wrong, "11")
    assert wrong == 0
    assert {"storage_hash", "content", "key"} <= set(refused)
    assert answer.rounds[-1].computed == left(SOME)


def test_damage_to_a_model_with_two_groups(engines: Engines, clean: Clean, weights: Path, store: Path) -> None:
    model, chance = models.write("windowed", weights / "windowed-float32"), random.Random(12)
    expected = clean.tokens(model, SOME)
    engines.run(model, [serving(SOME)], store)
    for _ in range(4):
        damage_some(store / SHARD, chance, 4)
        answer = engines.run(model, [serving(SOME), serving(SOME)], store)
        assert [each.tokens for each in answer.rounds] == [expected, expected]
        print(f"two groups: {sum(answer.rounds[0].computed)} tokens computed, {rejections(answer.rounds[0].worker)}")
        assert answer.rounds[1].computed == left(SOME)


def test_a_run_after_damage_stores_nothing_that_came_from_it(
    stored: Path, engines: Engines, clean: Clean, llama: Path, store: Path
) -> None:
    """The records that a recovered engine leaves behind hold what a clean engine stored: same keys, same checksums."""
    shutil.copytree(stored, store)
    records = Records(store / SHARD)
    for headers in records.requests():
        for place in (0, 3, 9):
            records.flip_content(headers[place], 99 * place)
    recovered(engines, clean, llama, store, THREE)
    good = {h.key: h.tagged_checksum for h in Records(stored / SHARD).headers()}
    assert {h.key: h.tagged_checksum for h in records.headers()} == good


def test_the_policy_fail_ends_the_request_and_is_warned_of(
    stored: Path, engines: Engines, clean: Clean, llama: Path, store: Path
) -> None:
    shutil.copytree(stored, store)
    records = Records(store / SHARD)
    records.flip_bit(records.requests()[0][4], 5)
    answer = engines.run(llama, [serving(THREE + SOME), serving(THREE + SOME)], store, policy="fail")
    assert any('kv_load_failure_policy is "fail"' in line for line in answer.log)
    assert sorted(map(str, answer.rounds[0].endings)) == ["error"] + ["length"] * (len(THREE + SOME) - 1)
    answers = zip(answer.rounds[0].tokens, answer.rounds[0].endings, clean.tokens(llama, THREE + SOME), strict=True)
    assert all(tokens == wanted for tokens, ending, wanted in answers if ending == "length")
    # It is a miss from then on: the next one computes it, and stores it.
    assert answer.rounds[1].endings == ["length"] * len(THREE + SOME)
    assert answer.rounds[1].tokens == clean.tokens(llama, THREE + SOME)
    recovered(engines, clean, llama, store, THREE)


def test_the_policy_recompute_is_named_at_start(engines: Engines, llama: Path, store: Path) -> None:
    answer = engines.run(llama, [serving(SOME[:1])], store)
    assert any('kv_load_failure_policy is "recompute"' in line for line in answer.log)
