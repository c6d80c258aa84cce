"""The layout of a job on the ranks that are there."""
