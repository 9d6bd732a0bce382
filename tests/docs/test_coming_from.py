"""The guide for those who come from other libraries: what stands beside our lines is right, as far as it runs."""

import re
from pathlib import Path

import numpy as np
import pytest

import funccoll as fc
from funccoll import P

SECTION = (Path(__file__).parents[2] / "docs" / "guides" / "coming_from.md").read_text()
BLOCKS = dict(zip(("jax", "mpi4py", "torch"), re.findall(r"```python\n(.*?)```", SECTION, re.DOTALL), strict=True))
PAIR = re.compile(r"^( *)(\w+ = |)(\S.*?) +# (.+)$", re.MULTILINE)


@pytest.mark.parametrize("library", BLOCKS)
def test_about_ten_lines_stand_beside_theirs(library):
    assert 10 <= len(PAIR.findall(BLOCKS[library])) <= 14


def test_mpi4py_users_read_first_that_a_numpy_array_is_the_global_value():
    paragraph = SECTION[SECTION.index("## mpi4py") + len("## mpi4py") :].replace("\n", " ")
    second = re.split(r"\.(?= )", paragraph)[1]
    assert all(part in second for part in ('`P("i")`', "*global* value", "`fc.from_local`"))


@pytest.mark.slow
@pytest.mark.processes
def test_it_is_the_global_value_indeed():
    def halves():
        mesh = fc.make_mesh({"i": 2})
        step = fc.jit(lambda x: x, mesh=mesh, in_specs=P("i"), out_specs=P("i"))
        whole = np.arange(2.0)
        mine = whole + 10 * fc.rank()
        return step(whole).local.tolist(), step(fc.from_local(mine, mesh, P("i"))).local.tolist()

    def own():
        fc.jit(lambda x: x, mesh=fc.make_mesh({"i": 2}), in_specs=P("i"), out_specs=P("i"))(np.arange(2.0) + 10 * fc.rank())
        fc.process_allgather(0.0)  # one of the two calls sees the other's value

    assert fc.launch(halves, 2) == [([0.0], [0.0, 1.0]), ([1.0], [10.0, 11.0])]
    with pytest.raises(fc.errors.ShardingError, match=r"each rank's own block as fc\.from_local"):
        fc.launch(own, 2)


def function_of(block, choose):
    """The body of the block's step, each line with its comment's code in place of ours where `choose` says so."""
    lines = []
    for line in block[block.index("def step") :].split("\n\n")[0].splitlines():
        pair = PAIR.match(line)
        lines.append(f"{pair[1]}{pair[2]}{choose(pair[3], pair[4])}" if pair else line)
    return "\n".join(lines)


@pytest.mark.slow
def test_the_lines_of_jax_compute_what_ours_do():
    jax = pytest.importorskip("jax")
    names = {"ring": [(i, (i + 1) % 4) for i in range(4)], "table": np.arange(4.0) ** 2}
    ours, theirs = {"fc": fc, "np": np, **names}, {"jax": jax, "jnp": jax.numpy, "lax": jax.lax, **names}
    exec(function_of(BLOCKS["jax"], lambda line, _: line), ours)
    exec(function_of(BLOCKS["jax"], lambda _, line: line), theirs)
    assert "fc." not in function_of(BLOCKS["jax"], lambda _, line: line)
    x = np.random.default_rng(0).normal(size=16).astype(np.float32)
    got = fc.jit(ours["step"], mesh=fc.make_mesh({"i": 4}), in_specs=P("i"), out_specs=P("i"))(x)
    split = jax.sharding.PartitionSpec("i")
    mesh = jax.make_mesh((4,), ("i",), devices=jax.devices()[:4], axis_types=(jax.sharding.AxisType.Auto,))
    want = jax.jit(jax.shard_map(theirs["step"], mesh=mesh, in_specs=split, out_specs=split))(x)
    assert got.keys() == want.keys()
    for name in want:
        np.testing.assert_allclose(got[name], want[name], rtol=1e-5, atol=1e-6)
