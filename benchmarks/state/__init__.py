"""Claim: with optimizer states on the host between steps a budget costs less, and a smaller one is reached."""
