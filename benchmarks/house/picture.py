"""The picture of the README: memory over one step of GPT-2 small, as written and within 8 GiB of an H200.

    python -m benchmarks.house.picture

The chart of the report's own page, by itself: with its style, and without what it tells on hover.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent.parent
PICTURE: Final = ROOT / "docs" / "memory.svg"
COLOURS: Final = {
    "--jt-soft": "#80889629",
    "--jt-line": "#80889652",
    "--jt-plain": "#8a93a3",
    "--jt-planned": "#3d82f0",
    "--jt-budget": "#e0503a",
    "currentColor": "#78808c",
}
"""As on the page; text in a grey that reads on light and on dark."""


def alone(page: str) -> str:
    """The chart of a report's page as a file of its own."""
    chart = re.search(r"<svg.*?</svg>", page, re.DOTALL)
    styles = re.findall(r"^\.jt-chart.*?(?=^\.jt|^</style>)", page, re.DOTALL | re.MULTILINE)
    assert chart is not None and styles, "no chart on the page"
    lines = re.sub(r'<rect class="jt-column".*?</rect>\n', "", chart[0], flags=re.DOTALL).splitlines()
    style = "".join(s for s in styles if "jt-column" not in s) + ".jt-chart{font:12px system-ui,sans-serif}"
    for name, colour in COLOURS.items():
        style = style.replace(f"var({name})", colour).replace(name, colour)
    lines[0] = lines[0].replace("<svg", '<svg xmlns="http://www.w3.org/2000/svg"')
    lines.insert(1, f"<style>{style}</style>")
    return "\n".join(lines) + "\n"


def main() -> None:
    sys.path.append(str(ROOT / "examples"))
    import jaxtensile
    from will_it_fit import gpt2_small

    given = gpt2_small()
    step = jaxtensile.jit(given.fun, budget="8GiB", target="nvidia-h200", **given.jit_options)
    PICTURE.write_text(alone(step.plan(*given.args).to_html()))
    print(f"{PICTURE.relative_to(ROOT)}: {PICTURE.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
