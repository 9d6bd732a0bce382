"""The machine of the cost model: ranks on hosts or on a torus, and the costs of messages and reductions there."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from ...core.display import html_table, seconds_text, titled
from ...core.keyword_errors import renamed
from ...core.machine_profile import HostParameters, NetworkParameters, current
from ...core.mesh import check_hosts
from ...errors import ScheduleError

__all__ = ["Link", "Topology", "check_topology"]


@dataclass(frozen=True)
class Link:
    """A class of links. A message of n bytes takes alpha + n·beta seconds.

    Source: Hockney, Parallel Computing 20, 1994.

    Args:
        name: A name, for tables.
        alpha: The latency of a message, in seconds.
        beta: The seconds per byte.
        shared: True for memory that all ranks read and write: nothing has to be forwarded.

    Raises:
        ScheduleError: If a time is negative or not finite.

    Example:
        >>> print(fc.schedules.Link("my network", alpha=5e-6, beta=1 / 12.5e9))
        my network (5 µs, 12.5 GB/s)
    """

    name: str
    alpha: float
    beta: float
    shared: bool = False
    """True for memory that all ranks read and write: nothing has to be forwarded."""

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise ScheduleError(f"a link's name must be a string, not {self.name!r:.40}.")
        for what, unit in (("alpha", "seconds"), ("beta", "seconds per byte")):
            _check_time(f"link {self.name!r}", what, getattr(self, what), unit)

    def __str__(self) -> str:
        return f"{self.name} ({seconds_text(self.alpha)}, {_rate(self.beta)})"


def _rate(seconds_per_byte: float) -> str:
    return f"{1e-9 / seconds_per_byte:.3g} GB/s" if seconds_per_byte else "no time per byte"


@dataclass(frozen=True, repr=False)
class Topology:
    """A model of the machine: ranks on hosts, and the costs of messages and reductions there. Plain, hashable values.

    Two ranks of one host communicate over `host`, others over `network`. Work on a rank's own memory costs only `gamma`.
    Contention inside a network is not modelled. The ports of ranks and hosts are: see `cost` and `simulate`. The classmethods
    are presets. Their figures are typical ones, to compare algorithms by. Pass your own Links for a machine you measured.

    Args:
        name: A name, for tables.
        hosts: The number of hosts.
        ranks_per_host: The number k of ranks on each host: rank r is device r mod k of host r // k. With `placement`, the
            largest number.
        host: The link between ranks of one host.
        network: The link between hosts.
        gamma: The seconds per byte reduced.
        shape: The sizes of a torus of hosts with one device each, in row-major order. There alpha counts once per hop and beta
            once. Messages that cross the same wire do not slow each other.
        start: The seconds that are added to every collective.
        memory: True if nothing is a message inside a host. Then there are no ports. A rank pays alpha once for each round in
            which it reads what another rank has written (inputs are there from the start). It pays beta for every byte that it
            reads and writes, also in its own memory.
        caches: Pairs (bytes, excess). The part of one rank's data (input and output) that does not fit into `bytes` takes
            `excess` times beta and gamma more per byte (see `factor`).
        placement: The host of each rank, if hosts have different numbers of ranks, or ranks have another order.
        one_port: True if the ranks of a host share one port to the network. The bytes of their messages then follow one
            another.

    Raises:
        ScheduleError: If a size is below 1, or a time is negative or not finite.

    Example:
        >>> print(fc.schedules.Topology.nvlink_infiniband(2))
        <Topology nvlink_infiniband: 2 hosts × 8 devices, NVLink (3.4 µs, 450 GB/s), InfiniBand (14 µs, 50 GB/s)>
    """

    name: str
    hosts: int
    ranks_per_host: int
    host: Link
    network: Link
    gamma: float
    shape: tuple[int, ...] = ()
    start: float = 0.0
    memory: bool = False
    caches: tuple[tuple[float, float], ...] = ()
    placement: tuple[int, ...] = ()
    one_port: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not isinstance(self.shape, tuple):
            raise ScheduleError(f"topology {self.name!r:.40}: its name must be a string, its shape a tuple.")
        for what in ("hosts", "ranks_per_host"):
            _check_size(self.name, what, getattr(self, what))
            object.__setattr__(self, what, int(getattr(self, what)))  # NumPy's integers may be narrow
        for size in self.shape:
            _check_size(self.name, "every size in shape", size)
        for what in ("host", "network"):
            if not isinstance(getattr(self, what), Link):
                raise ScheduleError(f"topology {self.name}: {what}={getattr(self, what)!r} must be a Link(name, alpha, beta).")
        self._check_placement()
        _check_time(f"topology {self.name}", "gamma", self.gamma, "seconds per byte")
        _check_time(f"topology {self.name}", "start", self.start, "seconds")
        for nbytes, excess in self.caches:
            if not nbytes > 0 or not 0 <= excess < math.inf:
                raise ScheduleError(
                    f"topology {self.name}: caches={self.caches!r:.80} must be pairs of bytes, more than 0, and an excess, "
                    "finite and at least 0."
                )
        if self.shape and (self.ranks_per_host != 1 or math.prod(self.shape) != self.hosts):
            raise ScheduleError(
                f"topology {self.name}: a torus of shape {self.shape} has {math.prod(self.shape)} hosts of 1 device each; "
                f"hosts={self.hosts} and ranks_per_host={self.ranks_per_host} were given."
            )

    def _check_placement(self) -> None:
        """Check the placement and number its hosts. If `hosts` and `ranks_per_host` already describe it, it becomes ()."""
        if not self.placement:
            return
        placed = check_hosts(self.placement, len(self.placement), "ranks", ScheduleError) or (0,) * len(self.placement)
        size = np.bincount(placed)
        if self.shape or (self.hosts, self.ranks_per_host) != (len(size), size.max()):
            raise ScheduleError(
                f"topology {self.name}: placement={self.placement!r:.60} is {len(size)} hosts with at most {size.max()} ranks; "
                f"hosts={self.hosts}, ranks_per_host={self.ranks_per_host}"
                f"{f' and shape={self.shape}' if self.shape else ''} were given."
            )
        regular = placed == tuple(np.repeat(np.arange(self.hosts), self.ranks_per_host).tolist())
        object.__setattr__(self, "placement", () if regular else placed)

    # ---------------------------------------------------------------- presets

    @classmethod
    def one_process(cls, p: int) -> Topology:
        """Model p virtual devices in one process. A message is a copy by one thread.

        Args:
            p: The number of devices.

        Returns:
            A `Topology`.
        """
        link = Link("same process", 0.5e-6, 1 / 10e9, shared=True)
        return cls("one_process", 1, p, link, link, 1 / 10e9)

    @classmethod
    def one_host(cls, p: int) -> Topology:
        """Model p processes on one host that read and write shared memory.

        It has the figures that `funccoll tune` has measured on this host (in a job, on the host of rank 0). Without these, a
        core copies or reduces about 10 GB/s.

        Args:
            p: The number of processes.

        Returns:
            A `Topology`.
        """
        profile = current()
        if profile is None or not profile.parameters or p == 1:
            return cls("one_host", 1, p, _SHARED_MEMORY, _SHARED_MEMORY, _COPY)
        return cls.measured_host(p, profile.parameters_for(p))

    @classmethod
    def measured_host(cls, p: int, measured: HostParameters) -> Topology:
        """Model p processes on one host whose waits and memory were measured (`memory`, `caches`).

        Args:
            p: The number of processes.
            measured: The fitted parameters of a machine profile.

        Returns:
            A `Topology`.
        """
        link = Link("measured shared memory", measured.alpha, measured.beta, shared=True)
        return cls("one_host", 1, p, link, link, measured.gamma, start=measured.start, memory=True, caches=measured.caches)

    @classmethod
    def of_hosts(cls, hosts: Sequence[int]) -> Topology:
        """Model processes on several hosts: shared memory inside, and one port of each host to the network.

        It has the figures that `funccoll tune` has measured on several hosts (in a job, those of rank 0). Without these, a core
        copies or reduces about 10 GB/s, and 25 Gb/s Ethernet with TCP links the hosts.

        Args:
            hosts: The host of each rank: `hosts[r]` is that of rank r.

        Returns:
            A `Topology`.

        Example:
            >>> topology = fc.schedules.Topology.of_hosts((0, 0, 1))
            >>> print(topology.hosts, topology.ranks_per_host, topology.host_map)
            2 2 (0, 0, 1)
        """
        placed = _placed(hosts)
        if not placed:
            return cls.one_host(len(hosts))
        profile = current()
        network = None if profile is None else profile.network_for(placed)
        if profile is None or network is None:
            return cls._on_hosts(placed, _SHARED_MEMORY, _ETHERNET, _COPY)
        return cls.measured_hosts(placed, profile.parameters_for(int(np.bincount(placed).max())), network)

    @classmethod
    def measured_hosts(cls, hosts: Sequence[int], inside: HostParameters, network: NetworkParameters) -> Topology:
        """Model processes on several hosts whose memory and network were measured.

        Args:
            hosts: The host of each rank.
            inside: The fitted parameters of a host.
            network: The fitted parameters of the network.

        Returns:
            A `Topology`.
        """
        host = Link("measured shared memory", inside.alpha, inside.beta, shared=True)
        link = Link("measured network", network.alpha, network.beta)
        found = cls._on_hosts(_placed(hosts), host, link, inside.gamma)
        return replace(found, start=network.start, memory=True, caches=inside.caches)

    @classmethod
    def _on_hosts(cls, placed: tuple[int, ...], host: Link, network: Link, gamma: float) -> Topology:
        size = np.bincount(placed).tolist()
        return cls("hosts", len(size), max(size), host, network, gamma, placement=placed, one_port=True)

    @property
    def preset(self) -> Topology:
        """The same hosts with the presets' figures, if there are several hosts with measured ones. Else the topology itself."""
        if self.hosts == 1 or not self.memory:
            return self
        return Topology._on_hosts(tuple(self.host_of.tolist()), _SHARED_MEMORY, _ETHERNET, _COPY)

    @classmethod
    def one_gpu(cls, p: int) -> Topology:
        """Model p virtual devices that share one H100. Each moves 1/p of its memory's 3.35 TB/s.

        It takes 1 µs to see what another multiprocessor has written: an H200 takes 2.0 µs there and back.

        Args:
            p: The number of devices.

        Returns:
            A `Topology`.
        """
        link = Link("GPU memory", 1e-6, p / 3.35e12, shared=True)
        return cls("one_gpu", 1, p, link, link, 3 * p / 3.35e12)

    @classmethod
    def nvlink(cls, p: int) -> Topology:
        """Model p H100 of one host that map each other's memory over NVLink 4 (450 GB/s each way).

        It takes 2 µs to see what another GPU has written. This is assumed, not measured.

        Args:
            p: The number of GPUs.

        Returns:
            A `Topology`.
        """
        link = Link("NVLink memory", 2e-6, 1 / 450e9, shared=True)
        return cls("nvlink", 1, p, link, link, 3 / 3.35e12)

    @classmethod
    @renamed(each="ranks_per_host")
    def nvlink_infiniband(cls, hosts: int, ranks_per_host: int = 8) -> Topology:
        """Model H100 hosts: NVLink 4 (450 GB/s each way) inside, one 400 Gb/s InfiniBand port per GPU between them.

        Latencies per step are those of NCCL's own model (ring, simple protocol: `hwLatencies` in its tuning source). A
        reduction reads two operands and writes one at 3.35 TB/s.

        Args:
            hosts: The number of hosts.
            ranks_per_host: The number of GPUs on each host.

        Returns:
            A `Topology`.
        """
        return cls(
            "nvlink_infiniband",
            hosts,
            ranks_per_host,
            Link("NVLink", 3.4e-6, 1 / 450e9),
            Link("InfiniBand", 14e-6, 1 / 50e9),
            3 / 3.35e12,
        )

    @classmethod
    @renamed(each="ranks_per_host")
    def ethernet(cls, hosts: int, ranks_per_host: int = 1) -> Topology:
        """Model hosts on 25 Gb/s Ethernet with TCP (30 µs per message), and shared memory inside.

        Args:
            hosts: The number of hosts.
            ranks_per_host: The number of ranks on each host.

        Returns:
            A `Topology`.
        """
        return cls("ethernet", hosts, ranks_per_host, _SHARED_MEMORY, _ETHERNET, _COPY)

    @classmethod
    def torus(cls, *shape: int | Sequence[int]) -> Topology:
        """Model a torus of accelerators.

        A link has 50 GB/s in each direction and the memory 1.2 TB/s, as in TPU v4. 1 µs per hop is assumed. A rank has one port
        to send and one to receive, as everywhere in this model. A real torus has one in each direction, so algorithms that use
        several at once (bidirectional_ring) are better there than this model shows.

        Source: Jouppi et al., "TPU v4: An Optically Reconfigurable Supercomputer", ISCA 2023.

        Args:
            *shape: The sizes, as arguments or as one sequence: `torus(4, 4)`, `torus((4, 4))`.

        Returns:
            A `Topology`.
        """
        sizes: tuple[Any, ...] = shape
        if len(shape) == 1:
            with suppress(TypeError):  # one size
                sizes = tuple(shape[0])  # type: ignore[arg-type]
        if not sizes:
            raise ScheduleError(f"topology torus: shape={sizes!r} must be the torus's sizes, such as (4, 4, 4).")
        for size in sizes:
            _check_size("torus", "every size in shape", size)
        link = Link("torus hop", 1e-6, 1 / 50e9)
        return cls("torus", math.prod(sizes), 1, link, link, 3 / 1.2e12, sizes)

    @classmethod
    def uniform(cls, p: int, alpha: float, beta: float, gamma: float) -> Topology:
        """Model the textbooks' machine: p hosts with one device each. Every message costs alpha + n·beta.

        Args:
            p: The number of ranks.
            alpha: The latency of a message, in seconds.
            beta: The seconds per byte.
            gamma: The seconds per byte reduced.

        Returns:
            A `Topology`.

        Example:
            >>> topology = fc.schedules.Topology.uniform(4, alpha=1e-6, beta=1e-9, gamma=0.0)
            >>> print(fc.schedules.build("broadcast", 4, "binomial").cost(topology, 1000))
            <Cost 4 µs: 2 rounds, 2,000 bytes sent and 0 reduced per rank>
        """
        link = Link("uniform", alpha, beta)
        return cls("uniform", p, 1, link, link, gamma)

    # ---------------------------------------------------------------- queries

    def factor(self, nbytes: float) -> float:
        """Return how many times as long a byte takes because the data do not fit into the caches.

        Args:
            nbytes: The bytes of a rank's input and output together.

        Returns:
            A float of at least 1.
        """
        return 1 + sum(excess * (1 - held / nbytes) for held, excess in self.caches if nbytes > held)

    def at(self, nbytes: float) -> Topology:
        """Return the same machine without caches, and with the times per byte for a size of data.

        Args:
            nbytes: The bytes of a rank's input and output together.

        Returns:
            A `Topology`.
        """
        factor = self.factor(nbytes)
        if factor == 1.0:
            return self
        host = replace(self.host, beta=self.host.beta * factor)
        network = host if self.network == self.host else self.network  # caches are the hosts'
        return replace(self, host=host, network=network, gamma=self.gamma * factor, caches=())

    @property
    def nranks(self) -> int:
        """The number of ranks."""
        return len(self.placement) or self.hosts * self.ranks_per_host

    @property
    def each(self) -> int:
        """`ranks_per_host`, by its former name."""
        return self.ranks_per_host

    @property
    def host_map(self) -> tuple[int, ...] | None:
        """The host of each rank, for hierarchical algorithms. It is None on one host, and if no host has several ranks."""
        return tuple(self.host_of.tolist()) if self.hosts > 1 and self.ranks_per_host > 1 else None

    @cached_property
    def host_of(self) -> np.ndarray:
        """int64[nranks]: the host of each rank."""
        return np.array(self.placement) if self.placement else np.arange(self.nranks) // self.ranks_per_host

    @cached_property
    def times(self) -> tuple[np.ndarray, np.ndarray]:
        """(alpha, beta) by distance, float64[largest distance + 1] each; distance 0 is a rank's own memory."""
        if not self.shape:
            return np.array([0.0, self.host.alpha, self.network.alpha]), np.array([0.0, self.host.beta, self.network.beta])
        hops = np.arange(1 + sum(n // 2 for n in self.shape))
        return hops * self.network.alpha, np.where(hops, self.network.beta, 0.0)

    def distance(self, src: Any, dst: Any) -> np.ndarray:
        """Return the distance between ranks: 0 itself, 1 the same host, 2 another. On a torus it is the number of hops.

        Args:
            src: Ranks, as integers or integer arrays.
            dst: Ranks. Both broadcast.

        Returns:
            An integer array.

        Example:
            >>> print(fc.schedules.Topology.torus(4).distance(0, np.arange(4)))
            [0 1 2 1]
        """
        src, dst = np.asarray(src), np.asarray(dst)
        if not self.shape:
            return (src != dst).astype(np.int64) + (self.host_of[src] != self.host_of[dst])
        hops = np.zeros(np.broadcast_shapes(src.shape, dst.shape), np.int64)
        for size in reversed(self.shape):
            distance = np.abs(src % size - dst % size)
            hops += np.minimum(distance, size - distance)
            src, dst = src // size, dst // size
        return hops

    def links(self, src: Any, dst: Any) -> tuple[np.ndarray, np.ndarray]:
        """Return (alpha, beta) of messages between ranks, in seconds and seconds per byte. Both are 0 from a rank to itself.

        Args:
            src: The sending ranks, as integers or integer arrays.
            dst: The receiving ranks. Both broadcast.

        Returns:
            Two float arrays.

        Example:
            >>> alpha, beta = fc.schedules.Topology.ethernet(2).links(0, np.array([0, 1]))
            >>> print(alpha, beta)
            [0.e+00 3.e-05] [0.0e+00 3.2e-10]
        """
        distance = self.distance(src, dst)
        alpha, beta = self.times
        return alpha[distance], beta[distance]

    def _size(self) -> str:
        if self.shape:
            return f"{' × '.join(map(str, self.shape))} torus"
        counted = ((self.hosts, "host"), (self.ranks_per_host, "device"))
        hosts, ranks_per_host = (f"{n} {what}{'s' if n > 1 else ''}" for n, what in counted)
        if not self.placement:
            return f"{hosts} × {ranks_per_host}"
        return f"{hosts} with {' + '.join(map(str, np.bincount(self.placement)))} devices"

    def _used(self) -> list[tuple[str, Link]]:
        """Return the classes of links that occur, each with the text of its place."""
        inside = [("same host", self.host)] if self.ranks_per_host > 1 else []
        return inside + ([("per hop" if self.shape else "between hosts", self.network)] if self.hosts > 1 else [])

    def __repr__(self) -> str:
        links = ", ".join(str(link) for _, link in self._used())
        return f"<Topology {self.name}: {self._size()}{', ' if links else ''}{links}>"

    def _repr_html_(self) -> str:
        rows = [(where, k.name, seconds_text(k.alpha), _rate(k.beta)) for where, k in self._used()]
        rows.append(("reduction", "", "", _rate(self.gamma)))
        table = html_table(("", "link", "latency", "bandwidth"), rows, right=("latency", "bandwidth"))
        return titled(f"{self.name}: {self._size()}", table)


Topology.__init__ = renamed(each="ranks_per_host")(Topology.__init__)


def check_topology(topology: Any, nranks: int | None = None) -> None:
    """Raise ScheduleError unless `topology` is a Topology, and has `nranks` ranks if you give them."""
    if not isinstance(topology, Topology):
        raise ScheduleError(f"topology={topology!r:.60} must be a Topology, such as Topology.one_host({nranks or 8}).")
    if nranks is not None and nranks != topology.nranks:
        raise ScheduleError(f"the schedule is for {nranks} ranks, and {topology!r} has {topology.nranks}. Make them agree.")


def _check_size(topology: str, what: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
        raise ScheduleError(f"topology {topology}: {what} must be an integer, at least 1, not {value!r}.")


def _check_time(where: str, what: str, value: Any, unit: str) -> None:
    number = isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)
    if not number or not 0 <= value < math.inf:
        raise ScheduleError(f"{where}: {what}={value!r} must be a number of {unit}, finite and at least 0.")


def _placed(hosts: Sequence[int]) -> tuple[int, ...]:
    return check_hosts(hosts, len(hosts), "ranks", ScheduleError)


_SHARED_MEMORY = Link("shared memory", 0.2e-6, 1 / 10e9, shared=True)
_ETHERNET = Link("Ethernet", 30e-6, 1 / 3.125e9)
_COPY = 1 / 10e9
"""The seconds in which a core copies or reduces a byte."""
