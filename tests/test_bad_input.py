"""The story: someone gives the store what it cannot take. The answer is an exception of its own class, whose message says
what was given and what to do, and nothing on disk has changed: no file made, written or touched.
"""

from __future__ import annotations

import os
import struct
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvstore import CacheIdentity, KVStore, PagedKVCache, Rank, StoreConfig, errors
from kvstore.identity import LayerSpec
from kvstore.prefixes import PrefixBlocks
from kvstore.storefile import DATA_NAME, FORMAT_VERSION, SLOT, SLOT_STRIDE, STORE_NAME, slot_hash
from tests.support import (
    IDENTITY,
    MIB,
    SMALL,
    block_hashes,
    canonical,
    io_mode,
    layer_tensors,
    make_cache,
    open_store,
    shard_of,
)
from tests.test_processes import child_outcome, run_python

pytestmark = pytest.mark.both
HASHES = block_hashes(8)
NAME = "model.layers.0.self_attn.attn"
NOBODY = 65534
Snapshot = dict[str, tuple[int, int, bytes]]


def snapshot(folder: Path, leave_out: tuple[str, ...] = ()) -> Snapshot:
    """Every file and folder below: mode, time of the last change, bytes."""
    paths = [p for p in sorted(folder.rglob("*")) if p.name not in leave_out and not p.is_symlink()]
    return {
        str(p.relative_to(folder)): (p.stat().st_mode, p.stat().st_mtime_ns, p.read_bytes() if p.is_file() else b"")
        for p in paths
    }


@contextmanager
def refused(
    error: type[errors.KVStoreError], *words: str, folder: Path, leave_out: tuple[str, ...] = ()
) -> Iterator[None]:
    """The block raises exactly this class, its message has all the words, and the folder is as it was before."""
    before = snapshot(folder, leave_out)
    with pytest.raises(errors.KVStoreError) as caught:
        yield
    assert caught.type is error, f"{caught.type.__name__}: {caught.value}"
    missing = [word for word in words if word not in str(caught.value)]
    assert not missing, f"{missing} not in: {caught.value}"
    assert snapshot(folder, leave_out) == before


@pytest.fixture
def filled(tmp_path: Path, cache: PagedKVCache) -> Iterator[KVStore]:
    """An open store with three blocks."""
    with open_store(tmp_path / "store", cache) as opened:
        assert opened.put_blocks(HASHES[:3], [0, 1, 2]).stored.all()
        yield opened


@pytest.fixture
def closed(tmp_path: Path, cache: PagedKVCache) -> Path:
    """The shard's folder of a closed store with three blocks, at tmp_path / "store"."""
    with open_store(tmp_path / "store", cache) as opened:
        assert opened.put_blocks(HASHES[:3], [0, 1, 2]).stored.all()
    return opened.folder


# --- arguments of put_blocks and get_blocks ------------------------------------------------------------------------

HASH, LENGTHS, ID, POSITION = (
    errors.InvalidBlockHash,
    errors.LengthMismatch,
    errors.InvalidBlockId,
    errors.InvalidPosition,
)


def released() -> memoryview:
    """A memoryview that can be read no more."""
    view = memoryview(HASHES[0])
    view.release()
    return view


BAD_CALLS: dict[str, tuple[dict[str, Any], type[errors.KVStoreError], tuple[str, ...]]] = {
    "hash too short": ({"block_hashes": [HASHES[0], b"7 bytes"]}, HASH, ("block_hashes[1]", "7 bytes", "expected 8 to 64")),
    "hash too long": ({"block_hashes": [bytes(65), HASHES[0]]}, HASH, ("block_hashes[0]", "65 bytes", "expected 8 to 64")),
    "hash is a released view": ({"block_hashes": [released(), HASHES[0]]}, HASH, ("block_hashes[0]", "released")),
    "hash is text": ({"block_hashes": ["a" * 32, HASHES[0]]}, HASH, ("block_hashes[0] is a str", "expected bytes")),
    "hash is a number": ({"block_hashes": [HASHES[0], 7]}, HASH, ("block_hashes[1] is a int", "expected bytes")),
    "one hash instead of a list": ({"block_hashes": HASHES[0]}, HASH, ("block_hashes[0] is a int", "expected bytes")),
    "no hashes": ({"block_hashes": None}, HASH, ("block_hashes is a NoneType", "expected a list")),
    "hash twice": ({"block_hashes": [HASHES[4]] * 2}, HASH, (HASHES[4].hex(), "given twice", "chained")),
    "more hashes than ids": ({"block_hashes": HASHES[:3]}, LENGTHS, ("3 block_hashes", "2 block_ids", "one id for each")),
    "more ids than hashes": ({"block_ids": [0, 1, 2]}, LENGTHS, ("2 block_hashes", "3 block_ids", "one id for each")),
    "id out of range": ({"block_ids": [0, 8]}, ID, ("block_ids[1] is 8", "0 to 7")),
    "id negative": ({"block_ids": [-1, 0]}, ID, ("block_ids[0] is -1", "0 to 7")),
    "id beyond int64": ({"block_ids": [0, 2**63]}, ID, ("block_ids", "expected a list of integers")),
    "id beyond uint64": ({"block_ids": [0, 2**70]}, ID, ("block_ids", "expected a list of integers")),
    "ids are floats": ({"block_ids": [0.0, 1.0]}, ID, ("float64", "expected a list of integers")),
    "ids are bools": ({"block_ids": [True, False]}, ID, ("bool", "expected a list of integers")),
    "ids are text": ({"block_ids": "01"}, ID, ("block_ids", "expected a list of integers")),
    "ids are one number": ({"block_ids": 0}, ID, ("block_ids", "expected a list of integers")),
    "ids are an iterator": ({"block_ids": iter([0, 1])}, ID, ("block_ids", "expected a list of integers")),
    "ids are missing": ({"block_ids": None}, ID, ("block_ids", "expected a list of integers")),
    "ids are nested": ({"block_ids": [[0, 1]]}, ID, ("(1, 2)", "expected a list of integers")),
    "ids are ragged": ({"block_ids": [[0], [0, 1]]}, ID, ("[[0], [0, 1]]", "expected a list of integers")),
    "ids without memory": ({"block_ids": torch.zeros(2, device="meta")}, ID, ("block_ids", "expected a list of integers")),
    "id twice": ({"block_ids": [3, 3]}, errors.DuplicateBlockId, ("block id 3", "given twice", "place of its own")),
    "start negative": ({"start": -1}, POSITION, ("start is -1", "at least 0")),
    "start is a bool": ({"start": True}, POSITION, ("start is True", "expected an integer")),
    "start is a float": ({"start": 1.0}, POSITION, ("start is 1.0", "expected an integer")),
    "start is missing": ({"start": None}, POSITION, ("start is None", "expected an integer")),
    "start beyond all requests": ({"start": 2**62}, POSITION, (f"start {2**62}", f"at most {2**62}")),
    "num_tokens negative": ({"num_tokens": -1}, POSITION, ("num_tokens is -1", "at least 0")),
    "num_tokens is a bool": ({"num_tokens": True}, POSITION, ("num_tokens is True", "expected an integer")),
    "num_tokens is a float": ({"num_tokens": 7.5}, POSITION, ("num_tokens is 7.5", "expected an integer")),
    "a block without valid tokens": ({"num_tokens": 4}, errors.NoValidTokens, ("position 1 ", "num_tokens 4", "leave out")),
    "no valid tokens": ({"num_tokens": 0}, errors.NoValidTokens, ("position 0 ", "num_tokens 0", "leave out")),
    "tokens end before start": ({"start": 5, "num_tokens": 20}, errors.NoValidTokens, ("position 5 ", "block_size 4")),
    "group unknown": ({"group": 1}, errors.UnknownGroup, ("group 1", "groups [0]")),
    "group is text": ({"group": "0"}, errors.UnknownGroup, ("group '0'", "groups [0]")),
    "group is missing": ({"group": None}, errors.UnknownGroup, ("group None", "groups [0]")),
    "group is a list": ({"group": [0]}, errors.UnknownGroup, ("group [0]", "groups [0]")),
}  # fmt: skip


@pytest.mark.both(cases=8)
@pytest.mark.parametrize("name", BAD_CALLS)
def test_a_call_with_bad_arguments_is_refused_and_changes_nothing(filled: KVStore, tmp_path: Path, name: str) -> None:
    given, error, words = BAD_CALLS[name]
    arguments: dict[str, Any] = {"block_hashes": HASHES[3:5], "block_ids": [0, 1]} | given
    kept = canonical(filled.cache, range(8))
    for call in (filled.put_blocks, filled.get_blocks):
        with refused(error, *words, folder=tmp_path):
            call(**arguments)
    for call in (filled.submit_put_blocks, filled.submit_get_blocks):
        with refused(error, *words, folder=tmp_path):
            call(**arguments).result()
    assert np.array_equal(canonical(filled.cache, range(8)), kept)


@pytest.mark.parametrize("parent", [b"short", bytes(65), "text" * 8, 5])
def test_a_bad_parent_is_refused(filled: KVStore, tmp_path: Path, parent: Any) -> None:
    with refused(HASH, "expected", "bytes", folder=tmp_path):
        filled.put_blocks(HASHES[3:5], [0, 1], parent=parent)


@pytest.mark.parametrize("hashes", [[b"7 bytes"], [bytes(65)], ["text" * 8], HASHES[0], None, 5])
def test_match_and_touch_refuse_bad_hashes(filled: KVStore, tmp_path: Path, hashes: Any) -> None:
    for call in (filled.match_prefix, filled.touch):
        with refused(HASH, "block_hashes", "expected", folder=tmp_path):
            call(hashes)


def test_match_and_touch_refuse_unknown_groups(filled: KVStore, tmp_path: Path) -> None:
    for call in (filled.match_prefix, filled.touch):
        with refused(errors.UnknownGroup, "group 3", "[0]", folder=tmp_path):
            call(HASHES, group=3)
    with refused(errors.UnknownGroup, "group 3", "[0]", folder=tmp_path):
        filled.match_prefix({0: HASHES, 3: HASHES})


@pytest.mark.parametrize(
    "make",
    [list, tuple, np.array, torch.tensor, lambda ids: np.array(ids, np.uint8), lambda ids: torch.tensor(ids).int()],
)
def test_arrays_and_tensors_are_as_good_as_lists(filled: KVStore, make: Callable[[list[int]], Any]) -> None:
    assert filled.put_blocks(tuple(HASHES[3:5]), make([3, 4]), start=np.int64(3), num_tokens=np.uint16(18)).stored.all()
    got = filled.get_blocks([bytearray(h) for h in HASHES[3:5]], make([5, 6]), start=3, num_tokens=18)
    assert got.verified.all()


# --- caches --------------------------------------------------------------------------------------------------------


def bf16(*shape: int, **options: Any) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16, **options)


def named(tensor: Any, name: Any = NAME) -> dict[Any, Any]:
    return {name: tensor}


GOOD = bf16(4, 2, 4, 32)
TWO = layer_tensors("BHNC")
FIRST, SECOND = TWO
BAD_CACHES: dict[str, tuple[Any, dict[str, Any], type[errors.KVStoreError], tuple[str, ...]]] = {
    "dtype float64": (named(GOOD.double()), {}, errors.UnsupportedDtype, (NAME, "torch.float64", "bfloat16")),
    "dtype bool": (named(GOOD.bool()), {}, errors.UnsupportedDtype, (NAME, "torch.bool", "bfloat16")),
    "dtype int64": (named(GOOD.long()), {}, errors.UnsupportedDtype, (NAME, "torch.int64", "bfloat16")),
    "dtype complex": (named(GOOD.cfloat()), {}, errors.UnsupportedDtype, (NAME, "torch.complex64", "bfloat16")),
    "device": (named(GOOD.to("meta")), {}, errors.UnsupportedDevice, (NAME, "meta", "the engine allocated")),
    "an axis too few": (named(bf16(4, 2, 4)), {}, errors.InvalidShape, (NAME, "(4, 2, 4)", "expected 4 non-empty ones")),
    "an axis too many": (named(bf16(1, 4, 2, 4, 32)), {}, errors.InvalidShape, (NAME, "'BHNC'", "expected 4 non-empty ones")),
    "an empty axis": (named(bf16(4, 2, 0, 32)), {}, errors.InvalidShape, (NAME, "(4, 2, 0, 32)", "non-empty")),
    "sparse": (named(GOOD.to_sparse()), {}, errors.InvalidShape, (NAME, "sparse", "dense")),
    "no K/V axis": (named(bf16(3, 4, 4, 2, 16)), {"layout": "2BNHD"}, errors.InvalidShape, (NAME, "3 entries", "expected 2")),
    "odd channels": (named(bf16(4, 2, 4, 33)), {}, errors.InvalidShape, (NAME, "33 channels", "value_channels")),
    "value_channels too many": (named(GOOD), {"value_channels": 32}, errors.InvalidShape, (NAME, "32", "0 to 31")),
    "expanded": (named(bf16(4, 1, 4, 32).expand(4, 2, 4, 32)), {}, errors.InvalidShape, (NAME, "several elements", "expand")),
    "overlapping": (named(bf16(999).as_strided((4, 2, 4, 32), (100, 16, 64, 1))), {}, errors.InvalidShape, ("as_strided",)),
    "K is no whole pieces": (named(bf16(4, 2, 4, 20)), {}, errors.UnsupportedCache, (NAME, "K has 20 bytes", "8-byte")),
    "V is no whole pieces": (
        *(named(bf16(4, 2, 4, 18)), {"value_channels": 2}, errors.UnsupportedCache, (NAME, "V has 4 bytes", "8-byte")),
    ),
    "layout word": (named(GOOD), {"layout": "BHNX"}, errors.UnknownLayout, ("'BHNX'", "BHNC", "2BNHD")),
    "layout in small letters": (named(GOOD), {"layout": "bhnc"}, errors.UnknownLayout, ("'bhnc'", "BHNC")),
    "layout with two heads": (named(GOOD), {"layout": "BHHNC"}, errors.UnknownLayout, ("'BHHNC'", "BHNC")),
    "layout missing": (named(GOOD), {"layout": None}, errors.UnknownLayout, ("None", "BHNC")),
    "layout empty": (named(GOOD), {"layout": ""}, errors.UnknownLayout, ("''", "BHNC")),
    "a pair for one tensor": (named((GOOD, GOOD)), {}, errors.InvalidCache, (NAME, "tuple", "one torch tensor")),
    "one tensor for a pair": (named(GOOD), {"layout": "BHND"}, errors.InvalidCache, (NAME, "Tensor", "pair (K, V)")),
    "K twice": (named((GOOD, GOOD)), {"layout": "BHND"}, errors.UnsupportedCache, (NAME, "share memory", "of its own")),
    "K and V differ": (
        *(named((GOOD, bf16(4, 2, 8, 32))), {"layout": "BHND"}, errors.InvalidShape, (NAME, "(4, 2, 8, 32)", "equal")),
    ),
    "an array": (named(np.zeros((4, 2, 4, 32))), {}, errors.InvalidCache, (NAME, "ndarray", "one torch tensor")),
    "no layers": ({}, {}, errors.InvalidCache, ("tensors", "{layer name: tensor}")),
    "a list of tensors": ([GOOD], {}, errors.InvalidCache, ("list", "{layer name: tensor}")),
    "a name that is a number": (named(GOOD, 0), {}, errors.InvalidCache, ("key 0", "layer names")),
    "a name without a number": (named(GOOD, "attn"), {}, errors.UnsupportedCache, ("'attn'", "0 numbers", "exactly one")),
    "a name with two numbers": (
        *(named(GOOD, "model.layers.0.experts.1"), {}, errors.UnsupportedCache, ("2 numbers", "exactly one")),
    ),
    "a tensor and a part of it": (
        {"layers.0": GOOD, "layers.1": GOOD[..., :16]},
        *({}, errors.UnsupportedCache, ("layers.0 K and layers.1 K", "share memory")),
    ),
    "other block counts": (
        *({"layers.0": GOOD, "layers.1": bf16(5, 2, 4, 32)}, {}),
        *(errors.UnsupportedCache, ("layers.1 has 5 blocks", "layers.0 has 4", "equal")),
    ),
    "other block sizes": (
        *({"layers.0": GOOD, "layers.1": bf16(4, 2, 8, 32)}, {}),
        *(errors.UnsupportedCache, ("4 blocks of 8 tokens", "4 of 4", "equal")),
    ),
    "too many heads": (named(bf16(1, 65537, 1, 8)), {}, errors.UnsupportedCache, (NAME, "0 to 65536", "at most 65536")),
    "heads numbered too high": (
        *(named(GOOD), {"first_head": {NAME: 65535}}, errors.UnsupportedCache, ("65535 to 65536", "at most 65536")),
    ),
    "first_head negative": (named(GOOD), {"first_head": {NAME: -1}}, errors.InvalidCache, (NAME, "-1", "0 or more")),
    "first_head of another layer": (
        *(named(GOOD), {"first_head": {"layers.9": 0}}, errors.InvalidCache, ("first_head", "layers.9", "not in tensors")),
    ),
    "first_head for all": (named(GOOD), {"first_head": 4}, errors.InvalidCache, ("first_head is 4", "{layer name: value}")),
    "layer type": (named(GOOD), {"layer_types": {NAME: "linear"}}, errors.UnsupportedCache, (NAME, "'linear'", "full")),
    "a state is no paged cache": (
        *(named(GOOD), {"layer_types": {NAME: "mamba"}}, errors.UnsupportedCache, ("'mamba'", "full")),
    ),
    "groups forget a layer": (TWO, {"groups": {0: [FIRST]}}, errors.InvalidCache, (SECOND, "exactly once")),
    "groups name a layer twice": (
        *(TWO, {"groups": {0: [FIRST, SECOND], 1: [FIRST]}}, errors.InvalidCache, (FIRST, "exactly once")),
    ),
    "groups name a strange layer": (TWO, {"groups": {0: [*TWO, 9]}}, errors.InvalidCache, ("9", "layer names")),
    "a group number too large": (TWO, {"groups": {65536: [*TWO]}}, errors.InvalidCache, ("groups[65536]", "0 to 65535")),
    "a group that is a number": (TWO, {"groups": {0: 5}}, errors.InvalidCache, ("groups[0] is 5", "layer names")),
    "a group of lists": (TWO, {"groups": {0: [[FIRST], SECOND]}}, errors.InvalidCache, ("groups[0]", "layer names")),
    "a group that is a name": (TWO, {"groups": {0: FIRST}}, errors.InvalidCache, ("groups[0]", "layer names")),
    "groups are a list": (TWO, {"groups": [[FIRST], [SECOND]]}, errors.InvalidCache, ("groups is [[", "{group number:")),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_CACHES)
@pytest.mark.inline("opens no store")
def test_a_cache_that_cannot_be_stored_is_refused_at_construction(tmp_path: Path, name: str) -> None:
    tensors, options, error, words = BAD_CACHES[name]
    with refused(error, *words, folder=tmp_path):
        PagedKVCache.from_tensors(tensors, **({"layout": "BHNC"} | options))


# --- identities, ranks and configurations --------------------------------------------------------------------------


def layers_of(cache: PagedKVCache, **changes: Any) -> tuple[LayerSpec, ...]:
    return tuple(replace(layer.spec(0), **changes) for layer in cache.group(0).layers)


BAD_IDENTITIES: dict[str, tuple[Callable[[], Any], tuple[str, ...]]] = {
    "model empty": (lambda: CacheIdentity(model=""), ("model is ''", "non-empty")),
    "model missing": (lambda: CacheIdentity(model=None), ("model is None", "non-empty")),  # type: ignore[arg-type]
    "revision a number": (lambda: CacheIdentity(model="m", revision=3), ("revision is 3", "str")),  # type: ignore[arg-type]
    "extra not plain": (
        lambda: CacheIdentity(model="m", extra={"rope": [1.0]}),  # type: ignore[dict-item]
        ("extra['rope']", "[1.0]", "expected str"),
    ),
    "extra too large": (lambda: CacheIdentity(model="m", extra={"n": 10**5000}), ("'n'", "below 2**63")),
    "extra NaN": (lambda: CacheIdentity(model="m", extra={"scale": float("nan")}).canonical_json(), ("scale", "nan")),
    "a layer twice": (lambda: CacheIdentity(model="m", layers=layers_of(make_cache()) * 2), ("one name", "once")),
    "a layer's type": (lambda: LayerSpec("layers.0", "linear", "bfloat16", 2, 8, 8), ("layers.0", "'linear'", "full")),
    "a layer without heads": (lambda: LayerSpec("layers.0", "full", "bfloat16", 0, 8, 8), ("0 KV heads", "1 to 65536")),
    "a layer's pieces": (lambda: LayerSpec("layers.0", "full", "bfloat16", 2, 12, 8), ("12", "multiples of 8")),
    "extra no mapping": (lambda: CacheIdentity("m", extra=5), ("extra is 5", "{name: value}")),  # type: ignore[arg-type]
    "layers no specs": (lambda: CacheIdentity("m", layers=["a"]), ("layers is ['a']", "LayerSpec")),  # type: ignore[arg-type]
    "layers empty": (lambda: CacheIdentity("m", layers=()), ("layers is ()", "every layer")),
    "a layer without a name": (lambda: LayerSpec("", "full", "bfloat16", 2, 8, 8), ("name=''", "non-empty strings")),
}


@pytest.mark.parametrize("name", BAD_IDENTITIES)
@pytest.mark.inline("opens no store")
def test_an_identity_that_says_too_little_is_refused(tmp_path: Path, name: str) -> None:
    make, words = BAD_IDENTITIES[name]
    with refused(errors.IdentityError, *words, folder=tmp_path):
        make()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dtype": "float16"}, ("float16", "bfloat16", "must agree")),
        ({"k_bytes": 64}, ("k_bytes=64", "must agree")),
        ({"type": "sliding"}, ("sliding", "must agree")),
        ({"group": 1}, ("group=1", "must agree")),
    ],
)
def test_layers_that_do_not_fit_the_cache_are_refused(
    tmp_path: Path, cache: PagedKVCache, changes: dict[str, Any], words: tuple[str, ...]
) -> None:
    identity = replace(IDENTITY, layers=layers_of(cache, **changes))
    with refused(errors.IdentityError, NAME, *words, folder=tmp_path):
        open_store(tmp_path / "store", cache, identity=identity)


def test_layers_that_the_identity_lacks_are_refused(tmp_path: Path, cache: PagedKVCache) -> None:
    identity = replace(IDENTITY, layers=layers_of(cache)[:1])
    with refused(errors.IdentityError, SECOND, "not one of", "1 layers", folder=tmp_path):
        open_store(tmp_path / "store", cache, identity=identity)


def test_more_heads_than_the_model_has_are_refused(tmp_path: Path, cache: PagedKVCache) -> None:
    identity = replace(IDENTITY, layers=layers_of(cache, kv_heads=1))
    with refused(errors.UnsupportedCache, NAME, "heads 0 to 1", "the model has 1", folder=tmp_path):
        open_store(tmp_path / "store", cache, identity=identity)


def test_a_rank_that_holds_a_part_needs_the_models_layers(tmp_path: Path, cache: PagedKVCache) -> None:
    shifted = PagedKVCache.from_tensors(layer_tensors("BHNC"), "BHNC", first_head={NAME: 2})
    with refused(errors.IdentityError, "tp0of2", "layers=", folder=tmp_path):
        open_store(tmp_path / "store", cache, rank=Rank(tp_size=2))
    with refused(errors.IdentityError, "part of the model", "layers=", folder=tmp_path):
        open_store(tmp_path / "store", shifted)


def test_nan_in_an_identity_is_refused_before_anything_is_made(tmp_path: Path, cache: PagedKVCache) -> None:
    with refused(errors.IdentityError, "k_scale", "nan", folder=tmp_path):
        open_store(tmp_path / "store", cache, identity=replace(IDENTITY, extra={"k_scale": float("nan")}))


@pytest.mark.inline("breaks what reads or writes the shard")
def test_an_identity_id_of_another_identity_is_refused(
    tmp_path: Path, cache: PagedKVCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_store(tmp_path / "store", cache) as store:
        assert store.put_blocks(HASHES[:1], [0]).stored.all()
        own = shard_of(store).identity_id
        with shard_of(store).db._env.begin(write=True) as txn:
            txn.put(b"identity:" + shard_of(store).identity_id, b'{"model":"another"}', db=shard_of(store).db._meta)
    monkeypatch.setattr("kvstore.inline.identity_digest", lambda text: own)
    words = ("belongs to another identity", "another", "path of its own")
    # LMDB was open by then, and its readers write their slots to lock.mdb; what is stored stays as it was.
    with refused(errors.IdentityError, *words, folder=tmp_path, leave_out=("lock.mdb",)):
        open_store(tmp_path / "store", cache)


def test_attach_refuses_what_does_not_fit(filled: KVStore, tmp_path: Path) -> None:
    with refused(errors.InvalidCache, "dict", "from_tensors", folder=tmp_path):
        filled.attach(TWO)  # type: ignore[arg-type]
    with refused(errors.IdentityError, "float16", "must agree", folder=tmp_path):
        filled.attach(make_cache(dtype=torch.float16))


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ({"durability": "always"}, ("'always'", "commit, process")),
        ({"codec": "zip"}, ("'zip'", "raw")),
        ({"capacity_bytes": MIB - 1}, ("capacity_bytes", str(MIB - 1), str(MIB))),
        ({"capacity_bytes": 1e9}, ("capacity_bytes", "integer")),
        ({"capacity_bytes": "16G"}, ("capacity_bytes", "'16G'", "integer")),
        ({"batch_bytes": 0}, ("batch_bytes is 0", "at least 1")),
        ({"batch_bytes": 2**50}, (f"batch_bytes is {2**50}", "at most")),
        ({"capacity_bytes": 2**64}, (f"capacity_bytes is {2**64}", "at most")),
        ({"read_batch_bytes": 0}, ("read_batch_bytes is 0", "at least 1")),
        ({"quarantine_bytes": -1}, ("quarantine_bytes is -1", "at least 0")),
        ({"threads": 0}, ("threads is 0", "at least 1")),
        ({"threads": True}, ("threads is True", "integer")),
    ],
)
@pytest.mark.inline("opens no store")
def test_a_configuration_out_of_range_is_refused(
    option: dict[str, Any], words: tuple[str, ...], tmp_path: Path
) -> None:
    with refused(errors.ConfigError, *words, folder=tmp_path):
        StoreConfig(**option)


@pytest.mark.inline("opens no store")
def test_an_unknown_option_is_refused() -> None:
    with pytest.raises(TypeError, match="capacity_gigabytes"):
        StoreConfig(capacity_gigabytes=1)  # type: ignore[call-arg]


@pytest.mark.parametrize("rank", [{"tp_rank": 2, "tp_size": 2}, {"pp_rank": -1}, {"tp_size": 0}, {"tp_rank": "0"}])
@pytest.mark.inline("opens no store")
def test_a_rank_out_of_range_is_refused(rank: dict[str, Any], tmp_path: Path) -> None:
    with refused(errors.ConfigError, "expected 0 <= rank < size", folder=tmp_path):
        Rank(**rank)


@pytest.mark.parametrize(
    ("option", "error", "words"),
    [
        ({"mode": "w"}, errors.ConfigError, ("mode 'w'", '"rw"')),
        ({"mode": None}, errors.ConfigError, ("mode None", '"rw"')),
        ({"io": "thread"}, errors.ConfigError, ("io 'thread'", '"inline" or "process"')),
        ({"rank": 0}, errors.ConfigError, ("int", "a Rank")),
        ({"config": {"capacity_bytes": MIB}}, errors.ConfigError, ("dict", "a StoreConfig")),
        ({"identity": "model"}, errors.IdentityError, ("str", "CacheIdentity(")),
    ],
)
def test_an_open_with_bad_options_makes_nothing(
    option: dict[str, Any],
    error: type[errors.KVStoreError],
    words: tuple[str, ...],
    tmp_path: Path,
    cache: PagedKVCache,
) -> None:
    with refused(error, *words, folder=tmp_path):
        open_store(tmp_path / "store", cache, **option)


def test_a_store_over_no_cache_is_refused(tmp_path: Path) -> None:
    with refused(errors.InvalidCache, "dict", "from_tensors", folder=tmp_path):
        open_store(tmp_path / "store", TWO)  # type: ignore[arg-type]


# --- paths ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [None, 5, b"store", "", "a\0b", os.fsdecode(b"store\xff"), "\ud800"])
def test_a_path_that_is_none_is_refused(path: Any, cache: PagedKVCache, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    with refused(errors.StorePathError, "path is", "expected", folder=tmp_path):
        open_store(path, cache)


@pytest.mark.parametrize("mode", ["r", "rw"])
def test_paths_that_lead_nowhere_are_refused(tmp_path: Path, cache: PagedKVCache, mode: str) -> None:
    (tmp_path / "file").write_bytes(b"mine")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "shard").mkdir()
    (tmp_path / "shard" / "tp0of1-pp0of1").write_bytes(b"mine")
    for name in ("file", "file/below", "loop", "shard", "n" * 300):
        with refused(errors.StorePathError, name, "expected", folder=tmp_path):
            open_store(tmp_path / name, cache, mode=mode)


def test_a_reader_of_nothing_is_refused_and_makes_nothing(tmp_path: Path, cache: PagedKVCache) -> None:
    (tmp_path / "empty" / "tp0of1-pp0of1").mkdir(parents=True)
    for name in ("missing", "empty"):
        with refused(errors.StorePathError, name, "a shard that a writer has made", folder=tmp_path):
            open_store(tmp_path / name, cache, mode="r")


@pytest.fixture
def public() -> Iterator[Path]:
    """A folder that every user may enter and read."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        yield Path(name)


def as_nobody(action: Callable[[], object]) -> str:
    """What the action says to a user without rights: run in a child, which gives root's rights up."""

    def run() -> object:
        if os.geteuid() == 0:
            os.setgid(NOBODY)
            os.setuid(NOBODY)
        return action()

    return child_outcome(run)


def deny(path: Path, mode: int) -> None:
    """Take rights away where the tests run as an ordinary user; from another user they are away already."""
    if os.geteuid() != 0:
        path.chmod(mode)


@pytest.mark.parametrize("mode", ["r", "rw"])
@pytest.mark.inline("gives up the rights that starting a process takes")
def test_a_store_of_another_user_is_refused(public: Path, cache: PagedKVCache, mode: str) -> None:
    with open_store(public / "store", cache) as store:
        store.put_blocks(HASHES[:3], [0, 1, 2])
    before = snapshot(public)
    deny(store.folder, 0)
    said = as_nobody(lambda: open_store(public / "store", cache, mode=mode))
    store.folder.chmod(0o700)
    assert said.startswith("StorePermissionError")
    assert "make it this user's, or give another path" in said
    assert snapshot(public) == before


@pytest.mark.parametrize("name", [STORE_NAME, DATA_NAME])
@pytest.mark.inline("gives up the rights that starting a process takes")
def test_files_of_another_user_are_refused(public: Path, cache: PagedKVCache, name: str) -> None:
    with open_store(public / "store", cache) as store:
        store.put_blocks(HASHES[:3], [0, 1, 2])
    for path in (public / "store", store.folder, *store.folder.iterdir()):
        path.chmod(0o777)
    (store.folder / name).chmod(0o600 if os.geteuid() == 0 else 0)
    before = {} if os.geteuid() else snapshot(public)
    for mode in ("r", "rw"):
        said = as_nobody(lambda mode=mode: open_store(public / "store", cache, mode=mode))  # type: ignore[misc]
        assert said.startswith("StorePermissionError"), said
        assert "make it this user's, or give another path" in said
    assert before == ({} if os.geteuid() else snapshot(public))


@pytest.mark.inline("gives up the rights that starting a process takes")
def test_a_folder_that_may_not_be_written_is_refused(public: Path, cache: PagedKVCache) -> None:
    (public / "parent").mkdir(mode=0o555)
    said = as_nobody(lambda: open_store(public / "parent" / "store", cache))
    assert said.startswith("StorePermissionError")
    assert "give another path" in said
    assert not list((public / "parent").iterdir())


# --- what lies at the path -----------------------------------------------------------------------------------------


def refused_by_both(
    error: type[errors.KVStoreError],
    *words: str,
    folder: Path,
    cache: PagedKVCache,
    modes: tuple[str, ...] = ("r", "rw"),
) -> None:
    for mode in modes:
        with refused(error, *words, folder=folder):
            open_store(folder / "store", cache, mode=mode)


def newer(data: bytearray, slot: int, hashed: bool) -> None:
    """Have a slot say the next format version, with the hash of its bytes or the old one."""
    at = slot * SLOT_STRIDE
    struct.pack_into("<I", data, at + 8, FORMAT_VERSION + 1)
    if hashed:
        struct.pack_into("<Q", data, at + 16, slot_hash(data[at : at + SLOT.size]))


@pytest.mark.parametrize(("slots", "hashed"), [((0,), True), ((1,), True), ((0, 1), True), ((0, 1), False)])
def test_a_store_of_a_newer_format_is_refused(
    closed: Path, tmp_path: Path, cache: PagedKVCache, slots: tuple[int, ...], hashed: bool
) -> None:
    data = bytearray((closed / STORE_NAME).read_bytes())
    for slot in slots:
        newer(data, slot, hashed)
    (closed / STORE_NAME).write_bytes(data)
    words = (f"version {FORMAT_VERSION + 1}", f"up to {FORMAT_VERSION}", "upgrade", "untouched")
    refused_by_both(errors.UnsupportedFormat, *words, folder=tmp_path, cache=cache)


@pytest.mark.parametrize("slot", [0, 1])
def test_a_version_that_is_a_flipped_bit_leaves_the_other_slot(closed: Path, cache: PagedKVCache, slot: int) -> None:
    data = bytearray((closed / STORE_NAME).read_bytes())
    newer(data, slot, hashed=False)
    (closed / STORE_NAME).write_bytes(data)
    with open_store(closed.parent, cache) as store:
        assert store.stats()["records"] >= 0


@pytest.mark.parametrize("garbage", [b"not a store at all", bytes(4096), os.urandom(64) * 16, b"\x89kvstore"])
def test_a_store_file_of_garbage_is_refused(closed: Path, tmp_path: Path, cache: PagedKVCache, garbage: bytes) -> None:
    (closed / STORE_NAME).write_bytes(garbage)
    words = (STORE_NAME, "neither", "kvstore-fsck --repair", "remove the shard's folder")
    refused_by_both(errors.StoreDamaged, *words, folder=tmp_path, cache=cache)


@pytest.mark.parametrize("left", [None, b""])
def test_a_database_without_its_store_file_is_not_touched(
    closed: Path, tmp_path: Path, cache: PagedKVCache, left: bytes | None
) -> None:
    (closed / STORE_NAME).unlink()
    if left is not None:
        (closed / STORE_NAME).write_bytes(left)
    words = ("data.mdb without a STORE file", "give another path")
    refused_by_both(errors.StoreDamaged, *words, folder=tmp_path, cache=cache)


@pytest.mark.inline("opens no store")
def test_a_slot_is_as_long_as_its_struct_says() -> None:
    assert SLOT.size <= SLOT_STRIDE


@pytest.mark.parametrize("name", [STORE_NAME, DATA_NAME])
def test_a_folder_where_a_file_belongs_is_refused(closed: Path, tmp_path: Path, cache: PagedKVCache, name: str) -> None:
    (closed / name).unlink()
    (closed / name).mkdir()
    refused_by_both(errors.StorePathError, name, "no plain file", "take it out", folder=tmp_path, cache=cache)


# --- two at once, after close, after fork, read-only ---------------------------------------------------------------


@pytest.mark.parametrize("mode", ["r", "rw"])
def test_a_second_open_in_one_process_is_refused_by_every_name(
    filled: KVStore, tmp_path: Path, cache: PagedKVCache, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for a reader whose files another process has open."""
    (tmp_path / "link").symlink_to("store")
    monkeypatch.chdir(tmp_path)
    for path in (tmp_path / "store", Path("store"), Path("link"), tmp_path / "link" / ".." / "store"):
        if (mode, io_mode()) == ("r", "process"):
            with open_store(path, cache, mode=mode) as reader:
                assert reader.match_prefix(HASHES) == 3
            continue
        with refused(errors.StoreAlreadyOpen, "open in this process already", "attach", "close it", folder=tmp_path):
            open_store(path, cache, mode=mode)
    assert filled.match_prefix(HASHES) == 3


def test_a_refused_open_leaves_the_path_free(closed: Path, tmp_path: Path, cache: PagedKVCache) -> None:
    good = (closed / STORE_NAME).read_bytes()
    (closed / STORE_NAME).write_bytes(b"garbage")
    with refused(errors.StoreDamaged, folder=tmp_path):
        open_store(tmp_path / "store", cache)
    (closed / STORE_NAME).write_bytes(good)
    with open_store(tmp_path / "store", cache) as store:
        assert store.match_prefix(HASHES) == 3


def test_a_second_writing_process_is_refused(filled: KVStore, tmp_path: Path) -> None:
    code = "open_store(Path(sys.argv[1]), make_cache())"
    before = snapshot(tmp_path)
    done = run_python(code, str(tmp_path / "store"))
    assert "kvstore.errors.StoreLocked" in done.stderr
    assert 'stop that process, give this rank a path of its own, or open with mode="r"' in done.stderr
    assert snapshot(tmp_path) == before


def every_call(store: KVStore) -> Mapping[str, Callable[[], object]]:
    """Each public method that uses the store, with good arguments."""
    one, ids = HASHES[:1], [0]
    return {
        "put_blocks": lambda: store.put_blocks(one, ids),
        "get_blocks": lambda: store.get_blocks(one, ids),
        "submit_put_blocks": lambda: store.submit_put_blocks(one, ids).result(),
        "submit_get_blocks": lambda: store.submit_get_blocks(one, ids).result(),
        "match_prefix": lambda: store.match_prefix(one),
        "match_prefix of groups": lambda: store.match_prefix({0: one}),
        "match_tokens": lambda: store.match_tokens({0: one}),
        "get_prefix": lambda: store.get_prefix({0: PrefixBlocks(one, [0])}),
        "touch": lambda: store.touch(one),
        "evict": lambda: store.evict(1),
        "clear": store.clear,
        "stats": store.stats,
        "attach": lambda: store.attach(make_cache()),
    }


def test_no_public_method_is_left_out(filled: KVStore) -> None:
    public = {name for name in vars(KVStore) if not name.startswith("_") and callable(getattr(filled, name))}
    assert public - {"close"} == {name.split()[0] for name in every_call(filled)}


@pytest.mark.parametrize("submitted", [False, True])
def test_every_call_after_close_is_refused(tmp_path: Path, cache: PagedKVCache, submitted: bool) -> None:
    store = open_store(tmp_path / "store", cache)
    attached = store.attach(make_cache(seed=1))
    if submitted:
        store.submit_put_blocks(HASHES[:1], [0]).result()
    store.close()
    store.close()
    for call in (*every_call(store).values(), *every_call(attached).values()):
        with refused(errors.StoreClosed, "was closed", "open the store again", folder=tmp_path):
            call()


def test_closing_an_attached_store_closes_nothing(filled: KVStore, cache: PagedKVCache) -> None:
    attached = filled.attach(make_cache(seed=1))
    attached.submit_get_blocks(HASHES[:1], [0]).result()
    attached.close()
    assert attached.submit_get_blocks(HASHES[:1], [0]).result().verified.all()
    assert filled.get_blocks(HASHES[:1], [5]).verified.all()


def test_every_call_in_a_forked_child_is_refused(filled: KVStore, tmp_path: Path) -> None:
    filled.submit_get_blocks(HASHES[:1], [0]).result()
    before = snapshot(tmp_path)
    for name, call in every_call(filled).items():
        said = child_outcome(call)
        assert said.startswith("StoreForked"), (name, said)
        assert str(os.getpid()) in said
        assert "a shard of its own" in said
    assert child_outcome(filled.close) == "None"
    assert snapshot(tmp_path) == before
    assert filled.get_blocks(HASHES[:3], [3, 4, 5]).verified.all()


def test_put_into_a_read_only_store_is_refused(closed: Path, tmp_path: Path, cache: PagedKVCache) -> None:
    with open_store(tmp_path / "store", cache, mode="r") as store:
        for call in (store.put_blocks, lambda *a: store.submit_put_blocks(*a).result()):
            with refused(errors.ReadOnlyStore, 'mode="r"', 'open it with mode="rw"', folder=tmp_path):
                call(HASHES[3:4], [0])
        assert store.get_blocks(HASHES[:3], [3, 4, 5]).verified.all()


@pytest.mark.inline("opens no store")
def test_every_exception_says_what_it_is_and_has_one_root() -> None:
    every = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    assert all(issubclass(kind, errors.KVStoreError) and kind.__doc__ for kind in every)


@pytest.mark.inline("opens no store")
def test_the_default_configuration_is_good() -> None:
    assert replace(SMALL) == SMALL
    assert StoreConfig().sync
