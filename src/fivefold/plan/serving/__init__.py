"""Serving: latency, throughput, cache."""
