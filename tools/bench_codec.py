"""Measure the codec bf16-planes on a real model's KV: `python -m kvstore.tools.bench_codec [--json]`.

The KV is SmolLM2-135M's after the demo's prompt, cut into chunks as a store cuts it. One thread; each chunk is copied,
encoded and decoded in warm memory, so that memcpy is measured right beside the codec.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Final

import numpy as np
import numpy.typing as npt
import torch
import typer
import zstandard

from kvstore.codec import Codec, codec_named
from kvstore.geometry import CHUNK_BYTES, chunk_plan
from kvstore.planes import plane_loops
from kvstore.tools.bench_report import machine, spread, versions
from kvstore.tools.demo_model import prefill, prompt_ids
from kvstore.tools.model import ModelUnavailable, load_smollm2, smollm2_folder

if TYPE_CHECKING:
    from transformers import DynamicCache

Bytes = npt.NDArray[np.uint8]
NAME: Final = "bf16-planes"
BLOCK_TOKENS: Final = 16
STEPS: Final = ("memcpy", "in", "out")


class WrongBytes(RuntimeError):
    """A chunk was decoded to other bytes than were encoded: the codec must not be used on this machine."""


def real_chunks() -> list[Bytes]:
    """Chunks of whole blocks in canonical order, (bytes,) uint8 each. Fetches the model on the first call ever."""
    tokenizer, model = load_smollm2(smollm2_folder())
    return chunks_of(prefill(model, prompt_ids(tokenizer)))


def chunks_of(cache: DynamicCache) -> list[Bytes]:
    """The chunks of a cache's full blocks of BLOCK_TOKENS tokens."""
    layers = [torch.cat([layer.keys[0], layer.values[0]], -1) for layer in cache.layers]
    slices = torch.stack(layers, 1).view(torch.uint8).numpy()
    heads, count, tokens, cell = slices.shape
    blocks = tokens // BLOCK_TOKENS
    parts = slices[:, :, : blocks * BLOCK_TOKENS].reshape(heads, count, blocks, BLOCK_TOKENS * cell)
    rows = parts.transpose(2, 0, 1, 3).reshape(blocks, -1)
    bounds = chunk_plan([BLOCK_TOKENS * cell] * (heads * count)).bounds
    return [row[a:b] for row in rows for a, b in itertools.pairwise(bounds)]


def measure(codec: Codec, chunks: Sequence[Bytes], repeat: int) -> dict[str, Any]:
    """ratio, and spreads over `repeat` rounds of GB/s and of the codec's GB/s over memcpy's. Raises WrongBytes."""
    work, out = np.empty(CHUNK_BYTES, np.uint8), np.empty(CHUNK_BYTES, np.uint8)
    total, stored, rates = sum(chunk.size for chunk in chunks), 0, np.empty((repeat, len(STEPS)))
    _round(codec, chunks, work, out)
    for number in range(repeat):
        seconds, stored = _round(codec, chunks, work, out)
        rates[number] = total / seconds / 1e9
    columns = dict(zip(STEPS, rates.T, strict=True))
    return {
        "ratio": total / stored,
        "gb_per_s": {name: spread(column.tolist()) for name, column in columns.items()},
        "to_memcpy": {name: spread((columns[name] / columns["memcpy"]).tolist()) for name in STEPS[1:]},
        "raw_bytes": total,
        "stored_bytes": stored,
        "chunks": len(chunks),
    }


def _round(codec: Codec, chunks: Sequence[Bytes], work: Bytes, out: Bytes) -> tuple[npt.NDArray[np.float64], int]:
    """Seconds of each step over all chunks, and the stored bytes."""
    seconds, stored = np.zeros(len(STEPS)), 0
    for chunk in chunks:
        raw, back = work[: chunk.size], out[: chunk.size]
        np.copyto(raw, chunk)
        times = [time.perf_counter()]
        np.copyto(back, raw)
        times.append(time.perf_counter())
        encoded = codec.encode(raw)
        times.append(time.perf_counter())
        wrong = codec.decode(encoded, back)
        times.append(time.perf_counter())
        if wrong or not np.array_equal(back, chunk):
            raise WrongBytes(f"{codec.name}: {wrong or 'a chunk came back changed'}; run the tests, and report this")
        seconds += np.diff(times)
        stored += len(encoded)
    return seconds, stored


def render(report: dict[str, Any]) -> str:
    """The report in a few lines."""
    rates, ratios = report["gb_per_s"], report["to_memcpy"]
    lines = [f"{report['codec']}: ratio {report['ratio']:.3f} on {report['raw_bytes'] / 1e6:.1f} MB of real KV"]
    for name in STEPS:
        beside = f", {ratios[name]['median']:.3f} of memcpy" if name in ratios else ""
        lines.append(f"{name:>6}: {rates[name]['max']:.2f} GB/s best, {rates[name]['median']:.2f} median{beside}")
    return "\n".join([*lines, f"One thread, {report['loops']} loops; {report['machine']['cpu']}."])


def main(
    repeat: Annotated[int, typer.Option(min=1, help="Measured rounds.")] = 15,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Measure the codec bf16-planes on SmolLM2-135M's KV: ratio, and GB/s (10^9 raw bytes a second) in and out beside
    memcpy's."""
    try:
        chunks = real_chunks()
    except ModelUnavailable as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None
    report = {"codec": NAME, "model": "SmolLM2-135M-Instruct", "repeat": repeat}
    report |= measure(codec_named(NAME), chunks, repeat)
    report |= {"loops": plane_loops().__name__.rpartition("_")[2], "machine": machine()}
    report |= {"versions": versions() | {"zstandard": zstandard.__version__}}
    typer.echo(json.dumps(report, indent=2) if as_json else render(report))


if __name__ == "__main__":
    typer.run(main)
