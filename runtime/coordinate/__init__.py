"""What the coordinator does when something happens: events in, commands out."""
