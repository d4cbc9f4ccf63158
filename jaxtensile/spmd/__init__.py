"""Several devices and processes: where arguments are, and how processes agree on one plan."""
