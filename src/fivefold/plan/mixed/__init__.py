"""Unlike GPUs in one run: which rank is on which, how many layers each takes, and which schedule."""
