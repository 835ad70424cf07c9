"""What `kvstore stat`, `ls`, `show` and `verify` print: lines for people, and objects for programs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from kvstore.explain import ChunkState, Explained, Field, codec_name, runs_in_words
from kvstore.fsck.findings import count
from kvstore.inspect import Item
from kvstore.record import FIXED, Header
from kvstore.results import Rejection
from kvstore.storefile import boot_id
from kvstore.survey import GroupSum, Names, Survey
from kvstore.tools.commands import age, table, when
from kvstore.tools.fsck_outcome import printable, size
from kvstore.verify import Checked

MOST_TEXT: Final = 60
HASH_DIGITS: Final = 16
MOST_CHUNKS: Final = 64
"""Lines of chunks that are shown of a sound record."""
HASHES: Final = ("fingerprint", "tagged_checksum", "directory_hash")
LS_FORM: Final = "{:17} {:8} {:>5} {:>8} {:>6} {:>8} {:>8} {:11} {}"
LS_HEADING: Final = LS_FORM.format(
    "block hash", "identity", "group", "position", "tokens", "raw", "stored", "codec", "written (UTC)"
)


def short(text: str) -> str:
    """Untrusted text on one line, of bounded length."""
    shown = printable(text[: MOST_TEXT + 1])
    return shown if len(text) <= MOST_TEXT else f"{shown}..."


# --- stat --------------------------------------------------------------------------------------------------------


def stat_lines(store: Path, found: Sequence[Survey]) -> Iterator[str]:
    """A store's shards, identities and groups."""
    total = _all(found)
    yield f"{printable(str(store))}: {count(len(found), 'shard')}, {count(total.records, 'record')}, {_bytes(total)}"
    yield ""
    yield from table([SHARD_HEADING, *map(_shard_row, found)], " rrrrrrr")
    for identity_id, names, groups in _identities(found):
        yield ""
        yield f"identity {identity_id.hex() or '(none)'}  {_named(names)}"
        rows = [_group_row(number, one) for number, one in groups.items()]
        yield from (f"  {line}" for line in table([GROUP_HEADING, *rows], "rrrrr     r"))
    for one in found:
        yield from _remarks(one)


SHARD_HEADING: Final = ["shard", "records", "stored", "raw", "file", "capacity", "free", "quarantine", "state"]
GROUP_HEADING: Final = [
    *("group", "records", "raw", "stored", "saved", "codecs", "oldest", "newest", "last asked for", "asked for"),
    "damaged",
]


def _shard_row(one: Survey) -> list[str]:
    figures = one.figures
    sizes = [size(figures[name]) for name in ("stored_bytes", "raw_bytes", "file_bytes", "capacity_bytes")]
    free = size(max(0, figures["free_bytes"]))
    return [
        printable(one.folder.name),
        f"{figures['records']:,}",
        *sizes,
        free,
        f"{figures['quarantine_records']:,}",
        state(one),
    ]


def state(one: Survey) -> str:
    """How the shard was left, or is."""
    if one.state is None:
        return "being made"
    if one.state.clean:
        return "clean"
    return "unsynced writes of this boot" if one.state.boot_id == boot_id() else "unsynced writes"


def _group_row(number: int, one: GroupSum) -> list[str]:
    saved = f"{1 - one.stored_bytes / one.raw_bytes:.0%}" if one.raw_bytes else "-"
    codecs = ", ".join(f"{codec_name(codec)} {n:,}" for codec, n in sorted(one.codecs.items())) or "-"
    times = [age(one.oldest), age(one.newest), age(one.touched)]
    sizes = [size(one.raw_bytes), size(one.stored_bytes), saved]
    damaged = f"{one.damaged:,}" + (f" (+{one.unknown:,} newer)" if one.unknown else "")
    return [str(number), f"{one.records:,}", *sizes, codecs, *times, f"{one.accesses:,}", damaged]


def _bytes(total: GroupSum) -> str:
    return f"{size(total.stored_bytes)} stored, {size(total.raw_bytes)} in the engine"


def _all(found: Sequence[Survey]) -> GroupSum:
    whole = GroupSum()
    for one in found:
        whole.merge(one.total)
    return whole


def _identities(found: Sequence[Survey]) -> list[tuple[bytes, Names, dict[int, GroupSum]]]:
    """What all shards hold of each identity."""
    names: dict[bytes, Names] = {}
    groups: dict[bytes, dict[int, GroupSum]] = {}
    for one in found:
        for name, said in one.identities.items():
            names[name] = said if said.model else names.get(name, said)
        for (name, number), part in one.groups.items():
            groups.setdefault(name, {}).setdefault(number, GroupSum()).merge(part)
    return [(name, names.get(name, Names()), groups.get(name, {})) for name in sorted({*names, *groups})]


def _named(names: Names) -> str:
    if not names.model:
        return "(what it is called is missing or damaged)"
    words = [
        short(names.model),
        f"revision {short(names.revision) or '-'}",
        short(names.dtype),
        short(names.quantization),
    ]
    return ", ".join([word for word in words if word] + [count(names.layers, "layer")])


def _remarks(one: Survey) -> Iterator[str]:
    """What else there is to say of a shard."""
    name = printable(one.folder.name)
    for what, kinds in (
        ("in quarantine", one.condemned),
        ("refused by readers, and not looked at by the writer yet", one.reported),
    ):
        if kinds:
            said = ", ".join(f"{short(kind)} {number:,}" for kind, number in sorted(kinds.items()))
            yield f"{name}: {what}: {said}"
    if one.accounts_differ:
        yield f"{name}: the accounting is not what the index has: {', '.join(one.accounts_differ)}: run kvstore-fsck"
    if one.total.damaged:
        yield f"{name}: {count(one.total.damaged, 'damaged index entry').replace('entrys', 'entries')}: run kvstore-fsck"


def stat_object(store: Path, found: Sequence[Survey]) -> dict[str, Any]:
    """The same for programs: bytes, microseconds since 1970, hexadecimal ids."""
    return {
        "schema": 1,
        "store": str(store),
        "shards": [_shard_object(one) for one in found],
        "identities": [
            {
                "identity": name.hex(),
                **vars(names),
                "groups": [{"group": number, **_group_object(part)} for number, part in groups.items()],
            }
            for name, names, groups in _identities(found)
        ],
        "total": _group_object(_all(found)),
    }


def _shard_object(one: Survey) -> dict[str, Any]:
    made = one.state
    return {
        "shard": one.folder.name,
        **one.figures,
        "clean": bool(made and made.clean),
        "store_id": made.store_id.hex() if made else "",
        "created": made.created if made else 0,
        "quarantine": dict(one.condemned),
        "reported": dict(one.reported),
        "settled": one.settled,
        "accounts_differ": one.accounts_differ,
    }


def _group_object(one: GroupSum) -> dict[str, Any]:
    return {**vars(one), "codecs": {codec_name(codec): number for codec, number in sorted(one.codecs.items())}}


# --- ls ----------------------------------------------------------------------------------------------------------


def ls_line(item: Item) -> str:
    """One record in a line under LS_HEADING."""
    name, header = _short_hash(item.block_hash), item.header
    start = (name, item.identity_id.hex()[:8] or "-", item.group)
    if isinstance(header, Rejection):
        return f"{'{:17} {:8} {:>5}'.format(*start)}  {header.kind}: {printable(header.detail)}"
    tokens = f"{header.valid_tokens}/{header.block_size}"
    sizes = size(header.raw_length), size(header.stored_length)
    return LS_FORM.format(*start, header.position, tokens, *sizes, codec_name(header.codec), when(header.written))


def _short_hash(block_hash: bytes) -> str:
    shown = block_hash.hex()
    return f"{shown[:HASH_DIGITS]}{'…' if len(shown) > HASH_DIGITS else ''}" or "-"


def item_object(item: Item) -> dict[str, Any]:
    """A record for programs."""
    where = {
        "shard": item.shard,
        "key": item.key.hex(),
        "identity": item.identity_id.hex(),
        "group": item.group,
        "block_hash": item.block_hash.hex(),
    }
    return where | header_object(item.header)


def header_object(header: Header | Rejection) -> dict[str, Any]:
    """A header's fields; 64-bit hashes and bytes in hexadecimal."""
    if isinstance(header, Rejection):
        return {"wrong": {"kind": header.kind, "detail": header.detail}}
    fields: Mapping[str, Any] = vars(header)
    plain = {name: value for name, value in fields.items() if name not in (*HASHES, "key", "geometry", "parent")}
    hashes = {name: f"{fields[name]:016x}" for name in HASHES}
    words = {"codec": codec_name(header.codec), "parent": header.parent.hex(), "geometry": header.geometry.hex()}
    return {**plain, **hashes, **words}


# --- show --------------------------------------------------------------------------------------------------------


def show_lines(one: Explained, names: Names) -> Iterator[str]:
    """A record field by field."""
    item, header = one.item, one.item.header
    yield f"record {item.block_hash.hex() or item.key.hex()}"
    yield f"  in {printable(item.shard)}, group {item.group}, identity {item.identity_id.hex()}: {_named(names)}"
    yield f"  index key {item.key.hex()}"
    yield ""
    verdict = "right" if one.hash_right else "WRONG: nothing of it is believed"
    yield f"header: {count(len(item.value), 'byte')}, its hash is {verdict}"
    yield from (f"  {line}" for line in table([[f.name, _value(f), f.meaning] for f in one.fields]))
    if not one.fields and item.value:
        yield f"  too short: {FIXED.size} bytes at least"
    if isinstance(header, Header):
        yield f"  parent {header.parent.hex() or '-'}"
        yield ""
        of, each = ("a range of state rows", "that a block stands for") if header.flags else ("a head", "each")
        yield f"geometry: {count(one.slices or 0, 'slice')} of a layer and {of}, {count(header.block_size, 'token')} {each}"
        yield from (f"  {line}" for line in runs_in_words(one.runs))
        yield ""
        yield from _chunk_lines(one)
    yield ""
    yield from checked_lines(one.checked)


def _value(field: Field) -> str:
    value = field.value
    if isinstance(value, bytes):
        return value.hex(" ")
    if field.sort == "hash":
        return f"{value:016x}"
    if field.sort == "time":
        return f"{value} µs ({when(value)} UTC, {age(value)})" if value else "0 µs (never)"
    if field.sort == "codec":
        return f"{value} ({codec_name(value)})"
    unit = {"length": "bytes", "tokens": "tokens"}.get(field.sort, "")
    exact = f"{value:,} {unit}".strip()
    return f"{exact} ({size(value)})" if field.sort == "length" and value >= 1024 else exact


def _chunk_lines(one: Explained) -> Iterator[str]:
    states = [*([one.directory] if one.directory else []), *one.chunks]
    wrong = sum(not chunk.right for chunk in states)
    verdict = f"{wrong} WRONG" if wrong else "every length and hash is right"
    yield f"directory and {count(len(one.chunks), 'chunk')}: {verdict}"
    shown = [chunk for chunk in states if not chunk.right] if wrong else states
    yield from (f"  {line}" for line in table([CHUNK_HEADING, *map(_chunk_row, shown[:MOST_CHUNKS])], "rrr"))
    if len(shown) > MOST_CHUNKS:
        yield f"  and {len(shown) - MOST_CHUNKS:,} more (all of them with --json)"


CHUNK_HEADING: Final = ["chunk", "raw", "stored", "how", "hash"]


def _chunk_row(chunk: ChunkState) -> list[str]:
    how = "directory" if not chunk.number else "raw" if chunk.stored == chunk.raw else "encoded"
    return [str(chunk.number), f"{chunk.raw:,}", f"{chunk.stored:,}", how, _verdict(chunk)]


def _verdict(chunk: ChunkState) -> str:
    if chunk.right:
        return "right"
    if chunk.present is None:
        return "MISSING"
    return "WRONG" if chunk.present == chunk.stored else f"WRONG: {chunk.present:,} bytes are there"


def show_object(one: Explained, names: Names) -> dict[str, Any]:
    """The same for programs."""
    chunks = [*([one.directory] if one.directory else []), *one.chunks]
    return {
        **item_object(one.item),
        "identity_names": vars(names),
        "header_hash_right": one.hash_right,
        "fields": {
            field.name: field.value if isinstance(field.value, int) else field.value.hex() for field in one.fields
        },
        "runs": [vars(run) for run in one.runs],
        "slices": one.slices,
        "chunks": [vars(chunk) for chunk in chunks],
        "checked": checked_object(one.checked),
    }


# --- verify ------------------------------------------------------------------------------------------------------


def status_word(checked: Checked) -> str:
    """intact, damaged, or unknown: what this version cannot judge."""
    return "intact" if checked.wrong is None else "damaged" if checked.damaged else "unknown"


def checked_lines(checked: Checked) -> Iterator[str]:
    """What the audit of a record found."""
    item, wrong = checked.item, checked.wrong
    name = f"{printable(item.shard)} group {item.group} {item.block_hash.hex() or item.key.hex()}"
    if wrong is None:
        yield f"intact   {name}: header, hashes, decoding and content checksum agree"
    else:
        yield f"{status_word(checked):8} {name}: {wrong.kind}: {printable(wrong.detail)}"
    if checked.transient is not None:
        said = f"{checked.transient.kind}: {printable(checked.transient.detail)}"
        yield f"  a first read said {said}: the record is fine, the way to it is not: look at memory, disk and cables"


def checked_object(checked: Checked) -> dict[str, Any]:
    """The same for programs."""
    item = checked.item
    return {
        "shard": item.shard,
        "key": item.key.hex(),
        "block_hash": item.block_hash.hex(),
        "status": status_word(checked),
        "wrong": _rejection(checked.wrong),
        "transient": _rejection(checked.transient),
    }


def _rejection(wrong: Rejection | None) -> dict[str, str] | None:
    return None if wrong is None else {"kind": wrong.kind, "detail": wrong.detail}
