"""Campaigns at the same time, each in a process of its own, so that nothing of one is in another's process and all
cores are used. What a campaign says is kept together, and told when it ended."""

from __future__ import annotations

import select
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from tests.campaign.children import Child, Ending, Say
from tests.campaign.framework import Campaign, Result

ENDED = "ended"
Complain = Callable[[str], None]
Run = Callable[[Campaign, Complain], Result]


@dataclass(frozen=True)
class Report:
    """What a campaign came to."""

    details: list[str]
    line: str
    failed: bool


def report_of(chosen: Campaign, run: Run, complain: Complain) -> Report:
    """Run a campaign in this process."""
    result = run(chosen, complain)
    return Report(result.details, result.line, bool(result.failures))


def run_together(chosen: Iterable[Campaign], jobs: int, run: Run, complain: Complain) -> Iterator[Report]:
    """Run so many campaigns at a time, then those that must be alone; their reports as they end."""
    campaigns = list(chosen)
    yield from _run_at_once([c for c in campaigns if not c.alone], jobs, run, complain)
    yield from _run_at_once([c for c in campaigns if c.alone], 1, run, complain)


def _run_at_once(campaigns: list[Campaign], jobs: int, run: Run, complain: Complain) -> Iterator[Report]:
    waiting, running = deque(campaigns), dict[Child, Campaign]()
    while waiting or running:
        while waiting and len(running) < jobs:
            chosen = waiting.popleft()
            running[Child(_action(chosen, run))] = chosen
        for child in select.select(running, [], [])[0]:
            if not child.listen(0):
                yield _read(running.pop(child), child.wait(), complain)


def _action(chosen: Campaign, run: Run) -> Callable[[Say], object]:
    def act(say: Say) -> None:
        complaints: list[str] = []
        report = report_of(chosen, run, complaints.append)
        say(ENDED, complaints, report.details, report.line, report.failed)

    return act


def _read(chosen: Campaign, ending: Ending, complain: Complain) -> Report:
    """What a campaign's process said, or how it ended before it could."""
    said = ending.all(ENDED)
    if not said or ending.crash:
        complain(f"FAILED campaign={chosen.name}: its process ended: {ending.crash or 'without a word'}")
        return Report([], f"campaign={chosen.name} crashed=1", True)
    for complaint in said[0][0]:
        complain(complaint)
    return Report(*said[0][1:])
