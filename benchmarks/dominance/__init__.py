"""Claim: at the bytes of any per-block policy or of XLA's own rematerialization we fit, with no more FLOPs."""
