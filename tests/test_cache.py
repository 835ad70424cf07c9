"""PagedKVCache: layouts, groups, first heads, and the canonical order that follows from them."""

from __future__ import annotations

import gc
import random
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore import CacheIdentity, LayerSpec, PagedKVCache, Rank, block_checksums
from kvstore.checksum import slice_factor
from kvstore.errors import InvalidCache, InvalidShape, UnsupportedCache
from kvstore.identity import group_fingerprint, layer_fingerprint, layer_number, layers_fingerprint
from tests.support import LAYOUTS, layer_tensors, make_cache


def test_slices_go_head_by_head_then_layer_by_layer() -> None:
    tensors = layer_tensors("BHNC", layers=3, heads=2)
    names = list(tensors)
    shuffled = {name: tensors[name] for name in (names[2], names[0], names[1])}
    cache = PagedKVCache.from_tensors(shuffled, "BHNC", first_head=dict.fromkeys(names, 4))
    assert [(s.head, s.layer) for s in cache.group(0).slices] == [(4, 0), (4, 1), (4, 2), (5, 0), (5, 1), (5, 2)]
    assert cache.group(0).factors.tolist() == [slice_factor(s.layer, s.head) for s in cache.group(0).slices]


def test_layers_of_different_heads_share_the_order() -> None:
    one, two = layer_tensors("BHNC", layers=1, heads=1), layer_tensors("BHNC", layers=1, heads=3, first_layer=1)
    cache = PagedKVCache.from_tensors(one | two, "BHNC")
    assert [(s.head, s.layer, s.local_head) for s in cache.group(0).slices] == [
        (0, 0, 0),
        (0, 1, 0),
        (1, 1, 1),
        (2, 1, 2),
    ]


@settings(max_examples=100, deadline=None, derandomize=True)
@given(layout=st.sampled_from(LAYOUTS), seed=st.integers(0, 99), layers=st.integers(1, 4), heads=st.integers(1, 4))
def test_the_order_of_the_arguments_does_not_matter(layout: str, seed: int, layers: int, heads: int) -> None:
    tensors = layer_tensors(layout, layers=layers, heads=heads, seed=seed)
    mixed = list(tensors.items())
    random.Random(seed).shuffle(mixed)
    caches = [PagedKVCache.from_tensors(t, layout) for t in (tensors, dict(mixed))]
    assert np.array_equal(block_checksums(caches[0], range(8)), block_checksums(caches[1], range(8)))
    sizes = [cache.group(0).block_bytes for cache in caches]
    assert sizes == [layers * heads * 4 * 64] * 2


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float8_e5m2, torch.int8, torch.uint8]
)
def test_dtypes_keep_their_names_and_sizes(dtype: torch.dtype) -> None:
    layer = make_cache(dtype=dtype).group(0).layers[0]
    assert layer.dtype == str(dtype).removeprefix("torch.")
    assert layer.cell_bytes == 32 * dtype.itemsize


def test_groups_have_blocks_and_sizes_of_their_own() -> None:
    small, large = layer_tensors("BHNC", layers=1), layer_tensors("BHNC", layers=1, tokens=8, blocks=3, first_layer=1)
    groups = {0: list(small), 3: list(large)}
    cache = PagedKVCache.from_tensors(small | large, "BHNC", groups=groups)
    assert [(g.block_size, g.num_blocks) for g in cache.groups.values()] == [(4, 8), (8, 3)]


def test_one_layer_number_may_be_in_two_groups() -> None:
    tensors = layer_tensors("BHNC", layers=1) | {"model.layers.0.indexer": torch.zeros(8, 1, 4, 32, dtype=torch.uint8)}
    names = list(tensors)
    assert set(PagedKVCache.from_tensors(tensors, "BHNC", groups={0: names[:1], 1: names[1:]}).groups) == {0, 1}


def several_caches(first: int, heads: int, kv_heads: dict[str, int] | None = None) -> PagedKVCache:
    """Heads first to first + heads - 1 of an attention of 4, all of an indexer of 1 and of a second one of 2, of layer 3."""
    sizes = {"layers.3.attn": heads, "layers.3.a_indexer": 1, "layers.3.second": 2}
    tensors = {name: torch.zeros(8, count, 4, 32, dtype=torch.uint8) for name, count in sizes.items()}
    return PagedKVCache.from_tensors(tensors, "BHNC", first_head={"layers.3.attn": first}, kv_heads=kv_heads)


def test_caches_of_one_layer_number_their_heads_one_after_the_other_by_name() -> None:
    group = several_caches(0, 4).group(0)
    assert [(layer.name, layer.first_head) for layer in group.layers] == [
        ("layers.3.a_indexer", 0),
        ("layers.3.attn", 1),
        ("layers.3.second", 5),
    ]
    assert [(s.layer, s.head) for s in group.slices] == [(3, head) for head in range(7)]


def test_a_rank_numbers_the_heads_of_its_caches_as_the_whole_model_does() -> None:
    rank = several_caches(2, 2, {"layers.3.attn": 4}).group(0)
    assert [s.head for s in rank.slices] == [0, 3, 4, 5, 6]
    assert [layer.own_first_head for layer in rank.layers] == [0, 2, 0]
    assert [s.head for s in several_caches(0, 2, {"layers.3.attn": 4}).group(0).slices] == [0, 1, 2, 5, 6]


def test_all_heads_of_a_layer_count_towards_the_most_that_it_may_have() -> None:
    with pytest.raises(UnsupportedCache, match=r"layer 3 \(.*layers.3.attn.*\) has 65539 KV heads: .* at most 65536"):
        several_caches(0, 4, {"layers.3.attn": 2**16})


@pytest.mark.parametrize("kv_heads", [{"layers.3.attn": 3}, {"layers.3.attn": 2.5}, {"layers.3.attn": True}])
def test_kv_heads_must_be_as_many_as_the_tensor_shows(kv_heads: dict[str, Any]) -> None:
    with pytest.raises(InvalidCache, match="kv_heads"):
        several_caches(2, 2, kv_heads)


def test_layers_that_share_a_cache_count_once_under_the_lowest_number() -> None:
    shared = torch.zeros(8, 2, 4, 32, dtype=torch.uint8)
    own = torch.zeros(8, 2, 4, 32, dtype=torch.uint8)
    cache = PagedKVCache.from_tensors(
        {"layers.7": shared, "layers.2": shared, "layers.4": own, "layers.3": shared}, "BHNC"
    )
    layers = cache.group(0).layers
    assert [(layer.name, layer.aliases) for layer in layers] == [
        ("layers.2", ("layers.3", "layers.7")),
        ("layers.4", ()),
    ]


def test_layers_that_share_a_cache_must_be_described_alike() -> None:
    shared = torch.zeros(8, 2, 4, 32, dtype=torch.uint8)
    with pytest.raises(InvalidCache, match=r"layers\.0 and layers\.1 share one cache"):
        PagedKVCache.from_tensors({"layers.0": shared, "layers.1": shared}, "BHNC", layer_types={"layers.1": "sliding"})


def test_a_group_that_cannot_be_checksummed_is_skipped_with_its_reason_where_that_is_asked_for(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tensors = layer_tensors("BHNC", layers=1) | {"model.embed": torch.zeros(8, 1, 4, 32, dtype=torch.uint8)}
    groups = {0: ["model.layers.0.self_attn.attn"], 3: ["model.embed"]}
    with pytest.raises(UnsupportedCache, match="0 numbers in its name"):
        PagedKVCache.from_tensors(tensors, "BHNC", groups)
    cache = PagedKVCache.from_tensors(tensors, "BHNC", groups, unsupported="skip")
    assert set(cache.groups) == {0}
    assert "0 numbers in its name" in cache.skipped[3]
    assert caplog.text.count("group 3 cannot be checksummed") == 1
    with pytest.raises(UnsupportedCache, match=r"group 3 cannot be checksummed: .*model\.embed"):
        cache.group(3)


@pytest.mark.parametrize("windows", [3, {1: 8}, {0: 0}, {0: True}, {0: "8"}])
def test_a_window_is_a_groups_and_a_number_of_tokens(windows: Any) -> None:
    assert PagedKVCache.from_tensors(layer_tensors("BHNC"), "BHNC", windows={0: 8}).group(0).window == 8
    with pytest.raises(InvalidCache, match="windows"):
        PagedKVCache.from_tensors(layer_tensors("BHNC"), "BHNC", windows=windows)


@pytest.mark.parametrize("given", [(0, 0), (2, 2), (2, -1), (2,), "ab", 3, (2.0, 1)])
def test_replicas_are_a_number_of_copies_and_which_of_them(given: Any) -> None:
    name = next(iter(layer_tensors("BHNC")))
    known = PagedKVCache.from_tensors(layer_tensors("BHNC"), "BHNC", replicas={name: (2, 1)})
    assert known.group(0).layers[0].replica == (2, 1)
    with pytest.raises(InvalidCache, match="replicas"):
        PagedKVCache.from_tensors(layer_tensors("BHNC"), "BHNC", replicas={name: given})


@pytest.mark.parametrize(
    "groups",
    [{0: []}, {0: ["no.such.0"]}, {0: "ab"}, {-1: ["x"]}, {70_000: ["x"]}, {"0": ["x"]}, {0: "twice"}, {0: "half"}],
)
def test_groups_must_name_each_layer_once(groups: Any) -> None:
    tensors = layer_tensors("BHNC")
    names = list(tensors)
    if groups == {0: "twice"}:
        groups = {0: names, 1: names[:1]}
    if groups == {0: "half"}:
        groups = {0: names[:1]}
    with pytest.raises(InvalidCache, match=r"groups|layers"):
        PagedKVCache.from_tensors(tensors, "BHNC", groups=groups)


def test_odd_channels_need_to_be_told_apart() -> None:
    tensors = {"layers.0": torch.zeros(2, 1, 4, 40, dtype=torch.uint8)}
    assert PagedKVCache.from_tensors(tensors, "BHNC", value_channels=8).group(0).layers[0].k.nbytes == 32
    with pytest.raises(UnsupportedCache, match="whole number"):
        PagedKVCache.from_tensors(tensors, "BHNC")
    with pytest.raises(InvalidShape, match="value_channels"):
        PagedKVCache.from_tensors(tensors, "BHNC", value_channels=40)
    with pytest.raises(InvalidShape, match="value_channels"):
        PagedKVCache.from_tensors({"layers.0": torch.zeros(2, 1, 4, 41, dtype=torch.uint8)}, "BHNC")


def pair(k: torch.Tensor, v: torch.Tensor) -> dict[str, Any]:
    return {"layers.0": (k, v)}


def overlapping() -> dict[str, tuple[dict[str, Any], str]]:
    """Caches in which two planes share bytes."""
    big = torch.zeros(9, 2, 4, 48, dtype=torch.uint8)
    one, two = big[:-1, ..., :32], big[1:, ..., :32]
    return {
        "one tensor twice, seen otherwise": ({"layers.0": one, "layers.1": one[..., :16]}, "BHNC"),
        "K and V are one": (pair(one, one), "BHND"),
        "V a block after K": (pair(one, two), "BHND"),
        "V some channels after K": (pair(big[..., :32], big[..., 16:]), "BHND"),
        "layers a block apart": ({"layers.0": one, "layers.1": two}, "BHNC"),
        "layers a head apart": ({"layers.0": big[:, :1], "layers.1": big[:, :, :, :]}, "BHNC"),
        "a V of two layers": ({"layers.0": (big[:-1, ..., :8], one), "layers.1": (torch.zeros_like(one), one)}, "BHND"),
    }


@pytest.mark.parametrize("case", overlapping())
def test_planes_that_share_bytes_are_refused(case: str) -> None:
    tensors, layout = overlapping()[case]
    with pytest.raises(UnsupportedCache, match="share memory"):
        PagedKVCache.from_tensors(tensors, layout)


def interleaved() -> dict[str, tuple[dict[str, Any], str]]:
    """Caches whose planes lie between one another, as engines allocate them, and share nothing."""
    blocks_first = torch.zeros(8, 3, 2, 4, 2, 32, dtype=torch.uint8)
    packed = torch.zeros(8, 2, 4, 48, dtype=torch.uint8)
    strided = torch.zeros(8, 2, 4, 64, dtype=torch.uint8)
    cross_layer = {f"layers.{i}": blocks_first[:, i] for i in range(3)}
    return {
        "all layers of a block together": (cross_layer, "B2NHD"),
        "K and V of a cell": (pair(packed[..., :32], packed[..., 32:]), "BHND"),
        "K and V channel by channel": (pair(strided[..., ::2], strided[..., 1::2]), "BHND"),
        "layers head by head": ({"layers.0": packed[:, :1], "layers.1": packed[:, 1:]}, "BHNC"),
        "V's blocks behind K's": (pair(torch.zeros(16, 2, 4, 32)[:8], torch.zeros(16, 2, 4, 32)[8:]), "BHND"),
    }


@pytest.mark.parametrize("case", interleaved())
def test_planes_that_interleave_are_served(case: str) -> None:
    tensors, layout = interleaved()[case]
    assert PagedKVCache.from_tensors(tensors, layout).group(0).block_bytes > 0


@settings(max_examples=300, deadline=None, derandomize=True)
@given(data=st.data())
def test_no_two_planes_share_a_byte_of_what_is_served(data: st.DataObject) -> None:
    """Two views of one allocation with random offsets and strides: what is accepted is checked byte by byte."""
    memory = torch.zeros(4096, dtype=torch.uint8)
    shape = [data.draw(st.integers(1, 3)) for _ in range(3)] + [8]

    def view() -> torch.Tensor:
        strides = [data.draw(st.sampled_from([8, 16, 24, 32, 48, 64, 96, 128, 256])) for _ in range(3)]
        return memory.as_strided(shape, [*strides, 1], data.draw(st.integers(0, 12)) * 8)

    k, v = view(), view()
    try:
        PagedKVCache.from_tensors(pair(k, v), "BHND")
    except InvalidCache:
        return
    memory.zero_()
    k += 1
    v += 1
    assert int(memory.max()) == 1


def test_groups_may_share_memory() -> None:
    tensor = torch.zeros(8, 1, 4, 32, dtype=torch.uint8)
    PagedKVCache.from_tensors(
        {"layers.0": tensor, "layers.1": tensor}, "BHNC", groups={0: ["layers.0"], 1: ["layers.1"]}
    )


def test_a_list_of_k_and_v_is_kept_alive_by_the_cache() -> None:
    k, v = torch.ones(4, 1, 4, 32), torch.ones(4, 1, 4, 32)
    held = [k, v]
    cache = PagedKVCache.from_tensors({"layers.0": held}, "BHND")  # type: ignore[dict-item]
    held.clear()
    assert cache.tensors["layers.0"][0] is k


def test_a_group_dies_with_its_cache() -> None:
    """Adapters make a cache a request: nothing may remember its groups."""
    cache = make_cache()
    block_checksums(cache, [0])
    group = weakref.ref(cache.group(0))
    del cache
    gc.collect()
    assert group() is None


def test_the_cache_keeps_its_tensors_alive() -> None:
    cache = make_cache(seed=1)
    before = block_checksums(cache, range(8)).tolist()
    junk = [torch.full((8, 2, 4, 32), i, dtype=torch.bfloat16) for i in range(20)]
    assert len(junk) == 20
    assert block_checksums(cache, range(8)).tolist() == before


@pytest.mark.parametrize(("name", "number"), [("model.layers.12.self_attn.attn", 12), ("0", 0), ("h.007.x", 7)])
def test_layer_numbers(name: str, number: int) -> None:
    assert layer_number(name) == number


@pytest.mark.parametrize(
    "name", ["model.attn", "layers.1.experts.2", "layers.x1", "layers.-1", "layers.99999999999", "layers.²"]
)
def test_names_without_one_number_are_unsupported(name: str) -> None:
    with pytest.raises(UnsupportedCache, match="number"):
        layer_number(name)


def test_fingerprints_of_stages_add_up_and_the_identity_counts_once() -> None:
    layers = tuple(LayerSpec(f"layers.{i}", "full", "bfloat16", 8, 256, 256) for i in range(4))
    identity = CacheIdentity("m", layers=layers)
    parts = sum(layer_fingerprint(layer) for layer in layers) % 2**64
    assert layers_fingerprint(layers) == parts
    own = int.from_bytes(identity.digest()[:8], "little")
    assert group_fingerprint(identity, 0) == (parts + own) % 2**64
    assert group_fingerprint(identity, 1) == own


def test_the_order_of_an_identitys_layers_does_not_matter() -> None:
    layers = tuple(LayerSpec(f"layers.{i}", "full", "bfloat16", 8, 256, 256) for i in range(4))
    assert CacheIdentity("m", layers=layers).digest() == CacheIdentity("m", layers=layers[::-1]).digest()


def test_rank_folders_are_made_of_integers() -> None:
    assert Rank(1, 4, 0, 2).folder == "tp1of4-pp0of2"
