"""What the command line says to terminals and shells."""
