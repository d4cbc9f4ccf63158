"""A folder for the path of every Python under ``jaxtensile exec``."""
