"""Placement of jobs on the machines of a cluster: no network, no clock."""
