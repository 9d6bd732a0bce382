"""mpirun of Open MPI and of MPICH: how to find it, its options, and the rank of each piece of its output.

Standard library only.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from .. import config
from .processes import LineBuffer
from .reports import MARK

__all__ = ["PREFIX", "Mpirun", "TaggedOutput", "find_mpirun", "find_program", "parse_hosts", "passed_on"]

_PASSED_ON = re.compile(
    r"(PATH|LD_LIBRARY_PATH|LD_PRELOAD|VIRTUAL_ENV|LANG|LC_.*|NO_COLOR|FORCE_COLOR|COLUMNS|PYTHON[A-Z]+|(TTY|FUNCCOLL|PYTHON"
    r"|NUMBA|MPI4PY|NPY|NUMPY|OMP|OPENBLAS|MKL|BLIS|MPICH|MPIR_CVAR|I_MPI|HYDRA|UCX|FI|CUDA|NCCL)_.*)"
)
_OF_ONE_PROCESS = {
    config.RANK,
    config.WORLD_SIZE,
    config.RUN_ID,
    config.JOINED,
    config.REPORTS,
    config.TORCH_RANK,
    config.SET_TORCH,
    "MPICH_INTERFACE_HOSTNAME",
    "MPIR_CVAR_CH3_INTERFACE_HOSTNAME",
}
_LONGEST_TAG = 40
PREFIX = "[{}] "
"""Prefix of each line that a rank prints, to be formatted with its number."""


@dataclass(frozen=True)
class Mpirun:
    """An mpirun: its path, and the output of its `--version`."""

    path: str
    vendor: str
    """"Open MPI" or "MPICH", which stands for all that start processes with Hydra; else the first line that it prints."""
    version: str
    token: str = ""
    """A word in MPICH's tags. It is random if a rank must not be able to print such a tag."""

    @property
    def is_known(self) -> bool:
        """True if `command` knows its options."""
        return self.vendor in ("Open MPI", "MPICH")

    @property
    def tag(self) -> re.Pattern[bytes]:
        """The tag before each piece of a rank's output, if `command` has started it."""
        if self.vendor == "Open MPI":
            return re.compile(rb"\[\d+,(\d+)\]<std(?:out|err)>:" + b" " * (self.major >= 5))
        return re.compile(re.escape(self._pattern).replace("%r", r"(\d+)").encode())

    @property
    def _pattern(self) -> str:
        return f"[rank %r {self.token}] " if self.token else "[rank %r] "

    @property
    def major(self) -> int:
        """The first number of the version."""
        return int(self.version.partition(".")[0])

    def command(
        self,
        hosts: Sequence[tuple[str, int]],
        program: Sequence[str],
        variables: Mapping[str, str | None],
        bind_to: str = "none",
        agent: str = "",
    ) -> list[str]:
        """Return the command that starts a program on (host, number of processes) each. Its output is tagged.

        `variables` are the ranks' environment, with None for the value in this one. `agent` runs in place of ssh, with the
        host's name and the command to run there. If an option exists for it, ranks that survive a death are left running: they
        learn of it from funccoll, and report it.
        """
        slots = ",".join(f"{name}:{count}" for name, count in hosts)
        if self.vendor == "Open MPI":
            command = [self.path, "--host", slots, "--bind-to", bind_to, "--tag-output"]
            command += ["--with-ft", "ulfm"] if self.major >= 5 else []
            command += ["--mca", "plm_rsh_agent", agent] if agent else []
            for name, value in variables.items():
                command += ["-x", name if value is None else f"{name}={value}"]
        else:
            bind_to = bind_to.partition(":")[0]  # processes may share a core anyway
            command = [self.path, "-hosts", slots, "-bind-to", bind_to, "-prepend-pattern", self._pattern]
            command += ["-disable-auto-cleanup"]  # of other hosts; the ranks of the same one are killed all the same
            command += ["-launcher", "ssh", "-launcher-exec", agent] if agent else []
            for name, value in variables.items():
                command += ["-genv", name, value] if value is not None else []
            if inherited := [name for name, value in variables.items() if value is None]:
                command += ["-genvlist", ",".join(inherited)]
        return [*command, "-n", str(sum(count for _, count in hosts)), *program]


def find_program(name: str, environment: Mapping[str, str] = os.environ) -> str | None:
    """The path of a program in PATH, or else beside the interpreter, where pip installs it; None if it is in neither."""
    return shutil.which(name, path=environment.get("PATH")) or shutil.which(name, path=os.path.dirname(sys.executable))


def find_mpirun(environment: Mapping[str, str] = os.environ) -> Mpirun | None:
    """The first mpirun in PATH, or the one beside the interpreter; None if there is none, or its version is unknown."""
    path = find_program("mpirun", environment)
    if path is None:
        return None
    try:
        done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=60, env=dict(environment))
    except (OSError, subprocess.SubprocessError):
        return None
    said = done.stdout.strip() or done.stderr.strip()
    if found := re.search(r"Open MPI\)? (\d[\w.]*)", said):
        return Mpirun(path, "Open MPI", found[1])
    if "hydra" in said.lower() and (found := re.search(r"Version:? +(\d[\w.]*)", said)):
        return Mpirun(path, "MPICH", found[1])
    return Mpirun(path, said.partition("\n")[0], "")


def parse_hosts(text: str) -> list[tuple[str, int]]:
    """The hosts "a:4,b:4", each with its number of processes. Raises ValueError with what is wrong."""
    hosts: list[tuple[str, int]] = []
    for entry in text.split(","):
        name, _, count = entry.strip().rpartition(":")
        if not name or not count.isdecimal() or int(count) < 1:
            raise ValueError(f"{entry.strip()!r} is not a host with its number of processes: write --hosts a:4,b:4")
        if name in [known for known, _ in hosts]:
            raise ValueError(f"host {name} is given twice: write it once, with all its processes")
        hosts.append((name, int(count)))
    return hosts


def passed_on(environment: Mapping[str, str], names: Sequence[str] = ()) -> dict[str, str | None]:
    """The variables of this environment that ranks on other hosts get as well, for `Mpirun.command`.

    They are those of Python and the libraries below it, and these further `names`. A name may have its own value after "=".

    Raises: ValueError for a name without a value.
    """
    known = [name for name in environment if _PASSED_ON.fullmatch(name) and name not in _OF_ONE_PROCESS]
    found: dict[str, str | None] = dict.fromkeys(sorted(known))
    for name, equals, value in (entry.partition("=") for entry in names):
        if not name:
            raise ValueError(f"-x {equals}{value} names no variable: write -x NAME or -x NAME=value")
        if not equals and name not in environment:
            raise ValueError(f"-x {name} passes a variable on that is not set here: set it, or write -x {name}=value")
        found[name] = value if equals else None
    return found


class TaggedOutput(LineBuffer):
    """Takes mpirun's stdout or stderr, and gives whole lines, each with a prefix for its rank. mpirun's own lines stay as they
    are.

    MPICH's tags precede every piece that a rank writes, so lines are put together here. Text after `MARK` goes to `take`, which
    returns whether it is a report. A report is not given out.
    """

    def __init__(self, tag: re.Pattern[bytes], take: Callable[[bytes], bool], prefix: str = PREFIX):
        super().__init__("")
        self.tag, self.take, self.rank_prefix = tag, take, prefix
        self.buffers = {-1: LineBuffer("")}  # by rank; mpirun's own
        self.rank = -1

    def feed(self, data: bytes) -> bytes:
        """The lines that `data` completes. The rest is kept."""
        data, self.rest = self.rest + data, b""
        cut = data.rfind(b"[", -_LONGEST_TAG)
        if cut >= 0 and b"\n" not in data[cut:] and not self.tag.match(data, cut):  # perhaps half a tag
            data, self.rest = data[:cut], data[cut:]
        return self._lines(data)

    def _lines(self, data: bytes) -> bytes:
        whole, pieces = [], self.tag.split(data)
        for i, piece in enumerate(pieces):
            if i % 2:
                self.rank = int(piece)
                continue
            line, newline, others = piece.partition(b"\n")
            whole.append(self._feed(self.rank, line + newline))
            if newline:  # each line of a rank has a tag
                self.rank = -1
                whole.append(self._feed(-1, others))
        return b"".join(whole)

    def _feed(self, rank: int, data: bytes) -> bytes:
        buffer = self.buffers.setdefault(rank, LineBuffer(self.rank_prefix.format(rank)))
        kept = []
        for line in buffer.feed(data).splitlines(keepends=True):
            text, mark, report = line.partition(MARK)
            if not mark or not self.take(report):
                kept.append(line)
            elif text != buffer.prefix:
                kept.append(text + b"\n")
        return b"".join(kept)

    def end(self) -> bytes:
        """The last lines, if they were not ended."""
        rest, self.rest = self.rest, b""
        return self._lines(rest) + b"".join(buffer.end() for buffer in self.buffers.values())
