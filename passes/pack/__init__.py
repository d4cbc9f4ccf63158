"""Offsets of buffers in one arena, and the bytes that an allocator takes for them."""
