"""Seconds of an op and of a planned step."""
