"""State that outlives a layout.

store      a run's checkpoints on disk: which are complete, which is the latest, which may go. No torch
pieces     what a rank holds of the whole, in DCP's words: any layout reads any other
staging    snapshots, in host memory that is made once; a GPU copies them beside its steps
save       a snapshot, written while training goes on
load       a checkpoint that is what its manifest says, into the ranks of any layout
"""
