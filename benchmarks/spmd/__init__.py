"""Programs over several devices: what is said of one device, against XLA."""
