"""Fivefold: one model, one data order, one loss curve, whatever the layout."""

__version__ = "0.1.0"
