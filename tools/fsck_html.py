"""The report of `kvstore-fsck --report`: one page that needs no network, no other file and no script.

Keys, paths and details come from untrusted bytes: fsck_markup escapes every string, and the page's content policy lets
a browser load and run nothing.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import kvstore
from kvstore.fsck.findings import KINDS, NOTHING, Finding, count
from kvstore.tools.fsck_map import FileMap, draw, file_map
from kvstore.tools.fsck_markup import Markup, el, join
from kvstore.tools.fsck_outcome import REMEDIES, Checked, Row, Run, damaged_records, rows, size
from kvstore.tools.fsck_style import STYLE
from kvstore.tools.fsck_words import repair_lines, scope_words, state_words, verdict_words

POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
MAX_SHOWN: Final = 100
"""Findings of each kind of a shard that are listed one by one."""


def page(run: Run, maps: Mapping[Path, FileMap | str]) -> str:
    """The report as HTML. maps: each shard's map, or a sentence on why there is none."""
    head = el(
        "head",
        el("meta", charset="utf-8"),
        el("meta", http_equiv="Content-Security-Policy", content=POLICY),
        el("meta", name="viewport", content="width=device-width, initial-scale=1"),
        el("meta", name="color-scheme", content="light dark"),
        el("title", f"kvstore-fsck: {run.store}"),
        el("style", Markup(STYLE)),
    )
    shards = (_shard(run, checked, maps.get(checked.shard, "")) for checked in run.shards)
    main = el("main", _verdict(run), _repair(run), *shards, _footer(run))
    return f"<!doctype html>\n{el('html', head, el('body', main), lang='en')}\n"


def write_report(run: Run, path: Path) -> None:
    """Write the report, readable by its owner alone: it names block hashes. Raises OSError."""
    maps = {checked.shard: file_map(checked.shard, checked.findings) for checked in run.shards if not checked.error}
    made = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        fd = os.open(made, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with open(fd, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(page(run, maps))
        os.replace(made, path)
    finally:
        made.unlink(missing_ok=True)


def _verdict(run: Run) -> Markup:
    tone, words = verdict_words(run)
    tiles = [
        (
            "records checked",
            f"{run.records:,}",
            f" of {run.total_records:,}" if run.total_records > run.records else "",
        ),
        ("stored bytes checked", size(run.nbytes), ""),
        ("findings", f"{len(run.findings):,}", ""),
        ("damaged records", f"{damaged_records(run.findings):,}", ""),
        ("bytes concerned", size(sum(f.nbytes for f in run.findings)), ""),
        ("time", f"{run.seconds:,.1f} s", ""),
    ]
    listed = (el("div", el("dt", name), el("dd", value, el("small", more))) for name, value, more in tiles)
    when = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(run.started))
    return el(
        "section",
        el("div", "kvstore-fsck", class_="tool"),
        el("h1", words),
        el("p", el("code", str(run.store)), class_="path"),
        el("p", f"{when}, {scope_words(run)}", class_="note"),
        el("dl", *listed, class_="tiles"),
        class_=f"card verdict {tone}",
    )


def _repair(run: Run) -> Markup:
    steps = [
        el("p", words) if not command else join(el("p", words), el("pre", command))
        for words, command in repair_lines(run)
    ]
    return el("section", el("h2", "How to repair it"), *steps, class_="card") if steps else Markup()


def _shard(run: Run, checked: Checked, drawn: FileMap | str) -> Markup:
    tone, words = state_words(checked)
    parts = [el("h2", el("span", words, class_=f"state {tone}"), checked.shard.name or str(checked.shard))]
    if checked.shard != run.store:
        parts.append(el("p", str(checked.shard), class_="note path"))
    if checked.error:
        parts.append(el("p", checked.error))
    if checked.done:
        parts += [el("h3", "What the repair did"), el("ul", *(el("li", done) for done in checked.done), class_="steps")]
    parts += [_kinds(checked), _map(checked, drawn), _findings(checked.findings), _unchecked(checked)]
    return el("section", *parts, class_="card")


def _kinds(checked: Checked) -> Markup:
    if not checked.findings:
        return Markup()
    head = [
        ("kind", ""),
        ("found", "num"),
        ("records", "num"),
        ("bytes", "num"),
        ("what it means", ""),
        ("a repair", ""),
    ]
    return join(el("h3", "What was found"), _table(head, [_kind_row(row) for row in rows(checked.findings)]))


def _kind_row(row: Row) -> list[str]:
    kind = KINDS[row.kind]
    meaning = kind.meaning
    if row.transient:
        meaning += f" ({row.transient:,} not found on a second read: look at memory, disk and cables)"
    records, nbytes = f"{row.records:,}" if row.records else "", size(row.nbytes) if row.nbytes else ""
    return [_kind(row.kind), f"{row.count:,}", records, nbytes, meaning, REMEDIES[kind.remedy]]


def _kind(kind: str) -> Markup:
    return el("span", kind, class_="kind" if KINDS[kind].damage else "kind harmless")


def _map(checked: Checked, drawn: FileMap | str) -> Markup:
    if isinstance(drawn, str):
        return el("p", f"No map of the file: {drawn}", class_="note") if drawn else Markup()
    title = el("h3", "Map of the file" if checked.findings else "Map of data.mdb")
    return join(title, draw(drawn))


def _findings(findings: Sequence[Finding]) -> Markup:
    if not findings:
        return Markup()
    head = [("kind", ""), ("key", ""), ("bytes", "num"), ("page", "num"), ("second read", "again"), ("detail", "")]
    of_kind = ([finding for finding in findings if finding.kind == row.kind] for row in rows(findings))
    shown = [_finding(finding) for found in of_kind for finding in found[:MAX_SHOWN]]
    more = len(findings) - len(shown)
    note = f"{count(more, 'finding')} more: --json lists every one." if more > 0 else ""
    parts = [el("h3", f"Findings ({len(findings):,})"), _table(head, shown)]
    return join(*parts, el("p", note, class_="note") if note else "")


def _finding(finding: Finding) -> list[str]:
    again = {True: "found again", False: "not found again", None: ""}[finding.persisted]
    key = el("span", finding.key.hex(), class_="mono") if finding.key else ""
    place = "" if finding.page is None else f"{finding.page:,}"
    if finding.page is not None and finding.pages > 1:
        place = f"{finding.page:,}\u2013{finding.page + finding.pages - 1:,}"
    stored = size(finding.nbytes) if finding.nbytes else ""
    return [_kind(finding.kind), key, stored, place, again, finding.detail]


def _table(head: Sequence[tuple[str, str]], lines: Sequence[Sequence[str]]) -> Markup:
    """A table whose cells carry their column's name, for narrow screens."""
    titles = el("tr", *(el("th", name, class_=kind, scope="col") for name, kind in head))
    body = [el("tr", *(_cell(*column, value) for column, value in zip(head, line, strict=True))) for line in lines]
    return el("table", el("thead", titles), el("tbody", *body))


def _cell(name: str, kind: str, value: str) -> Markup:
    classes = " ".join(filter(None, (kind, name if name in ("key", "detail") else "", "" if value else "empty")))
    return el("td", el("span", value), class_=classes, data_label=name)


def _unchecked(checked: Checked) -> Markup:
    if not checked.summary or not checked.summary.unchecked:
        return Markup()
    return join(
        el("h3", "What was not checked"),
        el("ul", *(el("li", said) for said in checked.summary.unchecked), class_="steps"),
    )


def _footer(run: Run) -> Markup:
    said = f"kvstore {kvstore.__version__}, exit status {run.status}. What a check does not see is in docs/fsck.md."
    if not any(KINDS[f.kind].remedy != NOTHING for f in run.findings):
        said += " Clean means: nothing was found by the checks named above."
    return el("footer", said)
