"""Clusters and accelerators, and the shares of their peak figures that software reaches."""
