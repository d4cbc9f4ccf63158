"""``jaxtensile.jit`` and ``filter_jit``: the path of a call."""
