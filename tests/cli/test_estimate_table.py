"""``jaxtensile estimate``: several targets, the largest batch, and a baseline for a user's CI."""

import json
import re
from textwrap import dedent

import pytest

from jaxtensile.cli import main as cli
from jaxtensile.cli.estimate import BaselineError, compare, read_baseline, tabulate
from jaxtensile.cli.loading import load_maker
from jaxtensile.estimation.estimate import estimate_on

TARGETS = ("nvidia-h200", "nvidia-rtx-3060")
FILE = """
    import jax, jax.numpy as jnp
    import jaxtensile

    WIDTH, LAYERS = 1024, 8

    def loss(w, x):
        for _ in range(LAYERS):
            x = jnp.tanh(x @ w)
        return (x * x).sum()

    def make(batch=2048):
        f32 = jnp.float32
        args = jax.ShapeDtypeStruct((WIDTH, WIDTH), f32), jax.ShapeDtypeStruct((batch, WIDTH), f32)
        return jaxtensile.Workload(fun=jax.grad(loss), args=args, name="net")

    def in_fours(batch_size=64):
        if batch_size % 4:
            raise ValueError("batches of four")
        return make(batch_size)

    def in_fours_as_traced(batch=64):
        work = make(batch)
        fun = lambda w, x: work.fun(w, x.reshape(4, -1, WIDTH).reshape(x.shape))
        return jaxtensile.Workload(fun=fun, args=work.args)

    def fixed():
        return make()
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "net.py"
    path.write_text(dedent(FILE))
    return path


def run(*arguments):
    return cli.main(["estimate", *map(str, arguments)])


def on(path, function, *targets, largest=True):
    return tabulate(load_maker(f"{path}:{function}"), targets, exact=False, largest=largest, tell=lambda _: None)


def fits(file, function, target, batch, *, exact=False):
    maker = load_maker(f"{file}:{function}")
    workload = maker(batch)
    return estimate_on(workload.fun, workload.args, workload.jit_options, targets=[target], exact=exact)[0].fits()


def test_no_larger_batch_fits_than_the_largest(file):
    table = on(file, "make", *TARGETS)
    assert table.fits and list(table.batches) == list(TARGETS)
    for target, batch in table.batches.items():
        assert [fits(file, "make", target, b) for b in (batch, batch + 1)] == [True, False]
    assert table.batches["nvidia-h200"] >= 8 * table.batches["nvidia-rtx-3060"]


def test_batch_sizes_that_the_workload_refuses_are_passed_over(file):
    target = TARGETS[1]
    for function in ("in_fours", "in_fours_as_traced"):
        batch = on(file, function, target).batches[target]
        assert batch % 4 == 0
        assert [fits(file, function, target, b) for b in (batch, batch + 4)] == [True, False]


@pytest.mark.cuda_aot
def test_the_largest_batch_of_exact_figures_is_exact(file):
    target = "nvidia-rtx-3060"
    file.write_text(file.read_text().replace("1024, 8", "1024, 2"))  # a dozen batches are compiled
    found = tabulate(load_maker(f"{file}:make"), [target], exact=True, largest=True, tell=lambda _: None)
    batch = found.batches[target]
    assert [fits(file, "make", target, b, exact=True) for b in (batch, batch + 1)] == [True, False]


def test_without_a_batch_parameter_none_is_looked_for(file):
    assert on(file, "fixed", TARGETS[0]).batches == {}
    assert on(file, "make", TARGETS[0], largest=False).batches == {}


def test_a_table_on_the_terminal_and_as_json(file, tmp_path, capsys):
    out = tmp_path / "e.json"
    assert run(f"{file}:make", "--target", TARGETS[0], "--target", TARGETS[1], "--planned", "--json", out) == cli.DONE
    told = capsys.readouterr()
    lines = told.out.splitlines()
    assert lines[0].split()[:3] == ["target", "device", "argument"] and lines[0].endswith("largest batch")
    assert all(re.search(r" \d+ as it is, \d+ planned$", line) for line in lines[1:3])
    assert [line.split()[0] for line in lines[1:3]] == list(TARGETS)
    assert "dot_general" in told.out and "net.py" in told.out
    assert "batch 1 ..." in told.err
    data = json.loads(out.read_text())
    assert set(data["targets"]) == set(data["largest_batch"]) == set(TARGETS)
    one = data["targets"][TARGETS[0]]
    assert one["device"] == one["argument"] + one["output"] + one["temp"] - one["alias"]
    assert one["process"] == sum(part["bytes"] for part in one["parts"])


def test_what_does_not_fit_ends_with_1(file, capsys):
    file.write_text(file.read_text().replace("batch=2048", "batch=1 << 20"))
    assert run(f"{file}:make", "--target", TARGETS[0], "--no-batch") == cli.DONE
    assert run(f"{file}:make", "--target", TARGETS[1], "--no-batch") == cli.DOES_NOT_FIT
    assert "DOES NOT FIT" in capsys.readouterr().out


def test_a_budget_is_what_must_suffice(file, capsys):
    target = TARGETS[1]
    command = (f"{file}:make", "--target", target)
    (needs,) = on(file, "make", target, largest=False).estimates.values()
    assert run(*command, "--no-batch", "--budget", needs.device) == cli.DONE
    assert "fits its budget of" in capsys.readouterr().out
    assert run(*command, "--no-batch", "--budget", needs.device - 1) == cli.DOES_NOT_FIT
    told = capsys.readouterr().out
    assert "DOES NOT FIT its budget of" in told and "looks for a plan that fits" in told
    assert run(*command, "--no-batch", "--budget", "much") == cli.WRONG_USE
    assert "cannot read 'much' as a size" in capsys.readouterr().err
    found = tabulate(
        load_maker(f"{file}:make"), [target], exact=False, largest=True, budget=str(needs.device), tell=lambda _: None
    )
    assert found.batches == {target: 2048}


def test_growth_is_found_and_named(file, tmp_path, capsys):
    base = tmp_path / "base.json"
    command = (f"{file}:make", "--target", TARGETS[0], "--no-batch")
    assert run(*command, "--json", base) == cli.DONE
    assert run(*command, "--baseline", base) == cli.DONE
    assert "+0.00 %" in capsys.readouterr().out
    text = file.read_text()
    file.write_text(text.replace("x = jnp.tanh(x @ w)", "x = jnp.tanh(x @ w) * jnp.sin(x @ w.T)"))
    before = base.read_bytes()
    assert run(*command, "--baseline", base, "--json", base) == cli.GREW
    told = capsys.readouterr().out
    assert base.read_bytes() == before and f"{base} stays as it is" in told, "no check moves its own bar"
    assert "GREW" in told and "dot_general f32[2048,1024]" in told and "net.py" in told
    assert run(*command, "--baseline", base, "--tolerance", "500%") == cli.DONE
    base.write_text(base.read_text().replace('"jax": "', '"jax": "0.'))
    assert run(*command, "--baseline", base) == cli.GREW
    assert "the baseline was made with jax 0." in capsys.readouterr().out
    assert run(*command, "--json", "-") == cli.DONE
    told = capsys.readouterr()
    assert set(json.loads(told.out)["versions"]) == {"jaxtensile", "jax", "jaxlib"} and "net on" in told.err
    file.write_text(text.replace("LAYERS = 1024, 8", "LAYERS = 1024, 4"))
    assert run(*command, "--baseline", base) == cli.DONE, "less is no fault"


def test_a_baseline_of_something_else_is_told(file, tmp_path, capsys):
    table = on(file, "fixed", TARGETS[0])
    with pytest.raises(BaselineError, match=r"cannot read .*missing\.json: No such file"):
        read_baseline(tmp_path / "missing.json")
    for text in ("", "[]", "{}", '{"targets": {"nvidia-h200": {}}}'):
        (tmp_path / "bad.json").write_text(text)
        with pytest.raises(BaselineError, match="is no estimate: write one with --json"):
            read_baseline(tmp_path / "bad.json")
    other = on(file, "fixed", TARGETS[1]).to_dict()
    (tmp_path / "other.json").write_text(json.dumps(other))
    with pytest.raises(BaselineError, match="knows nothing of nvidia-h200, but of nvidia-rtx-3060"):
        compare(table, read_baseline(tmp_path / "other.json"))
    exact = table.to_dict()
    exact["targets"][TARGETS[0]]["exact"] = True
    (tmp_path / "exact.json").write_text(json.dumps(exact))
    with pytest.raises(BaselineError, match="add --exact"):
        compare(table, read_baseline(tmp_path / "exact.json"))
    assert run(f"{file}:fixed", "--target", TARGETS[0], "--baseline", tmp_path / "missing.json") == cli.WRONG_USE
    told = capsys.readouterr()
    assert "Traceback" not in told.err and not told.out, "before the work"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--target", "nvidia-h20"], "unknown target 'nvidia-h20'"),
        (["--json", "/nowhere/x.json"], "there is no folder /nowhere"),
        (["--json", "/"], "cannot write /: it is a folder"),
    ],
)
def test_mistakes_are_told_before_the_work(file, arguments, told, capsys):
    assert run(f"{file}:make", *arguments) == cli.WRONG_USE
    said = capsys.readouterr()
    assert told in said.err and not said.out and "batch" not in said.err


@pytest.mark.parametrize("text", ["-1", "nan", "much"])
def test_a_tolerance_is_a_percentage(file, text, capsys):
    with pytest.raises(SystemExit) as info:
        run(f"{file}:make", "--tolerance", text)
    assert info.value.code == cli.WRONG_USE and f"'{text}': give the percentage" in capsys.readouterr().err


@pytest.mark.cuda_aot
def test_exact_is_the_compilers_own(file, capsys):
    assert run(f"{file}:fixed", "--target", TARGETS[0], "--exact") == cli.DONE
    told = capsys.readouterr()
    assert "(XLA)" in told.out and "compiling for nvidia-h200 ..." in told.err
