"""What both processes of the demo do with the model: prefill a prompt in chunks, go on from a cache, answer."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch

from kvstore.tools.demo_text import QUESTION, STORY

if TYPE_CHECKING:
    from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

CHUNK: Final = 256
"""Tokens a forward pass of a prefill. Both processes use the same: KV depends on it in the last bits."""
COMPARED: Final = 16
"""How many of the prompt's last tokens have their logits compared."""
ANSWER_TOKENS: Final = 24
TOKENS_LEFT: Final = 20
"""At least so many of the prompt's tokens are not stored: those of the question."""


@dataclass(frozen=True, eq=False)
class Continuation:
    """What a model said: the logits of the prompt's last COMPARED tokens and of each answered one, [tokens,
    vocabulary], and the ids of the answer, decoded greedily."""

    logits: torch.Tensor
    answer: list[int]

    def same_bits(self, logits: torch.Tensor) -> bool:
        """Whether logits of the same dtype are equal to these bit for bit."""
        return self.logits.shape == logits.shape and torch.equal(as_bits(self.logits), as_bits(logits))


def as_bits(logits: torch.Tensor) -> torch.Tensor:
    """bfloat16 logits as int16, which compares equal only where every bit is."""
    return logits.view(torch.int16)


def prompt_ids(tokenizer: PreTrainedTokenizerBase) -> torch.Tensor:
    """The story and the question as a chat, [1, tokens]."""
    paragraphs = "\n\n".join(part.replace("\n", " ") for part in STORY.strip().split("\n\n"))
    chat = [{"role": "user", "content": f"{paragraphs}\n\n{QUESTION}"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    ids: torch.Tensor = tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"]
    return ids


def forward(model: PreTrainedModel, ids: torch.Tensor, cache: DynamicCache | None, keep: int) -> Any:
    """One forward pass: the output, with the logits of the last `keep` tokens. The cache grows in place."""
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    with torch.no_grad():
        return model(ids, use_cache=True, logits_to_keep=keep, **{name: cache})


def prefill(model: PreTrainedModel, ids: torch.Tensor, advance: Callable[[int], None] | None = None) -> DynamicCache:
    """The cache of all these tokens, computed CHUNK at a time; advance is told how many each time."""
    cache = None
    for chunk in torch.split(ids, CHUNK, dim=1):
        output = forward(model, chunk, cache, 1)
        cache = output["cache"] if "cache" in output else output["past_key_values"]
        if advance is not None:
            advance(chunk.shape[1])
    return cache


def go_on(model: PreTrainedModel, ids: torch.Tensor, cache: DynamicCache) -> Continuation:
    """Compute the prompt's tokens that are not in the cache in one forward pass, then answer."""
    rest = ids[:, cache.get_seq_length() :]
    logits, answer = [forward(model, rest, cache, COMPARED)["logits"][0]], list[int]()
    while len(answer) < ANSWER_TOKENS:
        answer.append(int(logits[-1][-1].argmax()))
        if answer[-1] == model.config.eos_token_id:
            break
        logits.append(forward(model, torch.tensor([answer[-1:]]), cache, 1)["logits"][0])
    return Continuation(torch.cat(logits), answer)
