"""Who gets how many bytes: no sockets, no clock, no threads."""
