"""A dry run: the code that trains, on fake tensors and fake ranks.

run, world, fast_fake   one rank's step, counted; they import nothing from plan/
vs_plan                 the planner's figures beside the counted ones
dryrun                  the command and the function of the Python API
"""
