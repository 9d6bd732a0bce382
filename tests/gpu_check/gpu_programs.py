"""Trials of programs on a GPU: loops and branches, convolution and pooling, wrong indices, graphs in little memory, Arrays."""

from __future__ import annotations

import pickle
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np

from tests.gpu_check.gpu_compute import GRADIENTS, VALUES, roundings
from tests.gpu_check.gpu_jobs import require_sharing, run_job
from tests.gpu_check.gpu_kernels import bits, check
from tests.gpu_check.gpu_trial import compiled, device, found, graph_of, place_of, recording, rehearses, require_gpu


def same_values(name: str, fn: Any, args: Sequence[Any], mesh: Any, graphs: Counter[str], most: float, **specs: Any) -> float:
    """Roundings between the values of a function on the CPU and on the mesh, where all calls have the first one's bits.

    Raises: AssertionError beyond `most`.
    """
    import funccoll as fc

    on_cpu = fc.jit(fn, mesh=fc.make_mesh(dict(mesh.shape), device="cpu"), **specs)
    run = fc.jit(fn, mesh=mesh, **specs)
    wanted, results = [np.asarray(x) for x in fc.tree.leaves(on_cpu(*args))], [run(*args) for _ in range(3)]
    for number, result in enumerate(results[1:], 2):
        check(bits(result), bits(results[0]), f"{name}: call {number}")
    graphs[graph_of(run).partition(":")[0]] += 1
    pairs = zip(fc.tree.leaves(results[0]), wanted, strict=True)
    off = max((roundings(np.asarray(h), w) for h, w in pairs), default=0.0)
    if not off <= most:
        raise AssertionError(f"{name}: off by {off:.3g} roundings")
    return off


class _Cases:
    """Cases of a trial: each is tried, and what fails is found; a few failures end the trial."""

    def __init__(self) -> None:
        self.began, self.count, self.failed, self.graphs = time.monotonic(), 0, 0, Counter[str]()
        self.worst: tuple[float, str] = (0.0, "none")

    def __call__(self, name: str, call: Callable[[], float | None]) -> None:
        if self.failed >= 5:
            return
        self.count += 1
        print(f"case {self.count}: {name}", flush=True)  # for a trial that does not end
        try:
            self.worst = max(self.worst, (call() or 0.0, name))
        except Exception as error:
            self.failed += 1
            found(name, failed=f"{type(error).__name__}: {error}"[:600], at=place_of(error))

    def report(self, what: str) -> None:
        """Say how many cases there were, and how many of their programs replay a graph."""
        graphs = ", ".join(f"{count} {words}" for words, count in self.graphs.most_common())
        says = f"{self.count} {what}, {self.failed} failed; worst {self.worst[0]:.3g} roundings ({self.worst[1]})"
        found("cases", says, counts=True, graphs=graphs, seconds=round(time.monotonic() - self.began, 1))
        if graphs:
            found("graphs", graphs)


# ---------------------------------------------------------------- loops and branches


def control(share: int, shares: int) -> None:
    """Each `shares`-th program of `control_cases`, and its gradient: what the CPU gives, which the tests hold against JAX."""
    where = device()
    import funccoll as fc
    from tests.support.cases import control_cases

    ours = SimpleNamespace(
        scan=fc.scan,
        while_loop=fc.while_loop,
        fori_loop=fc.fori_loop,
        cond=fc.cond,
        switch=fc.switch,
        grad=fc.grad,
        jvp=fc.jvp,
        vmap=fc.vmap,
        asarray=fc.asarray,
    )
    mesh, cases = fc.make_mesh({"one": 1}, device=where), _Cases()
    names = [*control_cases.CASES, *control_cases.FORWARD][share::shares]
    for name in names:
        fn, args = (control_cases.CASES | control_cases.FORWARD)[name]

        def value(*args: Any, fn: Any = fn) -> Any:
            return fn(np, ours, *args)

        def loss(*args: Any, value: Any = value) -> Any:
            leaves = [x for x in fc.tree.leaves(value(*args)) if x.dtype.kind == "f"]
            return sum((x * np.cos(np.arange(x.size) + 0.5).reshape(x.shape)).sum() for x in leaves)

        cases(name, lambda: same_values("value", value, args, mesh, cases.graphs, VALUES))
        if name in control_cases.CASES:
            gradient = fc.grad(loss, tuple(range(len(args))))
            cases(f"gradient of {name}", lambda: same_values("gradient", gradient, args, mesh, cases.graphs, GRADIENTS))
    cases.report("loops, branches and their gradients")


# ---------------------------------------------------------------- convolution and pooling


def convolution() -> None:
    """Convolution and pooling, with first and second derivatives, in a batch, in all dtypes, and split over devices."""
    where = device()
    import ml_dtypes

    import funccoll as fc
    from funccoll import P, nn

    one, cases, rng = fc.make_mesh({"one": 1}, device=where), _Cases(), np.random.default_rng(0)
    small = lambda *shape: rng.integers(-3, 4, shape).astype(np.float32)
    x, w = small(2, 9, 8, 4), small(3, 2, 2, 6)
    convolutions = [((1, 1), "SAME", (2, 1)), ((2, 3), "VALID", (1, 1)), ((1, 2), ((1, 2), (0, 3)), (1, 2))]
    maxima = [((2, 2), "VALID"), ((1, 2), "SAME"), ((2, 1), ((1, 1), (0, 1)))]

    def convolved(x: Any, w: Any) -> Any:
        return [nn.conv(x, w, strides=s, padding=p, dilation=d, groups=2) for s, p, d in convolutions]

    def pooled(x: Any) -> Any:
        averages = [nn.avg_pool(x, (3, 2), strides=s, padding=p, count_padding=c) for s, p in maxima for c in (True, False)]
        return [nn.max_pool(x, (3, 2), strides=s, padding=p) for s, p in maxima] + averages

    def model(x: Any, w: Any) -> Any:
        y = nn.max_pool(np.tanh(nn.conv(x, w, padding="SAME", groups=2)), 2, strides=1, padding="SAME")
        return np.mean(np.square(nn.avg_pool(y, 2) + 1))

    gradient = fc.grad(model, (0, 1))
    floats = (rng.normal(size=x.shape), rng.normal(size=w.shape))
    singles = tuple(v.astype(np.float32) for v in floats)
    batch, weigh = rng.normal(size=(3, *x.shape)), lambda t: sum(np.sum(np.sin(v)) for v in fc.tree.leaves(t))
    programs: dict[str, tuple[Any, tuple, float]] = {
        "convolutions of integers": (convolved, (x, w), 0),
        "convolutions": (convolved, floats, VALUES),
        "convolutions of float32": (convolved, singles, VALUES),
        "gradients of convolutions": (fc.grad(lambda x, w: weigh(convolved(x, w)), (0, 1)), floats, GRADIENTS),
        "pooling": (pooled, floats[:1], VALUES),
        "pooling of integers": (pooled, (x,), VALUES),
        "gradients of pooling": (fc.grad(lambda x: weigh(pooled(x))), floats[:1], GRADIENTS),
        "a model": (fc.value_and_grad(model, (0, 1)), floats, GRADIENTS),
        "a model of float32": (fc.value_and_grad(model, (0, 1)), singles, GRADIENTS),
        "second derivatives": (fc.grad(lambda x, w: weigh(gradient(x, w)), (0, 1)), floats, GRADIENTS),
        "a batch": (lambda b, w: fc.vmap(lambda x: nn.conv(x, w, groups=2))(b), (batch, floats[1]), VALUES),
        "a batch of kernels": (lambda x, b: fc.vmap(lambda w: convolved(x, w))(b), (x, np.stack([w, 2 * w])), 0),
        "channels first": (
            lambda x, w: nn.conv(np.moveaxis(x, -1, 1), np.moveaxis(w, (-1, -2), (0, 1)), channels_first=True, groups=2),
            floats,
            VALUES,
        ),
        "one dimension": (lambda x, w: nn.conv(x[:, :, 0], w[:, 0], padding="SAME", groups=2), floats, VALUES),
        "no channels": (nn.conv, (np.ones((2, 4, 4, 0), np.float32), np.ones((2, 2, 0, 3), np.float32)), 0),
        **{
            f"convolution of {np.dtype(t).name}": (lambda x, w: nn.conv(x, w, groups=2), (x.astype(t), w.astype(t)), 0)
            for t in (np.float16, ml_dtypes.bfloat16, np.complex64, np.int32)
        },
        **{
            f"maxima of {np.dtype(t).name}": (lambda x: nn.max_pool(x, 2), (x.astype(t),), 0)
            for t in (np.float16, ml_dtypes.bfloat16, np.int32, np.int8)
        },
    }
    for name, (fn, args, most) in programs.items():
        cases(name, lambda: same_values("call", fn, args, one, cases.graphs, most))
    four = fc.make_mesh({"d": 4}, device=where)
    split: Any = {"in_specs": (P(), P("d")), "out_specs": P()}
    kernel = lambda w, x: fc.grad(lambda w: fc.all_reduce(np.sum(np.square(nn.conv(x, w, groups=2))), "d"))(w)
    cases(
        "a kernel's gradient over 4 devices",
        lambda: same_values("call", kernel, (w, np.concatenate([x, x + 1])), four, cases.graphs, 0, **split),
    )
    cases.report("programs with convolution and pooling")


# ---------------------------------------------------------------- wrong indices


def indices() -> None:
    """An index that only the GPU knew to be wrong is an IndexError when values are read, and what comes after it is right."""
    where = device()
    import funccoll as fc

    if rehearses():
        place: Any = np.asarray
    else:
        place = require_gpu().asarray
    functions: dict[str, Callable[..., Any]] = {
        "get": lambda x, i: x[i],
        "two indices": lambda x, i: x[i, i],
        "add": lambda x, i: fc.at(x)[:, i].add(1.0),
        "set": lambda x, i: fc.at(x)[i].set(1.0),
        "grad": lambda x, i: fc.grad(lambda x: np.sum(x[i] ** 2))(x),
        "in a loop": lambda x, i: fc.scan(lambda c, k: (c + x[k], None), np.zeros(5), i)[0],
    }
    x, cases = np.arange(25.0).reshape(5, 5), _Cases()
    good = np.array([0, -5])
    reads = {"np.asarray": np.asarray, "a wait": lambda y: y.block_until_ready(), "tolist": lambda y: y.tolist()}

    def wrong(name: str, bad: int, dtype: str, read: str) -> None:
        run = fc.jit(functions[name])
        want = np.asarray(run(x, good))
        index = (np.array([0, bad]) if bad < 2**63 else np.array([0, bad], np.uint64)).astype(dtype)
        for call in range(3):  # kernel by kernel, captured, replayed
            try:
                y = run(place(x), place(index))
                run(place(x), place(good.astype(dtype) if dtype[0] != "u" else np.array([0, 0], dtype)))  # nothing is read yet
                reads[read](y)
            except IndexError as error:
                if "out of range for a dimension of size 5" not in str(error) or not any(
                    "gpu_programs.py" in note for note in getattr(error, "__notes__", ())
                ):
                    raise AssertionError(f"call {call + 1}: {error}, with the notes {error.__notes__}") from error
            else:
                raise AssertionError(f"no IndexError was raised in call {call + 1}")
            have = np.asarray(run(place(x), place(good)))
            if not np.array_equal(have, want):
                raise AssertionError(f"after call {call + 1} the next one is wrong")
        cases.graphs[graph_of(run).partition(":")[0]] += 1

    for name in functions:
        for bad, dtype in ((5, "i8"), (-6, "i4"), (100, "u1"), (2**63 + 1, "u8")):
            for read in reads if name == "get" else ("np.asarray",):
                if not rehearses():
                    cases(f"{name}, {bad} as {dtype}, {read}", lambda: wrong(name, bad, dtype, read))
    right = fc.jit(lambda x, i: fc.at(x[i])[0].set(7.0), mesh=fc.make_mesh({"one": 1}, device=where))
    cases("right ones", lambda: check(bits(right(x, good)), [[right_bytes(x, good)]], "a right index"))
    cases.report("wrong indices")


def ragged() -> None:
    """Ragged collectives between virtual devices, with other sizes in each call of a program, have the values of slices."""
    where = device()
    import funccoll as fc
    from tests.support.cases import ragged_cases

    cases = _Cases()
    for axes, over in (({"d": 2}, ("d",)), ({"d": 4}, ("d",)), ({"a": 2, "b": 2}, ("b",))):
        mesh = fc.make_mesh(axes, device=where)
        for seed in range(4):
            most = 9 if seed < 3 else 3000
            cases(f"{axes} over {over}, seed {seed}", lambda: ragged_cases.check({}, over, seed, most=most, mesh=mesh) and None)
    cases.report("random sizes of ragged collectives")


def right_bytes(x: np.ndarray, rows: np.ndarray) -> bytes:
    """The bytes of `x[rows]` with 7 in its first row."""
    y = x[rows]
    y[0] = 7.0
    return y.tobytes()


# ---------------------------------------------------------------- graphs that make room for others


def graphs() -> None:
    """Graphs that were used longest ago make room for others, free their memory, and are captured anew; results stay right."""
    where = device()
    import funccoll as fc
    from funccoll.platforms.gpu import captured_program

    if where == "cpu":
        found("graphs", "the CPU has none")
        return
    cupy, cases = require_gpu(), _Cases()
    mesh, side = fc.make_mesh({"one": 1}, device=where), 2048 if hasattr(require_gpu(), "ElementwiseKernel") else 64
    own: Any = mesh.transport.device.gpu  # pyright: ignore[reportAttributeAccessIssue]
    x = cupy.asarray(np.linspace(-1, 1, side * side).reshape(side, side))
    steps = [fc.jit(lambda x, k=k: np.square(x + k) * 2 - x, mesh=mesh) for k in range(4)]
    wanted = [np.square(x.get() + k) * 2 - x.get() for k in range(4)]

    def call(k: int, times: int = 1) -> Any:
        for _ in range(times):
            result = np.asarray(steps[k](x))
            if not np.array_equal(result, wanted[k]):
                raise AssertionError(f"program {k} is wrong: {recording(steps[k]).execution}")
        return recording(steps[k])

    def free_bytes() -> int:
        cupy.get_default_memory_pool().free_all_blocks()
        return cupy.cuda.runtime.memGetInfo()[0]

    @contextmanager
    def limits(**most: int) -> Any:
        kept = own.graphs.most_bytes, captured_program.MOST_GRAPHS
        own.graphs.most_bytes, captured_program.MOST_GRAPHS = most.get("nbytes", kept[0]), most.get("count", kept[1])
        try:
            yield
        finally:
            own.graphs.most_bytes, captured_program.MOST_GRAPHS = kept

    def expect(what: str, have: object, want: object) -> None:
        if have != want:
            raise AssertionError(f"{what}: {have} in place of {want}")

    def room() -> None:
        first = call(0, 3)
        each = first.nbytes
        expect("one graph", (own.stats()["graphs"], own.stats()["graph bytes"]), (1, each))
        with limits(nbytes=2 * each):
            second = call(1, 3)
            call(0)
            before = free_bytes()
            third = call(2, 3)
            expect("which are captured", [p.is_captured for p in (first, second, third)], [True, False, True])
            expect("bytes of graphs", own.stats()["graph bytes"], 2 * each)
            if free_bytes() < before - each // 2:
                raise AssertionError(f"a graph that was dropped kept its memory: {before} bytes were free, now {free_bytes()}")
            expect("how often it runs kernel by kernel", [call(1).is_captured for _ in range(4)], [False, False, True, True])
            expect("the one used longest ago", first.is_captured, False)
            found("room", f"graphs of {each} bytes in {2 * each}: {second.execution}, then {first.execution}")

    def count() -> None:
        with limits(count=1):
            expect("graphs", (call(3, 3).is_captured, own.stats()["graphs"]), (True, 1))

    def memory() -> None:
        """A capture that gets no memory takes that of the other graphs."""
        held, kept = call(0, 8), cupy.cuda.Memory
        fresh = fc.jit(lambda x: np.square(x + 9) * 2 - x, mesh=mesh)
        fresh(x)
        failed = []

        def refusing(nbytes: int) -> Any:  # as the driver where nothing is left
            if held.is_captured:
                failed.append(nbytes)
                raise MemoryError("no memory is left")
            return kept(nbytes)

        expect("the other one", held.is_captured, True)
        cupy.cuda.Memory = refusing
        try:
            result = np.asarray(fresh(x))
        finally:
            cupy.cuda.Memory = kept
        expect("its values", np.array_equal(result, np.square(x.get() + 9) * 2 - x.get()), True)
        states = recording(fresh).is_captured, bool(failed), held.is_captured
        expect("captured, refused, the other one", states, (True, True, False))

    for name, case in (("room", room), ("count", count), ("a capture without memory", memory)):
        cases(name, lambda: case())
    cases.report("limits of graphs")


# ---------------------------------------------------------------- Arrays


def arrays() -> None:
    """Arrays on a GPU: how they come, go, are split anew, donated, pickled, and used by threads; started collectives."""
    where = device()
    import funccoll as fc
    from funccoll import P

    cases, library = _Cases(), np if rehearses() else require_gpu()
    mesh, host = fc.make_mesh({"d": 2, "e": 2}, device=where), fc.make_mesh({"d": 2, "e": 2}, device="cpu")
    value = np.arange(48.0).reshape(8, 6)
    x = fc.device_put(value, mesh, P("d", "e"))
    kind = library.ndarray

    def equal(have: Any, want: np.ndarray, what: str) -> None:
        if not np.array_equal(np.asarray(have.get() if hasattr(have, "get") else have), want):
            raise AssertionError(f"{what}: {have} in place of {want}")

    def on_gpu(block: Any, what: str) -> None:
        if type(block) is not kind:
            raise AssertionError(f"{what} is a {type(block)}")

    def operators() -> None:
        for what, y, want in (
            ("x * x", x * x, value * value),
            ("-x", -x, -value),
            ("sum", x.sum(), value.sum()),
            ("x > 3", x > 3, value > 3),
            ("reshape", x.reshape(48), value.reshape(48)),
            ("x >= block", x >= library.asarray(value), value >= value),
            ("x + block", x + library.asarray(value), value * 2),
        ):
            on_gpu(y, what) if np.ndim(want) else None
            equal(y, want, what)
        for what, y, want in (("T", x.T, value.T), ("x[1:3]", x[1:3], value[1:3])):  # of the host, as they say
            equal(y, want, what)
        equal(np.asarray(x.tolist()), value, "tolist")
        if float(fc.jit(np.sum, mesh=mesh)(x)) != value.sum():
            raise AssertionError("float of a result")

    def moves() -> None:
        for spec in (P(), P("e"), P(("d", "e")), P(None, "d"), P("e", "d")):
            y = fc.redistribute(x, spec)
            equal(y, value, f"redistribute to {spec}")
            on_gpu(y.shards[0], f"redistribute to {spec}")
            equal(fc.device_put(y, host, P("d")), value, "device_put to the CPU")
            equal(fc.device_put(fc.device_put(y, host, P("d")), mesh, spec), value, "device_put to the GPU")
            specs: Any = {"in_specs": P("d", "e"), "out_specs": P("d", "e")}
            step = fc.jit(lambda a: fc.all_reduce(a.sum(), ("d", "e")) + a, mesh=mesh, **specs)
            equal(step(y), value + value.sum(), f"an argument split by {spec}")
        blocks = [library.asarray(value[:4]), library.asarray(value[4:])]
        pair = fc.make_mesh({"d": 2}, device=where)
        equal(fc.from_local(blocks, pair, P("d")), value, "from_local")
        equal(fc.process_allgather(x), value, "process_allgather")
        auto = fc.jit(lambda a: np.tanh(a) * 2, mesh=mesh, in_specs=fc.AUTO, out_specs=fc.AUTO)
        for _ in range(3):
            y = auto(x)
        if y.sharding.spec != x.sharding.spec:
            raise AssertionError(f"AUTO: {y.sharding} in place of {x.sharding}")

    def donated() -> None:
        step = fc.jit(lambda a: a + 1, mesh=mesh, in_specs=P("d", "e"), out_specs=P("d", "e"), donate_argnums=0)
        y = step(x + 0 if rehearses() else fc.device_put(value, mesh, P("d", "e")))
        for k in range(4):
            z = step(y)
            equal(z, value + 2 + k, "a donated argument")
            y = z

    def pickled() -> None:
        again = pickle.loads(pickle.dumps(mesh))
        step = fc.jit(lambda a: fc.all_reduce(a, "d"), mesh=again, in_specs=P("d"), out_specs=P())
        equal(step(value), value[:4] + value[4:], "a pickled mesh")
        part = mesh["e", "d"]
        equal(fc.device_put(value, part, P("d")), value, "a mesh with its axes in another order")

    def threads() -> None:
        step = fc.jit(lambda a: fc.all_reduce(np.sin(a) * 2 + 1, "d"), mesh=mesh, in_specs=P("d"), out_specs=P())
        want, failures = np.asarray(step(value)), []

        def work() -> None:
            try:
                for _ in range(20):
                    equal(step(value), want, "in a thread")
                    equal(step(fc.device_put(value, mesh, P("d"))), want, "in a thread, of an Array")
            except Exception as error:
                failures.append(error)

        several = [threading.Thread(target=work) for _ in range(4)]
        for thread in several:
            thread.start()
        for thread in several:
            thread.join()
        if failures:
            raise failures[0]

    def started() -> None:
        step = fc.jit(lambda a: fc.all_reduce(a, ("d", "e")), mesh=mesh, in_specs=P(("d", "e")), out_specs=P())
        y = fc.device_put(value, mesh, P(("d", "e")))
        want = np.asarray(step(y))
        work = compiled(step).group_calls[0].start(y.take_copies())
        if not work.test() or work.exception() is not None:
            raise AssertionError(f"{work} with {work.exception()}")
        result = work.result()
        equal((result[0] if isinstance(result, tuple) else result), want, "a started collective")

    def training() -> None:
        """An optimizer's state, `donate`, gradients that are reduced: the same with as many devices on the CPU."""
        optimizer = fc.optim.adamw(1e-2)

        def loss(w: Any, a: Any) -> Any:
            return fc.all_reduce(np.mean(np.square(np.tanh(a @ w) - 0.5)), "d", op="mean")

        def step(w: Any, state: Any, a: Any) -> Any:
            value, grads = fc.value_and_grad(loss)(w, a)
            w, state = fc.optim.apply(optimizer, grads, state, w)
            return w, state, value

        found_values = []
        for place in (mesh, host):
            run = fc.jit(step, mesh=place, in_specs=(P(), P(), P("d")), out_specs=(P(), P(), P()), donate_argnums=(0, 1))
            w: Any = np.linspace(-1, 1, 18).reshape(6, 3)
            state = optimizer.init(w)
            for _ in range(5):
                w, state, last = run(w, state, value / 50)
            found_values.append([np.asarray(leaf) for leaf in fc.tree.leaves((w, state, last))])
        for h, want in zip(*found_values, strict=True):
            if not roundings(h, want) <= GRADIENTS:
                raise AssertionError(f"training is off by {roundings(h, want):.3g} roundings")

    for case in (operators, moves, donated, pickled, threads, started, training):
        cases(case.__name__, case)
    cases.report("uses of Arrays")


def job_arrays() -> None:
    """The same between 2 processes on one GPU: Arrays, calls from other threads, and programs that are not recorded."""
    require_sharing()
    done = run_job(2, "gpu_programs:job_arrays_rank")
    if done.returncode or done.stdout.count("arrays of a job are right") != 2:
        raise RuntimeError(f"exit code {done.returncode}: {done.stdout[-2500:]}")
    found("arrays", "2 processes: redistributed, gathered, from another thread, kernel by kernel", counts=True)


def job_arrays_rank() -> None:
    """One process of the job."""
    import funccoll as fc
    from funccoll import P

    mesh = fc.make_mesh({"d": fc.world_size()})
    value = np.arange(48.0).reshape(8, 6)
    x = fc.device_put(value, mesh, P("d"))
    np.testing.assert_array_equal(fc.process_allgather(x), value)
    np.testing.assert_array_equal(fc.process_allgather(fc.redistribute(x, P(None, "d"))), value)
    np.testing.assert_array_equal(np.asarray(fc.redistribute(x, P())), value)
    other = fc.make_mesh({"d": fc.world_size()})  # whose communicators belong to the thread that calls them first
    mine = fc.from_local(value[4 * fc.rank() : 4 * fc.rank() + 4], other, P("d"))
    step = fc.jit(lambda a: fc.all_reduce(a, "d") * 2 + fc.axis_index("d") * 0, mesh=other, in_specs=P("d"), out_specs=P("d"))
    words, seen = step.lower(mine).compile().execution, []
    if device() == "cuda" and not words.startswith("kernel by kernel: the hosts agree"):
        raise AssertionError(f"a job's program runs {words!r}")

    def work() -> None:
        for _ in range(3):  # what `JobGpuDevice.record` returns, in a thread whose current device CuPy chose
            seen.append(fc.process_allgather(step(mine)))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if len(seen) != 3:
        raise AssertionError("the thread has failed")
    for result in seen:
        np.testing.assert_array_equal(result, np.concatenate([2 * (value[:4] + value[4:])] * 2))
    print("arrays of a job are right", flush=True)
