"""A mixture of experts: every token visits a few of many feed-forward networks.

router    which experts a token visits, and how much each of them counts
dispatch  tokens in the order of their experts, and back again: on one device; `parallel/experts/` has it across ranks
grouped   the matmuls of several experts in one
balance   what keeps the load even: losses, and a bias that follows the load
mixture   the module that the decoder has in place of a dense network
"""
