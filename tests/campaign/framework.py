"""What a fault campaign is, and how it is run, counted and reported.

A campaign is a generator that makes numbered faults and yields what became of each:

    from tests.campaign.framework import Context, Kind, Outcome, campaign

    @campaign("kill", quick=200, full=20_000)
    def kill(context: Context) -> Iterator[Outcome]:
        '''The first line says what is done to the store: `--list` prints it.'''
        for number in context.faults():
            chance = context.random(number)  # everything that is random about this fault comes from here
            with context.folder(number) as path:  # an empty folder, removed afterwards
                ...
            yield Outcome(number, Kind.DETECTED)

Rules:

- `context.faults()` gives the numbers of the faults to make, and may give any subset: `--fault 17` repeats the 17th alone.
  So a fault must follow from its number and the seed, `context.random(number)`, never from the faults before it. Where
  faults share an expensive beginning (a store that is filled once), make it in `context.root`, from `context.random(None)`.
- Every fault yields exactly one outcome, of the worst kind that it caused:
    DETECTED          something was lost or refused, and said so: a rejection, a refusal to open, a counter, a warning
    HARMLESS          nothing was lost that had to be there, and all that was verified was right
    MISSED_SILENTLY   damage became a plain miss, which nothing counted or reported
    CRASHED           the engine's process ended by a signal (other than the campaign's own) or by an exception that the
                      interface does not promise
    WRONG_SERVED      a block was verified that is not bit for bit what was stored
    BROKEN            a promise of the campaign's own was broken: an acknowledged block was lost, accounting that does
                      not add up, a file beyond its capacity. `detail` says which
- WRONG_SERVED, CRASHED and BROKEN fail the campaign, and `detail` is printed with how to repeat the fault. Only for a
  limit that the documentation names, `Outcome(..., known=True)` counts without failing; WRONG_SERVED fails always.
  `--verbose` prints the details of all outcomes that have one.
- `context.count(name, amount)` adds a figure of the campaign's own to the end of its line (`blocks=...`, `points=...`).
  A figure says how much was looked at, so that nobody takes a campaign that did nothing for one that found nothing.
- A campaign that cannot run here (no strace, no second file system) raises `Unavailable(why)`; its line says so, and it
  does not fail. An exception of any other kind fails the campaign, at the fault whose number was given out last.
- Modules of this package are imported to find the campaigns in them: nothing may run at import.
- Standard output has one line for each campaign; what failed goes to standard error.
- With `--jobs` several campaigns run at a time, each in a process of its own. One with short deadlines, which a busy
  machine would miss, says `alone=True`: those use all cores by themselves.
"""

from __future__ import annotations

import random
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path


class Kind(StrEnum):
    """What became of a fault, from the mildest to the worst."""

    HARMLESS = "harmless"
    DETECTED = "detected"
    MISSED_SILENTLY = "missed_silently"
    CRASHED = "crashed"
    BROKEN = "broken"
    WRONG_SERVED = "wrong_served"


FAILING = (Kind.CRASHED, Kind.BROKEN, Kind.WRONG_SERVED)
COLUMNS = (Kind.DETECTED, Kind.HARMLESS, Kind.MISSED_SILENTLY, Kind.WRONG_SERVED, Kind.CRASHED)


@dataclass(frozen=True)
class Outcome:
    """What became of one fault."""

    number: int
    kind: Kind
    detail: str = ""
    known: bool = False
    """A limit that docs/operations.md names: counted in its column, and no failure."""


class Unavailable(Exception):
    """The campaign cannot run here; the text says why."""


Make = Callable[["Context"], Iterator[Outcome]]


@dataclass(frozen=True)
class Campaign:
    """A campaign's name, what it does, and how many faults it makes in the two forms."""

    name: str
    quick: int
    full: int
    make: Make
    alone: bool = False
    """Whether no other may run at the same time."""

    @property
    def summary(self) -> str:
        return (self.make.__doc__ or "").strip().splitlines()[0]


CAMPAIGNS: dict[str, Campaign] = {}


def campaign(name: str, quick: int, full: int, alone: bool = False) -> Callable[[Make], Make]:
    """Register a campaign of `quick` faults, or `full` with --full. alone: with --jobs, nothing runs beside it."""

    def register(make: Make) -> Make:
        CAMPAIGNS[name] = Campaign(name, quick, full, make, alone)
        return make

    return register


@dataclass
class Context:
    """What a campaign is given: which faults to make, where, and the randomness of each."""

    name: str
    seed: int
    numbers: Sequence[int]
    full: bool
    root: Path
    """A folder of this run's own, removed at its end."""
    figures: Counter[str] = field(default_factory=Counter)
    current: int | None = None
    """The fault whose number was given out last."""

    def faults(self) -> Iterator[int]:
        """The numbers of the faults to make."""
        for number in self.numbers:
            self.current = number
            yield number

    def random(self, number: int | None) -> random.Random:
        """The randomness of one fault, or with None of what all faults share."""
        return random.Random(f"{self.name}/{self.seed}/{number}")

    @contextmanager
    def folder(self, number: int) -> Iterator[Path]:
        """An empty folder for one fault, removed afterwards."""
        path = self.root / f"fault-{number}"
        path.mkdir()
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)

    def count(self, name: str, amount: int = 1) -> None:
        """Add to a figure of the campaign's own, which its line ends with."""
        self.figures[name] += amount


@dataclass
class Result:
    """What a campaign came to."""

    name: str
    seed: int
    counts: Counter[Kind]
    figures: Counter[str]
    seconds: float = 0.0
    failures: list[str] = field(default_factory=list)
    details: list[str] = field(default_factory=list)
    unavailable: str = ""

    @property
    def line(self) -> str:
        if self.unavailable:
            return f"campaign={self.name} skipped={self.unavailable!r}"
        figures: dict[str, object] = {"campaign": self.name, "faults": self.counts.total()}
        figures |= {kind.value: self.counts[kind] for kind in COLUMNS}
        figures |= {"seed": self.seed, "broken": self.counts[Kind.BROKEN]} | dict(self.figures)
        return " ".join(f"{name}={value}" for name, value in (figures | {"seconds": f"{self.seconds:.0f}"}).items())


def tell(text: str) -> None:
    """Say what failed."""
    print(text, file=sys.stderr, flush=True)


def run(
    chosen: Campaign,
    seed: int,
    numbers: Sequence[int] | None = None,
    full: bool = False,
    scratch: Path | None = None,
    complain: Callable[[str], None] = tell,
) -> Result:
    """Run a campaign. numbers: which faults, by default as many as the form has; scratch: where its folders are made."""
    if numbers is None:
        numbers = range(chosen.full if full else chosen.quick)
    result, begin = Result(chosen.name, seed, Counter(), Counter()), time.monotonic()
    with tempfile.TemporaryDirectory(prefix=f"{chosen.name}-", dir=scratch, ignore_cleanup_errors=True) as root:
        context = Context(chosen.name, seed, numbers, full, Path(root), result.figures)
        try:
            for outcome in chosen.make(context):
                _take(result, outcome, complain)
        except Unavailable as why:
            result.unavailable = str(why)
        except Exception:
            _fail(result, context.current, f"the campaign ended: {traceback.format_exc()}", complain)
    result.seconds = time.monotonic() - begin
    return result


def _take(result: Result, outcome: Outcome, complain: Callable[[str], None]) -> None:
    result.counts[outcome.kind] += 1
    result.details += [f"fault={outcome.number} {outcome.kind}: {outcome.detail}"] if outcome.detail else []
    if outcome.kind in FAILING and not (outcome.known and outcome.kind != Kind.WRONG_SERVED):
        _fail(result, outcome.number, f"{outcome.kind}: {outcome.detail}", complain)


def _fail(result: Result, number: int | None, detail: str, complain: Callable[[str], None]) -> None:
    again = f"python -m tests.campaign --only {result.name} --seed {result.seed}"
    again += "" if number is None else f" --fault {number}"
    result.failures.append(detail)
    complain(f"FAILED campaign={result.name} seed={result.seed} fault={number}: {detail}\n  again: {again}")
