"""A trained model's own words.

cache      keys and values of earlier tokens, kept by the ops of attention
choose     logits to a token: the likeliest, or drawn
generator    a model over the ranks of a layout, that goes on from a prompt
text       prompts to tokens, and back
"""
