"""Runs command lines, each with some states of the standard streams; prints (exit code, stdout, stderr) of all as JSON.

The commands are forked from a process that has imported them all. Each then has the streams that Python makes when it starts.
"""

import gc
import importlib
import io
import json
import os
import sys
import traceback
from pathlib import Path

import funccoll as fc
from funccoll.core import machine_profile
from funccoll.tools import cli
from tests.support.machine_profiles import profile, times

STATES = {
    "as usual": "utf-8",
    "ascii": "ascii",
    "latin": "latin-1",
    "stdout closed": None,
    "no reader": "utf-8",
    "full": "utf-8",
    "stderr closed": "utf-8",
    "all closed": None,
}
"""Each state of the standard streams, with the encoding of stdout where it is open."""
SCRIPT = """
import sys
import numpy as np, funccoll as fc
step = fc.jit(lambda x: fc.all_reduce(x, "d"), mesh=fc.make_mesh({"d": 2}), in_specs=fc.P("d"), out_specs=fc.P())
print(f"µ of the script: {step(np.ones(4))}")
"""


def streams(state, out, err):
    """Set this process's descriptors and Python's streams."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(os.open(out, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 1)
    os.dup2(os.open(err, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
    if state == "no reader":
        reader, writer = os.pipe()
        os.dup2(writer, 1)
        os.close(reader)
        os.close(writer)
    if state == "full":
        os.dup2(os.open("/dev/full", os.O_WRONLY), 1)
    encoding = STATES[state]
    out, err = (io.BufferedWriter(io.FileIO(number, "w", closefd=False)) for number in (1, 2))
    sys.stdout = sys.__stdout__ = None if encoding is None else io.TextIOWrapper(out, encoding)
    sys.stderr = sys.__stderr__ = io.TextIOWrapper(err, encoding or "ascii", "backslashreplace")
    if encoding is None:
        os.close(1)
    if state in ("stderr closed", "all closed"):
        sys.stderr = sys.__stderr__ = None
        os.close(2)
    if state == "all closed":
        os.close(0)


def prepare(folder):
    """Files that the commands read, in a folder: a script, a profile, a machine profile."""
    (folder / "script.py").write_text(SCRIPT)
    with fc.profile(folder / "profile"):
        exec(compile(SCRIPT.replace("print", "len"), "script.py", "exec"), {})
    (folder / "funccoll").mkdir(mode=0o700)
    os.environ["XDG_CACHE_HOME"] = str(folder)


def end(command):
    """End this process with what a command returns, as Python does, but for the modules that it would delete."""
    try:
        code = command()
    except SystemExit as exit:
        code = exit.code or 0
    except BaseException:
        traceback.print_exc()
        code = 1
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    os._exit(code)


def main():
    folder = Path(sys.argv[1])
    prepare(folder)
    for command in cli.COMMANDS:
        importlib.import_module(f"funccoll.tools.commands.{command}_command")
    gc.freeze()
    found = []
    for words, states in json.loads(sys.argv[2]):
        for state in states:
            out, err = folder / "out", folder / "err"
            machine_profile.save(profile(measured=[times()]), machine_profile.default_path())
            if (child := os.fork()) == 0:
                os.chdir(folder)
                streams(state, out, err)
                sys.argv = ["funccoll", *words]
                end(cli.main)
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            text = out.read_bytes().decode(STATES[state] or "utf-8", "surrogateescape")
            found.append([words, state, code, text, err.read_text(errors="replace")])
    print(json.dumps(found))


if __name__ == "__main__":
    main()
