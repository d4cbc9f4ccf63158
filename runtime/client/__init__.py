"""The job's side: a handle, a lease, turns, interrupts."""
