"""Reading of MSCCL's XML. Elements, attributes and limits are checked, and each error has its line. Nothing is executed.

The parser is expat without document types, so there are no entities to expand and no other files to load. Every count is
bounded by the elements that the file really has, before memory is allocated for it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import NoReturn
from xml.parsers import expat

from ...errors import ScheduleError, Source
from ..collective import KINDS, similar
from .msccl_format import (
    COLLECTIVES,
    MOST_COUNT,
    MOST_THREAD_BLOCKS,
    OPERATIONS,
    MscclGpu,
    MscclProgram,
    MscclStep,
    ThreadBlock,
    own_cells,
    scale,
)
from .read_text import read_text

__all__ = ["parse_msccl"]

_KINDS = {spelling: kind for kind, spelling in COLLECTIVES.items()} | {"reduce_scatter": "reduce_scatter"}
"""Our names of collectives. msccl-tools writes reduce_scatter, which the runtimes do not know."""
_INSIDE = {"algo": "", "gpu": "algo", "tb": "gpu", "step": "tb"}
_MOST_ELEMENTS = 1 << 16
_MOST_CHUNKS = 1 << 20
"""Chunks of all ranks in all buffers."""
_INTEGER = re.compile(r"-?[0-9]{1,10}")


def parse_msccl(given: str | os.PathLike[str]) -> tuple[MscclProgram, str]:
    """Return the program in a text or file, and the name of the text. Raises ScheduleError with element, attribute and line."""
    text, name = read_text(given, "<", "MSCCL XML")
    reader = _XmlReader(name)
    reader.read(text)
    return reader.finish(), name


class _XmlReader:
    def __init__(self, name: str):
        self.name = name
        self.open: list[str] = []
        self.elements = 0
        self.program: MscclProgram | None = None
        self.parser = expat.ParserCreate("UTF-8")
        self.parser.StartElementHandler = self._start
        self.parser.EndElementHandler = self._end
        self.parser.StartDoctypeDeclHandler = self._doctype
        self.parser.CharacterDataHandler = self._characters

    def read(self, text: str) -> None:
        """Parse the text."""
        try:
            self.parser.Parse(text.encode("utf-8"), True)
        except UnicodeEncodeError:
            raise ScheduleError("MSCCL XML: the text has characters that UTF-8 does not have.") from None
        except expat.ExpatError as error:
            raise self._error(f"it is not well-formed: {expat.ErrorString(error.code)}", error.lineno) from None

    def finish(self) -> MscclProgram:
        """Return the program once everything is read. Counts are compared with the elements that were there."""
        program = self.program
        if program is None:
            raise self._error("it has no element algo", 1)
        if len(program.gpus) != program.nranks:
            raise self._error(f"ngpus={program.nranks}, and there are {len(program.gpus)} gpus", program.line)
        self._check_sizes(program)
        for rank, gpu in enumerate(program.gpus):
            for number, block in enumerate(gpu.blocks):
                for index, step in enumerate(block.steps):
                    self._check_dependency(gpu, number, index, step)
                    if step.type != "nop":
                        self._check_cells(gpu, rank, index, step)
        return program

    # ------------------------------------------------------------ elements

    def _start(self, name: str, attributes: Mapping[str, str]) -> None:
        self.elements += 1
        if self.elements > _MOST_ELEMENTS:
            self._fail(f"it has more than {_MOST_ELEMENTS:,} elements")
        if name not in _INSIDE:
            self._fail(f"there is no element {name:.40}.{similar(name[:40], _INSIDE)} There are {', '.join(_INSIDE)}")
        outside = self.open[-1] if self.open else ""
        if _INSIDE[name] != outside:
            self._fail(f"{name} stands in {outside or 'nothing'}, and belongs in {_INSIDE[name] or 'nothing: it is the first'}")
        self.open.append(name)
        self.attributes, self.element = attributes, name
        getattr(self, f"_{name}")()

    def _end(self, name: str) -> None:
        self.open.pop()

    def _doctype(self, *_: object) -> None:
        self._fail("it declares a document type (DTD), which could define entities. MSCCL's files have none; remove it")

    def _characters(self, text: str) -> None:
        if text.strip():
            self._fail(f"it has text between the elements: {text.strip()[:40]!r}")

    def _algo(self) -> None:
        coll = self._text("coll")
        if coll not in _KINDS:
            self._fail(
                f"coll={coll!r:.40} is not a collective of funccoll's.{similar(coll[:40], _KINDS)} These are: "
                f"{', '.join(COLLECTIVES.values())}"
            )
        kind, nranks = _KINDS[coll], self._integer("ngpus", 1)
        loop, factor = self._integer("nchunksperloop", 1), scale(_KINDS[coll], nranks)
        if loop % factor:
            self._fail(f"nchunksperloop={loop} of {coll} is not a multiple of ngpus={nranks}")
        name = self._text("name")
        if not name.isprintable() or len(name) > 200:
            self._fail("name must have at most 200 printable characters")
        root = self._integer("root", 0, nranks - 1, default=-1)
        if root >= 0 and not KINDS[kind].rooted:
            self._fail(f"{coll} has no root, and root={root} is given")
        in_place = bool(self._integer("inplace", 0, 1, default=0)) and not self._integer("outofplace", 0, 1, default=0)
        channels = self._integer("nchannels", 1, 1 << 10)
        self.program = MscclProgram(
            name, kind, nranks, None if root < 0 else root, loop // factor, channels, [], in_place, self._line
        )

    def _gpu(self) -> None:
        assert self.program is not None
        rank = self._integer("id", 0, self.program.nranks - 1)
        if rank != len(self.program.gpus):
            self._fail(f"gpu id={rank} comes in place of {len(self.program.gpus)}: each rank once, in order")
        sizes = {letter: self._integer(f"{letter}_chunks", 0) for letter in "ios"}
        self.program.gpus.append(MscclGpu(sizes, [], self._line))

    def _tb(self) -> None:
        assert self.program is not None
        gpu, nranks = self.program.gpus[-1], self.program.nranks
        rank, number = len(self.program.gpus) - 1, self._integer("id", 0, MOST_THREAD_BLOCKS * 8 - 1)
        if number != len(gpu.blocks):
            self._fail(f"tb id={number} of gpu {rank} comes in place of {len(gpu.blocks)}: each once, in order")
        send, receive = self._integer("send", -1, nranks - 1), self._integer("recv", -1, nranks - 1)
        channel = self._integer("chan", -1 if send == receive == -1 else 0, self.program.channels - 1)
        if rank in (send, receive):
            self._fail(f"tb {number} of gpu {rank} sends to, or receives from, its own rank")
        for other, block in enumerate(gpu.blocks):
            if channel == block.channel and (0 <= send == block.send or 0 <= receive == block.receive):
                self._fail(
                    f"tb {number} and tb {other} of gpu {rank} have the same connection: one thread block sends to, and one "
                    f"receives from, a rank over a channel ({channel})"
                )
        gpu.blocks.append(ThreadBlock(send, receive, max(channel, 0), [], self._line))

    def _step(self) -> None:
        assert self.program is not None
        block = self.program.gpus[-1].blocks[-1]
        index = self._integer("s", 0)
        if index != len(block.steps):
            self._fail(f"step s={index} comes in place of {len(block.steps)}: each once, in order")
        type = self._text("type")
        if type not in OPERATIONS:
            self._fail(f"there is no step of type={type!r:.40}. There are {', '.join(OPERATIONS)}")
        does = OPERATIONS[type]
        for needed, peer, side in ((does.sends, block.send, "send"), (does.receives, block.receive, "recv")):
            if needed and peer < 0:
                self._fail(f'step {index}, type="{type}", is in a thread block with {side}="-1"')
        cells: list[tuple[str, int]] = []
        for side in ("src", "dst"):
            letter = self._text(f"{side}buf")
            if letter not in ("i", "o", "s"):
                self._fail(f"{side}buf={letter!r:.40} is not a buffer: i, o or s")
            cells.append((letter, self._integer(f"{side}off", -1)))
        count = self._integer("cnt", 0 if type == "nop" else 1, MOST_COUNT)
        depends = self._integer("depid", -1), self._integer("deps", -1)
        if (depends[0] < 0) != (depends[1] < 0):
            self._fail(f"depid={depends[0]} and deps={depends[1]}: both name a step, or both are -1")
        awaited = bool(self._integer("hasdep", 0, 1))
        source, destination = cells
        wait = depends if depends[0] >= 0 else None
        block.steps.append(MscclStep(type, source, destination, count, wait, awaited, self._line))

    # ------------------------------------------------------------ checks of the whole

    def _check_sizes(self, program: MscclProgram) -> None:
        blocks = [KINDS[program.kind].input_blocks or program.nranks, KINDS[program.kind].output_blocks or program.nranks]
        most = dict(zip("io", (n * program.parts for n in blocks), strict=True))
        whole = sum(most.values()) * program.nranks + sum(gpu.chunks["s"] for gpu in program.gpus)
        if whole > _MOST_CHUNKS:
            raise self._error(f"its buffers have {whole:,} chunks, and {_MOST_CHUNKS:,} are read at most", program.line)
        for rank, gpu in enumerate(program.gpus):
            for letter, n in most.items():
                if gpu.chunks[letter] > max(n, max(most.values()) if program.in_place else 0):
                    raise self._error(
                        f"{letter}_chunks={gpu.chunks[letter]} of gpu {rank}: nchunksperloop={program.loop_chunks} means that "
                        f"an {'input' if letter == 'i' else 'output'} of {COLLECTIVES[program.kind]} has {n}",
                        gpu.line,
                    )

    def _check_dependency(self, gpu: MscclGpu, number: int, index: int, step: MscclStep) -> None:
        if step.depends is None:
            return
        tb, s = step.depends
        if tb >= len(gpu.blocks) or s >= len(gpu.blocks[tb].steps):
            raise self._error(f"depid={tb}, deps={s}: this gpu has no such step", step.line)
        awaited = gpu.blocks[tb].steps[s]
        if tb == number and s >= index:
            what = f"depid={tb}, deps={s}: the step waits for itself, or for a later one of its thread block"
            raise self._error(what, step.line)
        if awaited.type == "nop" or not awaited.awaited:
            raise self._error(
                f'depid={tb}, deps={s}: that step (line {awaited.line}) has hasdep="0" or is a nop, so nothing signals when it '
                "is done and this one would wait forever",
                step.line,
            )

    def _check_cells(self, gpu: MscclGpu, rank: int, index: int, step: MscclStep) -> None:
        for letter, offset in own_cells(step):
            if offset < 0 or offset + step.count > gpu.chunks[letter]:
                raise self._error(
                    f'step {index}, type="{step.type}": chunks {offset} to {offset + step.count - 1} of "{letter}" do not '
                    f"exist: {letter}_chunks={gpu.chunks[letter]} on gpu {rank}",
                    step.line,
                )

    # ------------------------------------------------------------ attributes

    @property
    def _line(self) -> int:
        return self.parser.CurrentLineNumber

    def _text(self, attribute: str) -> str:
        value = self.attributes.get(attribute)
        if value is None:
            self._fail(f"{self.element} has no attribute {attribute}")
        return value

    def _integer(self, attribute: str, least: int, most: int = 10**9, default: int | None = None) -> int:
        if default is not None and attribute not in self.attributes:
            return default
        text = self._text(attribute)
        value = int(text) if _INTEGER.fullmatch(text) else most + 1
        if not least <= value <= most:
            self._fail(f"{attribute}={text!r:.40} of {self.element} must be an integer from {least} to {most}")
        return value

    def _fail(self, what: str) -> NoReturn:
        raise self._error(what, self._line)

    def _error(self, what: str, line: int) -> ScheduleError:
        return ScheduleError(f"MSCCL XML, line {line}: {what}.", Source(self.name, line, "MSCCL XML"))
