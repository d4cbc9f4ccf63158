"""The command ``jaxtensile``: a file for each of its commands."""
