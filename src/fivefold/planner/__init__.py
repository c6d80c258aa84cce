"""The planner: closed forms for what a layout moves, holds and takes. No torch here."""
