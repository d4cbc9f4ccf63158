"""Which buffers wait on the host, when they are copied, and what the waiting costs."""
