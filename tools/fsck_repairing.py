"""`kvstore-fsck --repair`, `--dry-run` and `--salvage`: the plan in words, a typed yes, and what was done."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from kvstore.errors import KVStoreError, StorePathError
from kvstore.fsck.findings import Progress, count
from kvstore.fsck.options import Options
from kvstore.fsck.repair import Plan, carry_out, plan
from kvstore.fsck.salvage import Salvaged, salvage
from kvstore.fsck.scan import check
from kvstore.tools.fsck_outcome import Checked, Run, one_line, printable, size

Show = Callable[[Path, Progress], None]


def plans(run: Run) -> list[tuple[Checked, Plan]]:
    """What a repair of each shard does that could be checked. A shard that cannot be looked at has its error."""
    made = []
    for checked in run.shards:
        if not checked.error and not checked.cancelled:
            try:
                made.append((checked, plan(checked.shard, checked.findings)))
            except (KVStoreError, OSError) as error:
                checked.error = one_line(error)
    return made


def plan_words(todo: Plan, compact: bool) -> list[str]:
    """A plan, a sentence each; empty where there is nothing to do."""
    words = [printable(action.what) for action in todo.actions]
    if compact:
        words.append("return free space to the file system")
    if words and todo.room:
        words.append(f"needs {size(todo.room)} of room on the disk, and the store to itself")
    words += [f"left alone: {count(number, 'finding')} of {kind}" for kind, number in todo.ignored.items()]
    return words


def does_nothing(todo: Plan, compact: bool) -> bool:
    """Whether a repair would leave the shard as it is."""
    return todo.nothing and not compact


def repair(made: Sequence[tuple[Checked, Plan]], options: Options, compact: bool, show: Show) -> list[Checked]:
    """Carry plans out; the shards that are to be checked again. options: how a salvaged database is checked meanwhile. A
    shard that cannot be repaired has its error."""
    again = []
    for checked, todo in made:
        if does_nothing(todo, compact):
            continue
        shard = checked.shard
        told = partial(show, shard)
        try:
            done = carry_out(shard, todo, compact, told, None, lambda shard: check(shard, options))
        except (KVStoreError, OSError) as error:
            checked.error = one_line(error)
            continue
        checked.done, checked.repaired = [printable(said) for said in done.words], not todo.nothing
        again.append(checked)
    return again


def salvage_all(store: Path, shards: Sequence[Path], output: Path, show: Show) -> list[Salvaged]:
    """Salvage every shard into a new store, each into the folder of its name; a lone shard into `output` itself.

    Raises what salvage raises, and StorePathError for an output inside the store."""
    if os.path.commonpath([os.path.realpath(store), os.path.realpath(output)]) == os.path.realpath(store):
        raise StorePathError(f"{output} lies in {store}: expected a folder outside of the store that is salvaged")
    into = [output if shards == [store] else output / shard.name for shard in shards]
    return [
        salvage(shard, folder, lambda progress, shard=shard: show(shard, progress))  # type: ignore[misc]
        for shard, folder in zip(shards, into, strict=True)
    ]


def salvaged_words(done: Salvaged) -> str:
    """What came back, in a sentence."""
    lost = sum(done.failed.values())
    parts = [f"{count(done.records, 'record')}, {size(done.nbytes)}"]
    if done.older:
        parts.append(f"{done.older:,} of them in an older version, since the newest is not intact")
    if lost:
        kinds = ", ".join(f"{kind} {number:,}" for kind, number in sorted(done.failed.items()))
        parts.append(f"{count(lost, 'key')} of which no record is intact ({kinds}), deleted records among them")
    if done.unknown:
        parts.append(f"{count(done.unknown, 'record')} of a newer version not copied")
    return f"{printable(str(done.output))}: {'; '.join(parts)}"
