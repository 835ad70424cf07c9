"""The story: a disk goes bad, and block after block is refused. Loads are then switched off for a while, so that an engine
computes instead of waiting for reads that will be refused; a few refusals an hour switch nothing off.
"""

from __future__ import annotations

import logging
import threading
from typing import Any

import pytest

from kvstore import StoreConfig
from kvstore.breaker import Breaker
from kvstore.errors import ConfigError


class Clock:
    """Seconds that a test sets."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def messages(caplog: pytest.LogCaptureFixture) -> list[tuple[int, str]]:
    return [(r.levelno, r.getMessage()) for r in caplog.records if r.name == "kvstore.breaker"]


def test_loads_go_off_above_the_rate_and_on_again_and_each_is_said_once(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    breaker = Breaker(10, 60.0, clock)
    breaker.rejected(10)
    assert not breaker.off()
    assert messages(caplog) == []
    breaker.rejected(1)
    assert breaker.off()
    clock.now += 59.9
    assert breaker.off()
    clock.now += 0.1
    assert not breaker.off()
    assert not breaker.off()
    assert breaker.trips == 1
    assert [level for level, _ in messages(caplog)] == [logging.ERROR, logging.WARNING]
    said = messages(caplog)[0][1]
    assert "11 blocks" in said
    assert "more than 10" in said
    assert "kvstore-fsck" in said


def test_what_lies_more_than_a_minute_back_does_not_count(clock: Clock) -> None:
    breaker = Breaker(10, 60.0, clock)
    for _ in range(50):
        breaker.rejected(5)
        clock.now += 40
    assert breaker.trips == 0
    breaker.rejected(5)
    clock.now += 59
    breaker.rejected(6)
    assert breaker.off()


def test_a_single_call_may_be_too_much(clock: Clock) -> None:
    breaker = Breaker(1000, 1.0, clock)
    breaker.rejected(1001)
    assert breaker.off()


def test_after_the_pause_counting_begins_anew_and_late_refusals_prolong_nothing(clock: Clock) -> None:
    breaker = Breaker(10, 30.0, clock)
    breaker.rejected(11)
    for _ in range(29):
        clock.now += 1
        breaker.rejected(100)
    clock.now += 1
    assert not breaker.off()
    breaker.rejected(10)
    assert not breaker.off()
    breaker.rejected(1)
    assert breaker.off()
    assert breaker.trips == 2
    clock.now += 61
    breaker.rejected(10)
    assert not breaker.off()
    breaker.rejected(1)
    assert breaker.trips == 3


def test_without_a_rate_nothing_switches_loads_off(clock: Clock) -> None:
    breaker = Breaker(None, 60.0, clock)
    breaker.rejected(10**9)
    assert not breaker.off()
    assert breaker.trips == 0


def test_memory_is_bounded(clock: Clock) -> None:
    breaker, most = Breaker(10**9, 60.0, clock), 0
    for _ in range(20_000):
        breaker.rejected(1)
        clock.now += 0.01
        most = max(most, len(breaker._counts))
    assert most <= 62


def test_threads_switch_it_off_once(clock: Clock) -> None:
    breaker, start = Breaker(799, 60.0, clock), threading.Barrier(8)

    def refuse() -> None:
        start.wait()
        for _ in range(100):
            breaker.rejected(1)

    threads = [threading.Thread(target=refuse) for _ in range(8)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert breaker.off()
    assert breaker.trips == 1


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_rejections_per_minute": 0},
        {"max_rejections_per_minute": 1.5},
        {"max_rejections_per_minute": True},
        {"loads_off_s": 0},
        {"loads_off_s": -1.0},
        {"loads_off_s": None},
        {"loads_off_s": float("nan")},
        {"loads_off_s": float("inf")},
    ],
)
def test_a_configuration_that_is_out_of_range_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        StoreConfig(**wrong)


def test_the_rate_may_be_none() -> None:
    assert StoreConfig(max_rejections_per_minute=None).max_rejections_per_minute is None
