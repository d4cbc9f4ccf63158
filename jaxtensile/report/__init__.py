"""What is told of a plan: text, HTML, a trace."""
