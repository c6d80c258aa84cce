"""A dry run: the code that trains, on tensors without data and ranks that are not there. Imports nothing from plan/."""
