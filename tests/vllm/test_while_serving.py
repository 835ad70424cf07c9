"""The story: while requests run, the store's process dies, its disk is full, its folder can be written no more, or is gone.
The engine serves on, and answers as without a store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.campaign.fulldisk import can_mount
from tests.vllm.harness import Answer, Clean, Engines, left, prompts, serving, wholly

FIRST = prompts(100, 200, 300, 400, max_tokens=24)
SECOND = prompts(150, 250, 350, 450, seed=1, max_tokens=24)
MANY = prompts(*12 * [700], seed=2, max_tokens=4)
"""More than 8 MiB of KV: a block takes 48 KiB."""
SPREAD = [{**request, "arrives": 3 * i} for i, request in enumerate(FIRST + SECOND)]


def checked(answer: Answer, clean: Clean, model: Path, rounds: list[dict[str, Any]]) -> Answer:
    """An answer all of whose rounds have the tokens of an engine without a store."""
    for number, (each, spec) in enumerate(zip(answer.rounds, rounds, strict=True)):
        counts = {
            key: n for key, n in each.worker.items() if n and key.startswith(("put_failed", "io_", "get_", "blocks"))
        }
        print(f"round {number}: {sum(each.computed)} of {sum(wholly(spec['requests']))} tokens computed, {counts}")
        assert each.tokens == clean.tokens(model, spec["requests"]), number
        assert each.endings == ["length"] * len(spec["requests"])
    return answer


def test_the_process_that_has_the_files_is_killed(engines: Engines, clean: Clean, llama: Path, store: Path) -> None:
    """Killed while blocks are loaded and saved, and when requests come; the rank's, the scheduler's, and both."""
    up = [["wait_for_io"]]
    rounds = [
        serving(FIRST),
        serving(SPREAD, actions={"9": [["kill_io"]]}),
        serving(SPREAD, actions={"0": up, "15": [["kill_io", 1]]}),
        serving(SPREAD, actions={"0": up, "1": [["kill_io_until_gone"]]}),
        serving(FIRST, actions={"0": [*up, ["kill_io", 1], ["kill_io"]]}),
        serving(FIRST + SECOND, actions={"0": up}),
        serving(FIRST + SECOND, actions={"0": up}),
    ]
    answer = checked(engines.run(llama, rounds, store), clean, llama, rounds)
    assert answer.rounds[-1].worker["io_crashes"] == 3
    assert answer.rounds[-1].scheduler["io_crashes"] == 2
    assert answer.rounds[-1].computed == left(FIRST + SECOND)


def test_the_disk_is_full(engines: Engines, clean: Clean, llama: Path, tmp_path: Path) -> None:
    """A file system of 8 MiB fills while the engine serves; once there is room again, blocks are stored again."""
    disk = tmp_path / "disk"
    assert can_mount(disk), "this machine lets no process mount a file system of its own"
    rounds = [
        serving(FIRST),
        serving(FIRST + MANY, actions={"0": [["fill_disk", str(disk)]]}),
        serving(FIRST + SECOND),
        serving(SECOND, actions={"0": [["free_disk", str(disk)]]}),
        serving(FIRST + SECOND),
    ]
    answer = engines.run(llama, rounds, disk / "store", before=[["mount", str(disk)]])
    checked(answer, clean, llama, rounds)
    assert answer.rounds[1].worker["put_failed_disk_full"] > 0
    assert answer.rounds[2].computed[: len(FIRST)] == left(FIRST)
    assert answer.rounds[4].computed == left(FIRST + SECOND)


def test_no_file_may_grow(engines: Engines, clean: Clean, llama: Path, store: Path) -> None:
    rounds = [
        serving(FIRST),
        serving(FIRST + MANY, actions={"0": [["bound_files", 0]]}),
        serving(SECOND, actions={"0": [["bound_files", None]]}),
        serving(FIRST + SECOND),
    ]
    answer = checked(engines.run(llama, rounds, store), clean, llama, rounds)
    counts = answer.rounds[1].worker
    assert sum(n for name, n in counts.items() if name.startswith("put_failed_")) > 0
    assert answer.rounds[3].computed == left(FIRST + SECOND)


def test_the_capacity_is_used_up(engines: Engines, clean: Clean, llama: Path, store: Path) -> None:
    """2 MiB hold 40 blocks; each round needs several times as many."""
    rounds = [serving(MANY), serving(FIRST + SECOND), serving(MANY), serving(FIRST)]
    answer = engines.run(llama, rounds, store, connector={"capacity": "2M"})
    checked(answer, clean, llama, rounds)
    assert (store / "tp0of1-pp0of1" / "data.mdb").stat().st_size <= 2 * 2**20
    counts = answer.rounds[-1].worker
    reasons = {name: n for name, n in counts.items() if name.startswith("blocks_save_failed_")}
    assert "blocks_save_failed_not_admitted" in reasons
    assert sum(reasons.values()) == counts["blocks_save_failed"]


@pytest.mark.parametrize("then", [[], [["kill_io_until_gone"], ["kill_io", 1]]], ids=["open", "to be opened again"])
def test_the_folder_is_removed(then: list[Any], engines: Engines, clean: Clean, llama: Path, store: Path) -> None:
    """The files that are open stay as long as they are; a process that starts again finds none, or makes new ones."""
    rounds = [
        serving(FIRST),
        serving(SPREAD, actions={"4": [["remove", str(store)], *then]}),
        serving(FIRST + SECOND),
        serving(FIRST + SECOND),
    ]
    checked(engines.run(llama, rounds, store), clean, llama, rounds)
    after = [serving(FIRST + SECOND), serving(FIRST + SECOND)]
    answer = checked(engines.run(llama, after, store), clean, llama, after)
    assert answer.rounds[1].computed == left(FIRST + SECOND)


@pytest.mark.parametrize("then", [[], [["kill_io_until_gone"], ["kill_io", 1]]], ids=["open", "to be opened again"])
def test_the_folder_is_made_read_only(
    then: list[Any], engines: Engines, clean: Clean, llama: Path, store: Path
) -> None:
    rounds = [
        serving(FIRST),
        serving(SPREAD, actions={"4": [["chmod", str(store), 0o500], *then]}),
        serving(FIRST + SECOND),
        serving(FIRST, actions={"0": [["chmod", str(store), 0o700]]}),
    ]
    answer = engines.run(llama, rounds, store, before=[["obey_modes"]])
    checked(answer, clean, llama, rounds)
    after = [serving(FIRST + SECOND), serving(FIRST + SECOND)]
    answer = checked(engines.run(llama, after, store), clean, llama, after)
    assert answer.rounds[0].computed[: len(FIRST)] == left(FIRST)
    assert answer.rounds[1].computed == left(FIRST + SECOND)


def test_a_store_that_cannot_be_opened_ends_the_engine_with_a_reason(
    engines: Engines, llama: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("no folder")
    answer = engines.ask(llama, [serving(FIRST)], tmp_path / "file" / "store")
    assert answer.error is not None
    assert str(tmp_path / "file") in answer.error


def test_an_unknown_option_is_refused_by_name(engines: Engines, llama: Path, store: Path) -> None:
    answer = engines.ask(llama, [serving(FIRST)], store, connector={"capacty": "1G"})
    assert answer.error is not None
    assert "capacty" in answer.error
    assert "capacity" in answer.error
