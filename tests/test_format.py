"""docs/format.md is enough to read a store.

The document's tables are read here, and a shard is taken apart by them and by lmdb alone: nothing of kvstore that
knows the format is imported. The checksum is written anew from docs/checksum.md, and canonical bytes are compared with
those that torch's own indexing finds in the cache. kvstore writes the stores and is otherwise not asked.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest
import torch
import xxhash
import zstandard

from kvstore import CacheIdentity, KVStore, LayerSpec, PagedKVCache, Rank
from tests.support import SMALL, Raw, block_hashes, flip, index_key, layer_tensors, open_store, random_tensor

DOCUMENT = (Path(__file__).parent.parent / "docs" / "format.md").read_text()
Row = dict[str, str]
Fields = dict[str, Any]
Slice = tuple[int, int, int]
MASK = 2**64 - 1


# --- the document's tables ---------------------------------------------------------------------------------------


def table(heading: str) -> list[Row]:
    """The first table under a heading, a dict a row."""
    after = re.split(rf"^#+ {re.escape(heading)}$", DOCUMENT, maxsplit=1, flags=re.MULTILINE)[1]
    section = re.split(r"^#+ ", after, maxsplit=1, flags=re.MULTILINE)[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    names, _, *rows = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    return [dict(zip(names, row, strict=True)) for row in rows]


def value_of(heading: str, name: str) -> str:
    """A row's value, without the backquotes of code."""
    return next(row["value"].strip("`") for row in table(heading) if row["name"] == name)


def constant(name: str) -> int:
    return int(value_of("Constants", name))


def evaluate(expression: str, known: Fields) -> int:
    """A sum, or difference, of products of numbers and of fields named before."""
    total = 0
    for sign, product in re.findall(r"([+-]?)\s*([^+-]+)", expression):
        factors = [factor.strip() for factor in product.split("*")]
        amount = int(np.prod([int(f) if f.isdigit() else known[f] for f in factors]))
        total += -amount if sign == "-" else amount
    return total


READERS: dict[str, Callable[[bytes], Any]] = {
    **dict.fromkeys(("u8", "u16", "u32", "u64"), lambda data: int.from_bytes(data, "little")),
    **dict.fromkeys(("u16be", "u64be"), lambda data: int.from_bytes(data, "big")),
    **dict.fromkeys(("bytes", "array"), bytes),
    "ascii": lambda data: data.decode("ascii"),
}


def take_apart(heading: str, data: bytes, **known: int) -> Fields:
    """A value's fields by the table under a heading."""
    fields: Fields = dict(known)
    for row in table(heading):
        start, size = evaluate(row["offset"], fields), evaluate(row["size"], fields)
        assert len(data[start : start + size]) == size, f"{heading}: {row['name']} lies past the end"
        fields[row["name"]] = READERS[row["type"]](data[start : start + size])
    return fields


def size_of(heading: str) -> int:
    """Bytes of a table whose fields all have fixed places."""
    last = table(heading)[-1]
    return int(last["offset"]) + int(last["size"])


def entries(heading: str, data: bytes) -> list[Fields]:
    """An array's entries."""
    size = size_of(heading)
    assert len(data) % size == 0
    return [take_apart(heading, data[at : at + size]) for at in range(0, len(data), size)]


def magic_of(heading: str) -> bytes:
    """The magic that a table gives in hexadecimal."""
    meaning = next(row["meaning"] for row in table(heading) if row["name"] == "magic")
    return bytes.fromhex(re.findall(r"`([0-9a-f ]+)`", meaning)[0])


def xxh3(data: bytes) -> int:
    return xxhash.xxh3_64_intdigest(data, seed=0)


# --- what the document says in words -----------------------------------------------------------------------------


def document_slices(header: Fields) -> list[Slice]:
    """(head, layer, bytes of a cell) in canonical order, section 8."""
    slices = []
    for run in entries("Run", header["geometry"]):
        for i in range(run["count"]):
            for head in range(run["first_head"], run["first_head"] + run["heads_less_one"] + 1):
                slices.append((head, run["first_layer"] + i * run["step"], run["k_bytes"] + run["v_bytes"]))
    return sorted(slices)


def document_chunks(sizes: Iterable[int]) -> list[int]:
    """Raw bytes of each chunk, section 8."""
    most, chunks, is_open = constant("CHUNK_BYTES"), list[int](), False
    for size in sizes:
        if size > most:
            chunks += [most] * ((size - 1) // most) + [(size - 1) % most + 1]
            is_open = False
        elif is_open and chunks[-1] + size <= most:
            chunks[-1] += size
        else:
            chunks.append(size)
            is_open = True
    return chunks


def document_decode(codec: int, stored: bytes, raw: int) -> bytes:
    """A chunk's raw bytes, section 10."""
    name = next(row["name"] for row in table("Codecs") if int(row["number"]) == codec)
    if len(stored) == raw:
        return stored
    assert name == "bf16-planes"
    words = raw // 2
    chunk = take_apart("Codec 1, bf16-planes", stored, raw=raw, stored=len(stored), words=words)
    frame = zstandard.get_frame_parameters(chunk["frame"])
    assert raw - words < len(stored) < raw
    assert (frame.content_size, frame.dict_id, frame.has_checksum) == (words, 0, False)
    assert frame.window_size <= 131072
    exponents = zstandard.ZstdDecompressor().decompress(chunk["frame"], allow_extra_data=False)
    planes = zip(exponents, chunk["others"], strict=True)
    values = [exponent << 7 | other >> 1 | (other & 1) << 15 for exponent, other in planes]
    return np.array(values, "<u2").tobytes() + bytes(chunk["rest"])


def document_layers(text: str) -> list[tuple[int, ...]]:
    """Layers of the geometry examples: (number, first head, heads, K bytes, V bytes)."""
    return [tuple(map(int, layer.split("/"))) for layer in text.split()]


def slice_sum(cells: bytes, cell_bytes: int, first_token: int) -> int:
    """s of the valid tokens' bytes, checksum.md section 2, in plain integers."""
    first = first_token * (cell_bytes // 8)
    pieces = [int.from_bytes(cells[at : at + 8], "little") for at in range(0, len(cells), 8)]
    return sum(x * (2 * j + 1) for j, x in enumerate(pieces, first)) & MASK


def block_sum(slices: Sequence[Slice], sums: Sequence[int]) -> int:
    """c, checksum.md section 2."""
    return sum((2 * (layer * 65536 + head) + 1) * s for (head, layer, _), s in zip(slices, sums, strict=True)) & MASK


def document_json(value: Any) -> bytes:
    """JSON as section 13 spells it."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()


def layer_fields(layer: Sequence[Any]) -> Fields:
    """A layer's array by the names of its elements; the last one is there for layers of states alone."""
    names = [row["name"] for row in table("Layer array")]
    assert names[-1] == "states"
    return dict(zip(names if layer[1] == "mamba" else names[:-1], layer, strict=True))


def document_fingerprint(identity: bytes, group: int) -> int:
    """A group's fingerprint from the identity's JSON, checksum.md section 6."""
    layers = [layer_fields(layer) for layer in json.loads(identity)["layers"]]
    parts = [[layer["name"], layer["type"], layer["dtype"]] for layer in layers if layer["group"] == group]
    hashed = [hashlib.blake2b(document_json(part), digest_size=8).digest() for part in parts]
    identity_id = hashlib.blake2b(identity, digest_size=16).digest()
    return sum(int.from_bytes(part, "little") for part in (*hashed, identity_id[:8])) & MASK


# --- shards to read ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """Two blocks and more of a request in every group of a cache."""

    name: str
    tensors: dict[str, Any]
    layout: str = "BHNC"
    groups: dict[int, list[str]] | None = None
    first_head: dict[str, int] = field(default_factory=dict)
    value_channels: int | dict[str, int] | None = None
    total_heads: int | None = None
    start: int = 0
    missing_tokens: int = 0
    codec: str = "raw"
    rank: Rank = field(default_factory=Rank)

    @property
    def cache(self) -> PagedKVCache:
        return PagedKVCache.from_tensors(
            self.tensors, self.layout, self.groups, self.first_head, value_channels=self.value_channels
        )

    def identity(self, cache: PagedKVCache) -> CacheIdentity:
        given = CacheIdentity(model="org/modèle", revision="1", dtype="bfloat16", extra={"scale": 0.5, "eps": 1e-06})
        if self.total_heads is None:
            return given
        specs = [layer.spec(g.number) for g in cache.groups.values() for layer in g.layers]
        return given.with_layers(
            LayerSpec(s.name, s.type, s.dtype, self.total_heads, s.k_bytes, s.v_bytes, s.group) for s in specs
        )


def odd_tensors() -> dict[str, torch.Tensor]:
    """Layers whose numbers, heads and sizes of K and V have no pattern: 3 tokens a block."""
    shapes = {1: (2, 40), 4: (2, 40), 7: (2, 40), 9: (1, 24), 40: (3, 8), 41: (3, 8), 42: (2, 40)}
    return {
        f"model.layers.{layer}.attn": random_tensor((6, heads, 3, channels), torch.bfloat16, layer)
        for layer, (heads, channels) in shapes.items()
    }


def half_noise() -> dict[str, torch.Tensor]:
    """A layer of bfloat16 as they occur, and one of random bytes; each slice is a chunk."""
    shape = (4, 1, 10, 9992)
    values = torch.randn(shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    return {"layers.0.attn": values, "layers.1.attn": random_tensor(shape, torch.bfloat16, 2)}


def case_list() -> list[Case]:
    small, four = layer_tensors("BHNC"), layer_tensors("2BNHD", layers=4)
    names = list(four)
    large = layer_tensors("BHNC", blocks=4, heads=2, tokens=40, head_size=2056)
    tiny = layer_tensors("BHNC", blocks=4, heads=3, tokens=40, head_size=12, first_layer=2)
    return [
        Case("plain", small),
        Case("partial", small, start=3, missing_tokens=3),
        Case("pairs", layer_tensors("BNHD", dtype=torch.float16), "BNHD", start=1),
        Case("groups", four, "2BNHD", groups={0: [names[0], names[2]], 513: [names[3], names[1]]}, missing_tokens=1),
        Case("ranks", small, first_head=dict.fromkeys(small, 2), total_heads=4, rank=Rank(1, 2)),
        Case("large", large | tiny, start=5, missing_tokens=7),
        Case("chunks", layer_tensors("BHNC", layers=3, blocks=4, heads=2, tokens=8, head_size=3128)),
        Case("odd", odd_tensors(), value_channels={"model.layers.9.attn": 4}, missing_tokens=2),
        Case("mla", {"layers.3.mla": random_tensor((5, 2, 36), torch.float8_e4m3fn, 3)[..., :32]}, "BNC"),
        Case("planes", half_noise(), missing_tokens=3, codec="bf16-planes"),
        Case("single", layer_tensors("BHNC", layers=1, heads=1, tokens=1, head_size=8, dtype=torch.uint8)),
    ]


CASES = case_list()
COUNT = 3


@dataclass
class Shard:
    """A closed shard, read with lmdb: each database as a dict."""

    case: Case
    cache: PagedKVCache
    folder: Path
    hashes: list[bytes]
    databases: dict[str, dict[bytes, bytes]]

    def records(self) -> list[tuple[bytes, bytes, Fields]]:
        """(key, value, fields) of each index entry."""
        return [(k, v, take_apart("Header", v)) for k, v in self.databases["index"].items()]

    def chunk(self, sequence: int, number: int) -> bytes:
        return self.databases["payload"][sequence.to_bytes(8, "big") + number.to_bytes(2, "big")]


def read_databases(folder: Path) -> dict[str, dict[bytes, bytes]]:
    """Every database of a shard, by section 4 of the document."""
    assert value_of("LMDB settings", "engine") == "0.9"
    names = [row["name"] for row in table("Databases")]
    assert len(names) == int(value_of("LMDB settings", "databases"))
    with (
        lmdb.open(str(folder), readonly=True, lock=False, max_dbs=len(names), lib_version=0) as env,
        env.begin() as txn,
    ):
        opened = {name: env.open_db(name.encode(), txn, create=False) for name in names}
        return {name: {bytes(k): bytes(v) for k, v in txn.cursor(database)} for name, database in opened.items()}


def make_shard(case: Case, root: Path) -> Shard:
    cache = case.cache
    hashes = block_hashes(COUNT + 1)
    config = replace(SMALL, codec=case.codec)
    with open_store(root, cache, config, identity=case.identity(cache), rank=case.rank) as store:
        for number, group in cache.groups.items():
            tokens = (case.start + COUNT) * group.block_size - case.missing_tokens
            put = store.put_blocks(hashes[1:], [2, 0, 3], case.start, tokens, number, hashes[0])
            assert put.stored.all()
    pattern = table("Files")[0]["path"].strip("`/")
    rank = case.rank
    values = {"tp_rank": rank.tp_rank, "tp_size": rank.tp_size, "pp_rank": rank.pp_rank, "pp_size": rank.pp_size}
    folder = root / pattern.format(**values)
    return Shard(case, cache, folder, hashes, read_databases(folder))


@pytest.fixture(scope="module", params=CASES, ids=lambda case: case.name)
def shard(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Shard:
    """A shard of each case; tests only read it."""
    return make_shard(request.param, tmp_path_factory.mktemp(request.param.name) / "store")


def position_of(shard: Shard, header: Fields) -> int:
    """The index in its call of the block whose record this is."""
    key = take_apart("Index key", header["key"], key_length=header["key_length"])
    return shard.hashes[1:].index(key["block_hash"])


def engine_bytes(shard: Shard, header: Fields) -> list[bytes]:
    """The valid tokens' bytes of each slice, taken from the cache by torch's indexing."""
    case, block = shard.case, [2, 0, 3][position_of(shard, header)]
    names = {int(re.findall(r"\d+", name)[0]): name for name in case.tensors}
    found = []
    for head, layer, _ in document_slices(header):
        name = names[layer]
        local = head - case.first_head.get(name, 0)
        tokens = range(header["valid_tokens"])
        found.append(b"".join(cell(case.tensors[name], case.layout, block, local, token) for token in tokens))
    return found


def cell(tensors: Any, layout: str, block: int, head: int, token: int) -> bytes:
    """K, then V of one token and head."""
    place = {"B": block, "H": head, "N": token, "C": slice(None), "D": slice(None), "2": slice(None)}
    parts = tensors if isinstance(tensors, tuple) else (tensors,)
    picked = [part[tuple(place[axis] for axis in layout)] for part in parts]
    return b"".join(part.contiguous().view(torch.uint8).numpy().tobytes() for part in picked)


# --- the records -------------------------------------------------------------------------------------------------


def test_every_put_block_has_an_index_entry_under_the_documents_key(shard: Shard) -> None:
    identity_id = hashlib.blake2b(shard.case.identity(shard.cache).canonical_json().encode(), digest_size=16).digest()
    if shard.case.total_heads is None:
        identity_id = next(k for k in shard.databases["meta"] if k.startswith(b"identity:"))[len("identity:") :]
    wanted = {identity_id + g.to_bytes(2, "big") + h for g in shard.cache.groups for h in shard.hashes[1:]}
    assert set(shard.databases["index"]) == wanted


def test_header_fields_are_where_the_document_says(shard: Shard) -> None:
    for key, value, header in shard.records():
        at, index = take_apart("Index key", key, key_length=len(key)), position_of(shard, header)
        group = shard.cache.groups[at["group"]]
        tokens = (shard.case.start + COUNT) * group.block_size - shard.case.missing_tokens
        assert header["magic"] == magic_of("Header")
        assert (header["version"], header["algorithm"]) == (constant("VERSION"), constant("CHECKSUM_ALGORITHM"))
        assert header["header_length"] == len(value) <= constant("MAX_HEADER_BYTES")
        assert (header["key"], header["parent"]) == (key, shard.hashes[index])
        assert (header["position"], header["block_size"]) == (shard.case.start + index, group.block_size)
        assert header["valid_tokens"] == min(group.block_size, tokens - header["position"] * group.block_size)
        assert (header["flags"], header["accesses"]) == (0, 1)
        assert header["eviction_class"] < 16
        assert 0 <= header["written"] - header["last_touch"] < 60 * 10**6
        assert header["written"] <= header["sequence"] < 2**62
        assert abs(header["written"] / 1e6 - time.time()) < 3600


def test_header_ends_where_its_last_field_ends_and_its_fixed_part_is_without_gaps(shard: Shard) -> None:
    rows = table("Header")
    for _, value, header in shard.records():
        end = 0
        for row in rows:
            assert evaluate(row["offset"], header) == end
            end += evaluate(row["size"], header)
        assert end == len(value)
    assert evaluate(next(row for row in rows if row["name"] == "key")["offset"], {}) == constant("FIXED_BYTES")


def test_header_hash_is_xxh3_of_the_header_without_it(shard: Shard) -> None:
    for _, value, header in shard.records():
        assert header["header_hash"] == xxh3(value[:8] + value[16:])


def test_directory_hash_and_length_are_the_headers(shard: Shard) -> None:
    for _, _, header in shard.records():
        directory = shard.chunk(header["sequence"], 0)
        assert header["directory_length"] == len(directory)
        assert header["directory_hash"] == xxh3(directory)


def directory_of(shard: Shard, header: Fields) -> tuple[list[int], list[Fields]]:
    """The slice sums and the entries of a record's directory."""
    slices = document_slices(header)
    sizes = [header["block_size"] * cell_bytes for _, _, cell_bytes in slices]
    counts = {"num_slices": len(slices), "num_chunks": len(document_chunks(sizes))}
    data = shard.chunk(header["sequence"], 0)
    fields = take_apart("Directory", data, **counts)
    assert len(data) == len(fields["slice_sums"]) + len(fields["chunks"])
    return np.frombuffer(fields["slice_sums"], "<u8").tolist(), entries("Directory entry", fields["chunks"])


def test_chunks_have_the_lengths_and_hashes_of_the_directory_and_nothing_else_is_stored(shard: Shard) -> None:
    stored = set(shard.databases["payload"])
    for _, _, header in shard.records():
        _, chunks = directory_of(shard, header)
        for number, entry in enumerate(chunks, 1):
            chunk = shard.chunk(header["sequence"], number)
            assert (entry["length"], entry["hash"]) == (len(chunk), xxh3(chunk))
        stored -= {header["sequence"].to_bytes(8, "big") + n.to_bytes(2, "big") for n in range(len(chunks) + 1)}
        assert header["stored_length"] == header["directory_length"] + sum(entry["length"] for entry in chunks)
    assert not stored


def test_decoded_chunks_are_the_canonical_bytes_cut_where_the_document_says(shard: Shard) -> None:
    for _, _, header in shard.records():
        slices = document_slices(header)
        sizes = [header["block_size"] * cell_bytes for _, _, cell_bytes in slices]
        engine = engine_bytes(shard, header)
        canonical = b"".join(data.ljust(size, b"\0") for data, size in zip(engine, sizes, strict=True))
        assert header["codec"] == int(next(r["number"] for r in table("Codecs") if r["name"] == shard.case.codec))
        assert header["raw_length"] == len(canonical)
        lengths = document_chunks(sizes)
        ends = np.cumsum([0, *lengths]).tolist()
        for number, length in enumerate(lengths, 1):
            chunk = document_decode(header["codec"], shard.chunk(header["sequence"], number), length)
            assert chunk == canonical[ends[number - 1] :][:length]


def test_a_chunk_is_encoded_where_that_gains_what_the_document_says(shard: Shard) -> None:
    for _, _, header in shard.records():
        sizes = [header["block_size"] * cell_bytes for _, _, cell_bytes in document_slices(header)]
        lengths = [entry["length"] for entry in directory_of(shard, header)[1]]
        ratios = [length / size for length, size in zip(lengths, document_chunks(sizes), strict=True)]
        assert all(ratio == 1 or ratio <= 19 / 20 for ratio in ratios)
        if shard.case.codec == "raw":
            assert set(ratios) == {1}


def test_slots_past_the_valid_tokens_are_zero_where_the_engines_are_not() -> None:
    partial = next(case for case in CASES if case.name == "partial")
    assert partial.missing_tokens
    last = partial.cache.tensors["model.layers.0.self_attn.attn"]
    assert isinstance(last, torch.Tensor)
    assert last[3, 0, -partial.missing_tokens :].view(torch.uint8).any()


def test_slice_sums_and_the_tagged_checksum_are_those_of_the_checksum_document(shard: Shard) -> None:
    identity = next(v for k, v in shard.databases["meta"].items() if k.startswith(b"identity:"))
    for key, _, header in shard.records():
        at = take_apart("Index key", key, key_length=len(key))
        slices, (table_sums, _) = document_slices(header), directory_of(shard, header)
        first = header["position"] * header["block_size"]
        parts = zip(engine_bytes(shard, header), slices, strict=True)
        sums = [slice_sum(cells, cell_bytes, first) for cells, (_, _, cell_bytes) in parts]
        assert table_sums == sums
        fingerprint = document_fingerprint(identity, at["group"])
        assert header["fingerprint"] == fingerprint
        tag = int.from_bytes(at["block_hash"][:8], "little") ^ fingerprint
        assert header["tagged_checksum"] == block_sum(slices, sums) ^ tag


def test_the_cases_reach_what_they_are_for(tmp_path: Path) -> None:
    shards = {case.name: make_shard(case, tmp_path / case.name) for case in CASES}
    headers = {name: [header for _, _, header in shard.records()] for name, shard in shards.items()}
    sizes = {
        name: [h["block_size"] * cell_bytes for _, _, cell_bytes in document_slices(h)]
        for name, (h, *_) in headers.items()
    }
    assert max(sizes["large"]) > constant("CHUNK_BYTES")
    assert len(document_chunks(sizes["large"])) == 10
    assert len(sizes["chunks"]) > len(document_chunks(sizes["chunks"])) > 1
    assert len(entries("Run", headers["odd"][0]["geometry"])) == 4
    assert {int.from_bytes(k[16:18], "big") for k in shards["groups"].databases["index"]} == {0, 513}
    assert {head for head, _, _ in document_slices(headers["ranks"][0])} == {2, 3}
    assert any(h["valid_tokens"] < h["block_size"] for h in headers["partial"])
    planes = next(header for header in headers["planes"] if header["valid_tokens"] == header["block_size"])
    encoded, kept = (entry["length"] for entry in directory_of(shards["planes"], planes)[1])
    assert encoded < kept == sizes["planes"][1]


# --- STORE, meta, quarantine -------------------------------------------------------------------------------------


def slots(folder: Path) -> dict[int, tuple[bytes, Fields]]:
    """The intact slots of a STORE file by their place."""
    data, size, stride = (folder / "STORE").read_bytes(), size_of("Slot"), constant("SLOT_STRIDE")
    assert len(data) == 2 * stride
    places = {at: data[at : at + size] for at in (0, stride)}
    magic = magic_of("Slot")
    return {at: (slot, take_apart("Slot", slot)) for at, slot in places.items() if slot.startswith(magic)}


def test_store_file_has_intact_slots_in_the_places_of_their_generations(shard: Shard) -> None:
    found = slots(shard.folder)
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", "")
    for at, (slot, fields) in found.items():
        assert at == constant("SLOT_STRIDE") * (fields["generation"] % 2)
        assert fields["slot_hash"] == xxh3(slot[:16] + slot[24:])
        assert (fields["version"], fields["slot_length"]) == (constant("FORMAT_VERSION"), len(slot))
        assert (fields["boot_id"].hex(), fields["reserved"]) == (boot, 0)
        assert abs(fields["created"] / 1e6 - time.time()) < 3600
    assert len({fields["store_id"] for _, fields in found.values()}) == 1


def test_store_file_says_clean_after_close_and_unclean_before(shard: Shard) -> None:
    before, after = sorted((fields for _, fields in slots(shard.folder).values()), key=lambda f: f["generation"])
    assert after["generation"] == before["generation"] + 1
    assert (before["flags"], after["flags"]) == (0, 1)


@pytest.mark.both
def test_first_slot_is_zero_until_the_second_generation(tmp_path: Path) -> None:
    case = CASES[0]
    with open_store(tmp_path, case.cache) as store:
        found = slots(store.folder)
    assert list(found) == [constant("SLOT_STRIDE")]
    assert found[512][1]["generation"] == 1


def test_usage_counts_the_index(shard: Shard) -> None:
    value = shard.databases["meta"][b"usage"]
    assert len(value) == size_of("Usage")
    usage, headers = take_apart("Usage", value), [header for _, _, header in shard.records()]
    assert usage["last_sequence"] == max(header["sequence"] for header in headers)
    assert usage["raw_bytes"] == sum(header["raw_length"] for header in headers)
    assert usage["stored_bytes"] == sum(header["stored_length"] for header in headers)
    assert (usage["quarantine_records"], usage["quarantine_bytes"]) == (0, 0)
    assert len({header["sequence"] for header in headers}) == len(headers)


def test_identity_is_canonical_json_under_its_own_id(shard: Shard) -> None:
    ((key, text),) = ((k, v) for k, v in shard.databases["meta"].items() if k != b"usage")
    assert key == b"identity:" + hashlib.blake2b(text, digest_size=16).digest()
    identity = json.loads(text)
    assert document_json(identity) == text
    assert sorted(identity) == [row["name"] for row in table("Identity")]
    names = [layer[0] for layer in identity["layers"]]
    assert names == sorted(shard.case.tensors)
    for layer in identity["layers"]:
        fields = layer_fields(layer)
        groups = shard.case.groups or {0: names}
        assert fields["name"] in groups[fields["group"]]
        assert fields["kv_heads"] == (shard.case.total_heads or fields["kv_heads"]) > 0


def condemn_one(store: KVStore, hashes: list[bytes]) -> tuple[bytes, bytes]:
    """Damage the last chunk of the first block and load it; its index key and entry."""
    raw, key = Raw(store), index_key(store, hashes[0])
    entry = raw.entry(key)
    assert entry is not None
    chunk = take_apart("Header", entry)["sequence"].to_bytes(8, "big") + (1).to_bytes(2, "big")
    raw.put_chunk(chunk, flip(raw.payload()[chunk], 77))
    assert store.get_blocks(hashes[:1], [4]).rejected[0].condemned
    return key, entry


@pytest.mark.both
def test_quarantine_entry_holds_the_condemned_index_entry(tmp_path: Path) -> None:
    hashes = block_hashes(2)
    with open_store(tmp_path, CASES[0].cache) as store:
        store.put_blocks(hashes, [0, 1])
        key, entry = condemn_one(store, hashes)
        folder = store.folder
    databases = read_databases(folder)
    ((name, value),) = databases["quarantine"].items()
    fields = take_apart("Quarantine entry", value)
    assert (fields["kind"], fields["key"], fields["value"]) == ("storage_hash", key, entry)
    assert len(value) == 12 + fields["kind_length"] + fields["key_length"] + fields["value_length"]
    header = take_apart("Header", fields["value"])
    usage = take_apart("Usage", databases["meta"][b"usage"])
    assert (usage["quarantine_records"], usage["quarantine_bytes"]) == (1, header["stored_length"])
    assert usage["last_sequence"] == take_apart("Quarantine key", name)["sequence"] > header["sequence"]
    assert key not in databases["index"]
    assert usage["raw_bytes"] == header["raw_length"], "of the record that is left"
    assert header["sequence"].to_bytes(8, "big") + b"\0\0" in databases["payload"], "its chunks stay"


# --- the document's own examples ---------------------------------------------------------------------------------


def test_identity_example_has_the_id_and_the_fingerprints_it_gives() -> None:
    text = value_of("Identity example", "JSON").encode()
    assert document_json(json.loads(text)) == text
    assert hashlib.blake2b(text, digest_size=16).hexdigest() == value_of("Identity example", "identity_id")
    for group in (0, 1):
        expected = int(value_of("Identity example", f"fingerprint of group {group}"), 16)
        assert document_fingerprint(text, group) == expected


@pytest.mark.parametrize("row", table("Geometry examples"), ids=lambda row: row["layers"])
def test_geometry_examples_unpack_to_their_layers(row: Row) -> None:
    layers = [
        (run["first_layer"] + i * run["step"], *(run["first_head"], run["heads_less_one"] + 1), *sizes)
        for run in entries("Run", bytes.fromhex(row["geometry"].strip("`")))
        for sizes in [(run["k_bytes"], run["v_bytes"])]
        for i in range(run["count"])
    ]
    assert sorted(layers) == sorted(document_layers(row["layers"]))


@pytest.mark.parametrize("row", table("Chunk examples"), ids=lambda row: row["slices"])
def test_chunk_examples_follow_from_the_rule(row: Row) -> None:
    assert document_chunks(map(int, row["slices"].split())) == list(map(int, row["chunks"].split()))


@pytest.mark.parametrize("row", table("Codec 1 examples"), ids=lambda row: str(len(row["raw"]) // 2 - 1))
def test_codec_examples_decode_by_the_document(row: Row) -> None:
    raw, stored = (bytes.fromhex(row[name].strip("`")) for name in ("raw", "stored"))
    assert document_decode(1, stored, len(raw)) == raw
