"""Which copy of its KV heads a rank has: as engines deal heads out, as the cache says, or not known at all."""

from __future__ import annotations

import pytest
import torch

from kvstore import PagedKVCache, Rank
from kvstore.errors import UnsupportedCache
from kvstore.replicas import replica_keys

NAME = "model.layers.0.attn"


def keys(rank: Rank, heads: int, first: int, model: int | None, **options: object) -> list[tuple[int, int]]:
    tensor = torch.zeros(2, heads, 4, 16, dtype=torch.uint8)
    cache = PagedKVCache.from_tensors({NAME: tensor}, "BHNC", first_head={NAME: first}, **options)  # type: ignore[arg-type]
    return [tuple(key) for key in replica_keys(cache.group(0), rank, {} if model is None else {NAME: model})]


@pytest.mark.parametrize(
    ("tp_size", "model", "expected"),
    [
        (1, 4, [(1, 0)]),
        (2, 4, [(1, 0)] * 2),
        (4, 4, [(1, 0)] * 4),
        (8, 4, [(2, 0), (2, 1)] * 4),
        (8, 2, [(4, 0), (4, 1), (4, 2), (4, 3)] * 2),
        (3, 1, [(3, 0), (3, 1), (3, 2)]),
    ],
)
def test_ranks_in_a_row_have_copies_where_there_are_more_of_them_than_heads(
    tp_size: int, model: int, expected: list[tuple[int, int]]
) -> None:
    heads, copies = max(1, model // tp_size), max(1, tp_size // model)
    found = [keys(Rank(r, tp_size), heads, r // copies * heads, model)[0] for r in range(tp_size)]
    assert found == expected


def test_one_head_a_rank_of_an_unknown_number_is_not_guessed() -> None:
    with pytest.raises(UnsupportedCache, match=r"one KV head on each of 2 ranks.*kv_heads="):
        keys(Rank(0, 2), 1, 0, None)
    assert keys(Rank(0, 2), 1, 0, None, kv_heads={NAME: 1}) == [(2, 0)]
    assert keys(Rank(0, 1), 1, 0, None) == keys(Rank(0, 2), 2, 0, None) == [(1, 0)]


@pytest.mark.parametrize(("rank", "heads", "first", "model"), [(1, 1, 1, 2), (0, 2, 0, 3), (0, 3, 0, 4)])
def test_heads_that_are_dealt_out_otherwise_are_not_guessed(rank: int, heads: int, first: int, model: int) -> None:
    with pytest.raises(UnsupportedCache, match=r"replicas=\{name"):
        keys(Rank(rank, 4), heads, first, model)
    assert keys(Rank(rank, 4), heads, first, model, replicas={NAME: (2, 1)}) == [(2, 1)]


def test_an_uneven_share_is_no_copy_where_the_ranks_have_fewer_heads_than_the_model() -> None:
    assert keys(Rank(1, 2), 1, 2, 3) == [(1, 0)]
