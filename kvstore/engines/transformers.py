"""The prefix of a transformers DynamicCache in a store, and back.

One sequence, full attention: the tensors of a DynamicCache, [1, KV heads, tokens, head size], are viewed as a paged
cache without a copy, block i being its tokens i * block_size and on. What is loaded is verified in the tensors that
the model reads.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt
import torch
from xxhash import xxh3_128_digest

from kvstore.cache import PagedKVCache
from kvstore.config import StoreConfig
from kvstore.errors import (
    ConfigError,
    EngineError,
    IdentityError,
    InvalidCache,
    InvalidShape,
    InvalidTokens,
    UnsupportedCache,
    UnsupportedDtype,
)
from kvstore.identity import CacheIdentity, Scalar
from kvstore.results import PutResult
from kvstore.store import KVStore

if TYPE_CHECKING:
    from transformers import DynamicCache, PreTrainedModel

BLOCK_SIZE: Final = 16
LAYOUT: Final = "BHND"
PERSON: Final = b"kvstore tokens 1"
"""Sets these hashes apart from any other BLAKE2b."""
RUN_SETTINGS: Final = frozenset(
    (
        *("_name_or_path", "_model_name_or_path", "architectures", "transformers_version", "quantization_config"),
        *("id2label", "label2id", "problem_type", "return_dict", "use_cache", "chunk_size_feed_forward"),
        *("output_attentions", "output_hidden_states"),
    )
)
"""What a model's configuration says about saving and running it, not about what it computes."""
LENGTH_DEPENDENT_ROPE: Final = frozenset({"dynamic", "longrope"})
"""Rope types that choose frequencies by the length of the whole prompt: the same tokens then have several KVs."""


class TransformersStore(KVStore):
    """A KVStore bound to one transformers model; `open_store` makes it.

    Its own cache is one block that nothing is copied to: the shapes of the model's KV. Ownership, threads and
    exceptions as KVStore; the model itself is not kept.
    """

    model_config: Any = None


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

    Raises EngineError (no transformers, no model, weights that are not in memory), UnsupportedCache (sliding-window,
    hybrid or encoder-decoder models, rope that depends on the prompt's length), ConfigError, IdentityError, or what
    KVStore raises; then nothing on disk was changed.
    """
    if isinstance(block_size, bool) or not isinstance(block_size, int) or block_size < 1:
        raise ConfigError(f"block_size is {block_size!r}: expected an integer of at least 1")
    _check_model(model)
    template = _template(model, block_size)
    store = TransformersStore(path, template, _identity(model, revision, extra or {}), config, mode=mode, io=io)
    store.model_config = model.config
    return store


def save_cache(store: KVStore, input_ids: torch.Tensor | Sequence[int], cache: DynamicCache) -> PutResult:
    """Store every whole block that a DynamicCache holds, under the chained hashes of its tokens.

    input_ids: the request's token ids from its first on, [tokens] or [1, tokens] integers; at least as many as the
    cache holds. cache: as the model of `open_store` filled it, without padding; it must not change during the call.
    The result has one entry a block, none where the cache holds less than one.

    Raises InvalidTokens, InvalidCache or one of its kinds (a batch, other layers or shapes, another kind of cache),
    EngineError for another store, or what `put_blocks` raises; then nothing was stored.
    """
    bound = _bound(store)
    ids = _token_ids(input_ids)
    tokens = _cached_tokens(bound, cache)
    if tokens > ids.size:
        raise InvalidTokens(f"{ids.size} input_ids, the cache holds {tokens} tokens: pass the id of every cached token")
    size = _block_size(bound)
    blocks = tokens // size
    if not blocks:
        return bound.put_blocks([], [])
    hashes = chain_hashes(ids[: blocks * size], size)
    return bound.attach(_paged(cache, blocks, size)).put_blocks(hashes, range(blocks))


def load_cache(store: KVStore, input_ids: torch.Tensor | Sequence[int]) -> tuple[DynamicCache, int]:
    """A DynamicCache with the longest verified prefix of a prompt, and how many tokens that is.

    input_ids: the prompt's token ids, [tokens] or [1, tokens] integers. At least one token is left to compute; go on
    with `model(input_ids[:, tokens:], cache=cache)` or `generate(input_ids, cache=cache)` (before transformers 5.24 the
    argument is past_key_values). The prefix ends before the first block that is missing or was refused. Without one
    the cache is empty and the number 0. The cache belongs to the caller.

    Raises InvalidTokens, EngineError for another store, or what `get_blocks` raises.
    """
    bound = _bound(store)
    ids, size = _token_ids(input_ids), _block_size(bound)
    hashes = chain_hashes(ids[: (ids.size - 1) // size * size], size)
    blocks = bound.match_prefix(hashes)
    if not blocks:
        return _empty_cache(bound), 0
    cache = _unfilled_cache(bound, blocks * size)
    got = bound.attach(_paged(cache, blocks, size)).get_blocks(hashes[:blocks], range(blocks))
    tokens = got.num_leading * size
    if not tokens:
        return _empty_cache(bound), 0
    # What was refused is undefined: it must not stay inside the tensors.
    cache.crop(tokens - blocks * size)
    return cache, tokens


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
    return store.cache.group(0).block_size


def _cache_utils() -> Any:
    """transformers.cache_utils, imported when first needed: it takes seconds."""
    try:
        from transformers import cache_utils
    except ImportError as error:
        raise EngineError(
            f"transformers cannot be imported: {error}: pip install transformers, or the extra `engines` of kvstore"
        ) from error
    return cache_utils


def _layer_name(index: int) -> str:
    return f"model.layers.{index}.self_attn"


def _paged(cache: DynamicCache, blocks: int, block_size: int) -> PagedKVCache:
    """The first blocks of a DynamicCache as a paged cache: views of its own tensors."""

    def view(tensor: torch.Tensor) -> torch.Tensor:
        heads, _, size = tensor[0].shape
        return tensor[0, :, : blocks * block_size].view(heads, blocks, block_size, size).transpose(0, 1)

    pairs = {_layer_name(i): (view(layer.keys), view(layer.values)) for i, layer in enumerate(cache.layers)}
    return PagedKVCache.from_tensors(pairs, LAYOUT)


def _empty_cache(store: TransformersStore) -> DynamicCache:
    return _cache_utils().DynamicCache(config=store.model_config)


def _unfilled_cache(store: TransformersStore, tokens: int) -> DynamicCache:
    """A DynamicCache of that many tokens, in the tensors that the model will read, whose contents are undefined.

    They are set here because `update` would copy them: what was verified would not be what is read.
    """
    cache = _empty_cache(store)
    for index, layer in enumerate(cache.layers):
        keys, values = (
            part.new_empty((1, part.shape[1], tokens, part.shape[3]))
            for part in store.cache.tensors[_layer_name(index)]
        )
        layer.lazy_initialization(keys, values)
        layer.keys, layer.values = keys, values
    return cache


def _cached_tokens(store: TransformersStore, cache: Any) -> int:
    """How many tokens a cache of the store's model holds; raises where it is another kind, or of another model."""
    utils, expected = _cache_utils(), store.cache.tensors
    if type(cache) is not utils.DynamicCache:
        raise UnsupportedCache(
            f"cache is a {type(cache).__name__}: expected a DynamicCache, as model(..., use_cache=True) returns it"
        )
    layers = cache.layers
    _check_kinds(layers)
    if not any(layer.is_initialized for layer in layers):
        return 0
    if len(layers) != len(expected):
        raise InvalidCache(
            f"the cache has {len(layers)} layers, the model of the store {len(expected)}: pass its cache"
        )
    tokens = cache.get_seq_length()
    for index, layer in enumerate(layers):
        for letter, given, part in zip("KV", (layer.keys, layer.values), expected[_layer_name(index)], strict=True):
            _check_tensor(f"{letter} of layer {index}", given, part, tokens)
    return int(tokens)


def _check_kinds(layers: Sequence[object]) -> None:
    plain = _cache_utils().DynamicLayer
    if kinds := sorted({type(layer).__name__ for layer in layers if type(layer) is not plain}):
        raise UnsupportedCache(
            f"the cache has layers of the kinds {', '.join(kinds)}: expected DynamicLayer alone (full attention, not "
            "quantised); sliding windows and recurrent states need more than a prefix of their tokens"
        )


def _check_tensor(what: str, given: torch.Tensor | None, part: torch.Tensor, tokens: int) -> None:
    """Compare a layer's tensor with the model's, [1, heads, block_size, head size]."""
    shape = (1, part.shape[1], tokens, part.shape[3])
    if given is None or tuple(given.shape) != shape:
        raise InvalidShape(
            f"{what} has the shape {None if given is None else tuple(given.shape)}: expected {shape}, one sequence of the "
            "store's model; save each sequence of a batch from a cache of its own"
        )
    if given.dtype != part.dtype:
        raise UnsupportedDtype(f"{what} is {given.dtype}: the store was opened for a model whose KV is {part.dtype}")


def _check_model(model: Any) -> None:
    _cache_utils()
    config: Any = getattr(model, "config", None)
    if not isinstance(model, torch.nn.Module) or not hasattr(config, "get_text_config"):
        raise EngineError(f"model is a {type(model).__name__}: expected a transformers PreTrainedModel")
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedCache(f"{type(model).__name__} is an encoder-decoder model: expected a decoder-only one")
    found = _rope_types(config.get_text_config(decoder=True).to_dict())
    if bad := sorted(found & LENGTH_DEPENDENT_ROPE):
        raise UnsupportedCache(
            f"{type(model).__name__} has rope of type {', '.join(bad)}, whose keys depend on the length of the whole prompt: "
            "its blocks cannot be told apart by their tokens; expected rope that depends on positions alone"
        )


def _rope_types(settings: object) -> set[str]:
    """Every rope_type in a configuration, at any depth: some models have one for each kind of layer."""
    if not isinstance(settings, Mapping):
        return set()
    own = {str(value) for key, value in settings.items() if key == "rope_type"}
    return own.union(*(_rope_types(value) for value in settings.values()))


def _template(model: Any, block_size: int) -> PagedKVCache:
    """One block with the shapes, dtype and device of the KV that the model makes of one token."""
    _check_kinds(_cache_utils().DynamicCache(config=model.config).layers)
    with torch.no_grad():
        output = model(torch.zeros((1, 1), dtype=torch.long, device=model.device), use_cache=True)
    cache = output["cache"] if "cache" in output else output["past_key_values"]
    _check_kinds(cache.layers)
    unused = [index for index, layer in enumerate(cache.layers) if not layer.is_initialized]
    if unused or not cache.layers:
        raise UnsupportedCache(
            f"{type(model).__name__} keeps no KV in the layers {unused}: expected a model whose layers each have their own"
        )

    def block(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.new_zeros((1, tensor.shape[1], block_size, tensor.shape[3]))

    pairs = {_layer_name(i): (block(layer.keys), block(layer.values)) for i, layer in enumerate(cache.layers)}
    return PagedKVCache.from_tensors(pairs, LAYOUT)


def _identity(model: Any, revision: str, extra: Mapping[str, Scalar]) -> CacheIdentity:
    settings = json.loads(model.config.to_json_string(use_diff=False))
    own = {
        "adapters": _text(_adapters(model)),
        "config": _text({key: value for key, value in settings.items() if key not in RUN_SETTINGS}),
        "weights": _weights_digest(model),
    }
    if taken := sorted(own.keys() & extra.keys()):
        raise IdentityError(f"extra has {', '.join(taken)}, which open_store fills itself: choose another name")
    quantization = settings.get("quantization_config")
    return CacheIdentity(
        model=model.config.name_or_path or type(model).__name__,
        revision=revision or getattr(model.config, "_commit_hash", None) or "",
        dtype=str(model.dtype).removeprefix("torch."),
        quantization=_text(quantization) if quantization else "",
        extra=own | dict(extra),
    )


def _text(value: object) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def _adapters(model: torch.nn.Module) -> list[object]:
    """Which adapters act in which layers, and how strongly: PEFT keeps that beside the weights."""
    return [
        [
            name,
            list(module.active_adapters),
            module.disable_adapters,
            sorted(dict(getattr(module, "scaling", {})).items()),
        ]
        for name, module in model.named_modules()
        if isinstance(getattr(module, "disable_adapters", None), bool)
    ]


def _weights_digest(model: torch.nn.Module) -> str:
    """A digest of every weight and stored buffer: BLAKE2b over name, dtype, shape and XXH3-128 of the bytes.

    It reads each byte once, at about the speed of memory, so that no change of a weight is overlooked.
    """
    total = hashlib.blake2b(digest_size=16)
    for name, tensor in sorted(model.state_dict().items()):
        total.update(_text([name, str(tensor.dtype), list(tensor.shape)]).encode())
        total.update(xxh3_128_digest(_bytes_of(name, tensor)))
    return total.hexdigest()


def _bytes_of(name: str, tensor: torch.Tensor) -> bytes | memoryview:
    try:
        flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    except (RuntimeError, NotImplementedError, TypeError, AttributeError) as error:
        raise EngineError(
            f"weight {name} ({tensor.dtype} on {tensor.device}) cannot be read: {error}: load the model into memory "
            "(no device_map that offloads) with plain tensors"
        ) from error
    return flat.data
