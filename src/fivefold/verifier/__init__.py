"""Proof that a layout computes what one device computes, and moves the bytes that the planner says."""
