"""`kvstore quarantine`: the records that were condemned, listed, explained, dropped."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import lmdb
import typer

from kvstore.blockdb import BlockDB
from kvstore.errors import ConfigError, StorePathError
from kvstore.explain import explain_condemned
from kvstore.fsck.findings import count
from kvstore.fsck.shards import shards as shard_folders
from kvstore.inspect import Condemned, condemned, find_condemned, opened
from kvstore.record import Header
from kvstore.survey import Names
from kvstore.tools import look, look_text
from kvstore.tools.commands import Reporting, ReportingGroup, age, table, when
from kvstore.tools.fsck_outcome import printable, size

AT_ONCE = 64
"""Records that one transaction drops."""
NAME_HELP = "A number of `kvstore quarantine list`, an index key, a block hash, or the first digits of one."

app = typer.Typer(cls=ReportingGroup, no_args_is_help=True, rich_markup_mode="markdown")


@app.callback()
def main() -> None:
    """Look at records that were condemned: they are served no more, and kept within a bound.

    Example: `kvstore quarantine list /var/lib/kvstore`
    """


@app.command("list", cls=Reporting)
def listed(store: look.StoreArgument, as_json: look.JsonOption = False) -> None:
    """List what is in quarantine, oldest first: when, why, which block.

    Examples:

    - `kvstore quarantine list /var/lib/kvstore`
    - `kvstore quarantine list /var/lib/kvstore --json`
    """
    with opened(shard_folders(store)) as shards:
        found = [one for shard in shards for one in condemned(shard)]
    if as_json:
        for one in found:
            typer.echo(look.dumped(condemned_object(one)))
    elif found:
        heading = ["number", "shard", "condemned (UTC)", "age", "why", "stored", "group", "block hash"]
        typer.echo("\n".join(table([heading, *map(_row, found)], "r    rr")))
    else:
        typer.echo(f"{store}: nothing is in quarantine")


def _row(one: Condemned) -> list[str]:
    start = [str(one.number), printable(one.shard)]
    if one.entry is None:
        return [*start, "-", "-", "the entry is damaged", "-", "-", "-"]
    stored = size(one.header.stored_length) if isinstance(one.header, Header) else "not known"
    where = [str(one.item.group), one.item.block_hash.hex() or one.item.key.hex()]
    return [*start, when(one.entry.time), age(one.entry.time), look_text.short(one.entry.kind), stored, *where]


def condemned_object(one: Condemned) -> dict[str, Any]:
    """A condemned record for programs."""
    found: dict[str, Any] = {"shard": one.shard, "number": one.number}
    if one.entry is None:
        return {**found, "entry": "damaged"}
    return {**look_text.item_object(one.item), **found, "time": one.entry.time, "kind": one.entry.kind}


@app.command(cls=Reporting)
def show(
    store: look.StoreArgument, name: Annotated[str, typer.Argument(help=NAME_HELP)], as_json: look.JsonOption = False
) -> None:
    """Explain a record in quarantine field by field, and what is wrong with it now.

    Examples:

    - `kvstore quarantine show /var/lib/kvstore 1764489600000000`
    - `kvstore quarantine show /var/lib/kvstore 3f2a91c0 --json`
    """
    with opened(shard_folders(store)) as shards:
        for one in find_condemned(shards, name):
            shard = next(shard for shard in shards if shard.folder.name == one.shard)
            explained = explain_condemned(shard, one.item)
            if as_json:
                typer.echo(look.dumped(look_text.show_object(explained, Names()) | condemned_object(one)))
                continue
            kind = one.entry.kind if one.entry else "the entry is damaged"
            time = when(one.entry.time) if one.entry else "-"
            typer.echo(f"quarantine {one.number}: condemned {time} UTC: {look_text.short(kind)}")
            typer.echo("\n".join([*look_text.show_lines(explained, look.names(shard, one.item)), ""]))


@app.command(cls=Reporting)
def drop(
    store: look.StoreArgument,
    names: Annotated[list[str] | None, typer.Argument(help=NAME_HELP, metavar="[NUMBER|KEY]...")] = None,
    everything: Annotated[bool, typer.Option("--all", help="All of the quarantine.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Delete records in quarantine; their room is used again.

    It needs the store to itself: stop the engine that writes it.

    Examples:

    - `kvstore quarantine drop /var/lib/kvstore 1764489600000000`
    - `kvstore quarantine drop /var/lib/kvstore --all --yes`
    """
    if bool(names) == everything:
        raise ConfigError("expected numbers or keys, or --all: `kvstore quarantine list` shows what there is")
    with opened(shard_folders(store), writable=True) as shards:
        found = (
            [one for shard in shards for one in condemned(shard)]
            if everything
            else [one for name in names or () for one in find_condemned(shards, name)]
        )
        if found and not yes:
            typer.confirm(f"Delete {count(len(found), 'record')} in quarantine from {store}?", abort=True)
        gone = sum(_drop(shard, [one.name for one in found if one.shard == shard.folder.name]) for shard in shards)
    typer.echo(f"{count(gone, 'record')} deleted")


def _drop(shard: BlockDB, names: Sequence[bytes]) -> int:
    """Delete a shard's entries, some a transaction. Raises StorePathError."""
    gone = 0
    try:
        for start in range(0, len(names), AT_ONCE):
            gone += shard.drop_condemned(names[start : start + AT_ONCE])
    except (lmdb.Error, OSError) as error:
        raise StorePathError(
            f"{shard.folder}: {error}: {gone} are deleted, others are not: look at the disk, and do it again"
        ) from None
    return gone
