"""What a store must know of a transformers model: whether its KV can be told apart by tokens, whether it goes on from states,
and its identity."""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Mapping
from typing import Any, Final

import torch
from xxhash import xxh3_128_digest

from kvstore.engines.transformers_states import RECURRENT
from kvstore.errors import EngineError, IdentityError, UnsupportedCache
from kvstore.identity import CacheIdentity, Scalar

RUN_SETTINGS: Final = frozenset(
    (
        *("_name_or_path", "_model_name_or_path", "architectures", "transformers_version", "quantization_config"),
        *("id2label", "label2id", "problem_type", "return_dict", "use_cache", "chunk_size_feed_forward"),
        *("output_attentions", "output_hidden_states"),
    )
)
"""What a model's configuration says about saving and running it, not about what it computes."""
CACHE_NAMES: Final = ("cache", "past_key_values", "cache_params")
"""What transformers calls the cache, by version and model."""
LENGTH_DEPENDENT_ROPE: Final = frozenset({"dynamic", "longrope"})
"""Rope types that choose frequencies by the length of the whole prompt: the same tokens then have several KVs."""


def check_model(model: Any) -> None:
    """Raise EngineError for what is no model, UnsupportedCache for one whose KV does not follow from its tokens alone."""
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


def compute(model: Any, tokens: int, cache: Any = None) -> Any:
    """A forward pass over the tokens 0, 1 and so on: the output. cache: where it goes on."""
    ids = torch.arange(tokens, device=model.device)[None]
    name = next((name for name in CACHE_NAMES if name in inspect.signature(model.forward).parameters), CACHE_NAMES[0])
    with torch.no_grad():
        return model(ids, use_cache=True, **({} if cache is None else {name: cache}))


def cache_of(output: Any) -> Any:
    """The cache in what a forward pass returned."""
    return next(output[name] for name in CACHE_NAMES if name in output)


def goes_on_at_once(model: Any) -> bool:
    """Whether a forward pass over several tokens goes on from recurrent states, where there are any. Some models read them
    for a single token alone, and take several for a request's first ones: then other states lead to the same."""
    said = []
    for value in (1.0, -1.0):
        cache = cache_of(compute(model, 1))
        states = [
            state for layer in cache.layers for state in getattr(layer, RECURRENT, {}).values() if state is not None
        ]
        if not states:
            return True
        for state in states:
            state.fill_(value)
        # Several tokens, as one may be padding, whose embedding is 0 and reads nothing.
        said.append(compute(model, 4, cache)[0])
    return not torch.equal(*said)


def _rope_types(settings: object) -> set[str]:
    """Every rope_type in a configuration, at any depth: some models have one for each kind of layer."""
    if not isinstance(settings, Mapping):
        return set()
    own = {str(value) for key, value in settings.items() if key == "rope_type"}
    return own.union(*(_rope_types(value) for value in settings.values()))


def model_identity(model: Any, revision: str, extra: Mapping[str, Scalar]) -> CacheIdentity:
    """The identity of a model's KV, without its layers. Reads every weight once.

    Raises IdentityError for names in `extra` that are taken, EngineError for weights that cannot be read.
    """
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
