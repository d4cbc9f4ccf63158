"""Jobs on many machines: which machine each goes to, and the agent there. Ray is imported on first use."""
