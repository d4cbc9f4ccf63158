"""Is it right? Derived again in the obvious way; shares nothing with the solvers."""
