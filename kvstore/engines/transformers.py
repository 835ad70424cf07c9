"""The prefix of a transformers DynamicCache in a store, and back.

One sequence: the tensors of a DynamicCache, [1, KV heads, tokens, head size], are viewed as a paged cache without a copy,
block i being the tokens i * block_size and on of the request. What is loaded is verified in the tensors that the model
reads. Layers with full attention are one group of the store, those with a sliding window another, and those with recurrent
states a third, which has one block a state: the one that ends where the state's tokens do.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt
import torch

from kvstore.cache import PagedKVCache
from kvstore.config import StoreConfig
from kvstore.engines.transformers_layers import (
    LayerGroup,
    Parts,
    cache_utils,
    check_keeps,
    check_kinds,
    described,
    filled,
    keeps_tokens,
    layer_groups,
    paged,
    parts_of,
)
from kvstore.engines.transformers_model import cache_of, check_model, compute, goes_on_at_once, model_identity
from kvstore.engines.transformers_states import STATES
from kvstore.errors import ConfigError, EngineError, InvalidTokens, UnsupportedCache
from kvstore.identity import Scalar
from kvstore.prefixes import PrefixBlocks
from kvstore.results import PutResult
from kvstore.store import KVStore

if TYPE_CHECKING:
    from transformers import DynamicCache, PreTrainedModel

log = logging.getLogger(__name__)
BLOCK_SIZE: Final = 16
PERSON: Final = b"kvstore tokens 1"
"""Sets these hashes apart from any other BLAKE2b."""
SLID_OUT: Final = "slid_out"
"""Why a block is not stored that no layer keeps any longer."""
NO_STATE: Final = "no_state"
"""Why a block of a model that keeps states alone is not stored: no state is there of exactly the tokens up to its end."""


class TransformersStore(KVStore):
    """A KVStore bound to one transformers model; `open_store` makes it.

    Its own cache is one block that nothing is copied to: the shapes of the model's KV. Ownership, threads and
    exceptions as KVStore; the model itself is not kept.
    """

    model_config: Any = None
    layer_groups: tuple[LayerGroup, ...] = ()
    goes_on_at_once: bool = True
    """Whether a forward pass of several tokens goes on from recurrent states; where not, only one of a single token does."""
    unsaved_states_told: bool = False
    """Whether the log has said that a state was not stored."""


def open_store(
    path: str | os.PathLike[str],
    model: PreTrainedModel,
    *,
    block_size: int = BLOCK_SIZE,
    config: StoreConfig | None = None,
    revision: str = "",
    extra: Mapping[str, Scalar] | None = None,
    mode: str = "rw",
    io: str = "inline",
) -> KVStore:
    """A store for the KV of this model, for `save_cache` and `load_cache`.

    block_size: tokens a block; KV is stored and found in whole blocks. revision: the weights as their owner names
    them, by default the hub's commit where the configuration has it. extra: what else changes KV. mode, io: as KVStore's.

    Other weights, another dtype, quantisation, configuration (rope settings among it), adapter or `extra` make
    another identity, so that their KV is a miss. Weights are told apart by a digest of all their bytes, which reads
    them once; the shapes of the KV are those of a forward pass over one token. The model must not change while the
    store is used: open another one after loading weights, or switching adapters.

    Raises EngineError (no transformers, no model, weights that are not in memory), UnsupportedCache (layers of other kinds
    than attention and recurrent states, encoder-decoder models, rope that depends on the prompt's length), ConfigError,
    IdentityError, or what KVStore raises; then nothing on disk was changed.
    """
    if isinstance(block_size, bool) or not isinstance(block_size, int) or block_size < 1:
        raise ConfigError(f"block_size is {block_size!r}: expected an integer of at least 1")
    cache_utils()
    check_model(model)
    template, groups = _template(model, block_size)
    goes_on = all(group.type != STATES for group in groups) or goes_on_at_once(model)
    store = TransformersStore(path, template, model_identity(model, revision, extra or {}), config, mode=mode, io=io)
    store.model_config, store.layer_groups = model.config, groups
    store.goes_on_at_once = goes_on
    if not goes_on:
        log.warning(
            "%s does not read its recurrent states when it computes several tokens: compute what is saved in one forward "
            "pass, and what follows, on a loaded cache too, one token a pass; else it forgets all tokens before",
            type(model).__name__,
        )
    return store


def save_cache(
    store: KVStore, input_ids: torch.Tensor | Sequence[int], cache: DynamicCache, *, tokens: int | None = None
) -> PutResult:
    """Store every whole block that a DynamicCache holds, under the chained hashes of its tokens.

    input_ids: the request's token ids from its first on, [tokens] or [1, tokens] integers; at least as many as the
    cache holds. cache: as the model of `open_store` filled it, without padding; it must not change during the call.
    tokens: how many the cache holds. A model without attention must be told, since recurrent states do not count: a wrong
    number stores a state under other tokens than its own. Elsewhere the cache says so, and another number is refused.
    The result has one entry a block, none where the cache holds less than one.

    A recurrent state is of all tokens so far: it is stored where these end at a block's end, and then a prefix up to there
    can be loaded. So save after a prefill of a multiple of block_size tokens, and then compute the rest; elsewhere the log
    says once that no state was stored. Of a model without attention, the blocks before are `failed` for the reason
    "no_state".

    A sliding-window layer drops tokens as soon as its window has passed them, and with them blocks that a prefix of the
    request needs. The caches of `load_cache`, also empty ones, keep them; elsewhere call `cache.activate_past_recording()`
    before the first forward pass. `cache.crop(0)` drops them once they were saved. Blocks that some layers have dropped
    are stored for the others alone, and a warning says how much of the request can be loaded; what no layer has any
    longer is `failed` for the reason "slid_out".

    Raises InvalidTokens, InvalidCache or one of its kinds (a batch, other layers or shapes, another kind of cache, states
    that record their past), EngineError for another store, or what `put_blocks` raises; then nothing was stored.
    """
    bound = _bound(store)
    ids = _token_ids(input_ids)
    count = _cached_tokens(bound, cache, tokens)
    if count > ids.size:
        raise InvalidTokens(f"{ids.size} input_ids, the cache holds {count} tokens: pass the id of every cached token")
    size, lost = _block_size(bound), SLID_OUT if _of_tokens(bound) else NO_STATE
    hashes = chain_hashes(ids[: count // size * size], size)
    held = {group: blocks for group in bound.layer_groups if hashes and (blocks := group.held(cache, count, size))}
    _tell_of_unsaved_states(bound, hashes, held, count)
    if not held:
        return _together(len(hashes), [(range(0), bound.put_blocks([], [], group=bound.layer_groups[0].number))], lost)
    target = bound.attach(paged(cache, held, size))
    put = [(blocks, _put(target, group, blocks, hashes)) for group, blocks in held.items()]
    _warn_of_lost_windows(bound, hashes, held)
    return _together(len(hashes), put, lost)


def load_cache(store: KVStore, input_ids: torch.Tensor | Sequence[int]) -> tuple[DynamicCache, int]:
    """A DynamicCache with the longest verified prefix of a prompt, and how many tokens that is.

    input_ids: the prompt's token ids, [tokens] or [1, tokens] integers. At least one token is left to compute; go on
    with `model(input_ids[:, tokens:], cache=cache)` or `generate(input_ids, cache=cache)` (before transformers 5.24 the
    argument is past_key_values). The prefix ends before the first block that is missing or was refused; of
    sliding-window layers it needs the blocks in the window before its end, of recurrent states the one that was saved there:
    it ends where some `save_cache` stored them. Without one the cache is empty and the number 0. The cache belongs to the
    caller. Its sliding-window layers keep what they are given, until `cache.crop(0)`. Where `store.goes_on_at_once` is False,
    go on with one token a forward pass: the model reads its recurrent states in no other.

    Raises InvalidTokens, EngineError for another store, or what `get_blocks` raises.
    """
    bound = _bound(store)
    ids, size = _token_ids(input_ids), _block_size(bound)
    hashes = chain_hashes(ids[: (ids.size - 1) // size * size], size)
    asked, promised = {group.number: hashes for group in bound.layer_groups}, ids.size
    # Where a window was refused, that of a shorter prefix may be there. Who promises the same again cannot keep it.
    while 0 < (tokens := bound.match_tokens(asked)) < promised:
        cache, found = _load(bound, hashes[: tokens // size], size)
        if found:
            return cache, found
        promised = tokens
    return _empty_cache(bound), 0


def chain_hashes(
    token_ids: torch.Tensor | Sequence[int] | npt.NDArray[np.integer[Any]], block_size: int, salt: bytes = b""
) -> list[bytes]:
    """The chained hash of each whole block of token ids: 32 bytes that depend on every token up to the block's end.

    BLAKE2b over the hash before and the block's ids as little-endian int64; before the first, over the salt. Equal in
    every process and on every machine. Raises InvalidTokens or ConfigError.
    """
    if isinstance(block_size, bool) or not isinstance(block_size, int) or block_size < 1:
        raise ConfigError(f"block_size is {block_size!r}: expected an integer of at least 1")
    ids = _integers(token_ids).astype("<i8")
    blocks = ids[: ids.size // block_size * block_size].reshape(-1, block_size)
    parent, hashes = _digest(salt), list[bytes]()
    for block in blocks:
        parent = _digest(parent + block.tobytes())
        hashes.append(parent)
    return hashes


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=32, person=PERSON).digest()


def _integers(token_ids: object) -> npt.NDArray[np.int64]:
    """Token ids as int64 [tokens]; raises InvalidTokens."""
    try:
        given = token_ids.detach().cpu().numpy() if isinstance(token_ids, torch.Tensor) else np.asarray(token_ids)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise InvalidTokens(f"input_ids: {error}: expected integers, [tokens] or [1, tokens]") from None
    if given.ndim == 2 and given.shape[0] == 1:
        given = given[0]
    if given.ndim != 1 or (given.size and given.dtype.kind not in "iu"):
        raise InvalidTokens(
            f"input_ids are {given.dtype} of shape {given.shape}: expected integers of one request, [tokens] or "
            "[1, tokens]; call once for each request of a batch"
        )
    if given.size and (given.min() < 0 or given.max() >= 2**63):
        raise InvalidTokens(f"input_ids reach from {given.min()} to {given.max()}: expected 0 or more, below 2**63")
    return given.astype(np.int64)


def _token_ids(input_ids: object) -> npt.NDArray[np.int64]:
    ids = _integers(input_ids)
    if not ids.size:
        raise InvalidTokens("input_ids is empty: expected the request's tokens, at least one")
    return ids


def _bound(store: object) -> TransformersStore:
    if not isinstance(store, TransformersStore) or store.model_config is None:
        raise EngineError(
            f"store is a {type(store).__name__}: expected what kvstore.engines.transformers.open_store(path, model) "
            "returned, which knows the model's KV"
        )
    return store


def _block_size(store: TransformersStore) -> int:
    return next(iter(store.cache.all_groups.values())).block_size


def _of_tokens(store: TransformersStore) -> list[LayerGroup]:
    """The groups that keep tokens, not states."""
    return [group for group in store.layer_groups if group.type != STATES]


def _put(target: KVStore, group: LayerGroup, blocks: range, hashes: Sequence[bytes]) -> PutResult:
    """Store a group's blocks, which are the first of the target's cache."""
    parent = hashes[blocks.start - 1] if blocks.start else None
    own = hashes[blocks.start : blocks.stop]
    return target.put_blocks(own, range(len(blocks)), blocks.start, group=group.number, parent=parent)


def _together(blocks: int, parts: Sequence[tuple[range, PutResult]], lost: str) -> PutResult:
    """What became of a request's blocks in all groups. parts: of each group the blocks' positions and what became of them.
    A block is stored where a group stored it, present where all had it, failed where one failed, or none had it: `lost`."""
    stored, seen, failed = np.zeros(blocks, bool), np.zeros(blocks, bool), dict[int, str]()
    for own, put in parts:
        stored[own.start : own.stop] |= put.stored
        seen[own.start : own.stop] = True
        failed |= {own.start + index: reason for index, reason in put.failed.items()}
    failed |= dict.fromkeys(map(int, np.flatnonzero(~seen)), lost)
    stored[list(failed)] = False
    present = ~stored
    present[list(failed)] = False
    return PutResult(stored, present, failed)


def _warn_of_lost_windows(store: TransformersStore, hashes: Sequence[bytes], held: Mapping[LayerGroup, range]) -> None:
    """Say so where a window was dropped before it was saved, now or earlier."""
    size = _block_size(store)
    end = len(hashes) * size
    none = range(len(hashes), len(hashes))
    groups = _of_tokens(store)
    if all(held.get(group, none).start <= group.needed(end, size).start for group in groups):
        return
    found = store.match_tokens({group.number: hashes for group in groups})
    if found < end:
        log.warning(
            "the first %d of %d saved tokens can be loaded: sliding-window layers had dropped what the others need; use the "
            "cache of load_cache, or call cache.activate_past_recording() before the first forward pass",
            found,
            end,
        )


def _tell_of_unsaved_states(
    store: TransformersStore, hashes: Sequence[bytes], held: Mapping[LayerGroup, range], tokens: int
) -> None:
    """Say so, once a store, where states are of tokens that do not end at a block's end."""
    if (
        not hashes
        or store.unsaved_states_told
        or all(group in held for group in store.layer_groups if group.type == STATES)
    ):
        return
    store.unsaved_states_told = True
    log.warning(
        "the recurrent states after %d tokens are not stored, since no block of %d tokens ends there, and attention without "
        "them is not loaded: call save_cache after a prefill of a multiple of %d tokens, %d for this prompt, and compute "
        "the rest after it; this is said once a store",
        *(tokens, _block_size(store), _block_size(store), len(hashes) * _block_size(store)),
    )


def _load(store: TransformersStore, hashes: Sequence[bytes], size: int) -> tuple[DynamicCache, int]:
    """Load a prefix of which everything is said to be there: the cache, and how many tokens of it may be used."""
    cache, end = _empty_cache(store), len(hashes) * size
    needed = {group: group.needed(end, size) for group in store.layer_groups}
    for group, layer, _, parts in _layers(store, cache):
        group.make_room(layer, parts, needed[group], size)
    wanted = {group: own for group, own in needed.items() if own}
    if not wanted:
        return cache, 0
    got = store.attach(paged(cache, wanted, size)).get_prefix(
        {group.number: PrefixBlocks(hashes[own.start :], range(len(own)), own.start) for group, own in wanted.items()}
    )
    if got.tokens:
        # What was refused is undefined: it must not stay inside the tensors.
        for group, layer, *_ in _layers(store, cache):
            group.cut(layer, got.tokens)
    return cache, got.tokens


def _layers(store: TransformersStore, cache: DynamicCache) -> Iterator[tuple[LayerGroup, Any, int, Parts]]:
    """The layers of a cache of the store's model by group: each one's group, itself, its index, and what a block of it looks
    like."""
    for group in store.layer_groups:
        for index in group.layers:
            yield group, cache.layers[index], index, parts_of(store.cache, group.name(index))


def _empty_cache(store: TransformersStore) -> DynamicCache:
    cache = cache_utils().DynamicCache(config=store.model_config)
    for group, layer, *_ in _layers(store, cache):
        group.record(layer)
    return cache


def _cached_tokens(store: TransformersStore, cache: Any, tokens: int | None) -> int:
    """How many tokens a cache of the store's model holds; raises where it is another kind, or of another model, or holds
    another number than the caller says."""
    if type(cache) is not cache_utils().DynamicCache:
        raise UnsupportedCache(
            f"cache is a {type(cache).__name__}: expected a DynamicCache, as model(..., use_cache=True) returns it"
        )
    check_kinds(cache.layers)
    if not any(filled(layer) for layer in cache.layers):
        return _agreed(0, tokens)
    check_keeps(cache.layers, store.layer_groups)
    counted = [int(layer.get_seq_length()) for layer in cache.layers if keeps_tokens(layer)]
    count = _agreed(counted[0] if counted else None, tokens)
    for group, layer, index, parts in _layers(store, cache):
        group.check(layer, index, parts, count)
    return count


def _agreed(counted: int | None, tokens: int | None) -> int:
    """How many tokens a cache holds. counted: what its attention says; None: it has none. tokens: what the caller says."""
    if tokens is not None and (isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 0):
        raise InvalidTokens(f"tokens is {tokens!r}: expected how many tokens the cache holds, 0 or more")
    if tokens is None and counted is None:
        raise InvalidTokens(
            "the cache has recurrent states alone, which do not tell of how many tokens they are: pass tokens=, the number "
            "that the model has computed with it (after `generate`, one less than it returned)"
        )
    if counted is not None and tokens not in (None, counted):
        raise InvalidTokens(f"tokens is {tokens}, the cache holds {counted}: pass its own number, or none")
    return counted if counted is not None else tokens or 0


def _template(model: Any, block_size: int) -> tuple[PagedKVCache, tuple[LayerGroup, ...]]:
    """One block with the shapes, dtype and device of the KV that the model makes of one token; and its groups."""
    check_kinds(cache_utils().DynamicCache(config=model.config).layers)
    cache = cache_of(compute(model, 1))
    check_kinds(cache.layers)
    unused = [index for index, layer in enumerate(cache.layers) if not filled(layer)]
    if unused or not cache.layers:
        raise UnsupportedCache(
            f"{type(model).__name__} keeps nothing in the layers {unused}: expected a model whose layers each have tokens or "
            "states of their own"
        )
    groups = layer_groups(cache.layers)
    blank = {g.name(index): g.blank(cache.layers[index], block_size) for g in groups for index in g.layers}
    return described(blank, groups, block_size), groups
