"""XLA's answers: compilers of absent devices, and the bytes and text of compiled programs."""
