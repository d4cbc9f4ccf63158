"""``jaxtensile tune``: the batch, and with or without a plan, that makes the most samples a second.

Ctrl-C ends the search, and what is known by then is told.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any, Final

from jaxtensile.cli.terminal.progress import Progress
from jaxtensile.errors import OptionError
from jaxtensile.runtime.config.config import Config
from jaxtensile.tuning.making import Maker

_STANDARD_OUTPUT: Final = Path("-")
_WORDS: Final = {"true": True, "false": False, "none": None}


def tune(options: argparse.Namespace, maker: Maker, config: Config) -> bool:
    """Look, print and write; True if something fits. Raises ``KeyboardInterrupt`` again, once all is told."""
    from jaxtensile.tuning import told
    from jaxtensile.tuning.tune import Asked, Tuned
    from jaxtensile.tuning.tune import tune as tuned_by

    given = {name: getattr(options, name) for name in ("host_budget", "objective", "chunk", "undo", "offload_state")}
    asked = Asked(
        target=options.target,
        budget=options.budget,
        batches=options.batches,
        vary=dict(options.vary),
        options={name: value for name, value in given.items() if value is not None},
        config=config,
        race=options.race,
    )
    tuned = Tuned(maker.function, options.target or "this machine", maker.batch)
    interrupted: KeyboardInterrupt | None = None
    try:
        with Progress() as progress:
            tuned_by(maker, asked, progress.tell, tuned)
    except KeyboardInterrupt as error:
        interrupted = error
    alone = _STANDARD_OUTPUT in (options.json, options.html)
    if tuned.points or interrupted is None:
        print(told.as_text(tuned), file=sys.stderr if alone else sys.stdout, flush=True)
        for path, text in (
            (options.json, lambda: json.dumps(told.as_dict(tuned), indent=1)),
            (options.html, lambda: told.as_page(tuned)),
        ):
            if path == _STANDARD_OUTPUT:
                print(text())
            elif path is not None:
                path.write_text(text() + "\n", encoding="utf-8")
    if interrupted is not None:
        raise interrupted
    return tuned.best is not None


def batches(text: str) -> tuple[int, ...]:
    """``8,16,32``. Raises argparse's error."""
    try:
        found = tuple(dict.fromkeys(int(part) for part in text.split(",")))
        if all(batch > 0 for batch in found):
            return found
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"{text!r}: give whole numbers from 1 on with commas, such as 8,16,32")


def varied(text: str) -> tuple[str, tuple[Any, ...]]:
    """``microbatch=1,2,4``: a parameter and its values: numbers, true, false, none, or texts."""
    name, equals, values = text.partition("=")
    if not (equals and name.isidentifier() and all(values.split(","))):
        raise argparse.ArgumentTypeError(f"{text!r}: give a parameter and its values, such as microbatch=1,2,4")
    return name, tuple(dict.fromkeys(map(_value, values.split(","))))


def _value(text: str) -> Any:
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def checked(options: argparse.Namespace) -> None:
    """Raise ``OptionError`` for options that cannot be together."""
    if _STANDARD_OUTPUT == options.json == options.html:
        raise OptionError("--json - and --html - both take standard output: give one of them a file")


__all__ = ["batches", "checked", "tune", "varied"]
