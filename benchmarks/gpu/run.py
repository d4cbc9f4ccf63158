"""Programs of ours and by hand on a real GPU: bytes, steps and losses, and seconds of each kernel.

    benchmarks/gpu/run.sh [--dry-run] [--programs FOLDER] [--seconds S] [SPEC ...]

Two parts. The programs are planned and lowered for the card without one (``benchmarks/gpu/programs.py``), which takes
an hour on two processors and some minutes on sixteen: best done beforehand, on a machine that costs nothing, with
``--programs`` naming the folder that is carried to the card. Then they are compiled and measured there
(``benchmarks/gpu/card.py``), in ``--seconds`` at most. What is missing in the folder is made first.

Results go to ``$OUT``, else to ``benchmarks/gpu/``, as ``results.json`` and ``.md``, beside the seconds of each kernel
and the scheduled HLO; those of a dry run (tiny sizes, any device) to ``$OUT`` or a temporary folder.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

from benchmarks.gpu.programs import POLICIES, known_specs, told
from benchmarks.gpu.summary import table

HERE: Final = Path(__file__).parent
SPECS: Final = (
    *(f"gpt2_small:{how}" for how in ("plain", *(f"policy={p}" for p in POLICIES), *(f"ours:{p}" for p in POLICIES))),
    *(f"gpt2_small:ours{how}:nothing_saveable" for how in (",flops", ",host", ",state")),
    *(
        f"{name}:{how}"
        for name in ("flash", "dlrm", "bert_base", "vit_b", "resnet50", "llama", "moe", "unet", "lstm", "mixer")
        for how in ("plain", "policy=nothing_saveable", "ours:nothing_saveable", "ours:60%")
    ),
)
"""What the README claims of a card, most important first."""
DRY: Final = ("gpt2_small:plain", "gpt2_small:policy=nothing_saveable", "gpt2_small:ours:nothing_saveable")
SECONDS: Final = 480.0
"""In which a card is done with what was compiled, by default."""


def prepare(folder: Path, specs: list[str], *, tiny: bool) -> None:
    """Make what is missing, a process per workload, as many at once as half of the processors."""
    folder.mkdir(parents=True, exist_ok=True)
    groups: dict[str, list[str]] = {}
    for spec in specs:
        if not told(folder, spec):
            groups.setdefault(spec.partition(":")[0], []).append(spec)

    def make(group: list[str]) -> None:
        options = ["--tiny"] if tiny else []
        command = [sys.executable, "-m", "benchmarks.gpu.programs", str(folder), *options, *group]
        subprocess.run(command, env={**os.environ, "JAX_PLATFORMS": "cpu"}, check=False)

    with ThreadPoolExecutor(max((os.cpu_count() or 2) // 2, 1)) as pool:
        list(pool.map(make, groups.values()))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "specs", nargs="*", metavar="SPEC", help="WORKLOAD:HOW[:BYTES]; default: what the README claims"
    )
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes and few programs, on whatever is here")
    parser.add_argument(
        "--programs", type=Path, metavar="FOLDER", help="where prepared programs are, or are to be kept"
    )
    parser.add_argument("--seconds", type=float, default=SECONDS, help=f"of measuring (default {SECONDS:.0f})")
    asked = parser.parse_args()
    wrong = [spec for spec in asked.specs if not known_specs(spec)]
    if wrong:
        parser.error(f"{wrong[0]!r} is no program: give WORKLOAD:HOW[:BYTES], as gpt2_small:ours:60%")
    from benchmarks.machine import describe
    from jaxtensile.devices.hardware import has_nvidia_driver

    if not asked.dry_run and not has_nvidia_driver():
        print("no NVIDIA GPU here: nothing is measured; --dry-run tries the script without", file=sys.stderr)
        return 2
    out = Path(os.environ.get("OUT") or (tempfile.mkdtemp() if asked.dry_run else HERE))
    specs = asked.specs or list(DRY if asked.dry_run else SPECS)
    folder = asked.programs or Path(tempfile.mkdtemp())
    prepare(folder, specs, tiny=asked.dry_run)
    from benchmarks.gpu.card import measure

    result: dict[str, Any] = {"machine": describe(), "dry_run": asked.dry_run}
    measure(folder, out, result, specs, time.monotonic() + asked.seconds)
    print(f"{table(result)}\n{out}")
    return int(not any("least" in row for row in result["rows"]))


if __name__ == "__main__":
    sys.exit(main())
