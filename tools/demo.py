"""`make demo`: a real model's KV cache goes to disk, comes back in another process, and damage is refused.

Exit status 0 says that every step held.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final, cast

import numpy as np
import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn
from rich.table import Table

from kvstore import KVStore, KVStoreError, StoreConfig
from kvstore.engines.transformers import BLOCK_SIZE, chain_hashes, load_cache, open_store, save_cache
from kvstore.record import record_key
from kvstore.results import REJECTION_KINDS
from kvstore.tools import demo_damage
from kvstore.tools.demo_model import TOKENS_LEFT, Continuation, go_on, prefill, prompt_ids
from kvstore.tools.demo_second import Figures, Task
from kvstore.tools.demo_text import QUESTION
from kvstore.tools.model import ModelUnavailable, load_smollm2, smollm2_folder

if TYPE_CHECKING:
    from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

CONFIG: Final = StoreConfig(capacity_bytes=256 * 2**20)
SECOND_TIMEOUT: Final = 300.0
GROUP: Final = 0


class DemoError(Exception):
    """The demo cannot go on; the message says why."""


@dataclass(eq=False)
class Report:
    """What the person sees, and which checks failed."""

    console: Console
    failures: list[str] = field(default_factory=list)
    steps: int = 0

    def step(self, title: str) -> None:
        """Begin a step."""
        self.steps += 1
        self.console.print(f"\n[bold cyan]{self.steps}[/] [bold]{escape(title)}[/]")

    def say(self, text: str) -> None:
        """A line under the step."""
        self.console.print(f"    {escape(text)}", style="dim")

    def check(self, held: bool, text: str) -> None:
        """A line that has to be true."""
        good, bad = ("ok", "NO") if self.console.options.ascii_only else ("✓", "✗")
        self.console.print(f"  [green]{good}[/] {escape(text)}" if held else f"  [bold red]{bad} {escape(text)}[/]")
        if not held:
            self.failures.append(f"step {self.steps}: {text}")

    @contextmanager
    def waiting(self, text: str) -> Iterator[None]:
        """A spinner during a step that has no measure; on a terminal only."""
        with self.console.status(text):
            yield

    @contextmanager
    def bar(self, text: str, total: int) -> Iterator[Progress]:
        """A progress bar over tokens; on a terminal only."""
        columns = (SpinnerColumn(), TextColumn(text), BarColumn(), MofNCompleteColumn(), TextColumn("tokens"))
        with Progress(*columns, console=self.console, transient=True, disable=not self.console.is_terminal) as bar:
            bar.add_task(text, total=total)
            yield bar


@dataclass(eq=False)
class Demo:
    """One run. `work` is a temporary folder that holds everything it writes.

    prefix: how many of the prompt's tokens are stored. whole: the uninterrupted run's cache, of which every shorter
    reference is the beginning. identity: the model's identity id in the store. counted: what every opening counted.
    """

    report: Report
    work: Path
    folder: Path
    tokenizer: PreTrainedTokenizerBase
    model: PreTrainedModel
    ids: torch.Tensor
    prefix: int
    whole: DynamicCache = None
    said: Continuation | None = None
    identity: bytes = b""
    counted: Counter[str] = field(default_factory=Counter)

    def run(self) -> None:
        """All steps; a check that fails is noted, and the next step begins."""
        self.show_model()
        self.prefill_and_store()
        self.second_process()
        blocks = self.prefix // BLOCK_SIZE
        self.flip(blocks * 3 // 4)
        self.exchange(blocks // 3, blocks // 2)
        self.put_again()

    def show_model(self) -> None:
        """What the model is."""
        config = self.model.config
        self.report.step("A real model")
        self.report.say(f"SmolLM2-135M in bfloat16: {config.num_hidden_layers} layers, on the CPU")
        self.report.say(f"a prompt of {self.ids.shape[1]:,} tokens: a story, and a question about it")

    def prefill_and_store(self) -> None:
        """Compute the prompt's KV, store it, and go on: the uninterrupted run."""
        self.report.step("Compute the keys and values of the story, and store them")
        start = time.perf_counter()
        with self.report.bar("prefill", self.prefix) as bar:
            self.whole = prefill(self.model, self.ids[:, : self.prefix], lambda n: bar.advance(bar.task_ids[0], n))
        self.report.say(f"{self.prefix:,} tokens computed in {time.perf_counter() - start:.2f} s")
        with self.open() as store:
            start = time.perf_counter()
            put = save_cache(store, self.ids, self.whole)
            seconds, megabytes = time.perf_counter() - start, store.stats()["put_bytes"] / 1e6
            self.identity = store.identity.digest()
        blocks = self.prefix // BLOCK_SIZE
        self.report.check(
            int(put.stored.sum()) == blocks and not put.failed,
            f"{int(put.stored.sum())} of {blocks} blocks stored, {megabytes:.1f} MB in {seconds:.2f} s, synced",
        )
        with self.report.waiting("answering the question"):
            self.said = go_on(self.model, self.ids, self.whole)
        self.report.say(f"Q: {QUESTION}")
        self.report.say(f"A: {self.text(self.said.answer)}")

    def second_process(self) -> None:
        """Load the prefix in a fresh interpreter, and compare what it says with the uninterrupted run."""
        self.report.step("Another process, which has computed nothing, loads them")
        task = Task(str(self.folder), str(self.work / "store"), self.ids[0].tolist(), torch.get_num_threads())
        (self.work / "task.json").write_text(json.dumps(asdict(task)))
        with self.report.waiting("starting a fresh interpreter"):
            figures = run_second(self.work)
        self.count(figures.stats)
        logits = torch.from_numpy(np.load(self.work / "second.npy")).view(torch.bfloat16)
        self.report.check(
            figures.tokens == self.prefix, f"{figures.tokens:,} of {self.ids.shape[1]:,} tokens verified and skipped"
        )
        restored = figures.load + figures.rest
        self.report.say(
            f"first token after {restored:.2f} s (load {figures.load:.2f} s) instead of {figures.full:.2f} s: "
            f"{figures.full / restored:.0f} times sooner"
        )
        same = self.said is not None and self.said.same_bits(logits)
        self.report.check(same, f"logits of {len(logits)} tokens bit-identical to the uninterrupted run")
        self.report.say(f"A: {self.text(figures.answer)}")

    def flip(self, block: int) -> None:
        """One bit of a payload flips in the file."""
        self.report.step("One bit of a stored block flips on the disk")
        bit = 3
        offset = demo_damage.flip_bit(self.shard, self.key(block), bit)
        self.report.say(f"block {block}: bit {bit} of byte {offset:,} of data.mdb")
        self.load_damaged("storage_hash", 1, block)

    def exchange(self, one: int, two: int) -> None:
        """Two intact records trade places in the index."""
        self.report.step("The index entries of two intact blocks are exchanged")
        demo_damage.exchange(self.shard, self.key(one), self.key(two))
        self.report.say(f"block {one} now lies under the key of block {two}, and the other way round")
        self.load_damaged("key", 2, one)

    def load_damaged(self, kind: str, count: int, block: int) -> None:
        """Load what is left, and show that the damage was refused, the rest used and the answer right."""
        with self.open() as store:
            cache, tokens = load_cache(store, self.ids)
            refused = rejections(store.stats())
        told = ", ".join(f"{n} by {name}" for name, n in refused.items()) or "none"
        self.report.check(refused == {kind: count}, f"blocks refused: {told}")
        self.report.say(REJECTION_KINDS[kind])
        self.report.check(
            tokens == block * BLOCK_SIZE, f"the {tokens // BLOCK_SIZE} blocks before it used: {tokens:,} tokens skipped"
        )
        with self.report.waiting("computing the rest, with and without the store"):
            expected = self.reference(tokens)
            said = go_on(self.model, self.ids, cache)
        same = expected.same_bits(said.logits)
        self.report.check(same, f"logits of {len(said.logits)} tokens bit-identical to the run without a store")
        self.report.say(f"A: {self.text(said.answer)}")

    def reference(self, tokens: int) -> Continuation:
        """What the model says after the first tokens of its own cache, which never left its memory."""
        self.whole.crop(tokens - self.whole.get_seq_length())
        return go_on(self.model, self.ids, self.whole)

    def put_again(self) -> None:
        """What was refused is stored again from a fresh prefill; show the figures."""
        self.report.step("The engine recomputes what was refused, and stores it again")
        with self.report.bar("prefill", self.prefix) as bar:
            cache = prefill(self.model, self.ids[:, : self.prefix], lambda n: bar.advance(bar.task_ids[0], n))
        with self.open() as store:
            put = save_cache(store, self.ids, cache)
            _, tokens = load_cache(store, self.ids)
            figures = store.stats()
        refused, stored = sum(rejections(self.counted).values()), int(put.stored.sum())
        self.report.check(
            stored == refused and not put.failed, f"{stored} blocks stored, {int(put.present.sum())} were present"
        )
        self.report.check(tokens == self.prefix, f"all {tokens:,} tokens verified")
        self.report.step("What the store counted in both processes, and holds")
        counted = dict(sorted(self.counted.items()))
        self.report.console.print(stats_table(counted | {n: v for n, v in figures.items() if n not in counted}))

    @contextmanager
    def open(self) -> Iterator[KVStore]:
        """The demo's store, for this model; closed, and its counters kept, at the end of the block."""
        with open_store(self.work / "store", self.model, config=CONFIG) as store:
            yield store
            self.count(store.stats())

    def count(self, stats: dict[str, int]) -> None:
        """Add the counters of one opening; the other figures are the shard's."""
        self.counted.update({name: n for name, n in stats.items() if name.startswith(("put_", "get_"))})

    @property
    def shard(self) -> Path:
        """The folder of the store's one shard."""
        return next((self.work / "store").glob("tp*"))

    def key(self, block: int) -> bytes:
        """The index key of the prompt's block at that position."""
        return record_key(self.identity, GROUP, chain_hashes(self.ids, BLOCK_SIZE)[block])

    def text(self, answer: list[int]) -> str:
        """An answer as text."""
        return cast(str, self.tokenizer.decode(answer, skip_special_tokens=True)).strip()


def run_second(work: Path) -> Figures:
    """Run the second process on work/task.json; raises DemoError where it fails."""
    command = [sys.executable, "-m", "kvstore.tools.demo_second", str(work)]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=SECOND_TIMEOUT)
    except subprocess.TimeoutExpired:
        raise DemoError(f"the second process took more than {SECOND_TIMEOUT:.0f} s") from None
    if result.returncode:
        raise DemoError(f"the second process ended with {result.returncode}:\n{result.stderr.strip()[-2000:]}")
    return Figures(**json.loads((work / "second.json").read_text()))


def rejections(stats: Mapping[str, int]) -> dict[str, int]:
    """How many blocks were refused, by kind."""
    prefix = "get_rejected_"
    return {name.removeprefix(prefix): n for name, n in stats.items() if name.startswith(prefix)}


def stats_table(stats: dict[str, int]) -> Table:
    """Counters as a table of two columns."""
    table = Table("counter", show_header=True, header_style="bold")
    table.add_column("value", justify="right")
    for name, value in stats.items():
        table.add_row(name, f"{value:,}")
    return table


@contextmanager
def without_warnings() -> Iterator[None]:
    """Refusals are shown as checks: the store's own warnings about them would tell the same twice."""
    log = logging.getLogger("kvstore")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(level)


def start(report: Report, work: Path) -> Demo:
    """A demo with its model loaded; raises ModelUnavailable."""
    folder = smollm2_folder()
    with report.waiting("loading the model"):
        tokenizer, model = load_smollm2(folder)
    ids = prompt_ids(tokenizer)
    prefix = (ids.shape[1] - TOKENS_LEFT) // BLOCK_SIZE * BLOCK_SIZE
    return Demo(report, work, folder, tokenizer, model, ids, prefix)


def main() -> int:
    """Run the demo; 0 where every step held."""
    report = Report(Console(highlight=False))
    report.console.print("[bold]kvstore[/]: KV that comes back is verified, or it does not come back")
    try:
        with without_warnings(), tempfile.TemporaryDirectory(prefix="kvstore-demo-") as work:
            start(report, Path(work)).run()
    except (DemoError, KVStoreError, ModelUnavailable, OSError, RuntimeError) as error:
        report.check(False, f"{type(error).__name__}: {error}")
    if report.failures:
        report.console.print(f"\n[bold red]{len(report.failures)} failed:[/]")
        for failure in report.failures:
            report.console.print(f"  {escape(failure)}")
        return 1
    report.console.print("\n[bold green]Every step held.[/]")
    return 0


if __name__ == "__main__":
    sys.exit(main())
