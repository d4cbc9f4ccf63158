"""From a request to a function that fits: search, compile, check, repeat. Start with ``pipeline``."""
