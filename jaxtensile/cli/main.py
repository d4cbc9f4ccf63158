"""The command line: ``jaxtensile COMMAND``, a command to each function here.

Exit codes: 0 done, 1 does not fit or a job failed, 3 needs more than the baseline, 2 anything else. JAX is imported
only by commands that need it.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import shutil
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxtensile.cli.interrupts import Interrupts
from jaxtensile.cli.terminal.progress import Progress
from jaxtensile.cli.tuning import batches, varied
from jaxtensile.devices.profiles import WEIGHTS
from jaxtensile.errors import BudgetError, JaxtensileError

if TYPE_CHECKING:
    from jaxtensile.runtime.config.config import Config
    from jaxtensile.tuning.making import Maker

DONE, DOES_NOT_FIT, WRONG_USE, GREW = 0, 1, 2, 3
"""Exit codes. 2 is argparse's own for a wrong use."""
STANDARD_OUTPUT = Path("-")
_INTERRUPTED = 130
"""Exit code after Ctrl-C, as in a shell: 128 plus SIGINT's number."""
_NOBODY_READS = 141
"""Exit code where nobody reads standard output, as in a shell: 128 plus SIGPIPE's number."""
_PLANS = (
    ("chunk", "work on many rows may be done in parts"),
    ("offload-state", "donated arguments that only the update needs wait in host memory"),
    ("undo", "the program's own checkpoints may be undone"),
)
"""Switches of plans, and what each says."""
_JSON: dict[str, Any] = {
    "metavar": "F",
    "nargs": "?",
    "const": STANDARD_OUTPUT,
    "type": Path,
    "help": "print JSON, or write it to F; -: print it",
}
_CONFIG = "the config; default: $JAXTENSILE_CONFIG, or the jaxtensile.toml found upward from here"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code."""
    _open_standard()
    parser = _parser()
    if not (sys.argv[1:] if argv is None else argv):
        parser.print_help(sys.stderr)
        parser.exit(WRONG_USE)
    options = parser.parse_args(argv)
    command: Callable[[argparse.Namespace], int] = options.command
    with Interrupts() as interrupts:
        try:
            code = command(options)
            sys.stdout.flush()
            return code
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Python writes what is left at its end
            return _NOBODY_READS
        except (KeyboardInterrupt, Exception) as error:
            return _INTERRUPTED if interrupts.pressed or isinstance(error, KeyboardInterrupt) else _failed(error)


def _open_standard() -> None:
    """Open /dev/null for missing standard descriptors: otherwise the next files get their numbers, and a daemon writes
    its log into its own lock. And have them take any text."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest number that is free
            setattr(sys, name, os.fdopen(number, mode, closefd=False))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # what a terminal cannot show is shown by its number
            stream.reconfigure(errors="backslashreplace")


def _failed(error: Exception) -> int:
    if not isinstance(error, JaxtensileError):
        # Python would exit with 1, which here says "does not fit".
        traceback.print_exception(error)
        return WRONG_USE
    _complain(error)
    # Without a smallest budget it is the text of the budget that was wrong.
    return DOES_NOT_FIT if isinstance(error, BudgetError) and error.needs is not None else WRONG_USE


def _parser() -> argparse.ArgumentParser:
    from jaxtensile import __version__

    parser = argparse.ArgumentParser(
        prog="jaxtensile", description="A memory planner for JAX: a byte budget in, a function that fits out."
    )
    parser.add_argument("--version", action="version", version=f"jaxtensile {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    estimate = commands.add_parser("estimate", help="how many bytes a program needs, before it runs")
    estimate.add_argument(
        "workload", metavar="FILE:FUNCTION", nargs="?", help="a function that returns a jaxtensile.Workload"
    )
    estimate.add_argument(
        "--explain",
        metavar="F",
        type=Path,
        help="what helps against the out-of-memory error saved in F; -: read it",
    )
    estimate.add_argument(
        "--target", metavar="T", action="append", default=[], help="a device (see doctor); may be given several times"
    )
    estimate.add_argument(
        "--budget", help="what must suffice: bytes, 12GiB, 12GB, or 80%% of the device; default: the config's"
    )
    estimate.add_argument("--exact", action="store_true", help="ask the target's own compiler")
    estimate.add_argument("--no-batch", action="store_true", help="do not look for the largest batch that fits")
    estimate.add_argument(
        "--planned", action="store_true", help="also the largest batch with a plan: may take minutes for a large model"
    )
    estimate.add_argument("--json", metavar="F", type=Path, help="also write the estimates to F as JSON; -: only those")
    estimate.add_argument(
        "--baseline", metavar="F", type=Path, help=f"exit with {GREW} if more is needed than in F, of --json"
    )
    estimate.add_argument(
        "--tolerance", metavar="PERCENT", type=_percent, default=2.0, help="growth that --baseline accepts (default: 2)"
    )
    estimate.set_defaults(command=_estimate)

    plan = commands.add_parser("plan", help="fit a program into a budget and say what was decided")
    plan.add_argument("workload", metavar="FILE:FUNCTION", help="a function that returns a jaxtensile.Workload")
    plan.add_argument("--budget", help="bytes, 12GiB, 12GB, or 80%% of the device; default: the config's")
    plan.add_argument("--target", help="compile for this device (see doctor); default: this machine's")
    plan.add_argument("--solver", default="auto", help="auto (default), greedy, exact or chain")
    plan.add_argument(
        "--objective",
        choices=tuple(WEIGHTS),
        help="what to spare first; default: the config's, or time: the shortest step",
    )
    plan.add_argument("--host-budget", metavar="B", help="bytes of host memory where values may wait")
    for name, what in _PLANS:
        plan.add_argument(f"--{name}", action=argparse.BooleanOptionalAction, help=f"{what}; default: the config's")
    plan.add_argument("--json", metavar="F", type=Path, help="also write the report to F as JSON; -: only that")
    plan.add_argument("--html", metavar="F", type=Path, help="also write it to F as a page with a memory chart")
    plan.add_argument("--perfetto", metavar="F", type=Path, help="also write a timeline to F, for ui.perfetto.dev")
    plan.set_defaults(command=_plan)

    diff = commands.add_parser("diff", help="two reports of plan --json: what grew, and what is treated otherwise")
    diff.add_argument("before", metavar="BEFORE", type=Path, help="the earlier report")
    diff.add_argument("after", metavar="AFTER", type=Path, help="the later one")
    diff.set_defaults(command=_diff)

    tune = commands.add_parser("tune", help="which batch, with or without a plan, makes the most samples a second")
    tune.add_argument("workload", metavar="FILE:FUNCTION", help="a function of batch= that returns a Workload")
    tune.add_argument("--target", metavar="T", help="for this device (see doctor); default: this machine's")
    tune.add_argument(
        "--budget", metavar="B", help="bytes of a step, 12GiB, 80%%; default: the config's, or the device"
    )
    tune.add_argument("--host-budget", metavar="B", help="bytes of host memory where values may wait")
    tune.add_argument("--batches", metavar="N,N", type=batches, help="these sizes; default: they are looked for")
    tune.add_argument(
        "--vary",
        metavar="NAME=V,V",
        type=varied,
        action="append",
        default=[],
        help="values of another parameter of FUNCTION, such as microbatch=1,2,4; may be given several times",
    )
    tune.add_argument("--objective", choices=tuple(WEIGHTS), help="what plans spare first; default: time")
    for name, what in _PLANS:
        tune.add_argument(f"--{name}", action=argparse.BooleanOptionalAction, help=f"{what}; default: the config's")
    tune.add_argument("--race", action="store_true", help="run the best two, on a device that is here")
    tune.add_argument("--json", metavar="F", type=Path, help="also write the points to F as JSON; -: only those")
    tune.add_argument("--html", metavar="F", type=Path, help="also write them to F as a page with a picture")
    tune.set_defaults(command=_tune)

    execute = commands.add_parser(
        "exec",
        help="run a command in which every jax.jit fits a budget",
        usage="%(prog)s [options] -- COMMAND ...",
    )
    execute.add_argument(
        "--budget", help="of a device, for all of the program: bytes, 12GiB, 80%%; default: the config's, or the device"
    )
    execute.add_argument("--host-budget", metavar="B", help="bytes of host memory where values may wait")
    execute.add_argument("--objective", choices=tuple(WEIGHTS), help="what to spare first; default: time")
    for names, what in (
        (("--chunk",), "work on many rows may be done in parts"),
        (("--offload-state", "--state-on-host"), "donated arguments that only the update needs wait in host memory"),
        (("--undo",), "the program's own checkpoints may be undone"),
        (("--best-effort",), "where no plan meets the budget, run what comes nearest"),
    ):
        execute.add_argument(*names, action=argparse.BooleanOptionalAction, help=what)
    execute.add_argument("command_line", metavar="COMMAND", nargs=argparse.REMAINDER, help="python train.py ...")
    execute.set_defaults(command=_exec)

    calibrate = commands.add_parser("calibrate", help="measure this machine's device; later plans use its own rates")
    calibrate.add_argument("--refresh", action="store_true", help="measure again what was measured before")
    calibrate.add_argument("--json", **_JSON)
    calibrate.set_defaults(command=_calibrate)

    _add_coordination(commands)

    config = commands.add_parser("config", help="check the config, and say what it says to plans")
    config.set_defaults(command=_config)
    doctor = commands.add_parser("doctor", help="versions, extras and targets, the config, and what is missing")
    doctor.set_defaults(command=_doctor)
    completion = commands.add_parser("completion", help="complete the command line in a shell")
    completion.add_argument("shell", choices=("bash", "zsh", "fish"), help="source <(jaxtensile completion bash)")
    completion.set_defaults(command=_completion)
    for reads_it in (estimate, plan, tune, execute, config, doctor):
        reads_it.add_argument("--config", metavar="F", help=_CONFIG)
    return parser


def _add_coordination(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    place = argparse.ArgumentParser(add_help=False)
    place.add_argument("--config", metavar="F", help=_CONFIG)
    place.add_argument("--socket", metavar="P", help="the coordinator's socket; default: the config's, or your own")

    serve = commands.add_parser("serve", parents=[place], help="the coordinator: share devices between jobs")
    serve.add_argument("--metrics", metavar="PORT", type=int, help="also serve Prometheus metrics on 127.0.0.1:PORT")
    serve.add_argument(
        "--grace", metavar="S", type=float, default=5.0, help="seconds for jobs to release at the end (default: 5)"
    )
    serve.add_argument("--with-parent", type=int, nargs="?", const=0, help=argparse.SUPPRESS)  # or with that process
    serve.set_defaults(command=_serve)

    status = commands.add_parser("status", parents=[place], help="what the coordinator has granted to whom")
    status.add_argument("--json", **_JSON)
    status.set_defaults(command=_status)

    top = commands.add_parser("top", parents=[place], help="the same, live")
    top.add_argument("--every", metavar="S", type=float, default=1.0, help="seconds between two looks (default: 1)")
    top.add_argument("--count", metavar="N", type=int, help="looks (default: until Ctrl-C, or 1 elsewhere)")
    top.set_defaults(command=_top)

    run = commands.add_parser("run", parents=[place], help="start jobs of the config, and share devices between them")
    run.add_argument("jobs", metavar="JOB", nargs="*", help="which; default: all of the config")
    run.add_argument("--on", choices=("ray",), help="on the machines of a Ray cluster; default: on this one")
    run.add_argument("--address", metavar="A", help="of the Ray cluster; default: the config's, $RAY_ADDRESS or auto")
    run.set_defaults(command=_run)

    keep = commands.add_parser("keep")  # what an agent of a cluster starts; not for people, so not in the list
    keep.add_argument("--least", type=int, default=0)
    keep.add_argument("--want", type=int)
    keep.add_argument("command_line", nargs="+")
    keep.set_defaults(command=_keep)


def _estimate(options: argparse.Namespace) -> int:
    from jaxtensile.cli.loading import load_maker
    from jaxtensile.devices.profiles import profile

    if (problem := _unwritable(options.json)) is not None:
        return _complain(problem)
    for target in options.target:
        profile(target)  # an unknown name is told before the work, not after
    if options.workload is None and options.explain is None:
        return _complain("estimate needs FILE:FUNCTION, such as train.py:step, or --explain with the text of an error")
    config = _config_of(options)
    maker = load_maker(options.workload) if options.workload is not None else None
    if options.explain is not None or maker is None:
        return _explain(options, maker, config)

    from jaxtensile.cli.estimate import compare, read_baseline, tabulate
    from jaxtensile.settings.identity import tell as tell_names

    baseline = read_baseline(options.baseline) if options.baseline is not None else None

    def tell(what: str) -> None:
        print(what, file=sys.stderr, flush=True)

    targets = tuple(dict.fromkeys(options.target))
    table = tabulate(
        maker,
        targets,
        exact=options.exact,
        largest=not options.no_batch,
        planned=options.planned,
        tell=tell,
        budget=options.budget,
        config=config,
    )
    alone = options.json == STANDARD_OUTPUT
    out = sys.stderr if alone else sys.stdout
    print(table.text(shutil.get_terminal_size().columns if out.isatty() else None), file=out)
    tell_names()
    grown = compare(table, baseline) if baseline is not None else []
    too_much = [g for g in grown if 100 * g.ratio > options.tolerance]
    for growth in grown:
        print(f"\n{'GREW' if growth in too_much else 'against the baseline'}: {growth}", file=out)
    if baseline is not None and baseline.older and any(g.before != g.after for g in grown):
        print(f"\n{baseline.older}", file=out)
    text = json.dumps(table.to_dict(), indent=1)
    if alone:
        print(text)
    elif options.json is not None and _same(options.json, options.baseline) and any(g.after > g.before for g in grown):
        print(f"\n{options.json} stays as it is: written anew, it would accept the growth", file=out)
    elif options.json is not None:
        options.json.write_text(text + "\n")
    return GREW if too_much else DONE if table.fits else DOES_NOT_FIT


def _explain(options: argparse.Namespace, maker: Maker | None, config: Config) -> int:
    from jaxtensile.cli.estimate import explain

    if len(options.target) > 1 or options.baseline is not None or options.exact or options.budget is not None:
        many = "--baseline, --budget, --exact and a second --target"
        return _complain(f"--explain predicts for one device: leave {many} out")
    with Progress() as progress:
        target = options.target[0] if options.target else None
        lines = explain(options.explain, maker, target, tell=progress.tell, config=config)
    _print(lambda: "\n".join(lines), lambda: json.dumps({"lines": lines}, indent=1), options.json)
    return DONE


def _same(one: Path, other: Path | None) -> bool:
    return other is not None and other.exists() and one.exists() and one.samefile(other)


def _percent(text: str) -> float:
    with suppress(ValueError):
        found = float(text.strip().removesuffix("%"))
        if found >= 0:  # which nan is not
            return found
    raise argparse.ArgumentTypeError(f"{text!r}: give the percentage that bytes may grow by, 0 or more, such as 2")


def _plan(options: argparse.Namespace) -> int:
    from jaxtensile.cli.loading import load_workload
    from jaxtensile.devices.profiles import profile

    files: list[Path | None] = [options.json, options.html, options.perfetto]
    for path in files:
        if (problem := _unwritable(path)) is not None:
            return _complain(problem)
    if options.target is not None:
        profile(options.target)  # an unknown name is told before the work, not after
    config = _config_of(options)
    workload = load_workload(options.workload)

    from jaxtensile.api.jit import jit
    from jaxtensile.settings.identity import tell
    from jaxtensile.tuning.making import telling

    with telling(workload):
        names = ("budget", "target", "solver", "objective", "host_budget", "chunk", "offload_state", "undo")
        given = {name: getattr(options, name) for name in names}
        asked = {name: value for name, value in given.items() if value is not None}
        step = jit(workload.fun, config=config, **asked, **workload.jit_options)
        report = step.plan(*workload.args)
    print(report, file=sys.stderr if STANDARD_OUTPUT in files else sys.stdout)
    tell()
    for write, path in zip((report.to_json, report.to_html, report.to_perfetto), files, strict=True):
        if path == STANDARD_OUTPUT:
            print(write())
        elif path is not None:
            write(path)
    return DONE


def _diff(options: argparse.Namespace) -> int:
    from jaxtensile.report.difference import difference, is_report

    reports: list[Any] = []
    for path in (options.before, options.after):
        try:
            reports.append(json.loads(path.read_text(encoding="utf-8")))
        except OSError as error:
            return _complain(f"{path} cannot be read: {error.strerror}")
        except ValueError:
            reports.append(None)
        if not is_report(reports[-1]):
            return _complain(f"{path} is no report: jaxtensile plan FILE:FUNCTION --json {path} writes one")
    print(difference(*reports, names=(str(options.before), str(options.after))))
    return DONE


def _tune(options: argparse.Namespace) -> int:
    from jaxtensile.cli.loading import load_maker
    from jaxtensile.cli.tuning import checked, tune
    from jaxtensile.devices.profiles import profile

    checked(options)
    for path in (options.json, options.html):
        if (problem := _unwritable(path)) is not None:
            return _complain(problem)
    if options.target is not None:
        profile(options.target)
    config = _config_of(options)
    return DONE if tune(options, load_maker(options.workload), config) else DOES_NOT_FIT


def _exec(options: argparse.Namespace) -> int:
    from jaxtensile.cli.executing import execute

    execute(options)


def _calibrate(options: argparse.Namespace) -> int:
    from jaxtensile.xla.calibration import calibrate, told_as_json, told_as_text

    if (problem := _unwritable(options.json)) is not None:
        return _complain(problem)
    device = calibrate(refresh=options.refresh)
    _print(lambda: told_as_text(device), lambda: told_as_json(device), options.json)
    return DONE


def _config(options: argparse.Namespace) -> int:
    from jaxtensile.settings.config_text import checked

    print(*checked(options.config), sep="\n")
    return DONE


def _config_of(options: argparse.Namespace) -> Config:
    """The config that counts; read first, so that its errors come before the work."""
    from jaxtensile.settings.options import config_of

    return config_of(options.config)


def _doctor(options: argparse.Namespace) -> int:
    from jaxtensile.cli.doctor import diagnose

    print(diagnose(options.config))
    return DONE


def _serve(options: argparse.Namespace) -> int:
    from jaxtensile.cli.serving import serve

    serve(options)
    return DONE


def _status(options: argparse.Namespace) -> int:
    from jaxtensile.cli.watching import as_json, as_text, status

    if (problem := _unwritable(options.json)) is not None:
        return _complain(problem)
    found = status(options)
    _print(lambda: as_text(*found), lambda: as_json(*found), options.json)
    return DONE


def _completion(options: argparse.Namespace) -> int:
    from jaxtensile.cli.terminal.completion import SHELLS, commands_of

    print(SHELLS[options.shell](commands_of(_parser())))
    return DONE


def _print(text: Callable[[], str], data: Callable[[], str], path: Path | None) -> None:
    """Print the text, or only the JSON if that goes to standard output; and write it to any other ``path``."""
    if path == STANDARD_OUTPUT:
        print(data())
        return
    print(text())
    if path is not None:
        path.write_text(data() + "\n", encoding="utf-8")


def _top(options: argparse.Namespace) -> int:
    from jaxtensile.cli.watching import top

    top(options)
    return DONE


def _run(options: argparse.Namespace) -> int:
    if options.on == "ray":
        from jaxtensile.cli.on_ray import run
    else:
        from jaxtensile.cli.running import run

    return DOES_NOT_FIT if run(options) else DONE


def _keep(options: argparse.Namespace) -> int:
    from jaxtensile.cli.keeping import keep

    return keep(options)


def _unwritable(path: Path | None) -> str | None:
    """Why a requested file cannot be written, checked before the work."""
    if path is None or path == STANDARD_OUTPUT:
        return None
    if not path.absolute().parent.is_dir():
        return f"cannot write {path}: there is no folder {path.parent}"
    return f"cannot write {path}: it is a folder" if path.is_dir() else None


def _complain(problem: object) -> int:
    print(f"jaxtensile: {problem}", file=sys.stderr)
    return WRONG_USE


if __name__ == "__main__":
    sys.exit(main())
