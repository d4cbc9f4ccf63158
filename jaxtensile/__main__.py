"""``python -m jaxtensile``: the command line without a console script."""

import sys

from jaxtensile.cli.main import main

sys.exit(main())
