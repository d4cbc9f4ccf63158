"""Several devices and several processes: where arguments are, and how processes come to one plan."""
