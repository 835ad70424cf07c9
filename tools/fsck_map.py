"""The map of a data.mdb for the report: a cell for every page, or for as many pages as keep the cells countable."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from kvstore.fsck.findings import KINDS, Finding, count
from kvstore.fsck.pagemap import FORMS, page_map, pages_of
from kvstore.storefile import DATA_NAME
from kvstore.tools.fsck_markup import Markup, el, join
from kvstore.tools.fsck_outcome import one_line, size

MAX_CELLS: Final = 1536
MAX_LOOKED_UP: Final = 2000
"""Records of a kind whose pages are looked up."""
MAX_PLACES: Final = 50
"""Damaged places that are listed beneath the map."""
LEGEND: Final = {
    "meta": "meta pages",
    "branch": "branches",
    "leaf": "leaves: the index, small values",
    "overflow": "stored bytes of records",
    "free": "free",
    "unused": "past the last page in use",
    "unknown": "nothing leads there",
}
"""What a page can be, and its words."""
DAMAGED: Final = "damaged"


@dataclass(frozen=True)
class Place:
    """Pages in a row that findings of a kind concern."""

    kind: str
    first: int
    pages: int


@dataclass(frozen=True)
class FileMap:
    """What each page of a file is, a number of FORMS, and where damage lies. lost: findings that have no known place."""

    page_bytes: int
    forms: npt.NDArray[np.uint8]
    places: tuple[Place, ...] = ()
    lost: int = 0


@dataclass(frozen=True)
class Cell:
    """Pages first to last, what most of them are, and the kinds of what was found there."""

    first: int
    last: int
    form: str
    found: tuple[str, ...] = ()


def file_map(shard: Path, findings: Sequence[Finding]) -> FileMap | str:
    """The map of a shard's data.mdb with its findings, or why there is none."""
    data = shard / DATA_NAME
    try:
        found = page_map(data)
        places, lost = _places_of(data, [finding for finding in findings if finding.damage])
    except (OSError, MemoryError) as error:
        return one_line(error)
    if not found.pages:
        return "the file has no whole page"
    return FileMap(found.page_bytes, found.forms, tuple(places), lost)


def _places_of(data: Path, damage: Sequence[Finding]) -> tuple[list[Place], int]:
    """Where findings lie: where the check says so, else where the way to their records leads; and how many lie nowhere."""
    places = [Place(f.kind, f.page, max(1, f.pages)) for f in damage if f.page is not None and f.page >= 0]
    lost = 0
    for kind in KINDS:
        without = [f for f in damage if f.kind == kind and f.page is None]
        keys = list(dict.fromkeys(f.key for f in without if f.key))[:MAX_LOOKED_UP]
        runs = pages_of(data, keys) if keys else []
        places += [Place(kind, first, pages) for first, pages in runs]
        lost += len(without) if not runs else sum(not f.key for f in without)
    return sorted(set(places), key=lambda place: (place.first, place.kind)), lost


def cells(file: FileMap) -> Iterator[Cell]:
    """The map's cells, in the order of the file, each of equally many pages."""
    step = -(-len(file.forms) // MAX_CELLS) or 1
    damage = _damage(file.places, step, -(-len(file.forms) // step))
    for number, first in enumerate(range(0, len(file.forms), step)):
        part = file.forms[first : first + step]
        found = tuple(kind for kind, here in damage.items() if here[number])
        yield Cell(first, first + len(part) - 1, FORMS[int(np.bincount(part).argmax())], found)


def _damage(places: Sequence[Place], step: int, num_cells: int) -> dict[str, npt.NDArray[np.int64]]:
    """How many places touch each cell, by kind: each adds one where it begins and takes it away behind its end."""
    edges = {kind: np.zeros(num_cells + 1, np.int64) for kind in KINDS if any(p.kind == kind for p in places)}
    for place in places:
        if place.first // step < num_cells:
            last = (place.first + place.pages - 1) // step
            edges[place.kind][place.first // step] += 1
            edges[place.kind][min(last + 1, num_cells)] -= 1
    return {kind: np.cumsum(edge) for kind, edge in edges.items()}


def draw(file: FileMap) -> Markup:
    """The map with its legend, and the damaged places in words beneath it."""
    found = list(cells(file))
    step = found[0].last - found[0].first + 1 if found else 1
    damaged = sum(bool(cell.found) for cell in found)
    caption = (
        f"{count(len(file.forms), 'page')} of {size(file.page_bytes)}, first to last; a square is "
        f"{count(step, 'page')}, {size(step * file.page_bytes)}."
    )
    label = f"Map of the file: {count(len(found), 'square')}, {damaged:,} with damage"
    grid = el("div", *(_square(cell, file.page_bytes) for cell in found), class_="map", role="img", aria_label=label)
    return join(_legend(found), grid, el("p", caption, class_="note"), _in_words(file))


def _square(cell: Cell, page_bytes: int) -> Markup:
    pages = f"page {cell.first:,}" if cell.first == cell.last else f"pages {cell.first:,} to {cell.last:,}"
    said = f"{pages} (from byte {cell.first * page_bytes:,}): {LEGEND[cell.form]}"
    if cell.found:
        return el("i", class_=f"{DAMAGED} {cell.form}", title=f"{said}; found: {', '.join(cell.found)}")
    return el("i", class_=cell.form, title=said)


def _legend(found: Sequence[Cell]) -> Markup:
    forms = [form for form in LEGEND if any(cell.form == form for cell in found)]
    items = [el("li", el("i", class_=form), LEGEND[form]) for form in forms]
    if any(cell.found for cell in found):
        items.insert(0, el("li", el("i", class_=DAMAGED), "damage found"))
    return el("ul", *items, class_="legend")


def _in_words(file: FileMap) -> Markup:
    """Where damage lies, in words: the map's squares say it to the eye alone."""
    lines = [el("li", _place(place, file.page_bytes)) for place in file.places[:MAX_PLACES]]
    if len(file.places) > MAX_PLACES:
        lines.append(el("li", f"and {count(len(file.places) - MAX_PLACES, 'place')} more"))
    parts = []
    if lines:
        summary = el("summary", f"{count(len(file.places), 'place')} in words")
        parts.append(el("details", summary, el("ul", *lines, class_="places")))
    if file.lost:
        parts.append(el("p", f"{count(file.lost, 'finding')} without a known place in the file.", class_="note"))
    return join(*parts)


def _place(place: Place, page_bytes: int) -> str:
    last = place.first + place.pages - 1
    where = f"page {place.first:,}" if place.pages == 1 else f"pages {place.first:,} to {last:,}"
    return f"{where}, {size(place.pages * page_bytes)} from byte {place.first * page_bytes:,}: {place.kind}"
