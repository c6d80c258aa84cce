"""The version of the package, for whoever writes it down; it imports nothing."""

__version__ = "0.1.0"
