"""Labs: exercises whose answers run on real ranks and are held against one process."""
