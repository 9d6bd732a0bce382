"""A schedule: the moves that take a collective's precondition to its postcondition, built by an algorithm."""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ..core.display import html_table, titled
from ..errors import MissingPackageError, ScheduleError, Source
from .collective import Collective, check_count, check_pairs
from .columns import check_batches
from .host_map import check_host_map, default_levels, levels_of
from .moves import Batch, MoveList, Places, encode
from .registry import Algorithm, find, known

if TYPE_CHECKING:
    from ..draw.drawing import Drawing
    from .model.cost import Cost
    from .model.simulate import Simulation
    from .model.topology import Topology
    from .proof.prove import Proof
    from .streams.streams import Streams

__all__ = ["Schedule", "build"]

_PICTURE = 60_000
"""The most characters of a picture in a notebook's view."""
_LIBRARY = os.path.join(os.path.dirname(os.path.abspath(__file__)), "library", "")


@dataclass(frozen=True, eq=False)
class Schedule:
    """Moves in program order, in rounds whose moves happen at the same time. Made by `build`.

    Raises ScheduleError for columns that do not fit each other, and for places that do not exist.
    """

    collective: Collective
    algorithm: str
    batches: tuple[Batch, ...]
    scratch_chunks: int = 0
    host_map: tuple[int, ...] | None = None
    """The host of each rank that a hierarchical algorithm was built for."""

    def __post_init__(self) -> None:
        check_batches(self.batches, self.places, self.algorithm)

    def __getstate__(self) -> dict[str, Any]:
        fields = ("collective", "algorithm", "batches", "scratch_chunks", "host_map")  # cached values are made again
        return {name: getattr(self, name) for name in fields}

    @property
    def kind(self) -> str:
        """The collective's name."""
        return self.collective.kind

    @property
    def nranks(self) -> int:
        """The number of ranks."""
        return self.collective.nranks

    @property
    def levels(self) -> tuple[int, int] | None:
        """(hosts, ranks per host) of a hierarchical algorithm, where hosts are equal and in the order of ranks."""
        return levels_of(self.host_map)

    @property
    def channels(self) -> int:
        """Streams of each rank, which work on separate parts of the data."""
        return self.collective.channels

    @functools.cached_property
    def places(self) -> Places:
        """The numbering of the places in the columns."""
        return Places(self.collective, self.scratch_chunks)

    @functools.cached_property
    def moves(self) -> MoveList:
        """The single moves, made from the columns when they are read."""
        return MoveList(self.batches, self.places)

    @functools.cached_property
    def nrounds(self) -> int:
        """The number of rounds the algorithm yields.

        Messages may have more, because a move that reads from and writes to other ranks takes two, or fewer, because
        independent rounds are joined (`Streams.rounds`).
        """
        return 1 + max((b.round for b in self.batches), default=-1)

    @functools.cached_property
    def digest(self) -> str:
        """A sha256 of the collective and the moves."""
        found = hashlib.sha256(repr(self.collective).encode())
        for batch in self.batches:
            found.update(repr((batch.dst.shape, batch.src.shape, batch.round)).encode())
            for column in (batch.dst, batch.src, batch.count, batch.by):
                found.update(column.tobytes())
        return found.hexdigest()

    def prove(self) -> Proof:
        """Prove that the moves take the precondition to the postcondition; raises ScheduleError with what is wrong.

        Every output chunk holds exactly what it must, each contribution exactly once; reductions are combined in the
        same order for all ranks; nothing is read before it is written. The result is kept.
        """
        return self._proof

    @functools.cached_property
    def _proof(self) -> Proof:
        from .proof.prove import prove

        return prove(self)

    def streams(self, hosts: Sequence[int] = ()) -> Streams:
        """The proved schedule lowered to one instruction stream per rank and channel. The result is kept.

        `hosts` are those of the ranks, where they are several: what crosses from one to another is a message. The streams'
        `schedule` is then this one, cut at the borders of hosts, with one stream for each rank. Raises ScheduleError for a
        number of hosts that is not the number of ranks.
        """
        key = tuple(hosts) if len(set(hosts)) > 1 else ()
        if key not in self._streams:
            from .streams.lower import lower

            self.prove()
            self._streams[key] = lower(self, key)
        return self._streams[key]

    @functools.cached_property
    def _streams(self) -> dict[tuple[int, ...], Streams]:
        return {}

    def messages(self) -> Streams:
        """The streams of ranks without common memory: each is a host of its own, and all that moves between ranks is a message.

        A stream is then rounds of nonblocking sends and receives, with combines between them, for transports such as NCCL.
        """
        return self.streams(range(self.nranks))

    def cost(self, topology: Topology, nbytes: int) -> Cost:
        """The α-β-γ cost of one execution; see `funccoll.schedules.model.cost`."""
        from .model.cost import cost

        return cost(self, topology, nbytes)

    def simulate(
        self,
        topology: Topology,
        nbytes: int,
        *,
        slow_ranks: Mapping[int, float] | None = None,
        slow_links: Mapping[tuple[int, int], float] | None = None,
        lost_links: Iterable[tuple[int, int]] = (),
    ) -> Simulation:
        """Run the streams on a model of the machine; `nbytes` are those of the larger of one rank's input and output.

        What if: `slow_ranks` {rank: factor}, `slow_links` {(source, destination): factor} take factor times as long;
        `lost_links` [(source, destination), ...] carry nothing. The first simulation in a process takes some tenths
        of a second longer (Numba); the first on a machine, some seconds. See
        `funccoll.schedules.model.simulate`.
        """
        from .model.simulate import simulate

        return simulate(self, topology, nbytes, slow_ranks=slow_ranks, slow_links=slow_links, lost_links=lost_links)

    def draw(self, kind: str = "space_time", **options: Any) -> Drawing:
        """Draw the schedule: "space_time", "link_matrix" or "chunk_table", by `fc.draw`'s function of that name."""
        from ..draw import draw_schedule

        return draw_schedule(self, kind, **options)

    def to_msccl_xml(self) -> str:
        """The proved schedule as XML for MSCCL's runtimes (Azure/msccl-executor-nccl, RCCL).

        Each channel has on each rank one thread block for each direction of each connection, and one for local work. A rooted
        collective also has the attribute `root`, which runtimes ignore. Raises ScheduleError for a collective that MSCCL does
        not have, and above the runtimes' limits (steps, thread blocks). `fc.schedules.from_msccl_xml` reads it.
        """
        from .export.msccl_export import to_msccl_xml

        return to_msccl_xml(self)

    def to_goal(self, nbytes: int, *, gamma: float = 1e-10) -> str:
        """The proved schedule in GOAL, the input of LogGOPSim (its txt2bin reads the text).

        `nbytes` are those of the larger of one rank's input and output; a combine is a `calc` of `gamma` seconds for each
        reduced byte, in whole nanoseconds; an empty message has one byte. Raises ScheduleError for bytes that the blocks do not
        divide. Source: see `funccoll.schedules.export.goal`.
        """
        from .export.goal import to_goal

        return to_goal(self, nbytes, gamma)

    def to_json(self) -> str:
        """The schedule as JSON, which `fc.schedules.from_json` reads; see `funccoll.schedules.export.json_schedule`."""
        from .export.json_schedule import to_json

        return to_json(self)

    def to_perfetto(self, path: str | os.PathLike[str] | None, topology: Topology, nbytes: int) -> str:
        """The timeline of a simulation for Perfetto and chrome://tracing: `simulate(...).timeline().to_perfetto(path)`."""
        return self.simulate(topology, nbytes).timeline().to_perfetto(path)

    def _repr_html_(self) -> str:
        head = ("algorithm", "ranks", "rounds", "moves", "chunks per block", "scratch chunks", "channels")
        numbers = (self.nranks, self.nrounds, len(self.moves), self.collective.chunks, self.scratch_chunks, self.channels)
        table = html_table(head, [(self.algorithm, *(f"{n:,}" for n in numbers))], right=head[1:])
        return titled(str(self.collective), table + self._picture())

    def _picture(self) -> str:
        """The space-time diagram as SVG, where it is small; else how to see it."""
        picture = ""
        if self.nranks <= 8 and self.nrounds <= 16:
            try:
                picture = self.draw().inline_svg()
            except MissingPackageError:
                return "<div>For pictures: pip install 'funccoll[draw]'.</div>"
        return picture if 0 < len(picture) <= _PICTURE else "<div>Its moves as a picture: .draw()</div>"

    def __repr__(self) -> str:
        moves = sum(len(b) for b in self.batches)
        parts = self.collective.chunks
        return (
            f"<Schedule {self.algorithm} for {self.collective}: {self.nrounds} round{'s' if self.nrounds != 1 else ''}, "
            f"{moves:,} move{'s' if moves != 1 else ''}, {parts} chunk{'s' if parts != 1 else ''} per block"
            f"{f', {self.channels} channels' if self.channels > 1 else ''}"
            f"{self._hosts_text()}>"
        )

    def _hosts_text(self) -> str:
        if self.host_map is None:
            return ""
        if self.levels:
            return f", levels {self.levels[0]} × {self.levels[1]}"
        return f", hosts {self.host_map}" if self.nranks <= 16 else f", {1 + max(self.host_map)} hosts"


def build(
    kind: str,
    nranks: int,
    algorithm: str | None = None,
    *,
    channels: int = 1,
    root: int = 0,
    chunks: int | None = None,
    hosts: int | Sequence[int] | None = None,
    levels: tuple[int, int] | None = None,
    pairs: Sequence[tuple[int, int]] = (),
) -> Schedule:
    """Build the schedule of a collective on `nranks` ranks by one algorithm (None: the kind's first).

    `channels` independent streams per rank each run the whole algorithm on their part of the data. `chunks` is the
    number of chunks of a block in a pipelined algorithm, `pairs` the (source, destination) ranks of a permute. `hosts` is the
    host of each rank, for a hierarchical algorithm, such as (0, 0, 1, 1), or a number of equal hosts in the order of ranks;
    `levels=(hosts, ranks per host)` is short for these, by default the factors of p nearest to √p, fewer hosts than ranks in
    each. Raises ScheduleError for an unknown collective or algorithm (with the names that exist), a number of ranks
    that it cannot run on, a root that is not a rank, and moves with places that do not exist.
    """
    Collective(kind, nranks, root, check_pairs(pairs)).check()
    nranks, root = int(nranks), int(root)  # NumPy's integers may be narrow
    collective = Collective(kind, nranks, root, check_pairs(pairs))
    found = find(kind, algorithm, nranks, root)
    host_map = _host_map(found, nranks, hosts, levels)
    if chunks is not None and "chunks" not in found.options:
        raise ScheduleError(
            f"{kind} algorithm {found.name!r} has its own number of chunks, {found.default_chunks(nranks, host_map)} for "
            f"{nranks} ranks; chunks={chunks!r} was given. {_takers(kind, 'chunks')}"
        )
    channels = check_count(channels, f"{kind}: channels")
    chunks = check_count(found.default_chunks(nranks, host_map) if chunks is None else chunks, f"{kind}: chunks")
    collective = replace(collective, chunks=chunks)
    given = {
        "root": root,
        "chunks": collective.chunks,
        "hosts": host_map,
        "levels": levels_of(host_map),
        "pairs": collective.pairs,
    }
    arguments = {name: value for name, value in given.items() if name in found.options}
    return _assemble(collective, found, tuple(_rounds(found, collective, arguments)), channels, host_map)


def _host_map(found: Algorithm, nranks: int, hosts: Any, levels: Any) -> tuple[int, ...] | None:
    """The host of each rank for a hierarchical algorithm, None for others. Raises ScheduleError."""
    if not found.is_hierarchical:
        for option, value in (("hosts", hosts), ("levels", levels)):
            if value is not None:
                raise ScheduleError(
                    f"{found.kind} algorithm {found.name!r} has no {option}; {option}={value!r} was given. "
                    f"{_takers(found.kind, 'hosts', 'levels')}"
                )
        return None
    host_map = check_host_map(hosts, default_levels(nranks) if hosts is None and levels is None else levels, nranks)
    if "levels" in found.options and levels_of(host_map) is None:
        raise ScheduleError(
            f"{found.kind} algorithm {found.name!r} takes levels: equal hosts in the order of ranks, and "
            f"hosts={host_map!r:.80} was given. With a parameter `hosts` in place of `levels` it gets the host of each rank."
        )
    return host_map


def _takers(kind: str, *options: str) -> str:
    """Sentence that names the algorithms which take one of the options."""
    names = ", ".join(a.name for a in known(kind) if a.options.intersection(options)) or "none"
    return f"Of {kind}'s algorithms these take {options[-1]}: {names}. Your own takes it as a parameter of that name."


def _rounds(found: Algorithm, collective: Collective, arguments: dict[str, Any]) -> Iterator[Batch]:
    """Batches of the moves that the algorithm yields, each with the line of its yield."""
    generator = found.function(collective.nranks, **arguments)
    if not hasattr(generator, "gi_frame"):
        raise ScheduleError(
            f"{collective.kind} algorithm {found.name!r} is not a generator function: it must `yield` Moves, and it returned "
            f"{generator!r:.60}.",
            found.source,
        )
    for number, step in enumerate(generator):
        source = _line(generator)
        for move in step if isinstance(step, (list, tuple)) else (step,):
            batch = encode(move, collective, number, source)
            if batch is not None:
                yield batch


def _line(generator: Any) -> Source | None:
    """The line of the yield that a generator stands at: under `yield from`, the innermost one outside of the library.

    For the library's own algorithms it is the line of the algorithm, which tells more than one in the combinators.
    """
    lines = []
    while getattr(generator, "gi_frame", None) is not None:
        code = generator.gi_code
        lines.append(Source(code.co_filename, generator.gi_frame.f_lineno, code.co_name))
        generator = generator.gi_yieldfrom
    users = [line for line in lines if not line.file.startswith(_LIBRARY)]
    return (users or lines[::-1])[-1]


def _assemble(
    collective: Collective, found: Algorithm, batches: tuple[Batch, ...], channels: int, hosts: tuple[int, ...] | None
) -> Schedule:
    p = collective.nranks
    first = Places(collective).first_row("scratch")
    last = max((int((b.count + side.max(axis=1) // p).max()) for b in batches for side in (b.dst, b.src)), default=0)
    scratch = max(0, last - first)
    if channels == 1:
        return Schedule(collective, found.name, batches, scratch, hosts)
    whole = replace(collective, channels=channels)
    widths = (collective.input_chunks, collective.output_chunks, scratch)
    copies = []
    for batch in batches:
        for channel in range(channels):
            shift = _channel_shift(widths, channels, channel)
            moved = {n: _shifted(getattr(batch, n), shift, p) for n in ("dst", "src")}
            copies.append(replace(batch, channel=channel, **moved))
    return Schedule(whole, found.name, tuple(copies), scratch * channels, hosts)


def _channel_shift(widths: tuple[int, int, int], channels: int, channel: int) -> np.ndarray:
    """Offsets to add to each row of the one-channel schedule."""
    shifts = []
    before = 0
    for width in widths:
        shifts.append(np.full(width, (channels - 1) * before + channel * width))
        before += width
    return np.concatenate(shifts)


def _shifted(codes: np.ndarray, shift: np.ndarray, p: int) -> np.ndarray:
    rows = codes // p
    wide = codes + shift[rows] * p
    return wide.astype(codes.dtype) if wide.max(initial=0) < np.iinfo(codes.dtype).max else wide
