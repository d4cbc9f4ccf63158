"""A job under a coordinator: its ladder of plans, its lease, its steps."""
