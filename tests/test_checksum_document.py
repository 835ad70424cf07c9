"""The worked example of docs/checksum.md is read from the document and computed again, so that the two cannot drift."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from hypothesis import settings

from kvstore.checksum import (
    MASK64,
    block_checksum_tags,
    num_valid_tokens,
    reference_block_checksum,
    reference_slice_checksum,
    reference_state_row_checksum,
    slice_factor,
)
from kvstore.identity import LayerSpec, layer_fingerprint
from tests.test_checksum import sum_without_multiplying

ROOT = Path(__file__).parent.parent
VECTORS: dict[str, Any] = json.loads((ROOT / "tests" / "vectors" / "checksum.json").read_text())
Cells = npt.NDArray[np.uint8]
Row = dict[str, str]
EXACT = settings(max_examples=60, deadline=None, derandomize=True)


def cells_of(line: str) -> list[str]:
    return [text.strip().strip("`") for text in line.strip().strip("|").split("|")]


def document_tables(section: str) -> list[list[Row]]:
    """The Markdown tables of a section, each a list of rows by column name."""
    text = (ROOT / "docs" / "checksum.md").read_text(encoding="utf-8")
    body = text.split(f"\n## {section}\n")[1].split("\n## ")[0]
    found = []
    for table in re.findall(r"(?:^\|.*\n)+", body, re.MULTILINE):
        header, _, *lines = table.splitlines()
        found.append([dict(zip(cells_of(header), cells_of(line), strict=True)) for line in lines])
    return found


PIECES, SUMS, BLOCKS, SIZES, LANES, STATE, LAYER = document_tables("8. A worked example")
NUM_TOKENS = 1 + max(int(row["token"]) for row in PIECES)
BLOCK_SIZE = 2


def number(row: Row, column: str) -> int:
    return int(row[column], 0)


def document_cells(layer: int, head: int) -> Cells:
    """All tokens of one slice of the example's request."""
    rows = [row for row in PIECES if (number(row, "layer"), number(row, "head")) == (layer, head)]
    rows.sort(key=lambda row: number(row, "token"))
    assert [number(row, "token") for row in rows] == list(range(NUM_TOKENS))
    return np.array([[number(row, "K"), number(row, "V")] for row in rows], "<u8").view(np.uint8)


def document_sum(layer: int, head: int, position: int, block_size: int) -> int:
    first = position * block_size
    valid = num_valid_tokens(position, block_size, NUM_TOKENS)
    return reference_slice_checksum(document_cells(layer, head)[first : first + valid], first)


def document_block(position: int, block_size: int) -> int:
    slices = sorted({(number(row, "layer"), number(row, "head")) for row in PIECES})
    return reference_block_checksum((*part, document_sum(*part, position, block_size)) for part in slices)


def test_document_slice_sums() -> None:
    assert len(SUMS) == 6
    for row in SUMS:
        layer, head, position = number(row, "layer"), number(row, "head"), number(row, "position")
        assert number(row, "m") == slice_factor(layer, head)
        assert number(row, "s") == document_sum(layer, head, position, BLOCK_SIZE)


def test_document_blocks_and_tags() -> None:
    assert [number(row, "position") for row in BLOCKS] == [0, 1]
    for row in BLOCKS:
        position = number(row, "position")
        assert number(row, "valid tokens") == num_valid_tokens(position, BLOCK_SIZE, NUM_TOKENS)
        assert number(row, "c") == document_block(position, BLOCK_SIZE)
        (tag,) = block_checksum_tags([bytes.fromhex(row["block hash"])], number(row, "fingerprint")).tolist()
        assert (number(row, "tag"), number(row, "stored")) == (tag, number(row, "c") ^ tag)


def test_document_block_sizes() -> None:
    total = sum(number(row, "c") for row in BLOCKS) & MASK64
    for row in SIZES:
        block_size = number(row, "block size")
        assert number(row, "valid tokens") == num_valid_tokens(0, block_size, NUM_TOKENS)
        assert number(row, "c") == document_block(0, block_size) == total


def test_document_multiply_free_form() -> None:
    pieces = document_cells(0, 0)[:BLOCK_SIZE].view("<u8").reshape(-1).tolist()
    expected = [[number(row, name) for row in LANES] for name in ("A", "B", "term")]
    assert list(sum_without_multiplying(pieces, 0, len(LANES))) == expected
    assert sum(expected[2]) == document_sum(0, 0, 0, BLOCK_SIZE)


def test_document_state_row() -> None:
    (row,) = STATE
    s = reference_state_row_checksum(np.frombuffer(bytes.fromhex(row["bytes"]), "<u2"))
    layer, index = number(row, "layer"), number(row, "row")
    assert (number(row, "m"), number(row, "s")) == (slice_factor(layer, index), s)
    assert number(row, "m*s") == reference_block_checksum([(layer, index, s)])


def test_document_layer_fingerprint() -> None:
    (row,) = LAYER
    layer = LayerSpec(row["name"], row["type"], row["dtype"], kv_heads=2, k_bytes=8, v_bytes=8)
    assert number(row, "F") == layer_fingerprint(layer)


def test_document_prose_has_the_tables_numbers() -> None:
    """The calculations written out in the text are right, and lead to numbers of the tables."""
    text = (ROOT / "docs" / "checksum.md").read_text(encoding="utf-8").split("\n## 8.")[1].split("\n## ")[0]
    shown = re.findall(r"`([0-9*+ -]+) = (-?[0-9]+)`", text)
    results = {number(row, name) for row in SUMS + BLOCKS + LANES for name in ("s", "c", "term") if name in row}
    assert len(shown) == 6
    for formula, result in shown:
        terms = re.findall(r"([+-]?)([0-9*]+)", formula.replace(" ", ""))
        total = sum((-1 if sign == "-" else 1) * int(np.prod([int(f) for f in t.split("*")])) for sign, t in terms)
        assert total == int(result)
        assert total & MASK64 in results
    assert document_cells(0, 0)[0].tobytes().hex() in text
