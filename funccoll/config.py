"""The environment variables of funccoll: all that are read, what they mean, and their values where they are not set.

A variable is its own name, so that it stands in messages and in the environments of processes as any text. `funccoll doctor`
shows those that are set, and names that begin like ours and are not.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

__all__ = ["PREFIX", "VARIABLES", "Variable"]

PREFIX = "FUNCCOLL_"


class Variable(str):
    """The name of an environment variable, with its value where it is not set or empty, and its meaning in words."""

    __slots__ = ("default", "meaning", "own")

    default: str
    meaning: str
    own: bool
    """True for one that launchers and ranks set for each other, and a user does not."""

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
    "seconds that a collective waits for a rank which does not come; fc.init(timeout=) says it, too",
)
RENDEZVOUS_TIMEOUT = Variable("RENDEZVOUS_TIMEOUT", "60", "seconds that ranks wait for each other when they join")
RUN_ID = Variable("RUN_ID", "", "a job's name, the same new text for all its processes; launchers make one")
TRANSPORT = Variable("TRANSPORT", "", "mpi: the ranks of one host use messages, as those of several do")
DIRECT_READS = Variable(
    "DIRECT_READS",
    "1",
    "0: no rank reads another one's memory (process_vm_readv); arguments are copied, for all ranks",
)
FORK_MIB = Variable("FORK_MIB", "1024", "mebibytes of Arrays that a forked child gets copies of")
BLAS_THREADS = Variable(
    "BLAS_THREADS",
    "1",
    "BLAS threads of each device, on meshes of several; it decides the bits of products, so all ranks have one",
)
LAUNCHER_AGENT = Variable(
    "LAUNCHER_AGENT",
    "",
    "what `funccoll run --hosts` starts in the place of ssh, with a host and a command",
)
DEVICE = Variable("DEVICE", "cpu", "cpu or cuda: the devices of meshes that name none")

# ---------------------------------------------------------------- of schedules and profiles

MACHINE_PROFILE = Variable("MACHINE_PROFILE", "", "a file of `funccoll tune` that chooses schedules; none: the presets choose")
TUNED_BITS = Variable("TUNED_BITS", "", "1, on all ranks: measured times may choose an order of combination with other bits")
PROFILE = Variable("PROFILE", "", "a directory into which each process records its collectives, for `funccoll profile`")

# ---------------------------------------------------------------- of debugging

DEBUG = Variable(
    "DEBUG",
    "",
    "words with commas between them. detail: arguments are compared in every call; nans: the operation that makes the first "
    "NaN is named",
)
CHECK = Variable("CHECK", "", "1: programs are type-checked after every pass of the compiler")
TRACEBACK = Variable("TRACEBACK", "", "full: tracebacks keep the frames of funccoll and of what it calls")
NATIVE = Variable("NATIVE", "1", "0: calls do without the C extension, one and a half to three times as slow")
SHOW_COMPILING = Variable(
    "SHOW_COMPILING",
    "",
    "1: a line on stderr when the first kernel of a machine is compiled; launchers set it for rank 0",
)
THEME = Variable("THEME", "light", "light or dark: the colours of drawings that name none")

# ---------------------------------------------------------------- between launchers and ranks

RANK = Variable("RANK", "", "a process's rank, by `funccoll run`", own=True)
WORLD_SIZE = Variable("WORLD_SIZE", "", "the number of ranks, by `funccoll run`", own=True)
REPORTS = Variable("REPORTS", "", "where a rank tells its launcher how it ended", own=True)
TRACEBACKS = Variable("TRACEBACKS", "", "first: ranks fold tracebacks that follow from another one's", own=True)
JOINED = Variable("JOINED", "", "the process that is the rank: a program that it starts is not", own=True)
TORCH_RANK = Variable("TORCH_RANK", "", "the rank of a process in torch.distributed, with its launcher", own=True)
SET_TORCH = Variable(
    "SET_TORCH",
    "",
    "torch's variables that `funccoll run` has set, and that say nothing of their own",
    own=True,
)
