"""The command `funccoll` in a process, as tests start it."""

import subprocess
import sys

import pytest

FUNCCOLL = [sys.executable, "-W", "error", "-m", "funccoll"]


def run(*arguments, command=FUNCCOLL, **options):
    """(exit code, stdout, stderr) of `funccoll run`."""
    done = subprocess.run([*command, "run", *arguments], capture_output=True, timeout=300, **options)
    return done.returncode, done.stdout.decode(), done.stderr.decode()


class Runner(subprocess.Popen):
    """A process that a failing test does not wait for."""

    def __exit__(self, kind, *rest):
        if kind is not None:
            self.kill()
        super().__exit__(kind, *rest)


def begin(*arguments, **options):
    """`funccoll run` in a process group of its own, as a shell would start it; returns when both ranks are ready."""
    runner = Runner(
        [*FUNCCOLL, "run", "-n", "2", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,
        **options,
    )
    said = {runner.stdout.readline() for _ in range(2)}
    if said != {"[0] ready\n", "[1] ready\n"}:
        runner.kill()
        pytest.fail(f"{said}, {runner.communicate()}")
    return runner
