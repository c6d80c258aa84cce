"""The decision for a layout, written down for a design review."""
