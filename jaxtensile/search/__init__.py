"""Which programs may a step be rewritten to, what does each cost, and which is the cheapest that fits?"""
