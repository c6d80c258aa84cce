"""Optimizers and their fused kernels."""
