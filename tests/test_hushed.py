"""Hushed: the lines that are not wanted are gone, and all others are there, from C and from Python."""

import subprocess
import sys

PROGRAM = """
import ctypes, os, sys, threading
from jaxtensile.devices.hushed import hushed
libc = ctypes.CDLL(None)
print("before")
with hushed(b"noise"):
    libc.puts(b"noise of a library")
    libc.puts(b"a library")
    print("python")
    other = threading.Thread(target=lambda: print("a thread"))
    other.start()
    other.join()
    libc.puts(b"noise again")
libc.puts(b"noise outside")
libc.fflush(None)
print("after")
"""


def test_only_those_lines_are_dropped_and_the_rest_is_in_order():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert sorted(lines) == sorted(["before", "a library", "python", "a thread", "noise outside", "after"])
    assert lines[0] == "before" and lines[-2:] == ["noise outside", "after"] and not done.stderr


def test_an_error_inside_leaves_the_output_as_it_was():
    program = PROGRAM.replace('    print("python")', '    raise SystemExit("stop")')
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.splitlines() == ["before", "a library"] and "stop" in done.stderr


def test_a_process_without_a_standard_output_goes_on():
    program = (
        "import os\nos.close(1)\n" + PROGRAM.replace("print(", "len(").replace("libc.puts", "len") + "\nos._exit(7)"
    )
    assert subprocess.run([sys.executable, "-c", program], stdout=subprocess.DEVNULL).returncode == 7
