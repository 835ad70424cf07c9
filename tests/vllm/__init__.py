"""kvstore in the real vLLM, on the CPU. `make test-vllm` runs it in an environment of its own: vLLM pins what it needs."""
