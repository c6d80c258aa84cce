"""Measures machines: what a device reaches (`calibrate`), and which rank, node or link is an outlier (`doctor`)."""
