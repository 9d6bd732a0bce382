"""The environment variables of funccoll: all that are read, their meanings and defaults.

A variable is a string, its own name, so messages and environments of processes can use it as text. `funccoll doctor` shows
those that are set, and unknown names with the same prefix.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

__all__ = ["PREFIX", "VARIABLES", "Variable"]

PREFIX = "FUNCCOLL_"


class Variable(str):
    """The name of an environment variable, with its default (if it is not set or empty) and its meaning in words."""

    __slots__ = ("default", "meaning", "own")

    default: str
    meaning: str
    own: bool
    """True for a variable that launchers and ranks set for each other, and users do not."""

    def __new__(cls, name: str, default: str, meaning: str, own: bool = False) -> Variable:
        """Make the variable, without the prefix in its name, and list it in `VARIABLES`."""
        made = super().__new__(cls, PREFIX + name)
        made.default, made.meaning, made.own = default, meaning, own
        VARIABLES[made] = made
        return made

    def read(self, environment: Mapping[str, str] = os.environ) -> str:
        """Return the value."""
        return environment.get(self) or self.default


VARIABLES: dict[str, Variable] = {}
"""Name -> the variable."""

# ---------------------------------------------------------------- of a job

TIMEOUT = Variable(
    "TIMEOUT",
    "600",
    "seconds that a collective waits for another rank before it raises; fc.init(timeout=) sets it, too",
)
RENDEZVOUS_TIMEOUT = Variable("RENDEZVOUS_TIMEOUT", "60", "seconds that ranks wait for each other when they join the job")
RUN_ID = Variable("RUN_ID", "", "a job's name, new and the same in all its processes; launchers make one")
TRANSPORT = Variable("TRANSPORT", "", "mpi: the ranks of one host send messages, as ranks of several hosts do")
DIRECT_READS = Variable(
    "DIRECT_READS",
    "1",
    "0: ranks do not read each other's memory (process_vm_readv); every call copies arguments to shared memory",
)
FORK_MIB = Variable("FORK_MIB", "1024", "mebibytes of Arrays that a forked child gets copies of")
BLAS_THREADS = Variable(
    "BLAS_THREADS",
    "1",
    "BLAS threads of each device, on meshes of several; it decides the bits of products, so set it alike on all ranks",
)
LAUNCHER_AGENT = Variable(
    "LAUNCHER_AGENT",
    "",
    "the command that `funccoll run --hosts` starts instead of ssh, with a host and a command as arguments",
)
DEVICE = Variable("DEVICE", "cpu", "cpu or cuda: the devices of meshes made without device=")

# ---------------------------------------------------------------- of schedules and profiles

MACHINE_PROFILE = Variable("MACHINE_PROFILE", "", "a file of `funccoll tune` that chooses schedules; none: the presets choose")
TUNED_BITS = Variable("TUNED_BITS", "", "1, on all ranks: measured times may choose an order of combination with other bits")
PROFILE = Variable("PROFILE", "", "a directory into which each process records its collectives, for `funccoll profile`")

# ---------------------------------------------------------------- of debugging

DEBUG = Variable(
    "DEBUG",
    "",
    "words with commas between them. detail: every call compares arguments; nans: the operation that makes the first NaN "
    "raises",
)
CHECK = Variable("CHECK", "", "1: programs are type-checked after every pass of the compiler")
ON_GPUS = "gpu"
FUSE = Variable(
    "FUSE",
    "1",
    f"0: NumPy computes compiled programs one operation at a time, without fused kernels; {ON_GPUS}: GPUs have them, too; set "
    "it alike on all ranks",
)
TRACEBACK = Variable("TRACEBACK", "", "full: tracebacks keep the frames of funccoll and of what it calls")
NATIVE = Variable("NATIVE", "1", "0: calls do not use the C extension, and are one and a half to three times as slow")
SHOW_COMPILING = Variable(
    "SHOW_COMPILING",
    "",
    "1: a line on stderr when the first kernel of a machine is compiled; launchers set it for rank 0",
)
THEME = Variable("THEME", "light", "light or dark: the colours of drawings made without theme=")

# ---------------------------------------------------------------- between launchers and ranks

RANK = Variable("RANK", "", "a process's rank, set by `funccoll run`", own=True)
WORLD_SIZE = Variable("WORLD_SIZE", "", "the number of ranks, set by `funccoll run`", own=True)
REPORTS = Variable("REPORTS", "", "where a rank reports to its launcher how it ended", own=True)
TRACEBACKS = Variable("TRACEBACKS", "", "first: ranks fold tracebacks that follow from another rank's", own=True)
JOINED = Variable("JOINED", "", "the process that is the rank; programs that it starts are not", own=True)
TORCH_RANK = Variable("TORCH_RANK", "", "the rank of a process in torch.distributed, with its launcher", own=True)
SET_TORCH = Variable(
    "SET_TORCH",
    "",
    "torch's variables that `funccoll run` set itself, so they are not another launcher's",
    own=True,
)
