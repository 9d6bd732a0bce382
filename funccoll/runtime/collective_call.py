"""Collectives of a program as transports execute them: each one call, with the operands of a rank or device."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..collectives.record import CollectivePrimitive, are_uneven, is_ragged, lowering, operands_of
from ..core.ir import Equation, Literal, Primitive, Program, Var
from ..core.mesh import Mesh, ReplicaGroups, copies_of_devices
from ..core.partition_spec import axes_in_words
from ..core.types import dtype_name
from ..errors import MeshError, Source, at_source

if TYPE_CHECKING:
    from ..collectives.pair_blocks import PairBlocks
    from ..schedules.chunk_layout import ChunkLayout
    from ..schedules.collective import Collective
    from ..schedules.schedule import Schedule

__all__ = ["NATIVE_ALGORITHMS", "NOTHING", "CollectiveCall", "CopyGroups", "Operand", "bind_arguments", "groups_of"]

NATIVE_ALGORITHMS = {
    "nccl": "NCCL's own collective, between GPUs of a job, one for each process",
    "mpi": "MPI's own collective, between processes of several hosts or with FUNCCOLL_TRANSPORT=mpi",
}
"""Algorithms that are a transport's own. No schedule describes them, so they are not proved. Name -> description."""


@dataclass(frozen=True)
class Operand:
    """One array of a collective: the shapes of a rank's input and output, and the dimensions that are cut and joined."""

    shape: tuple[int, ...]
    out_shape: tuple[int, ...]
    dtype: np.dtype
    dim: int = 0
    concat_dim: int = 0
    argument: int | None = None
    """The number of its input in an executable of several collectives (`bind_arguments`): argument `argument` of the
    executable, or result ~argument of it. None if no input is passed, as for a barrier."""
    source: Var | None = field(default=None, compare=False, repr=False)
    """The variable of the program that it reads."""
    result: Var | None = field(default=None, compare=False, repr=False)
    """The variable of the program that it makes."""
    is_ragged: bool = False
    """True if the blocks that move are found in each call (`CollectiveCall.blocks`)."""

    @property
    def variables(self) -> tuple[Var, Var]:
        """The variables of the program: (source, result)."""
        assert self.source is not None
        assert self.result is not None
        return self.source, self.result

    def reads_result(self, begin: int) -> bool:
        """True if it reads a result of the executable with a number of at least `begin`."""
        return self.argument is not None and ~self.argument >= begin

    @property
    def size(self) -> int:
        """Elements of the input."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the input."""
        return self.size * self.dtype.itemsize

    @property
    def out_nbytes(self) -> int:
        """Bytes of the output."""
        return math.prod(self.out_shape) * self.dtype.itemsize

    def layout(self, collective: Collective) -> ChunkLayout:
        """The chunks of its input and output in a collective. Those of a ragged one are as large as a block may become."""
        from ..schedules.chunk_layout import Blocks, ChunkLayout  # imported here: not every program needs schedules

        if self.is_ragged:
            most = max(1, min(self.size, math.prod(self.out_shape)))
            taken, given = (Blocks(1, blocks, most) for blocks in (collective.input_blocks, collective.output_blocks))
            return ChunkLayout(collective, self.dtype.itemsize, taken, given)
        return ChunkLayout.of(collective, self.shape, self.dtype.itemsize, self.dim, self.concat_dim)


class CopyGroups(NamedTuple):
    """The groups of a collective if one process plays all devices. It holds equal values of several devices once."""

    size: int
    """Distinct copies of the operand."""
    groups: tuple[tuple[int, ...], ...]
    """The copies that communicate, by rank: each is in one group."""
    results: tuple[tuple[int, int], ...]
    """By copy of the result: the group that makes it, and a rank that has it."""


def groups_of(eqn: Equation, mesh: Mesh) -> ReplicaGroups:
    """Return the groups of a mesh's devices that run one schedule in a collective.

    In groups of one size along the axes these are the groups. If sizes differ, one schedule is that of all groups.
    """
    groups = eqn.params.get("groups", ())
    return mesh.replica_groups(eqn.axes(), () if are_uneven(groups) else groups)


NOTHING = Operand((0,), (0,), np.dtype(np.uint8))
"""The operand of a barrier."""


@dataclass(frozen=True)
class CollectiveCall:
    """One collective with its proved schedule, over all groups of devices at once.

    The compiler builds it once from an equation. A transport derives from it whatever it executes.
    """

    groups: ReplicaGroups
    schedule: Schedule
    """The schedule. For a native collective it says what the collective computes."""
    op: str
    operands: tuple[Operand, ...]
    key: str
    """The text that must be equal on all ranks: the program's, and the place of the collective in it."""
    source: Source | None = None
    """The user's line."""
    native: str = ""
    """The name in NATIVE_ALGORITHMS if the transport itself executes it; empty for the schedule."""
    definition: Primitive | None = field(default=None, compare=False, repr=False)
    params: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)
    """The parameters of the definition's reference."""
    program: Program | None = field(default=None, compare=False, repr=False)
    """The program that contains it. The program's fingerprint begins the key."""
    argument_types: str = field(default="", compare=False, repr=False)
    """The types of the program's arguments, for errors. The key determines them."""
    table: Var | None = field(default=None, compare=False, repr=False)
    """The variable with the table of sizes, if the collective is ragged."""

    @classmethod
    def of_equation(
        cls, eqn: Equation, schedule: Schedule, key: str, mesh: Mesh, program: Program, argument_types: str
    ) -> CollectiveCall:
        """Return the call of an equation."""
        how, algorithm = lowering(eqn), eqn.params["algorithm"]
        ragged, cuts = is_ragged(eqn), (how.cut_dim, how.concat_dim)
        table = eqn.inputs[-1] if ragged else None
        assert not isinstance(table, Literal), "a literal is a scalar, and a table is not"
        operands = [
            Operand(how.input_shape(a.type.shape), out.type.shape, a.type.dtype, *cuts, None, a, out, ragged)
            for a, out in zip(operands_of(eqn), eqn.outputs, strict=True)
            if isinstance(a, Var)
        ]
        assert len(operands) == len(eqn.outputs), "an operand of a collective varies, and a literal does not"
        native = algorithm if algorithm in NATIVE_ALGORITHMS else ""
        params = {name: value for name, value in eqn.params.items() if name not in ("axes", "groups")}
        return cls(
            groups_of(eqn, mesh),
            schedule,
            how.op if operands else "or",
            tuple(operands) or (NOTHING,),
            f"{key} {native}".rstrip(),
            eqn.source,
            native,
            eqn.primitive,
            params,
            program,
            argument_types,
            table,
        )

    def __post_init__(self):
        assert self.groups.size == self.schedule.nranks, f"a schedule of {self.schedule.nranks} ranks for {self.groups.ranks}"

    def groups_of_copies(self, mesh: Mesh, varying: frozenset[str], out_varying: frozenset[str]) -> CopyGroups:
        """Return the groups of an operand's copies, if one process plays all devices. Operand and result vary over these axes.

        Raises MeshError for a device that is in no group, and for devices that have one copy and must have several.
        """
        copies, result_copies = copies_of_devices(mesh, varying), copies_of_devices(mesh, out_varying)
        numbers: dict[tuple[int, ...], int] = {}
        read: dict[int, tuple[int, int]] = {}
        made: dict[int, tuple[int, int]] = {}
        with at_source(self.source):
            for device in set(range(mesh.size)).difference(*self.groups.ranks):
                self.groups.of(device)
            for ranks in self.groups.ranks:
                number = numbers.setdefault(tuple([copies[device] for device in ranks]), len(numbers))
                for rank, device in enumerate(ranks):
                    place = number, rank
                    if read.setdefault(copies[device], place) != place:
                        raise self._are_one("operand", varying)
                    if made.setdefault(result_copies[device], place)[0] != number:
                        raise self._are_one("result", out_varying)
        return CopyGroups(len(read), tuple(numbers), tuple([made[copy] for copy in range(len(made))]))

    def _are_one(self, what: str, varying: frozenset[str]) -> MeshError:
        over = axes_in_words(sorted(varying)) if varying else "no axis"
        return MeshError(
            f"{self.name} in groups {self.groups.ranks!r:.200}: its {what} varies over {over} alone, so that devices of which "
            "these groups make different ones have one. Let it vary over more axes (fc.pvary)."
        )

    def blocks(self, table: np.ndarray) -> PairBlocks:
        """Return the blocks of a ragged collective, from the value of its table: the rows that move between ranks.

        Raises ShapeError if they do not fit. All ranks have the same table, so all raise, before anything moves.
        """
        assert isinstance(self.definition, CollectivePrimitive)
        assert self.definition.pairs is not None
        (operand,), combines = self.operands, self.schedule.collective.meaning.combines
        with at_source(self.source):
            found = self.definition.pairs[table.ndim](table, self.name)
            return found.checked(self.name, operand.shape[0], operand.out_shape[0], combines)

    @property
    def kind(self) -> str:
        """The collective's name, for the texts of errors."""
        return self.schedule.kind if self.table is None or self.definition is None else self.definition.name

    @property
    def along(self) -> tuple[tuple[int, ...], ...]:
        """The positions along the axes that communicate with each other; () if all of them do."""
        return self.groups.within or self.schedule.collective.groups

    @property
    def is_barrier(self) -> bool:
        """True for a collective that moves nothing."""
        return self.schedule.kind == "barrier"

    @property
    def name(self) -> str:
        """The collective and its axes, for the texts of errors."""
        return f"{self.kind} over {self.groups}"

    @property
    def fields(self) -> tuple[str, ...]:
        """The fields of a description: see `shm.plan.DESCRIPTION`."""
        shapes = ", ".join(str(list(o.shape)) for o in self.operands)
        dtypes = ", ".join(dtype_name(o.dtype) for o in self.operands)
        collective, line = self.schedule.collective, str(self.source) if self.source else ""
        op = self.op if collective.meaning.combines else ""
        over, algorithm = str(self.groups), self.schedule.algorithm
        return str(collective), op, shapes, dtypes, over, algorithm, line, self.key, self.argument_types

    def hash(self, segments: Sequence[Mapping[int, ChunkLayout]], is_shared: bool = False) -> int:
        """A hash of the call and of how its arrays are cut, odd. A rank publishes it when it enters, and peers compare it."""
        cut = [[(i, layout.ranges) for i, layout in segment.items()] for segment in segments]
        shared = " shared" if is_shared else ""
        text = f"{self.key} {self.schedule!r} {self.schedule.digest} {self.op} {self.operands} {cut}{shared}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "little") | 1


def bind_arguments(
    calls: Sequence[CollectiveCall],
) -> tuple[list[CollectiveCall], tuple[Var, ...], tuple[Var, ...]]:
    """(the calls with numbers for their operands, the variables that they read from outside, those they make).

    The numbers are for an executable of all the calls. Each variable is one argument, in the order of the first reads.
    """
    operands = [operand for call in calls for operand in call.operands]
    outputs = tuple(o.result for o in operands if o.result is not None)
    made = {result: ~number for number, result in enumerate(outputs)}
    read = dict.fromkeys(o.source for o in operands if o.source is not None and o.source not in made)
    number: dict[Var | None, int] = {**{source: i for i, source in enumerate(read)}, **made}
    bound = [replace(call, operands=tuple(replace(o, argument=number.get(o.source)) for o in call.operands)) for call in calls]
    return bound, tuple(read), outputs
