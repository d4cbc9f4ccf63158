"""A compiled step cut into executables that run one after another."""
