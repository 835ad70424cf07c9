"""Campaign "io-truncate": data.mdb is cut short under the I/O process while it serves. What it reads then ends it, and only
it."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from random import Random

from kvstore.storefile import DATA_NAME
from tests.campaign.framework import Context, Outcome, campaign
from tests.campaign.ioengine import HANDS, SHORTAGES, Engine, Report, engine_of, forget, in_servants, warm
from tests.campaign.iohand import PAUSE_S, Setting

TIMEOUT_S = 2.0
WEIGHTS: dict[str, float] = {"get": 8, "put": 2, "match": 2, "touch": 1, "stats": 1}
PAGE = 4096
THEN = ("restored", "removed", "left", "left")


@campaign("io-truncate", quick=100, full=2000, alone=True)
def io_truncate(context: Context) -> Iterator[Outcome]:
    """data.mdb is truncated under the I/O process: SIGBUS ends it, calls miss, and a file that is whole again serves."""
    warm()
    yield from in_servants(context, lambda number: one(context.random(number), context.root))


def one(chance: Random, root: Path) -> Report:
    """One fault."""
    report = Report()
    setting = Setting.of(chance, TIMEOUT_S)
    then, engine = chance.choice(THEN), engine_of(setting, root)
    engine.reset(report, chance, HANDS, SHORTAGES)
    for hand in engine.hands:
        hand.damaged = True
    copy, before = engine.path / "copy", engine.crashes()
    shutil.copytree(engine.folder, copy)
    known = [set(hand.must) for hand in engine.hands]
    cut(engine, report, chance)
    report.counts["ended"] += engine.crashes() > before
    report.counts[then] += 1
    mend(engine, report, then, copy, known)
    if report.broken or report.crashed:
        report.broken.append(f"({then}, {setting})")
        forget(engine)
    return report


def cut(engine: Engine, report: Report, chance: Random) -> None:
    """Truncate the file while hands use the store, and let them go on for a while."""
    size = (engine.folder / DATA_NAME).stat().st_size
    length = chance.choice([0, PAGE, chance.randrange(size), chance.randrange(size) // PAGE * PAGE])
    engine.begin(WEIGHTS)
    time.sleep(chance.uniform(0, 0.02))
    os.truncate(engine.folder / DATA_NAME, length)
    before, deadline = engine.crashes(), time.monotonic() + chance.uniform(0.02, 0.4)
    while engine.crashes() == before and time.monotonic() < deadline:
        time.sleep(PAUSE_S)
    time.sleep(chance.uniform(0, 0.05))
    engine.end(report)


def mend(engine: Engine, report: Report, then: str, copy: Path, known: list[set[int]]) -> None:
    """Put the copy in the folder's place, or remove the folder, at once or after a look: what serves then has what lies
    there. Whatever process is there ends, since it has the truncated file open."""
    engine.kill()
    if then == "left":
        look(engine, report)
    remove(engine.folder)
    for hand, must in zip(engine.hands, known, strict=True):
        hand.must = must - set(hand.rejected) if then == "restored" else set()
    if then == "restored":
        place(copy, engine.folder)
    else:
        shutil.rmtree(copy)
    engine.kill()
    if engine.settle(report):
        engine.check(report)


def look(engine: Engine, report: Report) -> None:
    """Whatever became of the file, calls end, and what they verify is right."""
    engine.begin(WEIGHTS)
    time.sleep(0.5)
    engine.end(report)
    report.counts["served_truncated"] += engine.store.io_process_id is not None


def place(copy: Path, folder: Path) -> None:
    """Put the copy in the folder's place, whatever an opening makes there meanwhile."""
    while copy.exists():
        shutil.rmtree(folder, ignore_errors=True)
        with suppress(OSError):
            os.rename(copy, folder)


def remove(folder: Path) -> None:
    """Move a folder out of the way in one step, then remove it. An opening may make it anew meanwhile."""
    away = folder.with_name("away")
    os.rename(folder, away)
    shutil.rmtree(away, ignore_errors=True)
