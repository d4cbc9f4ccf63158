"""Several processes whose devices run one program: how they agree on one plan."""
