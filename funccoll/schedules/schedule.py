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
from .moves import Batch, MoveList, Places, encode, mirrored
from .registry import Algorithm, find, known

if TYPE_CHECKING:
    from ..draw.drawing import Drawing
    from .model.cost import Cost
    from .model.simulate import Simulation
    from .model.topology import Topology
    from .proof.prove import Proof
    from .streams.streams import Streams

__all__ = ["Schedule", "build", "moves_of"]

_PICTURE = 60_000
"""The most characters of a picture in a notebook's view."""
_LIBRARY = os.path.join(os.path.dirname(os.path.abspath(__file__)), "library", "")


@dataclass(frozen=True, eq=False)
class Schedule:
    """Moves in program order, in rounds whose moves happen at the same time. `build` makes schedules.

    One and the same schedule is proved, costed, simulated, drawn and executed.

    Raises:
        ScheduleError: If the columns do not fit each other, or a place does not exist.

    Example:
        >>> schedule = fc.schedules.build("reduce_scatter", 4, "ring")
        >>> print(schedule)
        <Schedule ring for reduce_scatter on 4 ranks: 3 rounds, 12 moves, 1 chunk per block>
        >>> print(schedule.prove())
        <Proof of ring for reduce_scatter on 4 ranks: 4 output chunks, 8 partial results>
    """

    collective: Collective
    """The collective that the moves implement."""
    algorithm: str
    """The algorithm's name."""
    batches: tuple[Batch, ...]
    """The moves, as integer columns."""
    scratch_chunks: int = 0
    """The number of chunks of scratch on each rank."""
    host_map: tuple[int, ...] | None = None
    """The host of each rank that a hierarchical algorithm was built for."""

    def __post_init__(self) -> None:
        check_batches(self.batches, self.places, self.algorithm)

    def __getstate__(self) -> dict[str, Any]:
        fields = ("collective", "algorithm", "batches", "scratch_chunks", "host_map")  # cached values are computed again
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
        """(hosts, ranks per host) of a hierarchical algorithm, if hosts are equal and in the order of ranks."""
        return levels_of(self.host_map)

    @property
    def channels(self) -> int:
        """The number of streams of each rank. They work on separate parts of the data."""
        return self.collective.channels

    @functools.cached_property
    def places(self) -> Places:
        """The numbering of the places in the columns."""
        return Places(self.collective, self.scratch_chunks)

    @functools.cached_property
    def moves(self) -> MoveList:
        """The single moves. They are made from the columns when you read them."""
        return MoveList(self.batches, self.places)

    @functools.cached_property
    def nrounds(self) -> int:
        """The number of rounds the algorithm yields.

        Messages may have more, because a move that reads from and writes to other ranks takes two. They may have fewer, because
        independent rounds are joined (`Streams.rounds`).
        """
        return 1 + max((b.round for b in self.batches), default=-1)

    @functools.cached_property
    def digest(self) -> str:
        """A sha256 of the collective and the moves."""
        found = hashlib.sha256(f"{self.collective!r}{' reverse' if self.collective.reverse else ''}".encode())
        for batch in self.batches:
            found.update(repr((batch.dst.shape, batch.src.shape, batch.round)).encode())
            for column in (batch.dst, batch.src, batch.count, batch.by):
                found.update(column.tobytes())
        return found.hexdigest()

    def prove(self) -> Proof:
        """Prove that the moves take the precondition to the postcondition. The result is kept.

        Every output chunk holds exactly what it must, each contribution exactly once. Reductions are combined in the same order
        for all ranks. Nothing is read before it is written.

        Returns:
            A `Proof`, with the expression of every output chunk.

        Raises:
            ScheduleError: If something is wrong. The message names the move, its line, and the rank and chunk.

        Example:
            >>> print(fc.schedules.build("all_reduce", 3).prove().text(rank=0))
            output[0]@0 = x0[0] + x1[0] + x2[0]
            output[1]@0 = x0[1] + x1[1] + x2[1]
            output[2]@0 = x0[2] + x1[2] + x2[2]
        """
        return self._proof

    @functools.cached_property
    def _proof(self) -> Proof:
        from .proof.prove import prove

        return prove(self)

    def streams(self, hosts: Sequence[int] = ()) -> Streams:
        """Prove the schedule and lower it to one instruction stream per rank and channel. The result is kept.

        Args:
            hosts: The host of each rank, if there are several hosts. Data cross from one host to another as messages. The
                streams' `schedule` is then this one, cut at the borders of hosts, with one stream for each rank.

        Returns:
            `Streams`.

        Raises:
            ScheduleError: If the proof fails, or `hosts` does not have one host for each rank.

        Example:
            >>> print(fc.schedules.build("all_gather", 2).streams().text(rank=0))
            rank 0, instruction 0: enter
            rank 0, instruction 1: output[0]@0 := input[0]@0 (...)
            rank 0, instruction 2: output[1]@0 := input[0]@1 (...)  after instruction 0 of rank 1
            rank 0, instruction 3: leave  after instruction 2 of rank 1
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
        """Return the streams of ranks without common memory: each rank is a host of its own, and data move as messages.

        A stream is then rounds of nonblocking sends and receives, with combines between them, for transports such as NCCL.

        Returns:
            `Streams`.

        Example:
            >>> print(fc.schedules.build("broadcast", 2).messages())
            <Streams of flat, 2 streams: 9 instructions, 0 waits>
        """
        return self.streams(range(self.nranks))

    def cost(self, topology: Topology, nbytes: int) -> Cost:
        """Compute the cost of one execution in the α-β-γ model; see `funccoll.schedules.model.cost`.

        Args:
            topology: The machine.
            nbytes: The bytes of the larger of one rank's input and output.

        Returns:
            An object with `seconds`, `rounds`, `bytes_sent` and `bytes_reduced`.

        Raises:
            ScheduleError: If the topology has another number of ranks, or `nbytes` is not positive.

        Example:
            >>> schedule = fc.schedules.build("all_reduce", 4, "ring")
            >>> print(schedule.cost(fc.schedules.Topology.ethernet(4), 1 << 20))
            <Cost 762 µs: 6 rounds, 1,572,864 bytes sent and 786,432 reduced per rank>
        """
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
        """Run the streams on a model of the machine; see `funccoll.schedules.model.simulate`.

        The first simulation in a process takes some tenths of a second longer, because Numba loads its code. The first on a
        machine takes some seconds.

        Args:
            topology: The machine.
            nbytes: The bytes of the larger of one rank's input and output.
            slow_ranks: From a rank to a factor: its work takes that many times as long.
            slow_links: From (source, destination) to a factor: messages there take that many times as long.
            lost_links: The (source, destination) pairs that carry nothing.

        Returns:
            A simulation with `seconds`, `finish` (the seconds at which each rank leaves), `stuck_ranks` and `timeline()`.

        Raises:
            ScheduleError: If the topology has another number of ranks, or a rank, link or factor does not exist.
        """
        from .model.simulate import simulate

        return simulate(self, topology, nbytes, slow_ranks=slow_ranks, slow_links=slow_links, lost_links=lost_links)

    def draw(self, kind: str = "space_time", **options: Any) -> Drawing:
        """Draw the schedule with `fc.draw`'s function of that name.

        Args:
            kind: "space_time", "link_matrix" or "chunk_table".
            **options: The options of that function.

        Returns:
            A `fc.draw.Drawing`.

        Raises:
            DrawingError: If there is no such drawing.

        Example:
            >>> print(fc.schedules.build("all_gather", 4, "ring").draw("chunk_table", theme="dark"))
            <Drawing: all_gather on 4 ranks: ring, 3 rounds, 1 chunk per block; .save("drawing.svg") writes it>
        """
        from ..draw import draw_schedule

        return draw_schedule(self, kind, **options)

    def to_msccl_xml(self) -> str:
        """Return the proved schedule as XML for MSCCL's runtimes (Azure/msccl-executor-nccl, RCCL). `from_msccl_xml` reads it.

        Each channel has on each rank one thread block for each direction of each connection, and one for local work. A rooted
        collective also has the attribute `root`, which runtimes ignore.

        Returns:
            The XML, a string.

        Raises:
            ScheduleError: If MSCCL does not have the collective, or the schedule exceeds the runtimes' limits (steps, thread
                blocks).
        """
        from .export.msccl_export import to_msccl_xml

        return to_msccl_xml(self)

    def to_goal(self, nbytes: int, *, gamma: float = 1e-10) -> str:
        """Return the proved schedule in GOAL, the input of LogGOPSim. Its txt2bin reads the text.

        A combine is a `calc`, in whole nanoseconds. An empty message has one byte.

        Source: see `funccoll.schedules.export.goal`.

        Args:
            nbytes: The bytes of the larger of one rank's input and output.
            gamma: The seconds for each reduced byte.

        Returns:
            The text.

        Raises:
            ScheduleError: If the number of blocks does not divide `nbytes`.

        Example:
            >>> print(fc.schedules.build("broadcast", 2).to_goal(8))
            num_ranks 2
            <BLANKLINE>
            rank 0 {
            l1: send 8b to 1 tag 0
            l2: calc 0
            }
            <BLANKLINE>
            rank 1 {
            l1: recv 8b from 0 tag 0
            }
        """
        from .export.goal import to_goal

        return to_goal(self, nbytes, gamma)

    def to_json(self) -> str:
        """Return the schedule as JSON. `from_json` reads it. The format is in `funccoll.schedules.export.json_schedule`.

        Returns:
            The JSON, a string.
        """
        from .export.json_schedule import to_json

        return to_json(self)

    def to_perfetto(self, path: str | os.PathLike[str] | None, topology: Topology, nbytes: int) -> str:
        """Write the timeline of a simulation for Perfetto and chrome://tracing.

        This is `simulate(topology, nbytes).timeline().to_perfetto(path)`.

        Args:
            path: The file to write, or None for no file.
            topology: The machine.
            nbytes: The bytes of the larger of one rank's input and output.

        Returns:
            The text of the trace.
        """
        return self.simulate(topology, nbytes).timeline().to_perfetto(path)

    def _repr_html_(self) -> str:
        head = ("algorithm", "ranks", "rounds", "moves", "chunks per block", "scratch chunks", "channels")
        numbers = (self.nranks, self.nrounds, len(self.moves), self.collective.chunks, self.scratch_chunks, self.channels)
        table = html_table(head, [(self.algorithm, *(f"{n:,}" for n in numbers))], right=head[1:])
        return titled(str(self.collective), table + self._picture())

    def _picture(self) -> str:
        """Return the space-time diagram as SVG if it is small, and else a hint how to see it."""
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
    reverse: bool = False,
) -> Schedule:
    """Build the schedule of a collective on `nranks` ranks by one algorithm.

    Args:
        kind: The collective's name.
        nranks: The number of ranks.
        algorithm: The algorithm's name, as `algorithms` lists them. None takes the first.
        channels: The number of independent streams per rank. Each runs the whole algorithm on its part of the data.
        root: The root of a rooted collective.
        chunks: The number of chunks of a block in a pipelined algorithm.
        hosts: The host of each rank, for a hierarchical algorithm, such as (0, 0, 1, 1). Or a number of equal hosts in the
            order of ranks.
        levels: Short for such `hosts`: (hosts, ranks per host). By default these are the factors of p nearest to √p, with fewer
            hosts than ranks in each.
        pairs: The (source, destination) ranks of a permute.
        reverse: True for a scan from the last rank to the first. It is the same algorithm, of ranks that are counted from the
            other end.

    Returns:
        A `Schedule`.

    Raises:
        ScheduleError: If the collective or the algorithm is unknown (the message names those that exist), it cannot run on this
            number of ranks, the root is not a rank, or a move has places that do not exist.

    Example:
        >>> print(fc.schedules.build("all_reduce", 4, "ring"))
        <Schedule ring for all_reduce on 4 ranks: 6 rounds, 24 moves, 4 chunks per block>
        >>> print(fc.schedules.build("broadcast", 2).moves)
        output[0]@0 := input[0]@0
        output[0]@1 := input[0]@0
    """
    channels = check_count(channels, f"{kind}: channels")
    found, collective, host_map, batches = _moves_of(kind, nranks, algorithm, root, chunks, hosts, levels, pairs, reverse)
    return _assemble(collective, found, tuple(batches), channels, host_map)


def moves_of(
    kind: str,
    nranks: int,
    algorithm: str,
    *,
    root: int = 0,
    chunks: int | None = None,
    hosts: int | Sequence[int] | None = None,
    pairs: Sequence[tuple[int, int]] = (),
    reverse: bool = False,
) -> tuple[Collective, Iterator[Batch]]:
    """Return the collective and the moves of a schedule, of one channel, each batch made when you read it.

    Arguments and errors are those of `build`.
    """
    _, collective, _, batches = _moves_of(kind, nranks, algorithm, root, chunks, hosts, None, pairs, reverse)
    return collective, batches


def _moves_of(
    kind: str,
    nranks: int,
    algorithm: str | None,
    root: int,
    chunks: int | None,
    hosts: int | Sequence[int] | None,
    levels: tuple[int, int] | None,
    pairs: Sequence[tuple[int, int]],
    reverse: bool,
) -> tuple[Algorithm, Collective, tuple[int, ...] | None, Iterator[Batch]]:
    """Return the algorithm, its collective, the host of each rank and the moves, after checks of the arguments of `build`."""
    Collective(kind, nranks, root, check_pairs(pairs), reverse=reverse).check()
    nranks, root = int(nranks), int(root)  # NumPy's integers may be narrow
    collective = Collective(kind, nranks, root, check_pairs(pairs))
    found = find(kind, algorithm, nranks, root)
    host_map = _host_map(found, nranks, hosts, levels)
    if chunks is not None and "chunks" not in found.options:
        raise ScheduleError(
            f"{kind} algorithm {found.name!r} has its own number of chunks, {found.default_chunks(nranks, host_map)} for "
            f"{nranks} ranks; chunks={chunks!r} was given. {_takers(kind, 'chunks')}"
        )
    chunks = check_count(found.default_chunks(nranks, host_map) if chunks is None else chunks, f"{kind}: chunks")
    collective = replace(collective, chunks=chunks)
    counted = check_host_map(host_map[::-1], None, nranks) if reverse and host_map else host_map
    given = {
        "root": root,
        "chunks": collective.chunks,
        "hosts": counted,
        "levels": levels_of(counted),
        "pairs": collective.pairs,
    }
    arguments = {name: value for name, value in given.items() if name in found.options}
    batches = _rounds(found, collective, arguments)
    if reverse:
        collective, batches = replace(collective, reverse=True), (mirrored(batch, nranks) for batch in batches)
    return found, collective, host_map, batches


def _host_map(found: Algorithm, nranks: int, hosts: Any, levels: Any) -> tuple[int, ...] | None:
    """Return the host of each rank for a hierarchical algorithm, and None for others. Raises ScheduleError."""
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
    """Return a sentence that names the algorithms which take one of the options."""
    names = ", ".join(a.name for a in known(kind) if a.options.intersection(options)) or "none"
    return f"Of {kind}'s algorithms these take {options[-1]}: {names}. Your own takes it as a parameter of that name."


def _rounds(found: Algorithm, collective: Collective, arguments: dict[str, Any]) -> Iterator[Batch]:
    """Yield batches of the moves that the algorithm yields, each with the line of its yield."""
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
    """Return the line of the yield at which a generator stands: under `yield from`, the innermost one outside of the library.

    For the library's own algorithms it is the line of the algorithm, which says more than one in the combinators.
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
    """Return the offsets to add to each row of the one-channel schedule."""
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
