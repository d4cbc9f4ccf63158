"""The coordinator as a process: sockets, signals, files."""
