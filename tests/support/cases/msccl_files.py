"""MSCCL files of the tests, written by hand in the style of msccl-tools: every type of step, in place, with buffered sends."""

from __future__ import annotations

import re
from collections.abc import Sequence


def step(
    index: int,
    type: str,
    src: str = "i-1",
    dst: str = "o-1",
    count: int = 1,
    depends: Sequence[int] = (-1, -1),
    awaited: int = 0,
) -> str:
    """A step; a place is a letter and an offset, such as "i0"."""
    return (
        f'<step s="{index}" type="{type}" srcbuf="{src[0]}" srcoff="{src[1:]}" dstbuf="{dst[0]}" dstoff="{dst[1:]}" '
        f'cnt="{0 if type == "nop" else count}" depid="{depends[0]}" deps="{depends[1]}" hasdep="{awaited}"/>'
    )


def block(number: int, send: int, recv: int, steps: Sequence[str], chan: int = 0) -> str:
    """A thread block."""
    return f'<tb id="{number}" send="{send}" recv="{recv}" chan="{chan}">\n' + "\n".join(steps) + "\n</tb>"


def algorithm(coll: str, chunks: int, gpus: Sequence[tuple[tuple[int, int, int], Sequence[str]]], **attributes: object) -> str:
    """A file; each gpu is its (i, o, s) chunks and its thread blocks."""
    given = {"nchannels": 1, "inplace": 0} | attributes
    text = " ".join(f'{k}="{v}"' for k, v in given.items())
    lines = [f'<algo name="by_hand" proto="LL" nchunksperloop="{chunks}" ngpus="{len(gpus)}" coll="{coll}" {text}>']
    for rank, ((i, o, s), blocks) in enumerate(gpus):
        lines += [f'<gpu id="{rank}" i_chunks="{i}" o_chunks="{o}" s_chunks="{s}">', *blocks, "</gpu>"]
    return "\n".join([*lines, "</algo>"])


def exchange_in_place() -> str:
    """all_reduce in place on two ranks, as msccl-tools' pairs: both send first, then receive, over one thread block each.

    Without buffers it deadlocks.
    """

    def gpu(rank: int) -> tuple[tuple[int, int, int], list[str]]:
        other = 1 - rank
        steps = [step(0, "s", "i0", "s0"), step(1, "r", "i0", "s0", awaited=1)]
        return (1, 0, 1), [block(0, other, other, steps), block(1, -1, -1, [step(0, "re", "s0", "i0", depends=(0, 1))])]

    return algorithm("allreduce", 1, [gpu(0), gpu(1)], inplace=1)


def pairs(p: int, own_first: bool) -> str:
    """all_reduce over pairs: all send to all, and each rank adds in the order of ranks, or its own value first."""

    def gpu(rank: int) -> tuple[tuple[int, int, int], list[str]]:
        others = [other for other in range(p) if other != rank]
        messages = [
            block(k, other, other, [step(0, "s", "i0", "s0"), step(1, "r", "i0", f"s{k}", awaited=1)])
            for k, other in enumerate(others)
        ]
        order = [rank, *others] if own_first else list(range(p))
        steps = []
        for number, source in enumerate(order):
            place = "i0" if source == rank else f"s{others.index(source)}"
            depends = (-1, -1) if source == rank else (others.index(source), 1)
            steps.append(step(number, "re" if number else "cpy", place, "o0", depends=depends))
        return (1, 1, p - 1), [*messages, block(p - 1, -1, -1, steps)]

    return algorithm("allreduce", 1, [gpu(rank) for rank in range(p)])


def ring_in_place(p: int) -> str:
    """all_reduce in place: one thread block on each rank with s, rrs, rrcs, rcs and r, which need buffers.

    Chunk c starts at rank c, is reduced around the ring, complete at rank c - 1, and goes around once more.
    """
    gpus = []
    for r in range(p):
        left, right = (r - 1) % p, (r + 1) % p
        steps = [step(0, "s", f"i{r}", f"i{r}")]
        for t in range(1, p):
            c = f"i{(r - t) % p}"
            steps.append(step(t, "rrcs" if t == p - 1 else "rrs", c, c))
        for t in range(p, 2 * p - 1):
            c = f"i{(r - t) % p}"
            steps.append(step(t, "r" if t == 2 * p - 2 else "rcs", c, c))
        gpus.append(((p, 0, 0), [block(0, right, left, steps)]))
    return algorithm("allreduce", p, gpus, inplace=1)


def overwritten_after_send() -> str:
    """broadcast on two ranks whose root sends a chunk of scratch, overwrites it, and sends it again: the sends are buffered.

    The receiver waits for the second send of another connection before it takes the first.
    """
    root = [
        block(0, 1, -1, [step(0, "cpy", "i0", "s0"), step(1, "s", "s0", "o0"), step(2, "cpy", "i1", "s0", awaited=1)]),
        block(1, 1, -1, [step(0, "s", "s0", "o1", depends=(0, 2))], chan=1),
        block(2, -1, -1, [step(0, "cpy", "i0", "o0", count=2)]),
    ]
    other = [
        block(0, -1, 0, [step(0, "r", "s0", "o0", depends=(1, 0))]),
        block(1, -1, 0, [step(0, "r", "s0", "o1", awaited=1)], chan=1),
    ]
    return algorithm("broadcast", 2, [((2, 2, 1), root), ((0, 2, 0), other)], nchannels=2)


def overwritten_late() -> str:
    """The same where the first send may wait for its receive, which comes late: nothing need be buffered."""
    root = [
        block(0, 1, -1, [step(0, "cpy", "i0", "s0"), step(1, "s", "s0", "o0"), step(2, "cpy", "i1", "s0")]),
        block(1, 1, -1, [step(0, "s", "i1", "o1")], chan=1),
        block(2, -1, -1, [step(0, "cpy", "i0", "o0", count=2)]),
    ]
    other = [
        block(0, -1, 0, [step(0, "r", "s0", "o0", depends=(1, 2))]),
        block(1, -1, 0, [step(0, "r", "i1", "o1"), step(1, "cpy", "o1", "s0"), step(2, "cpy", "s0", "s1", awaited=1)], chan=1),
    ]
    return algorithm("broadcast", 2, [((2, 2, 1), root), ((0, 2, 2), other)], nchannels=2)


def gather_in_place() -> str:
    """all_gather in place on two ranks: the input is a slice of the output."""

    def gpu(r: int) -> tuple[tuple[int, int, int], list[str]]:
        other = 1 - r
        return (1, 2, 0), [
            block(0, other, -1, [step(0, "s", "i0", f"o{r}")]),
            block(1, -1, other, [step(0, "r", "i0", f"o{other}")]),
        ]

    return algorithm("allgather", 2, [gpu(0), gpu(1)], inplace=1)


def scatter_in_place() -> str:
    """reduce_scatter in place on two ranks, by msccl-tools' name for it: the output is a slice of the input."""

    def gpu(r: int) -> tuple[tuple[int, int, int], list[str]]:
        other = 1 - r
        return (2, 1, 0), [
            block(0, other, -1, [step(0, "s", f"i{other}", f"i{other}")]),
            block(1, -1, other, [step(0, "rrc", f"i{r}", "o0")]),
        ]

    return algorithm("reduce_scatter", 2, [gpu(0), gpu(1)], inplace=1)


def replaced(text: str, old: str, new: str, count: int = 1) -> str:
    """A text in which something that is there is replaced."""
    assert old in text, old
    return text.replace(old, new, count)


def line_of(text: str, part: str) -> int:
    """The number of the first line with a part."""
    return 1 + next(i for i, line in enumerate(text.splitlines()) if re.search(part, line))
