"""The records of collectives are complete, agree with each other, and are all that a collective needs."""

from __future__ import annotations

import importlib
import inspect
import math
import re
from pathlib import Path

import numpy as np
import pytest

import funccoll as fc
from funccoll import collectives as package
from funccoll import schedules
from funccoll.collectives import COLLECTIVES, RAGGED
from funccoll.collectives import functions as collectives
from funccoll.collectives.record import CollectivePrimitive, lowering
from funccoll.schedules.chunk_layout import ChunkLayout
from funccoll.schedules.collective import KINDS, Collective
from tests.support.cases import added_collective
from tests.support.cases.collective_cases import CASES
from tests.support.groups import in_groups
from tests.support.ranks.ranks import launch
from tests.support.spmd import MESHES, per_device

pytestmark = pytest.mark.covers("collectives")

FOLDER = Path(package.__file__).parent
SHARED = {"__init__", "arg_reduce", "argument_checks", "axis_groups", "functions", "pair_blocks", "record", "started"}
DESIGN = (Path(__file__).parents[3] / "docs" / "design" / "types.md").read_text(encoding="utf-8")


def test_one_file_and_one_kind_for_each_collective():
    names = [primitive.name for primitive in COLLECTIVES]
    assert names == list(KINDS)
    assert {path.stem for path in FOLDER.glob("*.py")} - SHARED == {*names, *map(str, RAGGED)}


@pytest.mark.parametrize("primitive", COLLECTIVES, ids=str)
def test_a_collective_is_complete(primitive: CollectivePrimitive):
    name, kind = primitive.name, KINDS[primitive.name]
    assert isinstance(primitive, CollectivePrimitive) and primitive.communicates
    module = importlib.import_module(f"{package.__name__}.{name}")
    assert (module.__doc__ or "").startswith(f"{name}: ") and re.search(r"^Cost: .*α", module.__doc__ or "", re.M)
    assert getattr(module, f"{name}_p") is getattr(package, f"{name}_p") is primitive
    assert (primitive.vjp is None) == (primitive.kind == "effect")
    assert ("combine" in inspect.signature(primitive.reference).parameters if primitive.vjp else False) == kind.combines

    public = inspect.signature(getattr(fc, name)).parameters
    assert name in collectives.__all__ and public["algorithm"].default is None
    assert ("op" in public, "root" in public, "pairs" in public) == (kind.combines, kind.rooted, kind.takes_pairs)

    assert schedules.algorithms(name)
    assert any(case.split()[0] == name for case in CASES)
    table = DESIGN[DESIGN.index("| collective (axis a, size p) |") :]
    rows = [row.split("|")[1] for row in table[: table.index("\n\n")].splitlines()]
    assert any(f"`{name}`" in row for row in rows)


@in_groups("name", CASES, of=20)
def test_a_lowering_fits_the_type(name: str):
    """What a schedule makes of an operand has the shape that the type rule says."""
    case, mesh = CASES[name], MESHES["grid"]
    x = np.zeros((mesh.size, *case.shape(4)), np.int32 if case.op not in ("mean",) else np.float32)
    program = per_device(mesh, lambda x: case.call(x, "data", 4)).trace(x).program
    for eqn in program.collectives():
        how, shapes = lowering(eqn), [atom.type.shape for atom in eqn.inputs]
        assert how.op == eqn.params.get("op", "")
        collective = Collective(how.kind, eqn.params["size"], **how.options).check()
        for shape, out in zip(map(how.input_shape, shapes), eqn.outputs, strict=True):
            given = ChunkLayout.of(collective, shape, 4, how.cut_dim, how.concat_dim)
            assert ChunkLayout.output_shape(collective, shape, how.cut_dim, how.concat_dim) == out.type.shape
            assert given.output.size == math.prod(out.type.shape)


@pytest.mark.processes
def test_a_collective_needs_nothing_but_its_record_its_kind_and_an_algorithm():
    for rows in launch(added_collective.run, 2):
        assert rows == ["mirrored_gather  ('d',) direct"]
