"""A dry run: the code that trains, on fake tensors and fake ranks.

run and fake import no planner: the agreement of the two is a proof.
"""
