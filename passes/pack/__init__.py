"""Where in one arena do buffers lie, and how much does an allocator take for them?"""
