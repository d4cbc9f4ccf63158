"""Which batch and which plan: what fits, how long its steps take, and what helps where nothing fits."""
