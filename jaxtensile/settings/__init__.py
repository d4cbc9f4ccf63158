"""The options of a function: its code's, the config's, or the defaults."""
