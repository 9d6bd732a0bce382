"""The core against JAX, in one run: `make bench`, or `python -m benchmarks.programs.core`.

JAX plays 8 virtual CPU devices, as funccoll does; both run the same programs on arrays that lie on their
devices already, and wait for the result. Writes benchmarks/results/core.json and the tables of docs/benchmarks. Loops,
convolutions and batched gradients are in `language.py`.
"""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"

import jax
import jax.numpy as jnp
import numpy as np

import funccoll as fc
from benchmarks.measure import ROUNDS, compare, import_seconds, machine, record, summary
from funccoll import P

RESULTS = Path(__file__).parents[1] / "results" / "core.json"
MESH = fc.make_mesh({"d": 8})
ONE = fc.make_mesh({"d": 1})
JMESH = jax.make_mesh((8,), ("d",))
JP = jax.sharding.PartitionSpec


def case(name: str, peer: str, goal: str, met: Callable[[float], bool] | None, numbers: dict[str, Any]) -> dict[str, Any]:
    """One row: `goal` in words, and whether the median ratio meets it (None: shown without a goal)."""
    ratio = numbers["ratio"]["median"]
    row = {"name": name, "against": peer, "goal": goal, "met": None if met is None else bool(met(ratio)), **numbers}
    print(
        f"{name:<58} {numbers['ours']['median_us']:>11.1f} µs  {peer} {numbers['peer']['median_us']:>11.1f} µs  "
        f"{ratio:6.2f}x  {'' if met is None else 'met' if row['met'] else 'MISSED'}  {goal}",
        flush=True,
    )
    return row


def all_reduce_cases() -> list[dict[str, Any]]:
    """A jitted step that is one all_reduce over 8 devices."""
    rows = []
    step = fc.jit(lambda x: fc.all_reduce(x, "d"), mesh=MESH, in_specs=P("d"), out_specs=P())
    jstep = jax.jit(jax.shard_map(lambda x: jax.lax.psum(x, "d"), mesh=JMESH, in_specs=JP("d"), out_specs=JP()))
    for label, nbytes, factor in (("4 B", 4, 10), ("4 KiB", 4096, 10), ("1 MiB", 1 << 20, 2), ("16 MiB", 1 << 24, None)):
        host = np.random.default_rng(0).normal(size=8 * nbytes // 4).astype(np.float32)
        x = fc.device_put(host, MESH, P("d"))
        jx = jax.device_put(host, jax.NamedSharding(JMESH, JP("d")))
        np.testing.assert_allclose(np.asarray(step(x)), np.asarray(jstep(jx)), rtol=1e-3, atol=1e-5)
        numbers = compare(lambda x=x: step(x), lambda jx=jx: jstep(jx).block_until_ready())
        goal = "" if factor is None else f"≥ {factor}× faster"
        met = None if factor is None else lambda r, factor=factor: r >= factor
        rows.append(case(f"all_reduce in a jitted step, 8 devices, {label} each", "JAX", goal, met, numbers))
    return rows


def long_program(xp: Any, reduce: Callable[[Any], Any] | None) -> Callable[[Any], Any]:
    """A new function object (nothing is cached) whose trace has 1,000 equations."""

    def fn(x: Any) -> Any:
        for i in range(250):
            y = xp.tanh(x)
            z = y * x
            z = z + y if reduce is None or i % 10 else reduce(z)
            x = z - x
        return x

    return fn


def compile_cases() -> list[dict[str, Any]]:
    """Time to trace and compile."""
    host = np.ones(8, np.float32)
    rows = []

    def ours(mesh: fc.Mesh, reduce: Any) -> Any:
        spec = P("d")
        return fc.jit(long_program(np, reduce), mesh=mesh, in_specs=spec, out_specs=spec).lower(host).compile()

    def jaxs(reduce: Any) -> Any:
        fn = long_program(jnp, reduce)
        if reduce is not None:
            fn = jax.shard_map(fn, mesh=JMESH, in_specs=JP("d"), out_specs=JP("d"))
        placed = host if reduce is None else jax.device_put(host, jax.NamedSharding(JMESH, JP("d")))
        return jax.jit(fn).lower(placed).compile()

    equations = len(fc.jit(long_program(np, None)).trace(host).program.equations)
    assert equations == len(jax.make_jaxpr(long_program(jnp, None))(host).eqns) == 1000
    goal, met = "≤ 1/2 of the time", lambda r: r >= 2
    numbers = compare(lambda: ours(ONE, None), lambda: jaxs(None), once=True)
    rows.append(case("trace + compile, 1,000 equations, 1 device", "JAX", goal, met, numbers))

    def reduce(z: Any) -> Any:
        return fc.pvary(fc.all_reduce(z, "d"), "d")

    def jreduce(z: Any) -> Any:
        return jax.lax.pcast(jax.lax.psum(z, "d"), "d", to="varying")

    numbers = compare(lambda: ours(MESH, reduce), lambda: jaxs(jreduce), once=True)
    rows.append(case("trace + compile, 1,000 equations, 25 all_reduces, 8 devices", "JAX", goal, met, numbers))
    return rows


def ten_ops(x: Any, y: Any) -> Any:
    """Ten tiny operations."""
    a = np.add(x, y)
    b = np.tanh(a)
    c = np.multiply(b, y)
    d = np.subtract(c, x)
    e = np.square(d)
    f = np.add(e, b)
    g = np.sin(f)
    h = np.maximum(g, y)
    i = np.negative(h)
    return np.add(i, x)


def call_cases() -> list[dict[str, Any]]:
    """The cost of a call beside NumPy, and cases in which XLA's fusion wins."""
    rows = []
    x, y = np.random.default_rng(1).random((2, 16), np.float32)
    step = fc.jit(ten_ops, mesh=ONE)
    ax, ay = fc.device_put(x, ONE), fc.device_put(y, ONE)
    goal, met = "≤ 2× NumPy's time", lambda r: r >= 0.5
    for what, args in (("Arrays", (ax, ay)), ("NumPy arrays", (x, y))):
        numbers = compare(lambda args=args: step(*args), lambda: ten_ops(x, y))
        rows.append(case(f"a compiled step of 10 tiny ops, 1 device, {what}", "NumPy", goal, met, numbers))
    big_x, big_y = np.random.default_rng(1).random((2, 1 << 20), np.float32)
    bx, by = fc.device_put(big_x, ONE), fc.device_put(big_y, ONE)
    numbers = compare(lambda: step(bx, by), lambda: ten_ops(big_x, big_y))
    rows.append(case("the same 10 ops on 4 MiB arrays", "NumPy", "", None, numbers))
    jstep = jax.jit(lambda u, v: jten_ops(u, v))
    jx, jy = jnp.asarray(big_x), jnp.asarray(big_y)
    numbers = compare(lambda: step(bx, by), lambda: jstep(jx, jy).block_until_ready())
    rows.append(case("the same 10 ops on 4 MiB arrays", "JAX", "", None, numbers))
    return rows


def jten_ops(x: Any, y: Any) -> Any:
    """`ten_ops` in JAX."""
    b = jnp.tanh(x + y)
    f = jnp.square(b * y - x) + b
    return -jnp.maximum(jnp.sin(f), y) + x


def training_cases() -> list[dict[str, Any]]:
    """Data-parallel training steps of a two-layer network, small and large."""
    return [training_case(64, 256, 10, 256), training_case(512, 2048, 512, 1024)]


def training_case(width: int, hidden: int, classes: int, batch: int) -> dict[str, Any]:
    """One step: gelu, mean squared error, gradients reduced over 8 devices, plain gradient descent."""
    rng = np.random.default_rng(2)
    params = {
        "w1": (rng.normal(size=(width, hidden)) * 0.1).astype(np.float32),
        "w2": (rng.normal(size=(hidden, classes)) * 0.1).astype(np.float32),
    }
    x, y = rng.normal(size=(batch, width)).astype(np.float32), rng.normal(size=(batch, classes)).astype(np.float32)

    def model(xp: Any, gelu: Any, p: Any, u: Any, v: Any) -> Any:
        return xp.mean((gelu(u @ p["w1"]) @ p["w2"] - v) ** 2)

    @fc.jit(mesh=MESH, in_specs=(P(), P("d"), P("d")), out_specs=(P(), P()))
    def step(p: Any, u: Any, v: Any) -> Any:
        def loss_fn(p: Any) -> Any:
            return fc.all_reduce(model(np, fc.nn.gelu, p, u, v), "d", op="mean")

        loss, grads = fc.value_and_grad(loss_fn)(p)
        return fc.tree.map(lambda a, g: a - 0.01 * g, p, grads), loss

    def jbody(p: Any, u: Any, v: Any) -> Any:
        loss, grads = jax.value_and_grad(lambda p: jax.lax.pmean(model(jnp, jax.nn.gelu, p, u, v), "d"))(p)
        return jax.tree.map(lambda a, g: a - 0.01 * g, p, grads), loss

    jstep = jax.jit(jax.shard_map(jbody, mesh=JMESH, in_specs=(JP(), JP("d"), JP("d")), out_specs=(JP(), JP())))
    ours = fc.tree.map(lambda v: fc.device_put(v, MESH), params), *(fc.device_put(v, MESH, P("d")) for v in (x, y))
    sharded = jax.NamedSharding(JMESH, JP("d"))
    theirs = jax.device_put(params, jax.NamedSharding(JMESH, JP())), *(jax.device_put(v, sharded) for v in (x, y))
    np.testing.assert_allclose(float(step(*ours)[1]), float(jstep(*theirs)[1]), rtol=1e-4)
    numbers = compare(lambda: step(*ours), lambda: jax.block_until_ready(jstep(*theirs)))
    name = f"a training step ({width}-{hidden}-{classes}, batch {batch}), 8 devices"
    return case(name, "JAX", "", None, numbers)


def import_case() -> list[dict[str, Any]]:
    """`import funccoll` beside `import numpy`, in fresh interpreters."""
    times: dict[str, list[float]] = {"import numpy": [], "import numpy, funccoll": []}
    for _ in range(ROUNDS):
        for statement, seconds in times.items():
            seconds.append(import_seconds(statement))
    base, both = times.values()
    extra = statistics.median(b - a for a, b in zip(base, both, strict=True))
    print(f"import funccoll adds {extra:.3f} s to import numpy ({statistics.median(base):.3f} s)")
    return [
        {
            "name": "import funccoll, beyond import numpy",
            "against": "",
            "goal": "≤ 0.25 s",
            "met": extra <= 0.25,
            "ours": summary(both),
            "base": summary(base),
            "extra_seconds": extra,
            "rounds": ROUNDS,
        }
    ]


def main() -> None:
    """Run every case, write the JSON, refresh the pages."""
    about = machine()
    rows = [*all_reduce_cases(), *compile_cases(), *call_cases(), *training_cases(), *import_case()]
    record(RESULTS, about, cases=rows)
    missed = [row["name"] for row in rows if row["met"] is False]
    print(f"written: {RESULTS}" + (f"; goals missed: {missed}" if missed else "; all goals met"))


if __name__ == "__main__":
    sys.exit(main())
