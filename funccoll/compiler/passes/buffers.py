"""Buffers: the plan of which results take a dead operand's memory, and which may share memory with arguments.

Values are NumPy arrays of one process. Values that may share memory form one storage class: views, pvary, collectives whose
results are their operands' memory. Memory is reused only if the whole class is dead and one device alone computed it. A class
that a pvary or a collective touched is never reused, because several devices may read it. Between processes a large result of a
collective is memory of this process alone, and is reused as well.

A primitive that works in place (an optimizer's step) takes more. It takes the memory of donated arguments. It also takes the
memory of a class that a pvary or a collective of this process touched, if all its readers have run before.

A result that is written into an operand's memory has that operand's strides, and the bits of later sums depend on strides. So
the plan lays out every value alike on all transports (`core/array_order.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from ...collectives import scatter_p
from ...collectives.record import operands_of
from ...core.ir import Equation, Literal, Program, Var
from ...core.types import bfloat16
from ...primitives.control_flow import cond_p, scan_p
from ...primitives.elementwise import convert_p, where_p
from ...primitives.fused import KERNELS
from ...primitives.higher_order import optimization_barrier_p
from ...primitives.linalg import matmul_p
from ...primitives.piece_sums import accumulate_p
from ...primitives.reductions import REDUCTIONS
from ...primitives.shaping import reshape_p
from ...primitives.varying import pvary_p

__all__ = ["SMALL_RESULT_BYTES", "Buffers", "memory_of", "plan_buffers", "storage_of"]


@dataclass(frozen=True)
class Buffers:
    """The plan for one program.

    - `reuse[v] = k`: the equation that defines v may write to its operand number k.
    - `borrowed`: variables that may share memory with an argument or a captured constant.
    - `published`: large values that a collective reads; their equations write them to memory of the device, in C order.
    - `overwritten`: donated inputs that the program writes to, so their memory must be the program's alone.
    - `bodies`: the plans of the programs that control flow runs.
    - `strided`: variables that may lie in another order than C.
    - `arranged`: results of collectives of virtual devices that must be brought into that order.
    """

    reuse: dict[Var, int]
    borrowed: frozenset[Var]
    published: frozenset[Var] = frozenset()
    overwritten: frozenset[Var] = frozenset()
    bodies: Mapping[Program, Buffers] = field(default_factory=dict)
    strided: frozenset[Var] = frozenset()
    arranged: frozenset[Var] = frozenset()

    def without_reuse(self) -> Buffers:
        """Return the plan in which no operand is overwritten."""
        bodies = {body: plan.without_reuse() for body, plan in self.bodies.items()}
        return replace(self, reuse={}, overwritten=frozenset(), bodies=bodies)


_PUBLISH_BYTES = 1 << 15
"""Bytes from which computing into shared memory costs less than copying there."""
_KEEP_ORDER = {
    matmul_p,
    where_p,
    convert_p,
    reshape_p,
    pvary_p,
    accumulate_p,
    optimization_barrier_p,
    *REDUCTIONS.values(),
}
"""Primitives besides ufuncs whose results lie in C order if their operands do."""
SMALL_RESULT_BYTES = 1 << 16
"""Bytes up to which a collective's result is not written to. Allocating another array is quick, and transports keep small
results for their next calls. A transport between processes must return larger ones as writable arrays."""


def plan_buffers(
    program: Program, aliases: bool = True, publishes: bool = False, donated: frozenset[Var] = frozenset()
) -> Buffers:
    """Plan the buffers of a program whose higher primitives are inlined, in the order in which it runs.

    Args:
        program: The program.
        aliases: A collective's result may be its operand's memory, as between virtual devices.
        publishes: Large operands of collectives are computed into memory of the device, and peers may read them there.
        donated: Inputs that the caller donates.
    """
    last_use: dict[Var, int] = {}
    for i, eqn in enumerate(program.equations):
        last_use.update((a, i) for a in eqn.inputs if type(a) is Var)
    last_use.update((a, len(program.equations)) for a in program.outputs if type(a) is Var)

    programs = [body for eqn in program.equations if eqn.primitive.kind == "control" for body in eqn.bodies.values()]
    bodies = {body: plan_buffers(body, aliases, publishes) for body in programs}
    memory = _storage_of(program, bodies, aliases)
    reuse = _reuse(program, memory, last_use)
    large = any(_may_be_written(eqn, v) for eqn in program.collectives() for v in eqn.outputs)
    if aliases and large:
        # A process may write to a collective's result, which lies in C order, and so does what it writes. NumPy lays out a
        # new array in C order too, if any operand does. Another operand's memory could have other strides.
        between_processes = _reuse(program, _storage_of(program, bodies, aliases=False), last_use)
        reuse = {out: k for out, k in reuse.items() if between_processes.get(out) == k}
    outside, storage, views, exposed = memory.outside, memory.storage, memory.views, memory.exposed
    owners = {v for eqn in program.equations if eqn.primitive.kind == "compute" for v in eqn.outputs} - views | donated
    overwritten = _work_in_place(program, reuse, storage, last_use, owners, exposed - donated)
    borrowed = frozenset(v for v, members in storage.items() if not members.isdisjoint(outside))
    published = _published(program, reuse) if publishes else frozenset()
    inner = {body: plan for outer in bodies.values() for body, plan in outer.bodies.items()}
    strided = _strided(program, published)
    arranged = _arranged(program, strided) if aliases else frozenset()
    return Buffers(reuse, borrowed, published, overwritten & donated, inner | bodies, strided, arranged)


def storage_of(program: Program, buffers: Buffers) -> dict[Var, set[Var]]:
    """Return the storage class of each variable, between processes: what may share its memory without an overwrite."""
    return _storage_of(program, buffers.bodies, aliases=False).storage


def memory_of(program: Program, buffers: Buffers) -> dict[Var, int]:
    """Return a number for the memory of each variable, between processes: equal ones may share it, at one time or another."""
    storage = storage_of(program, buffers)
    for eqn in program.equations:
        for v in eqn.outputs:
            if (k := buffers.reuse.get(v)) is not None:
                operand = eqn.inputs[k]
                assert type(operand) is Var
                _join(storage, v, operand)
    return {v: id(members) for v, members in storage.items()}


@dataclass(frozen=True)
class _Storage:
    """Variables that share memory, and those that may be written to or read elsewhere."""

    outside: set[Var]
    """Inputs and constants."""
    storage: dict[Var, set[Var]]
    """Every variable's storage class, one set for all its members."""
    private: set[Var]
    """Allocated by compute on one device, and only views share it."""
    views: set[Var]
    exposed: set[Var]
    """Read or made by collectives between processes."""


def _storage_of(program: Program, bodies: Mapping[Program, Buffers], aliases: bool) -> _Storage:
    """Find the storage classes of a program."""
    outside = {*program.inputs, *(v for v, _ in program.constants)}
    storage: dict[Var, set[Var]] = {v: {v} for v in outside}
    private: set[Var] = set()
    views: set[Var] = set()
    exposed: set[Var] = set()
    for eqn in program.equations:
        if eqn.primitive.kind == "control":
            for var in eqn.outputs:
                storage[var] = {var}
            for var, atom in _shared_by_control(eqn, bodies):
                _join(storage, var, atom)
            for a in eqn.inputs:  # its programs may read them in every iteration, and collectives in these at any time
                if type(a) is Var:
                    private.difference_update(storage[a])
                    exposed.add(a)
            exposed.update(eqn.outputs)
            continue
        collective = eqn.primitive.kind == "collective"
        shares = eqn.primitive.view or (collective and (aliases or not eqn.primitive.communicates))
        for k, var in enumerate(eqn.outputs):
            storage[var] = {var}
            sources = eqn.inputs[k : k + 1] if collective else eqn.inputs  # a collective has one operand for each output
            operands = [a for a in sources if type(a) is Var] if shares else []
            for a in operands:
                _join(storage, var, a)
            if eqn.primitive.kind == "compute" and all(a in private for a in operands):
                private.add(var)
            if shares:
                views.add(var)
        if collective and not shares:  # it may run later than its place in the program, so its operands are not overwritten
            exposed.update(eqn.outputs)
            for a in eqn.inputs:
                if type(a) is Var:
                    private.difference_update(storage[a])
                    exposed.add(a)
            private.update(v for v in eqn.outputs if _may_be_written(eqn, v))

    return _Storage(outside, storage, private, views, exposed)


def _reuse(program: Program, memory: _Storage, last_use: Mapping[Var, int]) -> dict[Var, int]:
    """Return the results that may be written to an operand's memory, and the operand's number."""
    storage, private, views = memory.storage, memory.private, memory.views
    reuse: dict[Var, int] = {}
    strided = _strided(program, frozenset())
    for i, eqn in enumerate(program.equations):
        taken: set[Var] = set()
        for n, k in _may_take(eqn):
            out, atom = eqn.outputs[n], eqn.inputs[k]
            if out in reuse or atom in taken:
                continue
            if eqn.primitive in KERNELS and atom in strided:  # kernels read and write C order
                continue
            # Views are not written to: a view may be a part of its memory, or its elements may overlap (broadcast_to).
            if isinstance(atom, Literal) or atom not in private or atom in views or not out.type.shape:
                continue
            if last_use[atom] > i:
                continue
            if atom.type.shape != out.type.shape or atom.type.dtype != out.type.dtype:
                continue
            if len(members := storage[atom]) > 1:
                dead = all(m in private and last_use.get(m, -1) <= i for m in members)
                # Another operand that views the same memory could be read after it was overwritten.
                if not dead or any(a is not atom and a in members for a in eqn.inputs if type(a) is Var):
                    continue
            reuse[out] = k
            taken.add(atom)
    return reuse


def _may_take(eqn: Equation) -> Sequence[tuple[int, int]]:
    """Return pairs of a result and an operand whose memory the result may take."""
    if eqn.primitive in KERNELS:
        return eqn.params["aliases"]
    return [(0, k) for k in range(len(eqn.inputs))] if eqn.primitive.ufunc is not None else ()


def _shared_by_control(eqn: Equation, bodies: Mapping[Program, Buffers]) -> list[tuple[Var, Var]]:
    """Yield pairs of a result of control flow and an operand whose memory it may be. What a scan stacks has its own memory."""
    first = len(eqn.inputs) - len(eqn.outputs)  # pairs of the carry: a loop without iterations returns it
    programs, results = eqn.params.get("branches") or (eqn.params["body"],), eqn.outputs
    if eqn.primitive is scan_p:
        first, results = eqn.params["consts"], results[: eqn.params["carry"]]
    found: list[tuple[Var, Var]] = []
    for k, var in enumerate(results):
        atoms = list(eqn.inputs[first + k : first + k + 1]) if eqn.primitive is not cond_p else []
        if any(program.outputs[k] in bodies[program].borrowed for program in programs):
            atoms = list(eqn.inputs)
        found += [(var, a) for a in atoms if type(a) is Var]
    return found


def _work_in_place(
    program: Program,
    reuse: dict[Var, int],
    storage: dict[Var, set[Var]],
    last_use: dict[Var, int],
    owners: set[Var],
    exposed: set[Var],
) -> frozenset[Var]:
    """Add to `reuse` the results of kernels that may take their operands' memory; return these operands.

    `owners` have their own memory, peers may read `exposed`.
    """
    if not any(eqn.primitive in KERNELS for eqn in program.equations):
        return frozenset()
    readers: dict[Var, list[int]] = {}
    made: dict[Var, Equation] = {}
    barriers = [0]  # by equation, the number of communicating equations before it: these run when all before has run
    for i, eqn in enumerate(program.equations):
        barriers.append(barriers[-1] + eqn.primitive.communicates)
        made.update(dict.fromkeys(eqn.outputs, eqn))
        for a in {a for a in eqn.inputs if type(a) is Var}:
            readers.setdefault(a, []).append(i)

    def has_run(reader: int, i: int, alike: bool) -> bool:
        """True if an equation runs before the i-th on every device. Between collectives, what varies less runs first.

        Equations that vary alike run in order on each device. That counts if a device reads only its own memory (`alike`).
        """
        if barriers[i] > barriers[reader]:
            return True
        if not program.equations[reader].outputs:  # control flow only for its effects
            return False
        first, second = (program.equations[k].outputs[0].type.varying for k in (reader, i))
        return (alike and first == second) or (len(first), sorted(first)) < (len(second), sorted(second))

    written: set[Var] = set()
    strided = _strided(program, frozenset())
    for i, eqn in enumerate(program.equations):
        for n, k in eqn.params["aliases"] if eqn.primitive in KERNELS else ():
            out, atom = eqn.outputs[n], eqn.inputs[k]
            if type(atom) is not Var or atom not in owners or atom in written or out in reuse:
                continue
            if k in map(reuse.get, eqn.outputs) or not _same_form(out, atom) or atom in strided:
                continue
            members = storage[atom]
            # All that shares the memory was made from this owner, is dead, and its readers have run: no other operand reads it.
            own = all(m is atom or m not in owners for m in members) and members.isdisjoint(exposed)
            known = own and all(m is atom or m in made for m in members)
            dead = known and all(last_use.get(m, -1) <= (i if m is atom else i - 1) for m in members)
            alone = dead and sum(a is atom for a in eqn.inputs) == 1
            alike = known and all(m is atom or made[m].primitive.kind == "compute" for m in members)
            if alone and all(has_run(r, i, alike) for m in members for r in readers.get(m, ()) if r != i):
                reuse[out] = k
                written.add(atom)
    return frozenset(written)


def _same_form(out: Var, operand: Var) -> bool:
    """True if an array of the operand's shape and dtype, not a NumPy scalar, can be the result."""
    return bool(out.type.shape) and (out.type.shape, out.type.dtype) == (operand.type.shape, operand.type.dtype)


def _may_be_written(eqn: Equation, result: Var) -> bool:
    """True if compute may write to a collective's result between processes: it is large, and every rank receives it.

    If some ranks get zeros, those are one array for all calls.
    """
    return result.type.nbytes > SMALL_RESULT_BYTES and result.type.varying.isdisjoint(eqn.axes())


def _published(program: Program, reuse: dict[Var, int]) -> frozenset[Var]:
    """Return values that own the memory of large operands of collectives, and can be computed into given memory."""
    made = {v: eqn for eqn in program.equations for v in eqn.outputs}
    found = set()
    for eqn in program.equations:
        for atom in eqn.inputs if eqn.primitive.communicates else ():
            maker = made.get(atom) if type(atom) is Var else None
            while maker is not None:
                out = atom
                if out in reuse:  # it has its operand's memory
                    atom = maker.inputs[reuse[out]]
                elif maker.primitive.view:
                    atom = maker.inputs[0]
                else:
                    if _can_write(maker) and out.type.nbytes >= _PUBLISH_BYTES:
                        found.add(out)
                    break
                maker = made.get(atom) if type(atom) is Var else None
    return frozenset(found)


def _strided(program: Program, published: frozenset[Var]) -> frozenset[Var]:
    """Return variables that may lie in another order than C: views, and results that NumPy lays out like one.

    Inputs and constants, results of collectives and of control flow lie in C order. So do results of these primitives if their
    operands do.
    """
    found: set[Var] = set()
    for eqn in program.equations:
        if eqn.primitive.communicates or eqn.primitive.kind == "control" or eqn.primitive in KERNELS:
            continue
        keeps = eqn.primitive.ufunc is not None or eqn.primitive in _KEEP_ORDER
        if not keeps:
            found.update(v for v in eqn.outputs if v.type.shape)
        elif any(a in found for a in eqn.inputs):
            # One dimension in new memory has one order, and a product of matrices lies in C order.
            dense = 0 if eqn.primitive.view else 2 if eqn.primitive is matmul_p else 1
            found.update(v for v in eqn.outputs if v.type.ndim > dense and v not in published)
    return frozenset(found)


def _arranged(program: Program, strided: frozenset[Var]) -> frozenset[Var]:
    """Return results of collectives that lie as a strided operand, or are parts of it."""
    return frozenset(
        v
        for eqn in program.equations
        if eqn.primitive.kind == "collective" and eqn.primitive.communicates
        for a, v in zip(operands_of(eqn), eqn.outputs, strict=True)
        if v.type.shape and (a in strided or eqn.primitive is scatter_p)
    )


def _can_write(eqn: Equation) -> bool:
    """True if NumPy can compute an equation's output into given memory (`out=`)."""
    out = eqn.outputs[0].type
    plain = eqn.primitive is matmul_p and out.dtype != bfloat16
    return len(out.shape) > 0 and (plain or eqn.primitive.ufunc is not None or eqn.primitive in KERNELS)


def _join(storage: dict[Var, set[Var]], a: Var, b: Var) -> None:
    """Merge the classes of a and b. The smaller one moves, so all merges together take n log n steps."""
    small, large = sorted((storage[a], storage[b]), key=len)
    if small is not large:
        large |= small
        storage.update(dict.fromkeys(small, large))
