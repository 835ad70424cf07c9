"""Payload codecs: what is encoded decodes to the same bytes, and bytes from a disk do no harm.

The first half has no store: round trips of every kind and length, then malformed bytes, each of which is refused or
decodes to bytes of the right length, inside the memory that is given. The second puts bf16-planes into stores: records of
both codecs side by side, and payloads whose hashes are right and whose content is not.
"""

from __future__ import annotations

import logging
import sys
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import xxhash
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore import KVStore, PagedKVCache
from kvstore import planes as planes_module
from kvstore.codec import CODECS, Codec, RawCodec, codec_named
from kvstore.geometry import CHUNK_BYTES
from kvstore.planes import WINDOW_BYTES, Bf16PlanesCodec, plane_loops
from tests.support import MIB, SMALL, Raw, block_hashes, canonical, flip, index_key, make_cache, open_store
from tests.test_format import document_decode, table, take_apart
from tests.test_record import Crafted, craft, outcome

FEW = settings(max_examples=60, deadline=None, derandomize=True)
MANY = settings(max_examples=300, deadline=None, derandomize=True)
Bytes = npt.NDArray[np.uint8]
PLANES = replace(SMALL, codec="bf16-planes")
CANARY = 0xA7


# --- contents ----------------------------------------------------------------------------------------------------


def random_bytes(size: int) -> Bytes:
    return np.random.default_rng(size).integers(0, 256, size, np.uint8)


def bf16(size: int) -> Bytes:
    """Normal values as bfloat16, and a byte where size is odd: what KV looks like."""
    values = torch.randn(size // 2 + 1, generator=torch.Generator().manual_seed(size)).bfloat16()
    return values.view(torch.uint8).numpy()[:size].copy()


def words(size: int, exponent: int, mask: int) -> Bytes:
    """Words of one exponent, with random bits under the mask."""
    noise = np.random.default_rng(size).integers(0, 2**16, size // 2 + 1, np.uint16) & mask
    return (noise | exponent << 7).astype("<u2").view(np.uint8)[:size].copy()


CONTENTS: dict[str, Callable[[int], Bytes]] = {
    "bf16": bf16,
    "random": random_bytes,
    "zero": lambda size: np.zeros(size, np.uint8),
    "ones": lambda size: np.full(size, 255, np.uint8),
    "counting": lambda size: np.arange(size).astype(np.uint8),
    "nan": lambda size: words(size, 255, 0x807F),
    "subnormal": lambda size: words(size, 0, 0x807F),
    "repeating": lambda size: np.resize(bf16(512), size),
    "half_noise": lambda size: np.concatenate((bf16(size // 2), random_bytes(size - size // 2))),
}
SIZES = (600, 4096, 106_496, CHUNK_BYTES - 8, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 5 * CHUNK_BYTES + 3)


def encoded(raw: Bytes, codec: Codec = CODECS[1]) -> memoryview:
    """The stored bytes of a copy."""
    return codec.encode(raw.copy())


def decoded(stored: memoryview | bytes, size: int, codec: Codec = CODECS[1]) -> Bytes | str:
    """The raw bytes, or what is wrong; nothing outside of them is written."""
    memory = np.full(size + 16, CANARY, np.uint8)
    wrong = codec.decode(memoryview(stored), memory[8 : 8 + size])
    assert (memory[:8] == CANARY).all()
    assert (memory[8 + size :] == CANARY).all()
    return memory[8 : 8 + size] if wrong is None else wrong


def assert_comes_back(raw: Bytes, codec: Codec = CODECS[1]) -> memoryview:
    stored = encoded(raw, codec)
    assert 20 * len(stored) <= 19 * raw.size or bytes(stored) == raw.tobytes()
    out = decoded(bytes(stored), raw.size, codec)
    assert not isinstance(out, str), out
    assert out.tobytes() == raw.tobytes()
    return stored


@pytest.fixture(params=["planes_numpy", "planes_numba"])
def loops(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Each kind of loops, used by the codec."""
    if request.param == "planes_numba":
        pytest.importorskip("numba")
        from kvstore import planes_numba as module
    else:
        from kvstore import planes_numpy as module
    monkeypatch.setattr(planes_module, "plane_loops", lambda: module)
    return module


# --- round trips -------------------------------------------------------------------------------------------------


def test_codecs_are_those_of_the_document() -> None:
    assert {str(number): codec.name for number, codec in CODECS.items()} == {
        row["number"]: row["name"] for row in table("Codecs")
    }
    assert all(codec.number == number and codec_named(codec.name) is codec for number, codec in CODECS.items())
    assert SMALL.codec == "raw"


@pytest.mark.parametrize("content", CONTENTS)
def test_every_short_length_comes_back(loops: ModuleType, content: str) -> None:
    for size in range(65):
        assert_comes_back(CONTENTS[content](size))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("content", CONTENTS)
def test_chunks_of_every_kind_come_back(loops: ModuleType, content: str, size: int) -> None:
    raw = CONTENTS[content](size)
    stored = bytes(assert_comes_back(raw))
    if size <= 4096:
        assert document_decode(1, stored, size) == raw.tobytes()


@MANY
@given(st.binary(max_size=2000), st.integers(1, 40))
def test_any_bytes_come_back(data: bytes, times: int) -> None:
    assert_comes_back(np.frombuffer(data * times, np.uint8))


@FEW
@given(st.binary(max_size=500), st.integers(0, 3), st.integers(0, 3))
def test_loops_of_both_kinds_give_equal_bytes_at_any_address(data: bytes, before: int, after: int) -> None:
    pytest.importorskip("numba")
    from kvstore import planes_numba, planes_numpy

    size = len(data) // 2 * 2
    raw = np.frombuffer(bytes(before) + data[:size], np.uint8)[before:]
    results = []
    for module in (planes_numba, planes_numpy):
        memory = np.zeros(2 * size + after, np.uint8)
        exponents, others = memory[after : after + size // 2], memory[after + size // 2 : after + size]
        module.split(raw, exponents, others)
        back = memory[after + size :]
        module.join(exponents, others, back)
        assert back.tobytes() == raw.tobytes()
        results.append(memory.tobytes())
    assert results[0] == results[1]


def test_the_split_is_the_documents(loops: ModuleType) -> None:
    every = np.arange(2**16, dtype="<u2")
    exponents, others = np.empty((2, every.size), np.uint8)
    loops.split(every.view(np.uint8), exponents, others)
    assert exponents.tolist() == [w >> 7 & 255 for w in range(2**16)]
    assert others.tolist() == [w << 1 & 254 | w >> 15 for w in range(2**16)]


@pytest.mark.parametrize("row", table("Codec 1 examples"), ids=lambda row: str(len(row["raw"]) // 2 - 1))
def test_the_documents_examples_decode(loops: ModuleType, row: dict[str, str]) -> None:
    raw, stored = (bytes.fromhex(row[name].strip("`")) for name in ("raw", "stored"))
    found = decoded(stored, len(raw))
    assert not isinstance(found, str)
    assert found.tobytes() == raw


def test_kv_gains_and_noise_is_kept_as_it_is() -> None:
    assert CHUNK_BYTES / len(encoded(bf16(CHUNK_BYTES))) > 1.38
    noise = random_bytes(CHUNK_BYTES)
    kept = noise.copy()
    assert len(CODECS[1].encode(noise)) == CHUNK_BYTES
    assert np.array_equal(noise, kept)


def test_encoding_takes_no_memory_but_the_chunks_own() -> None:
    batch = np.stack([bf16(CHUNK_BYTES)] * 16)
    CODECS[1].encode(batch[0].copy())
    tracemalloc.start()
    stored = [CODECS[1].encode(raw) for raw in batch]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert all(np.shares_memory(np.frombuffer(s, np.uint8), raw) for s, raw in zip(stored, batch, strict=True))
    assert peak < CHUNK_BYTES


def test_the_raw_codec_refuses_another_length() -> None:
    assert isinstance(decoded(bytes(7), 8, RawCodec()), str)
    assert isinstance(decoded(bytes(9), 8, RawCodec()), str)


# --- threads, interruptions, loops -------------------------------------------------------------------------------


def test_threads_share_a_codec() -> None:
    codec = Bf16PlanesCodec()
    barrier = threading.Barrier(4)

    def work(seed: int) -> None:
        barrier.wait()
        for number in range(20):
            assert_comes_back(bf16(20_000 + 1000 * seed + number), codec)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert 1 <= len(codec._idle) <= 4


def test_a_call_inside_of_another_does_not_disturb_it(monkeypatch: pytest.MonkeyPatch) -> None:
    codec, inner, outer = Bf16PlanesCodec(), bf16(2000), bf16(3000)
    assert_comes_back(inner, codec)
    module = plane_loops()

    class Interrupted:
        join = staticmethod(module.join)

        @staticmethod
        def split(raw: Bytes, exponents: Bytes, others: Bytes) -> None:
            module.split(raw, exponents, others)
            monkeypatch.setattr(planes_module, "plane_loops", lambda: module)
            assert_comes_back(inner, codec)

    monkeypatch.setattr(planes_module, "plane_loops", lambda: Interrupted)
    assert_comes_back(outer, codec)


def test_a_workspace_that_an_exception_left_is_not_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    codec, raw = Bf16PlanesCodec(), bf16(2000)

    class Broken:
        @staticmethod
        def split(raw: Bytes, exponents: Bytes, others: Bytes) -> None:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(planes_module, "plane_loops", lambda: Broken)
        with pytest.raises(KeyboardInterrupt):
            encoded(raw, codec)
    assert codec._idle == []
    assert_comes_back(raw, codec)


@pytest.fixture
def fresh_loops() -> Iterator[None]:
    """The loops are chosen anew in the test, and after it."""
    plane_loops.cache_clear()
    yield
    plane_loops.cache_clear()


@pytest.mark.parametrize("missing", ["kvstore.planes_numba", "numba"])
def test_without_numba_numpy_does_it_and_says_so_once(
    fresh_loops: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, missing: str
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    with caplog.at_level(logging.WARNING, "kvstore.planes"):
        for _ in range(3):
            assert_comes_back(bf16(2000), Bf16PlanesCodec())
    assert plane_loops().__name__ == "kvstore.planes_numpy"
    (record,) = caplog.records
    assert "pip install numba" in record.getMessage()


# --- malformed bytes ---------------------------------------------------------------------------------------------


def frame_of(content: bytes, **options: Any) -> bytes:
    """A zstd frame of these bytes."""
    return bytes(zstandard.ZstdCompressor(**options).compress(content))


def crafted_frame(claimed: int, blocks: bytes, window: int | None = None) -> bytes:
    """A zstd frame by hand: its claimed content size, its blocks, and the byte of its window, None for a single
    segment."""
    head = bytes([0xC0 | (0x20 if window is None else 0)]) + (b"" if window is None else bytes([window]))
    return zstandard.FRAME_HEADER + head + claimed.to_bytes(8, "little") + blocks


def run_block(size: int, last: bool) -> bytes:
    """A block that stands for a run of one byte."""
    return (int(last) | 1 << 1 | size << 3).to_bytes(3, "little") + b"\x7f"


SIZE = 4096
WORDS = SIZE // 2
RUN = bytes([0x7F]) * WORDS
SKIPPABLE = bytes.fromhex("502a4d18")
EMPTY_SKIPPABLE = SKIPPABLE + bytes(4)
STREAMED = zstandard.ZstdCompressor().compressobj()
FRAMES: dict[str, bytes] = {
    "nothing": b"",
    "no_frame": bytes(40),
    "magic": zstandard.FRAME_HEADER,
    "one_too_few": frame_of(RUN[:-1]),
    "one_too_many": frame_of(RUN + b"\x7f"),
    "no_content": frame_of(b""),
    "no_size": STREAMED.compress(RUN) + STREAMED.flush(),
    "size_not_written": frame_of(RUN, write_content_size=False),
    "followed_by_a_byte": frame_of(RUN) + b"\0",
    "followed_by_a_frame": frame_of(RUN) * 2,
    "followed_by_an_empty_frame": frame_of(RUN) + frame_of(b""),
    "two_halves": frame_of(RUN[: WORDS // 2]) * 2,
    "after_an_empty_frame": frame_of(b"") + frame_of(RUN),
    "skippable": SKIPPABLE + WORDS.to_bytes(4, "little") + bytes(WORDS - 9),
    "after_a_skippable": EMPTY_SKIPPABLE + frame_of(RUN),
    "followed_by_a_skippable": frame_of(RUN) + EMPTY_SKIPPABLE,
    "wrong_checksum": frame_of(RUN, write_checksum=True)[:-1] + b"\0",
    "unknown_dictionary": zstandard.FRAME_HEADER
    + bytes([0x61, 9])
    + WORDS.to_bytes(2, "little")
    + run_block(WORDS, True),
    "claims_2_to_62": crafted_frame(2**62, run_block(WORDS, True)),
    "bomb_beyond_its_claim": crafted_frame(WORDS, run_block(128 * 1024, False) * 300 + run_block(1, True)),
    "bomb_in_a_window": crafted_frame(WORDS, run_block(128 * 1024, False) * 300 + run_block(1, True), 0x38),
    "honest_bomb": crafted_frame(300 * 128 * 1024, run_block(128 * 1024, False) * 299 + run_block(128 * 1024, True)),
    "huge_window": crafted_frame(WORDS, run_block(WORDS, True), 0x88),
    "huge_window_cut": crafted_frame(WORDS, run_block(WORDS, False), 0x88),
    "window_cut": crafted_frame(WORDS, run_block(WORDS, False), 0x38),
    "reserved_block": crafted_frame(WORDS, (1 | 3 << 1 | WORDS << 3).to_bytes(3, "little")),
    "empty_blocks_alone": crafted_frame(WORDS, run_block(0, False) * 400 + run_block(0, True)),
}


@pytest.mark.parametrize("name", FRAMES)
def test_a_frame_that_is_not_the_one_expected_is_refused(loops: ModuleType, name: str) -> None:
    codec = Bf16PlanesCodec()
    stored = bytes(WORDS) + FRAMES[name]
    assert len(stored) < SIZE
    tracemalloc.start()
    found = decoded(stored, SIZE, codec)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert isinstance(found, str), found
    assert peak < MIB
    assert all(w.decompressor.memory_size() < MIB for w in codec._idle)
    assert_comes_back(bf16(SIZE), codec)


@pytest.mark.parametrize("window", [None, 0x38])
def test_a_crafted_frame_that_is_right_decodes(window: int | None) -> None:
    blocks = run_block(WORDS - 5, False) + run_block(0, False) + run_block(5, True)
    found = decoded(bytes(WORDS) + crafted_frame(WORDS, blocks, window), SIZE)
    assert not isinstance(found, str), found
    assert found.view("<u2").tolist() == [0x3F80] * WORDS
    checked = bytes(WORDS) + frame_of(RUN, write_checksum=True)
    assert np.array_equal(found, decoded(checked, SIZE))


def test_the_largest_chunk_has_the_largest_window() -> None:
    stored = encoded(bf16(CHUNK_BYTES))
    parameters = zstandard.get_frame_parameters(stored[CHUNK_BYTES // 2 :])
    assert parameters.window_size == parameters.content_size == WINDOW_BYTES == CHUNK_BYTES // 2


@pytest.mark.parametrize("size", [600, 601])
def test_a_chunk_cut_anywhere_is_refused(size: int) -> None:
    raw = bf16(size)
    good = bytes(encoded(raw))
    assert len(good) < size
    for length in range(len(good)):
        assert isinstance(decoded(good[:length], size), str), length
    for more in range(1, size - len(good)):
        assert isinstance(decoded(good + bytes(more), size), str), more
    for longer in (size + 1, size + 9, 2 * size):
        assert isinstance(decoded(good + bytes(longer - len(good)), size), str)


@pytest.mark.parametrize("other", [0, 1, 2, 3, 598, 599, 602, 604, 1198, 1200])
def test_a_chunk_under_another_raw_length_is_refused_or_has_that_length(other: int) -> None:
    stored = bytes(encoded(bf16(600)))
    found = decoded(stored, other)
    assert isinstance(found, str) or found.size == other
    if other != 601:
        assert isinstance(found, str)


def test_every_flipped_bit_is_refused_or_gives_bytes_of_the_right_length(loops: ModuleType) -> None:
    raw = bf16(600)
    good = bytes(encoded(raw))
    changed = refused = 0
    for bit in range(len(good) * 8):
        found = decoded(flip(good, bit), raw.size)
        refused += isinstance(found, str)
        changed += not isinstance(found, str) and found.tobytes() != raw.tobytes()
        if bit < 300 * 8:
            assert changed == bit + 1, "each bit of the others is one bit of the chunk"
    unused = len(good) * 8 - changed - refused
    assert refused > 8 * 8
    assert unused <= 8, "a frame has few bits that mean nothing"


@MANY
@given(st.binary(max_size=400), st.integers(0, 800))
def test_any_bytes_are_refused_or_give_bytes_of_the_right_length(data: bytes, size: int) -> None:
    assert isinstance(decoded(data, size), str | np.ndarray)


@MANY
@given(st.data())
def test_any_change_of_a_chunk_is_refused_or_gives_bytes_of_the_right_length(data: st.DataObject) -> None:
    size = data.draw(st.sampled_from([600, 601, 20_000]))
    bad = bytearray(encoded(bf16(size)))
    at = data.draw(st.integers(size - size // 2, len(bad) - 1))
    patch = data.draw(st.binary(min_size=1, max_size=12))
    bad[at : at + data.draw(st.integers(0, 12))] = patch
    assert isinstance(decoded(bytes(bad), size), str | np.ndarray)


@FEW
@given(st.binary(max_size=60), st.integers(0, 255), st.booleans(), st.integers(0, 2**64 - 1))
def test_any_blocks_under_any_header_are_refused_or_give_bytes_of_the_right_length(
    blocks: bytes, window: int, single: bool, claimed: int
) -> None:
    for size in (WORDS, claimed):
        frame = crafted_frame(size, blocks, None if single else window)
        assert isinstance(decoded(bytes(WORDS) + frame, SIZE), str | np.ndarray)


# --- stores ------------------------------------------------------------------------------------------------------

BIG = {"layers": 3, "blocks": 10, "heads": 2, "tokens": 16, "head_size": 64}
HASHES = block_hashes(4)


def model_cache(layout: str = "BHNC", seed: int = 0, **options: Any) -> PagedKVCache:
    """A cache of bfloat16 as they occur."""
    cache = make_cache(layout, **BIG | options)
    generator = torch.Generator().manual_seed(seed)
    for tensors in cache.tensors.values():
        for tensor in tensors if isinstance(tensors, tuple) else (tensors,):
            tensor.copy_(torch.randn(tensor.shape, generator=generator))
    return cache


def header_of(store: KVStore, block_hash: bytes) -> dict[str, Any]:
    entry = Raw(store).entry(index_key(store, block_hash))
    assert entry is not None
    return take_apart("Header", entry)


def assert_served(store: KVStore, cache: PagedKVCache, hashes: list[bytes], source: list[int], to: list[int]) -> None:
    """The blocks are verified in other places of the cache, with the bytes of their sources."""
    good = canonical(cache, source)
    assert store.get_blocks(hashes, to).verified.all()
    assert np.array_equal(canonical(cache, to), good)


@pytest.mark.both
@pytest.mark.parametrize("layout", ["BHNC", "2BNHD", "BNHD"])
def test_a_store_of_planes_gives_back_what_was_put(loops: ModuleType, tmp_path: Path, layout: str) -> None:
    cache = model_cache(layout)
    with open_store(tmp_path, cache, PLANES) as store:
        assert store.put_blocks(HASHES, [0, 1, 2, 3], num_tokens=4 * 16 - 5).stored.all()
        header = header_of(store, HASHES[0])
        assert header["codec"] == 1
        assert header["stored_length"] < header["raw_length"] / 1.3
        for to in ([4, 5, 6, 7], [8, 9, 4, 5]):
            assert store.get_blocks(HASHES, to, num_tokens=4 * 16 - 5).verified.all()
            assert np.array_equal(canonical(cache, to[:3]), canonical(cache, [0, 1, 2]))
        assert store.put_blocks(HASHES[:1], [0]).present.all()
    with open_store(tmp_path, cache, SMALL, mode="r") as reader:
        assert_served(reader, cache, HASHES[:3], [0, 1, 2], [6, 7, 8])


@pytest.mark.both
def test_records_of_both_codecs_lie_side_by_side(tmp_path: Path) -> None:
    cache = model_cache()
    with open_store(tmp_path, cache) as store:
        store.put_blocks(HASHES[:2], [0, 1])
    with open_store(tmp_path, cache, PLANES) as store:
        assert store.put_blocks(HASHES, [0, 1, 2, 3]).present.tolist() == [True, True, False, False]
        assert [header_of(store, h)["codec"] for h in HASHES] == [0, 0, 1, 1]
        assert_served(store, cache, HASHES, [0, 1, 2, 3], [4, 5, 6, 7])
    for codec in ("raw", "bf16-planes"):
        with open_store(tmp_path, cache, replace(SMALL, codec=codec), mode="r") as reader:
            assert_served(reader, cache, HASHES, [0, 1, 2, 3], [6, 7, 8, 9])
    with open_store(tmp_path, cache) as store:
        assert store.put_blocks(HASHES, [0, 1, 2, 3]).present.all()


@pytest.mark.both
@pytest.mark.parametrize("dtype", [torch.float16, torch.float8_e4m3fn, torch.int8])
def test_other_element_types_come_back(tmp_path: Path, dtype: torch.dtype) -> None:
    cache = make_cache(**BIG, dtype=dtype)
    with open_store(tmp_path, cache, PLANES) as store:
        assert store.put_blocks(HASHES, [0, 1, 2, 3]).stored.all()
        header = header_of(store, HASHES[0])
        assert (header["codec"], header["stored_length"] - header["directory_length"]) == (1, header["raw_length"])
        assert_served(store, cache, HASHES, [0, 1, 2, 3], [4, 5, 6, 7])


@pytest.mark.both
def test_chunks_of_one_record_may_be_stored_either_way(tmp_path: Path) -> None:
    cache = model_cache(heads=1, tokens=8, head_size=6000)
    noise = cache.tensors["model.layers.1.self_attn.attn"]
    assert isinstance(noise, torch.Tensor)
    noise.view(torch.int16).random_()
    with open_store(tmp_path, cache, PLANES) as store:
        store.put_blocks(HASHES, [0, 1, 2, 3])
        lengths = [len(chunk) for chunk in list(Raw(store).payload().values())[1:4]]
        assert lengths[1] == 192_000 > 1.3 * max(lengths[0], lengths[2])
        assert_served(store, cache, HASHES, [0, 1, 2, 3], [4, 5, 6, 7])


@pytest.mark.both
def test_small_batches_and_many_blocks_come_back(tmp_path: Path) -> None:
    cache = model_cache(blocks=40)
    config = replace(PLANES, batch_bytes=1, read_batch_bytes=1)
    hashes, source, to = block_hashes(20), list(range(20)), list(range(20, 40))
    with open_store(tmp_path / "one", cache, config) as store:
        assert store.put_blocks(hashes, source).stored.all()
        assert_served(store, cache, hashes, source, to)
    with open_store(tmp_path / "two", cache, replace(PLANES, batch_bytes=1)) as store:
        assert store.put_blocks(hashes, source).stored.all()
        assert_served(store, cache, hashes, source, to)


@pytest.mark.both
def test_a_load_decodes_in_staging_and_takes_no_memory_by_the_block(tmp_path: Path) -> None:
    cache = model_cache(blocks=64, tokens=64)
    hashes = block_hashes(32)
    with open_store(tmp_path, cache, PLANES) as store:
        store.put_blocks(hashes, list(range(32)))
        store.get_blocks(hashes, list(range(32, 64)))
        tracemalloc.start()
        assert store.get_blocks(hashes, list(range(32, 64))).verified.all()
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < MIB < 32 * header_of(store, HASHES[0])["raw_length"]


# --- payloads whose hashes are right -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory, io: str) -> Iterator[KVStore]:
    """One store for all crafted records."""
    with open_store(tmp_path_factory.mktemp("crafted"), model_cache(), PLANES) as store:
        yield store


def rewrite(record: Crafted, chunk: bytes) -> None:
    """Another first chunk, with the length and the hash that everything else says it has."""
    more = len(chunk) - len(record.chunks[0])
    record.chunks[0] = chunk
    record.directory.lengths[0] += more
    record.directory.hashes[0] = xxhash.xxh3_64_intdigest(chunk)
    record.change(stored_length=record.header.stored_length + more)


CHUNKS: dict[str, tuple[Callable[[bytes, int], bytes], str]] = {
    "cut": (lambda chunk, raw: chunk[:-1], "decode"),
    "prolonged": (lambda chunk, raw: chunk + b"\0", "decode"),
    "empty": (lambda chunk, raw: b"", "decode"),
    "planes_without_a_frame": (lambda chunk, raw: chunk[: raw // 2], "decode"),
    "two_frames": (lambda chunk, raw: chunk + chunk[raw // 2 :][: raw - len(chunk) - 1], "decode"),
    "bomb": (
        lambda chunk, raw: bytes(raw // 2) + crafted_frame(raw // 2, run_block(128 * 1024, False) * 300),
        "decode",
    ),
    "no_frame": (lambda chunk, raw: bytes(len(chunk)), "decode"),
    "flipped_mantissa": (lambda chunk, raw: flip(chunk, 5), "content"),
    "flipped_sign": (lambda chunk, raw: flip(chunk, 8), "content"),
    "other_exponents": (lambda chunk, raw: chunk[: raw // 2] + frame_of(bytes([0x7F]) * (raw // 2)), "content"),
    "zeros_stored_raw": (lambda chunk, raw: bytes(raw), "content"),
    "longer_than_raw": (lambda chunk, raw: bytes(raw + 8), "decode"),
}


@pytest.mark.both(cases=200)
@pytest.mark.parametrize("name", CHUNKS)
def test_a_damaged_chunk_under_right_hashes_is_refused(shared: KVStore, name: str) -> None:
    record, raw, key = craft(shared)
    change, kind = CHUNKS[name]
    rewrite(record, change(record.chunks[0], record.header.raw_length))
    record.put(raw, key)
    assert outcome(shared) == (kind, True)


@pytest.mark.both
def test_a_chunk_that_does_not_decode_leaves_the_other_blocks_good(tmp_path: Path) -> None:
    cache = model_cache()
    with open_store(tmp_path, cache, PLANES) as store:
        record, raw, key = craft(store)
        assert store.put_blocks(HASHES[1:], [1, 2, 3], start=1).stored.all()
        rewrite(record, record.chunks[0][:-1])
        record.put(raw, key)
        got = store.get_blocks(HASHES, [4, 5, 6, 7])
        assert {i: r.kind for i, r in got.rejected.items()} == {0: "decode"}
        assert got.verified.tolist() == [False, True, True, True]
        assert np.array_equal(canonical(cache, [5, 6, 7]), canonical(cache, [1, 2, 3]))


@pytest.mark.both(cases=200)
@pytest.mark.inline("breaks what reads or writes the shard")
def test_a_damaged_chunk_under_its_old_hash_is_refused_before_it_is_decoded(
    shared: KVStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    record, raw, key = craft(shared)
    monkeypatch.setattr(Bf16PlanesCodec, "decode", lambda *_: pytest.fail("decoded"))
    for bit in (0, len(record.chunks[0]) * 4, len(record.chunks[0]) * 8 - 1):
        record.put(raw, key)
        chunk = record.header.sequence.to_bytes(8, "big") + (1).to_bytes(2, "big")
        raw.put_chunk(chunk, flip(record.chunks[0], bit))
        assert outcome(shared) == ("storage_hash", True)
        record, raw, key = craft(shared)
    raw.put_entry(key, None)


@pytest.mark.both
def test_a_record_that_names_the_other_codec_is_refused(shared: KVStore) -> None:
    record, raw, key = craft(shared)
    record.change(codec=0)
    record.put(raw, key)
    assert outcome(shared) == ("decode", True)


@pytest.mark.both
def test_a_raw_record_that_names_planes_is_served_since_its_chunks_are_raw(tmp_path: Path) -> None:
    with open_store(tmp_path, model_cache()) as store:
        record, raw, key = craft(store)
        record.change(codec=1)
        record.put(raw, key)
        assert outcome(store) == ("verified", False)
