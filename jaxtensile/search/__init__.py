"""Rewritten programs of a step, their costs, and the cheapest that fits."""
