"""Tiny random models with several kinds of layers, and the process that goes on from what another one saved.

The oracle is always "prefill in the same chunks, then go on in place": KV recomputed in other chunks differs in its last
bits. One thread, so that bits do not depend on how busy the machine is.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import DeepseekV2Config, DeepseekV3Config, Gemma3TextConfig, MistralConfig

from kvstore.engines.transformers import load_cache, open_store
from kvstore.tools.demo_model import forward

BLOCK = 4
ANSWER = 6
VOCABULARY = 96
SIZES = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256}


def gemma3(window: int) -> Any:
    """Full attention in every second layer, a sliding window in the others."""
    kinds = ["sliding_attention", "full_attention"] * 2
    settings = {"sliding_window": window, "layer_types": kinds, "num_hidden_layers": len(kinds)}
    return made(transformers.Gemma3ForCausalLM, Gemma3TextConfig(**SIZES, **HEADS, **settings))


def mistral(window: int) -> Any:
    """A sliding window in every layer."""
    config = MistralConfig(**SIZES, **HEADS, num_hidden_layers=2, sliding_window=window)
    return made(transformers.MistralForCausalLM, config)


def deepseek(version: int) -> Any:
    """Multi-head latent attention: one head, whose keys are latents and whose values are rotated positions."""
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "q_lora_rank": 8, "kv_lora_rank": 16, "topk_group": 1}
    widths = {"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "first_k_dense_replace": 2, "n_group": 1}
    config = (DeepseekV2Config, DeepseekV3Config)[version - 2](**SIZES, **heads, **widths, num_hidden_layers=2)
    return made((transformers.DeepseekV2ForCausalLM, transformers.DeepseekV3ForCausalLM)[version - 2], config)


def made(kind: Any, config: Any) -> Any:
    """A model of random weights, the same in every process."""
    torch.manual_seed(0)
    return kind(config).to(torch.bfloat16).eval()


MODELS: dict[str, Callable[[], Any]] = {
    "gemma3, window 8": lambda: gemma3(8),
    "gemma3, window 9": lambda: gemma3(9),
    "gemma3, window 6": lambda: gemma3(6),
    "gemma3, window 3": lambda: gemma3(3),
    "mistral, window 8": lambda: mistral(8),
    "deepseek v2": lambda: deepseek(2),
    "deepseek v3": lambda: deepseek(3),
}


def request(count: int, seed: int = 0) -> torch.Tensor:
    """Token ids of a request, [1, count]."""
    return torch.randint(0, VOCABULARY, (1, count), generator=torch.Generator().manual_seed(seed))


def fill(model: Any, ids: torch.Tensor, cache: Any, ends: Sequence[int], done: int | None = None) -> Any:
    """Compute tokens up to each of these ends in a forward pass of its own; the cache is returned. done: how many the cache
    has, where it does not tell."""
    done = cache.get_seq_length() if done is None else done
    for end in ends:
        if end > done:
            forward(model, ids[:, done:end], cache, 1)
            done = end
    return cache


@dataclass(frozen=True)
class Continuation:
    """What a model made of the rest of a prompt and of what it said itself: a digest of the bits of all logits, of a token
    each, and the tokens."""

    logits: str
    answer: list[int]


def go_on(model: Any, ids: torch.Tensor, cache: Any, done: int | None = None) -> Continuation:
    """Compute what is not in the cache in one forward pass, then answer greedily. done: as `fill`."""
    done = cache.get_seq_length() if done is None else done
    logits = [forward(model, ids[:, done:], cache, 0)["logits"][0]]
    answer = list[int]()
    while len(answer) < ANSWER:
        answer.append(int(logits[-1][-1].argmax()))
        logits.append(forward(model, torch.tensor([answer[-1:]]), cache, 1)["logits"][0])
    bits = torch.cat(logits).view(torch.int16).numpy().tobytes()
    return Continuation(hashlib.sha256(bits).hexdigest(), answer)


def elsewhere(tasks: Sequence[dict[str, Any]], folder: Path, module: str = "tests.real_models") -> list[dict[str, Any]]:
    """Go on from stores in another process. Each task: model, store, ids; of each comes back tokens, logits, answer.
    module: the one whose models these are."""
    path = folder / "tasks.json"
    path.write_text(json.dumps(tasks))
    command = [sys.executable, "-m", module, str(path)]
    result = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent.parent)
    assert result.returncode == 0, result.stderr
    found: list[dict[str, Any]] = json.loads(result.stdout)
    return found


def main(known: Mapping[str, Callable[[], Any]], go_on: Callable[..., Continuation]) -> None:
    """What the other process does, with these models by name. go_on: as this module's."""
    torch.set_num_threads(1)
    tasks = json.loads(Path(sys.argv[1]).read_text())
    models, found = {name: known[name]() for name in {task["model"] for task in tasks}}, []
    for task in tasks:
        model, ids = models[task["model"]], torch.tensor([task["ids"]])
        with open_store(task["store"], model, block_size=BLOCK, mode="r") as store:
            cache, tokens = load_cache(store, ids)
        said = go_on(model, ids, cache, tokens)
        found.append({"tokens": tokens, "logits": said.logits, "answer": said.answer})
    print(json.dumps(found))


if __name__ == "__main__":
    main(MODELS, go_on)
