"""The decoder, plain to read: nothing in here knows of parallelism."""
