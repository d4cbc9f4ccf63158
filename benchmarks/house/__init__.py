"""The layout of the code, measured."""
