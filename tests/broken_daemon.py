"""``jaxtensile serve`` with something missing, for tests that have to notice: ``broken_daemon.py WHAT serve ...``."""

import functools
import sys

from jaxtensile.cli import main as cli
from jaxtensile.runtime.coordinate.coordinator import Coordinator
from jaxtensile.runtime.daemon import server
from jaxtensile.runtime.daemon.journal_file import JournalFile
from jaxtensile.runtime.decide.events import Rules

RULES = {
    "frees on EOF": "free_on_death",
    "frees the silent": "ttl_quarantines",
    "grants before ACK": "charge_until_ack",
    "ends turns on EOF": "turns_last",
}


def main(what, arguments):
    if what in RULES:
        server.Coordinator = functools.partial(Coordinator, rules=Rules(**{RULES[what]: False}))
    elif what == "keeps no journal":
        JournalFile.append = JournalFile.replace = lambda *_: None
        JournalFile.lost = lambda _: False
    else:
        raise SystemExit(f"nothing is called {what!r}")
    sys.exit(cli.main(arguments))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
