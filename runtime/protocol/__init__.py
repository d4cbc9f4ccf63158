"""What a job and the coordinator say to each other, and as which bytes."""
