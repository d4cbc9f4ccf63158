"""How long does an op take, and how long a planned step?"""
