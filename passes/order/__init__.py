"""In which order does a program run, and how is XLA kept in it?"""
