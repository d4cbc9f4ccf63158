"""Who may hold how many bytes, and when: standard library and msgspec only, never JAX."""
