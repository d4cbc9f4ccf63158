"""The smallest programs that were found in this process, for requests whose budget was not met.

An error names what such a program needs, so a budget of as many bytes is met: by that very program, compiled again,
without a search.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import replace
from typing import Final

from jaxtensile.ir.ir import Graph
from jaxtensile.planner.plan_cache import Entry, key_of
from jaxtensile.search.request import Request
from jaxtensile.units import Bytes

MOST: Final = 256
"""Programs that are remembered, those asked for last."""
_FOUND: OrderedDict[str, tuple[Bytes, Entry]] = OrderedDict()
_LOCK = threading.Lock()


def remember(request: Request, graph: Graph, needs: Bytes, entry: Entry) -> None:
    """What needs ``needs`` bytes on the device is ``entry``."""
    with _LOCK:
        _FOUND[_key(request, graph)] = needs, entry
        while len(_FOUND) > MOST:
            _FOUND.popitem(last=False)


def remembered(request: Request, graph: Graph) -> tuple[Bytes, Entry] | None:
    """The smallest program of a request, whatever its budget is now, and its bytes; of several devices nothing is
    remembered, as their processes must find the same."""
    if request.shards > 1:
        return None
    key = _key(request, graph)
    with _LOCK:
        if key in _FOUND:
            _FOUND.move_to_end(key)
        return _FOUND.get(key)


def forget() -> None:
    """Nothing is remembered."""
    with _LOCK:
        _FOUND.clear()


def _key(request: Request, graph: Graph) -> str:
    return key_of(replace(request, budget=0), graph)


__all__ = ["forget", "remember", "remembered"]
