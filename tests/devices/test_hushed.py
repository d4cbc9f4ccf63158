"""Hushed: the lines that are not wanted are gone, and all others are there, from C, from Python and from processes."""

import subprocess
import sys

PROGRAM = """
import ctypes, os, subprocess, sys, threading
from jaxtensile.devices.hushed import hushed
libc = ctypes.CDLL(None)
libc.puts(b"before")
with hushed(b"noise"):
    libc.puts(b"noise of a library")
    libc.puts(b"a library")
    print("python", flush=True)
    other = threading.Thread(target=libc.puts, args=(b"a thread",))
    other.start()
    other.join()
    started = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
    libc.puts(b"noise again")
with hushed(b"noise"):
    libc.puts(b"noise")
libc.puts(b"noise outside")
started.communicate(b"a process, later" + os.linesep.encode())
"""


def test_only_those_lines_are_dropped_and_the_rest_of_a_library_is_in_order():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    lines, others = done.stdout.splitlines(), {"python", "a process, later"}
    assert others < {*lines}
    assert [x for x in lines if x not in others] == ["before", "a library", "a thread", "noise outside"]
    assert not done.stderr


def test_an_error_inside_leaves_the_output_as_it_was():
    program = PROGRAM.replace('    print("python", flush=True)', '    raise SystemExit("stop")')
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.splitlines() == ["before", "a library"] and "stop" in done.stderr


def test_a_process_without_a_standard_output_goes_on():
    program = "import os\nos.close(1)\n" + PROGRAM.replace("print(", "dict(file=") + "\nos._exit(7)"
    assert subprocess.run([sys.executable, "-c", program], stdout=subprocess.DEVNULL).returncode == 7
