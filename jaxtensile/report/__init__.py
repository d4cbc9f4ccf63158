"""Reports of a plan: text, HTML, a trace."""
