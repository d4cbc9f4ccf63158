"""Steps that a TPU refuses."""
