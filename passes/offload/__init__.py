"""What waits on the host, when it is copied, and what waiting for it costs."""
