"""Benchmarks of the project itself, each a command: python -m benchmarks.pipeline --help."""
