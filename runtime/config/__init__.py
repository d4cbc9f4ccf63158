"""What ``jaxtensile.toml`` says."""
