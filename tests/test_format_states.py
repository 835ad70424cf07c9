"""docs/format.md is enough to read records of Mamba states: as tests/test_format.py, with the document's tables and lmdb
alone, and the states' bytes as torch's own indexing finds them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from kvstore import Rank, StoreConfig
from kvstore.stategeometry import MAX_RANGES, UNSPLIT
from tests.state_cases import (
    FORMS,
    GROUP,
    MASK,
    TOKENS,
    States,
    cache_of,
    model_rows,
    number_of,
    plain_bytes,
    row_bytes,
    weighed,
)
from tests.support import IDENTITY, MIB, block_hashes, open_store
from tests.test_format import (
    Fields,
    Row,
    constant,
    document_chunks,
    document_decode,
    document_fingerprint,
    document_json,
    entries,
    layer_fields,
    read_databases,
    table,
    take_apart,
    xxh3,
)

HASHES = block_hashes(3)
IDS = [3, 0]
START, MISSING = 1, 3


@dataclass
class Shard:
    """A closed shard of states, read with lmdb."""

    states: States
    databases: dict[str, dict[bytes, bytes]]

    @property
    def headers(self) -> list[Fields]:
        """Of the blocks in the order of IDS."""
        found = [take_apart("Header", value) for value in self.databases["index"].values()]
        return sorted(found, key=lambda header: header["position"])

    def chunk(self, header: Fields, number: int) -> bytes:
        return self.databases["payload"][header["sequence"].to_bytes(8, "big") + number.to_bytes(2, "big")]


@pytest.fixture(scope="module", params=FORMS)
def shard(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Shard:
    """A shard of each form; tests only read it."""
    states = FORMS[request.param](1)
    cache = cache_of(states)
    specs = [layer.spec(g.number) for g in cache.all_groups.values() for layer in g.layers]
    config = StoreConfig(capacity_bytes=64 * MIB, codec="bf16-planes")
    root: Path = tmp_path_factory.mktemp("states")
    with open_store(root, cache, config, identity=IDENTITY.with_layers(specs), rank=Rank(0, 2), io="inline") as store:
        tokens = (START + 2) * TOKENS - MISSING
        assert store.put_blocks(HASHES[1:], IDS, START, tokens, GROUP, HASHES[0]).stored.all()
    return Shard(states, read_databases(store.folder))


# --- what the document says in words -----------------------------------------------------------------------------

Part = tuple[int, int, int, int, int]
"""Origin, first row, rows, elements, item size."""


def document_slices(header: Fields) -> list[tuple[int, list[Part]]]:
    """(layer, parts) of each slice in canonical order, section 8; of several parts where the split is not known."""
    known: list[tuple[int, int, list[Part]]] = []
    unsplit: dict[int, list[Part]] = {}
    for run in entries("State run", header["geometry"]):
        for i in range(run["count"]):
            layer, rows = run["first_layer"] + i * run["step"], run["rows_less_one"] + 1
            form = run["elements"], run["itemsize"]
            if run["grid"] == constant("UNSPLIT"):
                assert rows == 1
                unsplit.setdefault(layer, []).append((run["origin"], run["first_row"], 1, *form))
                continue
            end, ranges = run["first_row"] + rows, range(run["origin"], 65536 * 2, 2 ** run["grid"])
            cuts = [run["first_row"], *(c for c in ranges if run["first_row"] < c < end), end]
            known += [(layer, a, [(run["origin"], a, b - a, *form)]) for a, b in pairwise(cuts)]
    slices = known + [(layer, parts[0][1], sorted(parts)) for layer, parts in unsplit.items()]
    return [(layer, parts) for layer, _, parts in sorted(slices)]


def size_of(parts: list[Part]) -> int:
    return sum(rows * elements * itemsize for _, _, rows, elements, itemsize in parts)


def engine_slice(shard: Shard, slot: int, layer: int, parts: list[Part]) -> tuple[bytes, int]:
    """A slice's bytes and its sum, taken from the tensors."""
    (given,) = (given for name, given in shard.states.items() if number_of(name) == layer)
    if any(state.split_axis is None for state in given):
        data, s, j = b"", 0, 0
        for state in given:
            own = plain_bytes(state.tensor[slot])
            s += weighed(own, state.tensor.itemsize, j)
            data, j = data + own, j + state.tensor[slot].numel()
        return data, (2 * (layer * 65536 + parts[0][1]) + 1) * s & MASK
    ((origin, first, rows, _, itemsize),) = parts
    origins = np.cumsum([0, *map(model_rows, given)]).tolist()
    own_rows = row_bytes(given[origins.index(origin)], slot)
    wanted = {row: own_rows[row - origin] for row in range(first, first + rows)}
    sums = ((2 * (layer * 65536 + row) + 1) * weighed(data, itemsize) for row, data in wanted.items())
    return b"".join(wanted.values()), sum(sums) & MASK


# --- the records -------------------------------------------------------------------------------------------------


def test_headers_are_as_the_document_says(shard: Shard) -> None:
    first, second = shard.headers
    for header in (first, second):
        assert header["flags"] == 1
        assert header["block_size"] == TOKENS
        sizes = [size_of(parts) for _, parts in document_slices(header)]
        assert header["raw_length"] == sum(sizes)
        assert header["directory_length"] == 8 * len(sizes) + 12 * len(document_chunks(sizes))
    assert (first["position"], second["position"]) == (START, START + 1)
    assert (first["valid_tokens"], second["valid_tokens"]) == (TOKENS, TOKENS - MISSING)
    assert first["geometry"] == second["geometry"]


def test_chunks_are_the_states_bytes_in_the_documents_order(shard: Shard) -> None:
    for header, slot in zip(shard.headers, IDS, strict=True):
        slices = document_slices(header)
        canonical = b"".join(engine_slice(shard, slot, layer, parts)[0] for layer, parts in slices)
        lengths = document_chunks([size_of(parts) for _, parts in slices])
        ends = np.cumsum([0, *lengths]).tolist()
        for number, length in enumerate(lengths, 1):
            found = document_decode(header["codec"], shard.chunk(header, number), length)
            assert found == canonical[ends[number - 1] :][:length]


def test_the_table_and_the_checksum_are_the_documents(shard: Shard) -> None:
    (text,) = (v for k, v in shard.databases["meta"].items() if k.startswith(b"identity:"))
    for header, slot, block_hash in zip(shard.headers, IDS, HASHES[1:], strict=True):
        slices = document_slices(header)
        chunks = len(document_chunks([size_of(parts) for _, parts in slices]))
        data = shard.chunk(header, 0)
        directory = take_apart("Directory", data, num_slices=len(slices), num_chunks=chunks)
        assert header["directory_hash"] == xxh3(data)
        sums = np.frombuffer(directory["slice_sums"], "<u8").tolist()
        assert sums == [engine_slice(shard, slot, layer, parts)[1] for layer, parts in slices]
        fingerprint = document_fingerprint(text, GROUP)
        assert header["fingerprint"] == fingerprint
        tag = int.from_bytes(block_hash[:8], "little") ^ fingerprint
        assert header["tagged_checksum"] == sum(sums) & MASK ^ tag


def test_the_identity_describes_the_states_of_the_model(shard: Shard) -> None:
    (text,) = (v for k, v in shard.databases["meta"].items() if k.startswith(b"identity:"))
    identity = json.loads(text)
    assert document_json(identity) == text
    layers = {layer[0]: layer_fields(layer) for layer in identity["layers"]}
    for name, given in shard.states.items():
        layer, known = layers[name], all(state.split_axis is not None for state in given)
        assert (layer["type"], layer["k_bytes"], layer["v_bytes"], layer["group"]) == ("mamba", 0, 0, GROUP)
        assert layer["dtype"].split(",") == [str(state.tensor.dtype).removeprefix("torch.") for state in given]
        rows = [model_rows(state) if known else 0 for state in given]
        assert [state[0] for state in layer["states"]] == rows
        assert layer["kv_heads"] == (sum(rows) if known else 1)
        elements = [
            state.tensor[0].numel() // (state.tensor.shape[state.split_axis or 0] if known else 1) for state in given
        ]
        assert [state[1:] for state in layer["states"]] == [
            [count, state.tensor.itemsize] for count, state in zip(elements, given, strict=True)
        ]
    assert {len(layer) for layer in layers.values()} == {7, 8}


def test_the_constants_are_the_codes() -> None:
    assert (constant("MAX_RANGES"), constant("UNSPLIT")) == (MAX_RANGES, UNSPLIT)


# --- the document's own examples ---------------------------------------------------------------------------------


@pytest.mark.parametrize("row", table("State geometry examples"), ids=lambda row: row["rows"])
def test_state_geometry_examples_unpack_to_their_rows(row: Row) -> None:
    names = ("origin", "first_row", "rows", "elements", "itemsize", "grid")
    found = [
        (run["first_layer"] + i * run["step"], *(({"rows": run["rows_less_one"] + 1} | run)[name] for name in names))
        for run in entries("State run", bytes.fromhex(row["geometry"].strip("`")))
        for i in range(run["count"])
    ]
    assert sorted(found) == sorted(tuple(map(int, one.split("/"))) for one in row["rows"].split())


@pytest.mark.parametrize("row", table("Grid examples"), ids=lambda row: row["rows"])
def test_grid_examples_follow_from_the_rule(row: Row) -> None:
    rows, most = int(row["rows"]), constant("MAX_RANGES") // int(row["states"])
    assert int(row["grid"]) == next(g for g in range(17) if -(-rows // 2**g) <= most)
