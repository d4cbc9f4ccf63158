"""The tutorial, followed: its script and its commands, in an empty folder, give what it shows."""

import os
import re
import subprocess
import sys

from paths import ROOT

PAGE = (ROOT / "docs" / "tutorial.md").read_text()
BLOCKS = re.findall(r"(?ms)^```(\w*)\n(.*?)^```$", PAGE)
NUMBER = re.compile(r"\d[\d.,]*\w*")


def shown_after(command):
    """What the page shows below a command, without its numbers and the width of its columns."""
    texts = [text for _, text in BLOCKS]
    return said(texts[texts.index(command + "\n") + 1])


def said(text):
    return [" ".join(NUMBER.sub("#", line).split()) for line in text.splitlines() if line.strip()]


def test_it_can_be_followed(tmp_path):
    (tmp_path / "train.py").write_text(next(text for language, text in BLOCKS if language == "python"))
    config = next(text for _, text in BLOCKS if text.startswith("[functions"))
    commands = [text.strip() for language, text in BLOCKS if not language and text.startswith("jaxtensile ")]
    assert [c.split()[1] for c in commands] == ["estimate", "plan", "exec"]

    def run(*words):
        there = {"JAXTENSILE_PLAN_CACHE": str(tmp_path / "plans"), "NO_COLOR": "1"}
        command = [sys.executable, *words]
        done = subprocess.run(
            command, cwd=tmp_path, env=os.environ | there, capture_output=True, text=True, timeout=600
        )
        assert done.returncode == 0, done.stderr
        return done.stdout + done.stderr

    plain = run("train.py")
    for command in commands:
        printed = run("-m", "jaxtensile", *(sys.executable if w == "python" else w for w in command.split()[1:]))
        assert set(shown_after(command)) <= set(said(printed))
    assert plain in printed  # the losses of the plain script
    assert len(list((tmp_path / "plans").iterdir())) == 1  # the run found what was planned
    assert (tmp_path / "plan.html").stat().st_size > 10_000

    (tmp_path / "jaxtensile.toml").write_text(config)
    assert "48MiB" in run("-m", "jaxtensile", "config")
