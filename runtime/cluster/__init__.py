"""Jobs on many machines: the cluster's coordinator, agents, submission. Ray is imported on first use."""
