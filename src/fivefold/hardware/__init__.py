"""Clusters and accelerators, and how much of their ceilings software reaches."""
