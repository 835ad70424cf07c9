"""What is checked before a store opens: types, the path, and that cache, rank and identity fit together."""

from __future__ import annotations

import os
from pathlib import Path

from kvstore.cache import LayerCache, PagedKVCache
from kvstore.config import StoreConfig
from kvstore.errors import ConfigError, IdentityError, InvalidCache, StorePathError, UnsupportedCache
from kvstore.identity import CacheIdentity, LayerSpec, Rank, heads_before
from kvstore.states import LayerStates
from kvstore.storefile import path_errors


def check_types(cache: object, identity: object, config: object, rank: object) -> None:
    if not isinstance(cache, PagedKVCache):
        raise InvalidCache(f"cache is a {type(cache).__name__}: expected PagedKVCache.from_tensors(...)")
    if not isinstance(identity, CacheIdentity):
        raise IdentityError(f"identity is a {type(identity).__name__}: expected CacheIdentity(model=..., revision=...)")
    if not isinstance(config, StoreConfig) or not isinstance(rank, Rank):
        raise ConfigError(
            f"config is a {type(config).__name__}, rank a {type(rank).__name__}: expected a StoreConfig and a Rank"
        )
    _check_state_ranks(cache, rank)


def _check_state_ranks(cache: PagedKVCache, rank: Rank) -> None:
    """A layer whose split is not known is numbered by its rank."""
    for group in cache.state_groups.values():
        for layer in group.layers:
            if layer.rank not in (None, rank.tp_rank):
                raise ConfigError(
                    f"layer {layer.name}: its states are those of tp_rank {layer.rank} in the cache, and the store's rank is "
                    f"{rank}: pass tp_rank={rank.tp_rank} to PagedKVCache.from_tensors"
                )


def check_choices(mode: object, io: object) -> None:
    """Raise ConfigError for a mode or an io that there is not."""
    if mode not in ("r", "rw"):
        raise ConfigError(f'mode {mode!r}: expected "r" or "rw"')
    if io not in ("inline", "process"):
        raise ConfigError(f'io {io!r}: expected "inline" or "process"')


def store_root(path: str | os.PathLike[str]) -> Path:
    name = os.fspath(path) if isinstance(path, str | os.PathLike) else None
    if not isinstance(name, str) or not name or "\0" in name or not _is_utf8(name):
        raise StorePathError(f"path is {path!r}: expected the name of a folder, in UTF-8")
    root = Path(name)
    with path_errors(root, "expected a folder, or a path where one can be made"):
        if root.exists() and not root.is_dir():
            raise StorePathError(f"{root} is a file: expected a folder, or a path where one can be made")
    return root


def _is_utf8(name: str) -> bool:
    """LMDB takes its path as UTF-8."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _specs(cache: PagedKVCache) -> list[LayerSpec]:
    return [layer.spec(group.number) for group in cache.all_groups.values() for layer in group.layers]


def complete_identity(identity: CacheIdentity, cache: PagedKVCache, rank: Rank) -> CacheIdentity:
    """The identity with the unsharded model's layers, from a cache that holds them all."""
    if identity.layers is not None:
        return identity
    shifted = [layer.name for group in cache.groups.values() for layer in group.layers if layer.own_first_head]
    parts = [layer.name for group in cache.state_groups.values() for layer in group.layers if not layer.whole]
    if not rank.whole or shifted or parts:
        raise IdentityError(
            f"rank {rank.folder} holds a part of the model, and the identity has no layers: pass "
            "CacheIdentity(..., layers=...) with every layer of the unsharded model"
        )
    return identity.with_layers(_specs(cache))


def check_layers(cache: PagedKVCache, identity: CacheIdentity) -> None:
    """Raise IdentityError or UnsupportedCache where a cache is no part of the identity's model."""
    known = {layer.name: layer for layer in identity.layers or ()}
    for group in cache.all_groups.values():
        for layer in group.layers:
            if layer.name not in known:
                raise IdentityError(f"layer {layer.name} is not one of the identity's {len(known)} layers")
            _check_layer(layer, group.number, known[layer.name])
        numbered = heads_before({name: layer.kv_heads for name, layer in known.items() if layer.group == group.number})
        for layer in group.layers:
            if layer.heads_before != numbered[layer.name]:
                raise IdentityError(
                    f"layer {layer.name}: its heads are numbered from {layer.heads_before} on in the cache, from "
                    f"{numbered[layer.name]} on in the identity, which has other caches of this layer number, or other "
                    "heads of them: pass kv_heads={name: KV heads in the unsharded model} with the cache"
                )


def _check_layer(layer: LayerCache | LayerStates, group: int, model: LayerSpec) -> None:
    own = layer.spec(group)
    if isinstance(layer, LayerStates):
        _check_states(layer, own, model)
        return
    fields = ("type", "dtype", "k_bytes", "v_bytes", "group")
    if any(getattr(own, name) != getattr(model, name) for name in fields):
        raise IdentityError(f"layer {layer.name} is {own} in the cache, {model} in the identity: they must agree")
    end = layer.own_first_head + layer.heads
    if end > model.kv_heads or layer.kv_heads not in (None, model.kv_heads):
        raise UnsupportedCache(
            f"layer {layer.name} has the heads {layer.own_first_head} to {end - 1} of {layer.kv_heads or 'the model'} in "
            f"the cache, the model has {model.kv_heads}: check first_head and kv_heads"
        )


def _check_states(layer: LayerStates, own: LayerSpec, model: LayerSpec) -> None:
    fields = ("type", "dtype", "states", "group")
    if any(getattr(own, name) != getattr(model, name) for name in fields):
        raise IdentityError(f"layer {layer.name} is {own} in the cache, {model} in the identity: they must agree")
    if layer.rank is not None and layer.rank >= model.kv_heads:
        raise UnsupportedCache(
            f"layer {layer.name} is rank {layer.rank}'s of a split that is not known, the identity has {model.kv_heads} "
            "ranks of it (kv_heads): check tp_rank and kv_heads"
        )
