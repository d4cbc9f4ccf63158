"""Several devices: where arguments are, and the program of one device."""
