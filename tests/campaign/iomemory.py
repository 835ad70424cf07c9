"""Campaign "io-memory": the I/O process runs out of memory, of address space or of room in its file."""

from __future__ import annotations

import resource
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random

from kvstore.storefile import DATA_NAME
from tests.campaign.framework import Context, Outcome, campaign
from tests.campaign.ioengine import SHORTAGES, Engine, Report, engine_of, forget, in_servants, send_signal, warm
from tests.campaign.iohand import Setting

TIMEOUT_S = 1.0
HANDS = 4
WEIGHTS: dict[str, float] = {"put": 4, "get": 4, "match": 1, "touch": 1, "stats": 1}
EVICTING: dict[str, float] = {**WEIGHTS, "evict": 1}
LIMITS = ("RLIMIT_AS", "RLIMIT_AS", "RLIMIT_DATA", "RLIMIT_DATA", "RLIMIT_FSIZE")
USED = {"RLIMIT_AS": "VmSize", "RLIMIT_DATA": "VmData"}
SPARE = (0, 4096, 2**16, 2**20, 2**23, 2**25)
"""Bytes that are left, in order of how soon something fails."""
REFUSALS = SHORTAGES | {"source_changed"}


@campaign("io-memory", quick=30, full=300, alone=True)
def io_memory(context: Context) -> Iterator[Outcome]:
    """The I/O process's memory and file size are limited to a little more than it has: puts fail, gets miss, both recover."""
    warm()
    yield from in_servants(context, lambda number: one(context.random(number), context.root))


def one(chance: Random, root: Path) -> Report:
    """One fault."""
    report, kind = Report(), chance.choice(LIMITS)
    setting = Setting.of(chance, TIMEOUT_S, ("none", "none", "hazard"))
    engine = engine_of(setting, root)
    engine.reset(report, chance, HANDS, SHORTAGES)
    before = engine.crashes()
    lifted = limit(engine, report, chance, kind)
    if not lifted:
        send_signal(engine.store.io_process_id, signal.SIGKILL)
    if engine.settle(report):
        engine.check(report)
    report.counts[kind] += 1
    report.counts["ended"] += engine.crashes() > before
    report.noticed |= engine.crashes() > before
    if report.broken or report.crashed:
        report.broken.append(f"({kind}, {setting})")
        forget(engine)
    return report


def limit(engine: Engine, report: Report, chance: Random, kind: str) -> bool:
    """Limit the process at a random moment while hands use the store; whether the limit was lifted again."""
    pid, which, spare = engine.store.io_process_id or 0, getattr(resource, kind), chance.choice(SPARE)
    _, hard = resource.prlimit(pid, which)
    engine.begin(WEIGHTS if engine.setting.keeps else EVICTING)
    time.sleep(chance.uniform(0, 0.03))
    try:
        used = (engine.folder / DATA_NAME).stat().st_size if kind == "RLIMIT_FSIZE" else used_bytes(pid, USED[kind])
        resource.prlimit(pid, which, (used + spare, hard))
        time.sleep(chance.uniform(0.1, 0.4))
        lifted = chance.random() < 0.6
        if lifted:
            resource.prlimit(pid, which, (hard, hard))
    except (ProcessLookupError, FileNotFoundError):
        lifted = True
    engine.end(report)
    return lifted


def used_bytes(pid: int, name: str) -> int:
    """A figure of /proc/pid/status."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(name + ":")).split()[1])
