"""Changes to loops: what they stack, read, carry and make again."""
