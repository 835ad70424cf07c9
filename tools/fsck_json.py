"""What `kvstore-fsck --json` prints: a line for each finding as it is made, and one for the whole at the end."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from kvstore.fsck.findings import KINDS, Finding
from kvstore.tools.fsck_outcome import Checked, Run, damaged_records

SCHEMA: Final = 1
"""Raised when a key goes or changes its meaning; keys may be added."""


def finding_line(shard: Path, finding: Finding, after_repair: bool) -> str:
    """One finding. key: hexadecimal digits; bytes: stored bytes that it concerns; page, pages: where in data.mdb; persisted:
    whether a second read found it too; after_repair: whether the check after a repair made it."""
    kind = KINDS[finding.kind]
    return _line(
        type="finding",
        shard=str(shard),
        kind=finding.kind,
        damage=kind.damage,
        key=finding.key.hex(),
        bytes=finding.nbytes,
        page=finding.page,
        pages=finding.pages,
        persisted=finding.persisted,
        remedy=kind.remedy,
        meaning=kind.meaning,
        detail=finding.detail,
        after_repair=after_repair,
    )


def summary_line(run: Run, plans: Sequence[tuple[Path, list[str]]] = ()) -> str:
    """The whole run. Its figures are sums over the shards, of the last check of each; plans: of a repair, in words."""
    return _line(
        type="summary",
        store=str(run.store),
        stage=run.stage,
        started=run.started,
        seconds=run.seconds,
        records=run.records,
        total_records=run.total_records,
        bytes=run.nbytes,
        findings=dict(Counter(finding.kind for finding in run.findings)),
        damaged_records=damaged_records(run.findings),
        damaged_bytes=sum(finding.nbytes for finding in run.findings if finding.damage),
        unchecked=[said for checked in run.shards if checked.summary for said in checked.summary.unchecked],
        cancelled=run.interrupted or any(checked.cancelled and not checked.error for checked in run.shards),
        repaired=any(checked.repaired for checked in run.shards),
        plan={str(shard): words for shard, words in plans},
        repair_command=run.repair_command(),
        exit_status=run.status,
        shards=[_shard(checked) for checked in run.shards],
    )


def _shard(checked: Checked) -> dict[str, Any]:
    return {
        "shard": str(checked.shard),
        "findings": len(checked.findings),
        "damaged": checked.damaged,
        "cancelled": checked.cancelled and not checked.error,
        "error": checked.error,
        "repaired": checked.repaired,
        "done": checked.done,
    }


def _line(**said: Any) -> str:
    """ASCII alone: whatever is in a path or a detail, a line is a line."""
    return json.dumps({"schema": SCHEMA, **said})
