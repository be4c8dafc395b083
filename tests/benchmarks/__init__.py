"""How fast, and in how much memory: run `python -m tests.benchmarks --help` at the root."""
