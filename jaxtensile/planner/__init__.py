"""From a request to a function that fits: search, compile, check, search again. Begin with ``pipeline``."""
