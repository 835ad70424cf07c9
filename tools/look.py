"""`kvstore stat`, `ls`, `show`, `verify`: looking into a store, also while an engine writes it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from kvstore.blockdb import BlockDB
from kvstore.explain import explain
from kvstore.fsck.shards import shards as shard_folders
from kvstore.inspect import Filter, Item, find, items, opened, reading
from kvstore.survey import Names, names_of, survey
from kvstore.tools import look_text
from kvstore.tools.commands import DAMAGE, FAILED, moment, nbytes
from kvstore.tools.fsck_outcome import printable
from kvstore.verify import Checked, Checker

StoreArgument = Annotated[Path, typer.Argument(help="The folder of a store, or of one of its shards.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON: a line each.")]
KEY_HELP: Final = "An index key, a block hash, or the first digits of one, in hexadecimal."
IdentityOption = Annotated[str, typer.Option(help="Only of this identity: the first hexadecimal digits of its id.")]
GroupOption = Annotated[int | None, typer.Option(min=0, max=65535, help="Only of this KV cache group.")]
PrefixOption = Annotated[str, typer.Option(help="Only blocks whose hash begins with these hexadecimal digits.")]
OlderOption = Annotated[
    str | None, typer.Option(help="Only what was written before: how long ago (12h, 7d) or a date (2026-01-31, UTC).")
]
NewerOption = Annotated[str | None, typer.Option(help="Only what was written after: as --older.")]
MinBytesOption = Annotated[str, typer.Option(help="Only records of at least so many stored bytes: 4096, 64K, 2M.")]
CodecOption = Annotated[str | None, typer.Option(help="Only records of this codec: raw, bf16-planes.")]
LimitOption = Annotated[int | None, typer.Option(min=0, help="So many at most.")]


def chosen(
    identity: str, group: int | None, prefix: str, older: str | None, newer: str | None, least: str, codec: str | None
) -> Filter:
    """The records that the options mean. Raises ConfigError."""
    times = [None if text is None else moment(text) for text in (older, newer)]
    return Filter(identity, group, prefix, times[0], times[1], nbytes(least), codec)


def dumped(found: Any) -> str:
    """JSON on one line; what is no ASCII is escaped."""
    return json.dumps(found, separators=(",", ":"))


def stat(
    store: StoreArgument, as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False
) -> None:
    """What a store holds: shards, identities, groups, records, bytes, ages, quarantine and room.

    `stored` is what records take, `raw` what their blocks take in the engine, `free` the room that is left of the capacity
    that the file was made for. `asked for` is how often eviction counted requests for the records that are there. Hits,
    misses and refused loads are counted by the engine while it has the store open (`store.stats()`); what stays of them in
    the store are the records in quarantine and what readers reported, by kind. It reads the index, and no chunk.

    Examples:

    - `kvstore stat /var/lib/kvstore`
    - `kvstore stat /var/lib/kvstore/tp0of2-pp0of1 --json`
    """
    with opened(shard_folders(store)) as shards:
        found = [survey(shard) for shard in shards]
    if as_json:
        typer.echo(dumped(look_text.stat_object(store, found)))
    else:
        typer.echo("\n".join(look_text.stat_lines(store, found)))


def ls(
    store: StoreArgument,
    identity: IdentityOption = "",
    group: GroupOption = None,
    prefix: PrefixOption = "",
    older: OlderOption = None,
    newer: NewerOption = None,
    min_bytes: MinBytesOption = "0",
    codec: CodecOption = None,
    limit: LimitOption = None,
    as_json: JsonOption = False,
) -> None:
    """List records in the order of their keys: identity, group, block hash.

    It reads the index, and no chunk: a record that is listed may still be damaged (`kvstore verify`, `kvstore-fsck`).
    `--json` has every field of the header, whole hashes and exact bytes; times are microseconds since 1970.

    Examples:

    - `kvstore ls /var/lib/kvstore --limit 20`
    - `kvstore ls /var/lib/kvstore --identity 3f2a --group 0 --older 7d --min-bytes 1M`
    - `kvstore ls /var/lib/kvstore --json | jq -r .key | xargs kvstore verify /var/lib/kvstore`
    """
    meant = chosen(identity, group, prefix, older, newer, min_bytes, codec)
    with opened(shard_folders(store)) as shards:
        listed = ((shard, item) for shard in shards for item in items(shard, meant))
        for line in _ls_lines(islice(listed, limit), len(shards) > 1, as_json):
            typer.echo(line)


def _ls_lines(listed: Iterator[tuple[BlockDB, Item]], several: bool, as_json: bool) -> Iterator[str]:
    current: BlockDB | None = None
    for shard, item in listed:
        if as_json:
            yield dumped(look_text.item_object(item))
            continue
        if shard is not current:
            yield from [f"{printable(str(shard.folder))}:"] * several
            yield look_text.LS_HEADING
            current = shard
        yield look_text.ls_line(item)


def show(store: StoreArgument, key: Annotated[str, typer.Argument(help=KEY_HELP)], as_json: JsonOption = False) -> None:
    """Explain a block's records field by field: the header, the geometry, the chunks, and whether all hashes are right.

    A block has a record in each shard, group and identity that stores it; each is shown. The exit status is 0 where they are
    intact, 4 where one is damaged, 8 where one cannot be judged by this version, or there is none.

    Examples:

    - `kvstore show /var/lib/kvstore 3f2a91c0`
    - `kvstore show /var/lib/kvstore 3f2a91c0 --json`
    """
    status = 0
    with opened(shard_folders(store)) as shards:
        for item in find(shards, key):
            shard = _shard_of(shards, item)
            explained = explain(shard, item)
            if explained is None:
                typer.echo(_gone(item, as_json))
                status |= FAILED
                continue
            said = names(shard, item)
            if as_json:
                typer.echo(dumped(look_text.show_object(explained, said)))
            else:
                typer.echo("\n".join([*look_text.show_lines(explained, said), ""]))
            status |= _status(explained.checked)
    raise typer.Exit(status)


def verify(
    store: StoreArgument,
    keys: Annotated[list[str], typer.Argument(help=f"Several: {KEY_HELP[0].lower()}{KEY_HELP[1:]}", metavar="KEY...")],
    as_json: JsonOption = False,
) -> None:
    """Check records wholly: header, key, hashes, decoding, content checksum, and the layers of their identity.

    What looks damaged is read twice. Nothing is changed. The exit status is 0 where all are intact, 4 where one is damaged,
    8 where one is not there, or cannot be judged by this version, 16 where a key is none; 12 is 4 and 8. To check a whole
    store, use `kvstore-fsck`.

    Examples:

    - `kvstore verify /var/lib/kvstore 3f2a91c0 77ab`
    - `kvstore ls /var/lib/kvstore --newer 1h --json | jq -r .key | xargs kvstore verify /var/lib/kvstore`
    """
    status = 0
    with opened(shard_folders(store)) as shards:
        checkers = {shard.folder.name: Checker(shard) for shard in shards}
        for item in [item for key in keys for item in find(shards, key)]:
            checked = checkers[item.shard].check(item.key)
            if checked is None:
                typer.echo(_gone(item, as_json))
                status |= FAILED
                continue
            lines = [dumped(look_text.checked_object(checked))] if as_json else look_text.checked_lines(checked)
            typer.echo("\n".join(lines))
            status |= _status(checked)
    raise typer.Exit(status)


def _gone(item: Item, as_json: bool) -> str:
    """What is said of a record that went while it was looked for."""
    if as_json:
        return dumped({"shard": item.shard, "key": item.key.hex(), "status": "gone"})
    shard = printable(item.shard)
    return f"gone     {shard} group {item.group} {item.block_hash.hex()}: evicted, or deleted, just now"


def _status(checked: Checked) -> int:
    """The bits of the exit status that a record sets."""
    if checked.wrong is None:
        return 0
    return DAMAGE if checked.damaged else FAILED


def _shard_of(shards: Sequence[BlockDB], item: Item) -> BlockDB:
    return next(shard for shard in shards if shard.folder.name == item.shard)


def names(shard: BlockDB, item: Item) -> Names:
    """What the identity of a record says of itself. Raises StoreDamaged."""
    with reading(shard):
        return names_of(item.identity_id, shard.identity(item.identity_id))
