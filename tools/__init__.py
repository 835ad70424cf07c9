"""Command lines, the demo and the benchmarks."""
