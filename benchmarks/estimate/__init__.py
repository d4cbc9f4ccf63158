"""Peak memory of training steps of public model code: the truth that estimates are held against.

``zoo``: the models, and which half each is in; ``truth``: what XLA allocates for them.
"""
