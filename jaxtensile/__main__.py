"""``python -m jaxtensile``: the command line, where no console script is installed."""

import sys

from jaxtensile.cli.main import main

sys.exit(main())
