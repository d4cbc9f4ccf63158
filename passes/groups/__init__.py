"""Where to cut a step into executables that run one after another, and what each takes and hands on."""
