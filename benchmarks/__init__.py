"""What jaxtensile costs and what it wins, each measured beside its peers."""

import os

os.environ.setdefault("JAXTENSILE_PLAN_CACHE", "off")  # what is measured is made here, not found
