"""Where kvstore speaks inside vLLM: in vLLM's own log."""

from __future__ import annotations

import logging


def speak_in_vllms_log() -> None:
    """Give the logger `kvstore` vLLM's handlers and level, unless whoever configured logging has given it some: vLLM
    configures its own logger alone, so that what others tell is lost, or comes without time and level."""
    own, vllm = logging.getLogger("kvstore"), logging.getLogger("vllm")
    if own.hasHandlers():
        return
    for handler in vllm.handlers:
        own.addHandler(handler)
    if own.level == logging.NOTSET:
        own.setLevel(vllm.level)
