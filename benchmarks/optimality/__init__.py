"""How far is the default solver from the best plan?"""
