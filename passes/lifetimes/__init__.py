"""Which values become buffers once XLA has fused a program, and when is each of them there?"""
