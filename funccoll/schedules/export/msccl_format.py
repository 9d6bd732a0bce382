"""MSCCL's XML: its elements as records, its operations and limits, and its text.

A `gpu` is a rank. A `tb` is a thread block that executes its `step`s in order. It sends to at most one rank and receives from
at most one, over a channel (`chan`). The k-th send over a connection (sender, receiver, channel) matches the k-th receive. A
step may wait for a step of another thread block of its rank (`depid`, `deps`). That step then has `hasdep="1"`. Before a step
with further waits stand `nop`s, one for each. Buffers are "i", "o" and "s" (input, output, scratch). Offsets and counts are
chunks. A block has `parts` of them, in the order of memory.

Source: the parser and the interpreter of Azure/msccl-executor-nccl (src/misc/msccl/msccl_parser.cc,
src/device/msccl_kernel.cu) and of ROCm/rccl, and the simulator MSCCL-XML-Verifier.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple
from xml.sax.saxutils import quoteattr

__all__ = [
    "COLLECTIVES",
    "MOST_COUNT",
    "MOST_NODES",
    "MOST_OFFSET",
    "MOST_PEERS",
    "MOST_STEPS",
    "MOST_THREAD_BLOCKS",
    "OPERATIONS",
    "MscclGpu",
    "MscclProgram",
    "MscclStep",
    "Operation",
    "ThreadBlock",
    "own_cells",
    "scale",
]

COLLECTIVES = {
    "all_reduce": "allreduce",
    "all_gather": "allgather",
    "reduce_scatter": "reducescatter",
    "all_to_all": "alltoall",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "gather": "gather",
    "scatter": "scatter",
}
"""The names that the runtimes know, by ours. They have no others but send, recv and alltoallv."""

MOST_STEPS = 256
"""The most steps of a thread block (MSCCL_MAX_NUM_STEPS; 64 in Azure's latest)."""
MOST_THREAD_BLOCKS = 128
"""The most thread blocks of a rank: `depid` is kept in 8 bits with a sign."""
MOST_PEERS = 32
"""The most thread blocks of a rank that send over one channel, and that receive (MSCCL_MAX_NUM_THREAD_BLOCKS_PER_CHANNEL)."""
MOST_COUNT = 71
"""The most chunks of a step: less than MSCCL_MAX_COUNT."""
MOST_OFFSET = 32767
"""The largest offset: offsets are kept in 16 bits with a sign."""
MOST_NODES = 4096
"""The most XML elements that are kept for one rank: the algorithm, all gpus, its thread blocks and steps."""


class Operation(NamedTuple):
    """The effect of a type of step.

    It receives, folds the data at `src` (to it, or what it received), writes `dst`, and sends.
    """

    receives: bool = False
    reads: bool = False
    writes: bool = False
    sends: bool = False
    reduces: bool = False


OPERATIONS = {
    "s": Operation(reads=True, sends=True),
    "r": Operation(receives=True, writes=True),
    "rcs": Operation(receives=True, writes=True, sends=True),
    "rrs": Operation(receives=True, reads=True, sends=True, reduces=True),
    "rrc": Operation(receives=True, reads=True, writes=True, reduces=True),
    "rrcs": Operation(receives=True, reads=True, writes=True, sends=True, reduces=True),
    "cpy": Operation(reads=True, writes=True),
    "re": Operation(reads=True, writes=True, reduces=True),
    "nop": Operation(),
}
"""Types of steps. `re` folds its source to its destination. The others that reduce fold what is received and the source."""


@dataclass(slots=True)
class MscclStep:
    """A step. The destination of an `s`, and the source of an `r`, are places on the other side."""

    type: str
    source: tuple[str, int]
    destination: tuple[str, int]
    count: int
    depends: tuple[int, int] | None = None
    """(thread block, step) that it waits for."""
    awaited: bool = False
    line: int = 0


def own_cells(step: MscclStep) -> list[tuple[str, int]]:
    """Return the first cells that a step reads and writes on its own rank."""
    does = OPERATIONS[step.type]
    return [step.source] * does.reads + [step.destination] * does.writes


@dataclass(slots=True)
class ThreadBlock:
    """A thread block: the ranks that it sends to and receives from, -1 for none."""

    send: int
    receive: int
    channel: int
    steps: list[MscclStep] = field(default_factory=list)
    line: int = 0


@dataclass(slots=True)
class MscclGpu:
    """One rank: its chunks in each buffer, by letter, and its thread blocks by number."""

    chunks: dict[str, int]
    blocks: list[ThreadBlock]
    line: int = 0


@dataclass(slots=True)
class MscclProgram:
    """An algorithm. `parts` are the chunks of one block, all channels together."""

    name: str
    kind: str
    nranks: int
    root: int | None
    parts: int
    channels: int
    gpus: list[MscclGpu]
    in_place: bool = False
    line: int = 0

    @property
    def loop_chunks(self) -> int:
        """`nchunksperloop`: chunks of the data that the runtime counts in the call.

        It multiplies the call's count by the number of ranks for three collectives.
        """
        return self.parts * scale(self.kind, self.nranks)

    def text(self) -> str:
        """Return the XML. The attribute `root` is ours. Runtimes ignore it, like all attributes they do not know."""
        return "\n".join(self._lines()) + "\n"

    def _lines(self) -> Iterator[str]:
        root = "" if self.root is None else f' root="{self.root}"'
        yield (
            f'<algo name={quoteattr(self.name)} proto="Simple" nchannels="{self.channels}" nchunksperloop="{self.loop_chunks}" '
            f'ngpus="{self.nranks}" coll="{COLLECTIVES[self.kind]}" inplace="{int(self.in_place)}" '
            f'outofplace="{int(not self.in_place)}" minBytes="0" maxBytes="0"{root}>'
        )
        for rank, gpu in enumerate(self.gpus):
            sizes = " ".join(f'{letter}_chunks="{gpu.chunks[letter]}"' for letter in "ios")
            yield f'  <gpu id="{rank}" {sizes}>'
            for number, block in enumerate(gpu.blocks):
                yield f'    <tb id="{number}" send="{block.send}" recv="{block.receive}" chan="{block.channel}">'
                for index, step in enumerate(block.steps):
                    tb, s = step.depends or (-1, -1)
                    yield (
                        f'      <step s="{index}" type="{step.type}" srcbuf="{step.source[0]}" srcoff="{step.source[1]}" '
                        f'dstbuf="{step.destination[0]}" dstoff="{step.destination[1]}" cnt="{step.count}" depid="{tb}" '
                        f'deps="{s}" hasdep="{int(step.awaited)}"/>'
                    )
                yield "    </tb>"
            yield "  </gpu>"
        yield "</algo>"


def scale(kind: str, nranks: int) -> int:
    """Return the number by which the runtimes multiply a call's count (`sizeMultiplier`)."""
    return nranks if kind in ("all_gather", "reduce_scatter", "all_to_all") else 1
