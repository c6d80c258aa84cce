"""A job file, and all that can be known to be wrong before a process starts."""
