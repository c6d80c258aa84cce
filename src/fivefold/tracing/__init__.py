"""Traces: the actions, waits and communication of every rank in a step, and the simulation of its schedule."""
