"""The command line: what it prints, its exit codes, and no traceback for a user's mistake."""

import json
import os
import re
import signal
import subprocess
import sys
from textwrap import dedent

import pytest

import jaxtensile
from daemons import until
from jaxtensile.cli import doctor
from jaxtensile.cli import main as cli
from jaxtensile.devices.profiles import targets
from paths import ROOT

WORKLOADS = """
    import signal
    import sys
    from dataclasses import dataclass
    import jax
    import jax.numpy as jnp
    import neighbour
    import jaxtensile

    @dataclass
    class Size:
        n: int

    def loss(w, x):
        for _ in range(neighbour.LAYERS):
            x = jnp.tanh(x @ w)
        return (x * x).sum()

    def small():
        size = Size(64)
        w = jax.ShapeDtypeStruct((size.n, size.n), jnp.float32)
        x = jax.ShapeDtypeStruct((4 * size.n, size.n), jnp.float32)
        return jaxtensile.Workload(fun=jax.grad(loss), args=(w, x))

    def number():
        return 3

    def broken():
        return undefined_name

    def stopped():
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt as error:
            raise ValueError("Cache keys should be comparable") from error

    x = jax.ShapeDtypeStruct((5, 7), jnp.float32)

    def shapes():
        return jaxtensile.Workload(fun=loss, args=(x, x))

    def value():
        return jaxtensile.Workload(fun=lambda x: x if x.sum() > 0 else -x, args=(x,))

    def text():
        return jaxtensile.Workload(fun=lambda x, mode: x, args=(x, "train"), name="my step")

    def option():
        return jaxtensile.Workload(fun=jnp.sin, args=(x,), jit_options={"donate": 0})

    def alone():
        return jaxtensile.Workload(fun=jnp.sin, args=x)

    constant = 7
"""


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "neighbour.py").write_text("LAYERS = 4\n")
    path = tmp_path / "some_workloads.py"
    path.write_text(dedent(WORKLOADS))
    yield str(path)
    for name in ("neighbour", "some_workloads"):
        sys.modules.pop(name, None)


def mistake(capsys, *arguments):
    """Run a command that the user got wrong; return the one line it says."""
    assert cli.main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("jaxtensile: ")
    assert err.count("\n") == 1, err
    return err


def test_help_names_the_commands(capsys):
    with pytest.raises(SystemExit) as done:
        cli.main(["--help"])
    assert done.value.code == 0
    out = capsys.readouterr().out
    assert "plan" in out
    assert "doctor" in out


def test_version(capsys):
    with pytest.raises(SystemExit) as done:
        cli.main(["--version"])
    assert done.value.code == 0
    assert capsys.readouterr().out == f"jaxtensile {jaxtensile.__version__}\n"


@pytest.mark.parametrize("arguments", [[], ["fly"], ["plan"], ["plan", "f.py:g", "--budget"]])
def test_wrong_arguments_exit_with_2(arguments, capsys):
    with pytest.raises(SystemExit) as done:
        cli.main(arguments)
    assert done.value.code == 2
    assert "usage: jaxtensile" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["train.py", ":step", "train.py:", ""])
def test_not_file_and_function(text, capsys):
    assert "is not FILE:FUNCTION" in mistake(capsys, "plan", text, "--budget", "1GiB")


def test_a_missing_file(capsys, tmp_path):
    said = mistake(capsys, "plan", f"{tmp_path}/nowhere.py:step", "--budget", "1GiB")
    assert "there is no file" in said
    assert "nowhere.py" in said


def test_a_missing_function_is_told_the_nearest(file, capsys):
    said = mistake(capsys, "plan", f"{file}:smal", "--budget", "1GiB")
    assert "has no 'smal'; it has small" in said


def test_something_that_is_no_function(file, capsys):
    assert "'constant' of" in mistake(capsys, "plan", f"{file}:constant", "--budget", "1GiB")


def test_a_function_that_returns_something_else(file, capsys):
    assert "returned int, not jaxtensile.Workload" in mistake(capsys, "plan", f"{file}:number", "--budget", "1GiB")


def test_a_function_that_raises_is_located(file, capsys):
    said = mistake(capsys, "plan", f"{file}:broken", "--budget", "1GiB")
    assert "NameError: name 'undefined_name' is not defined" in said
    line = 1 + dedent(WORKLOADS).splitlines().index("    return undefined_name")
    assert f"some_workloads.py:{line}" in said


@pytest.mark.parametrize("command", [("plan", "--budget", "1GiB"), ("estimate",)])
@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("shapes", "loss cannot be traced: TypeError: dot_general requires"),
        ("value", "<lambda> cannot be traced: TracerBoolConversionError"),
        ("text", "my step cannot be traced: TypeError: Error interpreting argument"),
        ("option", "'donate'"),
        ("alone", "whose args are a ShapeDtypeStruct: write args=(x,)"),
    ],
)
def test_a_function_that_cannot_be_traced_is_told_in_a_line(function, said, command, file, capsys):
    first, *options = command
    assert cli.main([first, f"{file}:{function}", *options]) == cli.WRONG_USE
    told = capsys.readouterr()
    last = told.err.splitlines()[-1]
    assert said in last and "Traceback" not in told.err and not told.out
    if function == "shapes":
        line = 1 + dedent(WORKLOADS).splitlines().index("        x = jnp.tanh(x @ w)")
        assert f"some_workloads.py:{line}" in last, "where the user wrote it"


@pytest.mark.parametrize(
    ("source", "said"),
    [("1 +", "SyntaxError"), ("import nothing_such", "nothing_such"), ("raise SystemExit(0)", "SystemExit")],
)
def test_a_file_that_does_not_load(source, said, tmp_path, capsys):
    path = tmp_path / "does_not_load.py"
    path.write_text(source)
    line = mistake(capsys, "plan", f"{path}:f", "--budget", "1GiB")
    assert said in line
    assert "does_not_load.py:1" in line


def test_an_unknown_target_is_told_before_the_file_is_run(capsys):
    assert "'nvidia-h200'" in mistake(capsys, "plan", "nowhere.py:f", "--budget", "1GiB", "--target", "h200")


@pytest.mark.parametrize("option", ["--json", "--html", "--perfetto"])
def test_a_folder_that_is_not_there(option, file, capsys, tmp_path):
    out = tmp_path / "no" / "plan.out"
    assert "there is no folder" in mistake(capsys, "plan", f"{file}:small", "--budget", "1GiB", option, str(out))


def test_a_folder_in_place_of_a_file(file, capsys, tmp_path):
    said = mistake(capsys, "plan", f"{file}:small", "--budget", "1GiB", "--html", str(tmp_path))
    assert f"cannot write {tmp_path}: it is a folder" in said


def test_a_file_never_takes_the_name_of_a_module(tmp_path, monkeypatch):
    from jaxtensile.cli.loading import load_workload

    monkeypatch.setattr(sys, "path", list(sys.path))
    path = tmp_path / "json.py"
    path.write_text("import jaxtensile\ndef f(): return jaxtensile.Workload(fun=abs, args=(1,), name=__name__)")
    assert load_workload(f"{path}:f").name == "_jaxtensile_json"
    assert sys.modules["json"] is json


def test_plan_prints_the_report_and_writes_json(file, capsys, tmp_path):
    out = tmp_path / "plan.json"
    assert cli.main(["plan", f"{file}:small", "--budget", "1GiB", "--target", "cpu", "--json", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "budget" in printed.lower()
    assert json.loads(out.read_text())


def test_diff_compares_two_reports_without_jax(file, capsys, tmp_path):
    json_file = tmp_path / "report.json"
    cli.main(["plan", f"{file}:small", "--budget", "1GiB", "--target", "cpu", "--json", str(json_file)])
    capsys.readouterr()
    assert cli.main(["diff", str(json_file), str(json_file)]) == 0
    assert "every value is treated alike" in capsys.readouterr().out
    for other, said in ((file, "is no report: jaxtensile plan"), (tmp_path / "none", "cannot be read: No such file")):
        assert cli.main(["diff", str(json_file), str(other)]) == 2
        assert said in capsys.readouterr().err
    imported = "import sys; from jaxtensile.cli.main import main; main(sys.argv[1:]); print('jax' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", imported, "diff", json_file, json_file], capture_output=True, text=True, check=True
    )
    assert done.stdout.endswith("False\n")


def test_plan_writes_a_page_and_a_timeline(file, capsys, tmp_path):
    page, timeline = tmp_path / "plan.html", tmp_path / "timeline.json"
    command = ["plan", f"{file}:small", "--budget", "1GiB", "--target", "cpu"]
    assert cli.main([*command, "--html", str(page), "--perfetto", str(timeline)]) == 0
    assert page.read_text().startswith("<!DOCTYPE html>")
    assert json.loads(timeline.read_text())["traceEvents"]


def test_plan_says_when_it_does_not_fit(file, capsys):
    assert cli.main(["plan", f"{file}:small", "--budget", "1KiB", "--target", "cpu"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("jaxtensile: ")
    assert "budget" in said.lower()


@pytest.fixture
def config(tmp_path, monkeypatch):
    """A config file that counts, for the workload ``small``."""
    monkeypatch.setenv("JAXTENSILE_CONFIG", str(tmp_path / "jaxtensile.toml"))

    def write(text):
        (tmp_path / "jaxtensile.toml").write_text(text)
        return tmp_path / "jaxtensile.toml"

    return write


def test_plan_takes_budget_and_objective_from_the_config(file, capsys, config):
    config('[functions."*"]\nbudget = "2GiB"\nobjective = "time"\n')
    assert cli.main(["plan", f"{file}:small", "--target", "cpu"]) == 0
    out = capsys.readouterr().out
    assert "budget 2.00GiB from" in out and 'jaxtensile.toml:2 [functions."*"]' in out
    assert "objective time from" in out
    assert cli.main(["plan", f"{file}:small", "--target", "cpu", "--budget", "1GiB", "--objective", "flops"]) == 0
    assert "its budget of 1.00GiB" in capsys.readouterr().out


def test_plan_and_estimate_heed_the_config_that_is_given(file, capsys, tmp_path):
    other = tmp_path / "other.toml"
    other.write_text('[device]\ncapacity = "1KiB"\n')
    assert cli.main(["plan", f"{file}:small", "--target", "cpu", "--config", str(other)]) == 1
    assert "budget 1.00KiB is below" in capsys.readouterr().err
    assert cli.main(["estimate", f"{file}:small", "--no-batch", "--config", str(other)]) == 1
    assert "budget 1.00KiB from" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["plan", "estimate", "config"])
def test_an_error_in_the_config_is_told_before_the_work(capsys, config, command):
    config("[functions.f]\nbugdet = 1\n")
    workload = [] if command == "config" else ["nowhere.py:f"]
    assert "jaxtensile.toml:2: unknown key 'bugdet'" in mistake(capsys, command, *workload)


def test_config_shows_each_value_with_its_line(capsys, config):
    file = config('[device]\ncapacity = "2GiB"\n[functions."*.f"]\nchunk = true\n[jobs.bert]\n')
    assert cli.main(["config"]) == 0
    first, *rows, default, jobs = capsys.readouterr().out.splitlines()
    assert first == f"{file} ($JAXTENSILE_CONFIG)"
    assert [row.split()[:2] for row in rows] == [["device.capacity", "2.00GiB"], ['functions."*.f".chunk', "True"]]
    assert [row.rpartition(":")[2] for row in rows] == ["2", "4"]
    assert "undo True" in default and jobs == "jobs: bert"


def test_config_says_that_there_is_none(capsys, monkeypatch, tmp_path):
    monkeypatch.delenv("JAXTENSILE_CONFIG", raising=False)
    monkeypatch.chdir(tmp_path)
    assert cli.main(["config"]) == 0
    assert "no jaxtensile.toml here or above" in capsys.readouterr().out


def test_a_budget_that_is_no_size_is_wrong_use(file, capsys):
    assert "parsecs" in mistake(capsys, "plan", f"{file}:small", "--budget", "12 parsecs")


def test_an_unexpected_failure_is_not_taken_for_does_not_fit(file, capsys, monkeypatch):
    def fail(*_):
        raise RuntimeError("a defect")

    monkeypatch.setattr(doctor, "diagnose", fail)
    assert cli.main(["doctor"]) == 2
    assert "Traceback" in capsys.readouterr().err


def test_doctor_reports_every_target_and_extra_and_the_config(capsys, config):
    config('[functions."f"]\nbudget = "2GiB"\n')
    assert cli.main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"\nConfig\n.*\n  functions\.f\.budget  2GiB  .*jaxtensile\.toml:2\n", out)
    assert f"jaxtensile   {jaxtensile.__version__}" in out
    for word in (*targets(), "cuda-aot", "tpu-aot", "ray", "plot", "test", "dev"):
        assert f"\n  {word} " in out, word
    assert "\n  cpu                compiles here" in out


def test_doctor_survives_a_trial_that_dies(monkeypatch):
    dies_at_the_second = """
import json, os, sys
print("noise from a plugin")
print(json.dumps([sys.argv[1], ""]), flush=True)
print("fatal: a check failed", file=sys.stderr, flush=True)
os.abort()
"""
    monkeypatch.setattr(doctor, "_TRY_TARGETS", dies_at_the_second)
    found = doctor.diagnose()
    first, *rest = targets()
    assert found.targets[first] == ""
    assert all("fatal: a check failed" in found.targets[name] for name in rest)
    assert f"{rest[0]:<18} no: " in str(found)


def test_doctor_names_the_extra_of_what_is_missing(monkeypatch):
    monkeypatch.setattr(doctor, "_version", lambda name: None)
    monkeypatch.setattr(doctor, "_try_targets", lambda names: dict.fromkeys(names, "no"))
    monkeypatch.setenv("JAXTENSILE_CONFIG", "nowhere.toml")
    text = str(doctor.diagnose())
    assert "\n  nowhere.toml: cannot be read" in text
    for extra in ("cuda-aot", "tpu-aot", "ray", "plot", "test", "dev"):
        assert f'pip install "jaxtensile[{extra}]"' in text
    assert "jaxlib       not installed" in text


def test_doctor_knows_the_extras_of_the_package():
    import re
    import tomllib

    path = ROOT / "pyproject.toml"
    declared = tomllib.loads(path.read_text())["project"]["optional-dependencies"]
    assert declared.keys() == doctor._EXTRAS.keys()
    for extra, requirements in declared.items():
        names = {re.split(r"[\[<>=; ]", r)[0] for r in requirements} - {"jax"}
        assert names <= set(doctor._EXTRAS[extra]), extra


@pytest.mark.parametrize("start", [["-m", "jaxtensile"], ["-m", "jaxtensile"]])
def test_it_runs_as_a_module(start):
    done = subprocess.run(
        [sys.executable, *start, "plan", "x", "--budget", "1"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr == "jaxtensile: 'x' is not FILE:FUNCTION: write for example train.py:step\n"


def test_without_standard_descriptors_no_other_file_is_in_their_places(tmp_path):
    """A daemon once wrote its log into its lock."""
    path = tmp_path / "s"
    command = [sys.executable, "-m", "jaxtensile", "serve", "--socket", str(path)]
    tmp_path.chmod(0o700)
    with subprocess.Popen(["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *command], cwd=tmp_path) as daemon:
        try:
            until(path.exists)
            assert {os.readlink(f"/proc/{daemon.pid}/fd/{k}") for k in range(3)} == {os.devnull}
            assert (tmp_path / "s.lock").read_text() == f"{daemon.pid}\n"
        finally:
            daemon.terminate()
    assert daemon.returncode == 0


def test_ctrl_c_that_came_out_as_another_error(file, capsys):
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert cli.main(["plan", f"{file}:stopped", "--budget", "1GiB"]) == 130
    finally:
        signal.signal(signal.SIGINT, before)
    assert capsys.readouterr().err == ""
