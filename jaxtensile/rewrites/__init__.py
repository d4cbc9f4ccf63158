"""What can be changed in a program beside running ops again: one file for each kind of change."""
