"""Random calls on the ranks of a job, against the same functions on virtual devices: the bits must be equal.

    python -m tests.support.cases.call_fuzz --calls 100000 --ranks 2,3,4 --seed 1

One process draws a program of calls from the seed, and runs it on virtual devices. Each rank draws the same program; it
passes the arguments in ways of its own, keeps results for a while, and verifies them again when it drops them. With
FUNCCOLL_NATIVE=0 and 1 it tests the calls in Python and by the C extension; by hand both are run.
"""

from __future__ import annotations

import argparse
import gc
import math
import os
import random
import secrets
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import funccoll as fc
from funccoll import P
from funccoll.config import NATIVE
from funccoll.core.c_extension import extension
from funccoll.core.mesh import Mesh
from funccoll.transports.plans import planned_collective
from funccoll.transports.shm import arena, heap, plan
from tests.support.cases.collective_cases import BF16, has_op, sample

DTYPES = [np.dtype(t) for t in ("f4", "f8", "i4", "?", "c8", "u1")] + [BF16]
BYTES = [0] * 4 + [1] * 6 + [100] * 8 + [4 << 10] * 4 + [16 << 10] * 3 + [64 << 10] * 2 + [256 << 10, 1 << 20]
"""Bytes of a rank's block: those of a signature are about one of them."""
MOST_KEPT, MOST_RESULTS = 24, 3
OPS = ["sum", "mean", "max", "min", "prod", "and", "or", "xor"]


def changed(x: Any) -> Any:
    """Something computed of an array of any dtype."""
    return np.logical_not(x) if x.dtype.kind == "b" else x + x


@dataclass
class Signature:
    """A jitted function and the types of its arguments; all of it is drawn from the seed."""

    name: str
    function: Callable[..., Any]
    spec: P
    shape: tuple[int, ...]
    dtype: np.dtype
    nargs: int
    number: float | None
    pytree: bool
    donated: bool
    in_job: Any = None
    """The jitted function."""

    def __str__(self) -> str:
        how = f"{self.nargs} arguments{', a pytree' * self.pytree}{', the first donated' * self.donated}"
        return f"{self.name} of {self.dtype}{list(self.shape)}, {how}"

    def jitted(self, mesh: Mesh) -> Any:
        specs = ({"a": [self.spec] * self.nargs},) if self.pytree else (self.spec,) * self.nargs
        if self.number is not None:
            specs = *specs, P()
        donated = (0,) if self.donated else ()
        return fc.jit(self.function, mesh=mesh, in_specs=specs, out_specs=self.spec, donate_argnums=donated)


def collective(rng: random.Random, axes: tuple[str, ...], n: int, dtype: np.dtype) -> tuple[str, Callable[[Any], Any], bool]:
    """A collective over some of the axes: its name, its function of a block, and True where the block's rows are split."""
    axis: Any = axes if len(axes) == 1 or rng.random() < 0.4 else (rng.choice(axes),)
    n, axis = (n if axis == axes else 2), axis[0] if len(axis) == 1 else axis
    op = rng.choice([op for op in OPS if has_op(op, dtype)])
    root, step = rng.randrange(n), rng.randrange(1, n)
    pairs = rng.choice([[(i, (i + step) % n) for i in range(n)], [(root, (root + step) % n)]])
    makers: dict[str, tuple[Callable[[Any], Any], bool]] = {
        "all_reduce": (lambda x: fc.all_reduce(x, axis, op=op), False),
        "all_gather": (lambda x: fc.all_gather(x, axis), False),
        "stacked all_gather": (lambda x: fc.all_gather(x, axis, stack=True), False),
        "reduce_scatter": (lambda x: fc.reduce_scatter(x, axis, op=op), True),
        "broadcast": (lambda x: fc.broadcast(x, axis, root=root), False),
        "all_to_all": (lambda x: fc.all_to_all(x, axis, split_dim=0, concat_dim=0), True),
        "turning all_to_all": (lambda x: fc.all_to_all(x, axis, split_dim=0, concat_dim=1), True),
        "permute": (lambda x: fc.permute(x, axis, pairs=pairs), False),
        "reduce": (lambda x: fc.reduce(x, axis, root=root, op=op), False),
        "gather": (lambda x: fc.gather(x, axis, root=root), False),
        "scatter": (lambda x: fc.scatter(x, axis, root=root), True),
        "inclusive_scan": (lambda x: fc.inclusive_scan(x, axis, op=op if op != "mean" else "sum"), False),
        "exclusive_scan": (lambda x: fc.exclusive_scan(x, axis, op=op if op != "mean" else "sum", reverse=True), False),
    }
    name = rng.choice(list(makers) + ["all_reduce"] * 3)
    function, splits = makers[name]
    return f"{name}({op}, {axis})", function, splits


def signature(rng: random.Random, axes: tuple[str, ...], n: int) -> Signature:
    dtype = rng.choice(DTYPES)
    parts = [collective(rng, axes, n, dtype) for _ in range(rng.choice([1, 1, 1, 2, 3]))]
    before, after = rng.random() < 0.3, rng.random() < 0.3
    chained = rng.random() < 0.5 and parts[0][0].startswith(("reduce_scatter", "all_to_all", "permute"))
    pytree, donated = rng.random() < 0.2, rng.random() < 0.15
    number = rng.choice([2, 0.5]) if rng.random() < 0.15 and dtype.kind == "f" else None
    nargs = rng.choice([1, 1, len(parts)])
    dictionary = len(parts) > 1 and rng.random() < 0.5

    def function(*args: Any) -> Any:
        blocks = args[0]["a"] if pytree else args[:nargs]
        if before:
            blocks = [changed(x) for x in blocks]
        if number is not None:
            blocks = [x * args[-1] for x in blocks]
        found = [part(blocks[i % nargs]) for i, (_, part, _) in enumerate(parts)]
        if chained:  # no compute is between them: one native call
            found[0] = fc.all_gather(found[0], axes if len(axes) > 1 else axes[0])
        if after:
            found = [changed(y) for y in found]
        return {"y": found[0], "z": found[1:]} if dictionary else found[0] if len(found) == 1 else tuple(found)

    nbytes = rng.choice(BYTES)
    items = 0 if not nbytes else 1 if nbytes == 1 else max(1, nbytes // dtype.itemsize + rng.randrange(-1, 2))
    columns = rng.choice([1, 1, 3]) if items > 3 else 1
    rows = -(-items // columns)
    if any(splits for _, _, splits in parts):
        rows = -(-rows // n) * n
    name = " and ".join(["changed"] * before + [name for name, _, _ in parts] + ["changed"] * after + ["gathered"] * chained)
    spec = P(axes if len(axes) > 1 else axes[0])
    return Signature(name, function, spec, (n * rows, columns), dtype, nargs, number, pytree, donated)


@dataclass
class Call:
    """One call of a program: `data` says where the values of each argument come from, a kept result or an offset."""

    number: int
    signature: Signature
    data: list[tuple[str, int]]
    keeps: list[int]
    """By leaf of the result, the place among the kept ones that it takes; -1 where it is not kept."""


@dataclass
class Stream:
    """A program of calls over one mesh."""

    seed: int
    axes: dict[str, int]
    calls: int
    number: int
    """Of signatures: each is compiled."""
    signatures: list[Signature] = field(default_factory=list)
    values: dict[Any, np.ndarray] = field(default_factory=dict)

    def __post_init__(self) -> None:
        rng = random.Random(self.seed)
        self.signatures = [signature(rng, tuple(self.axes), math.prod(self.axes.values())) for _ in range(self.number)]

    def program(self, kept: Sequence[Any]) -> Iterator[Call]:
        """The calls; `kept` are the results that the reader has kept so far, at most MOST_KEPT, None where there is none."""
        rng = random.Random(self.seed + 1)
        weights = [1 / (1 + s.shape[0] * s.shape[1] * s.dtype.itemsize / 50_000) for s in self.signatures]
        for number in range(self.calls):
            (drawn,) = rng.choices(self.signatures, weights)
            data, taken = [], set()
            for _ in range(drawn.nargs):
                fitting = [
                    k
                    for k, y in enumerate(kept)
                    if y is not None and k not in taken and (y.shape, y.dtype) == (drawn.shape, drawn.dtype)
                ]
                if fitting and rng.random() < 0.6:
                    data.append(("kept", rng.choice(fitting)))
                    taken.add(data[-1][1])
                else:
                    data.append(("new", rng.randrange(1000)))
            keeps = [rng.randrange(MOST_KEPT) if rng.random() < 0.3 else -1 for _ in range(MOST_RESULTS)]
            yield Call(number, drawn, data, keeps)

    def value(self, s: Signature, offset: int) -> np.ndarray:
        """A new array of a signature's type: a part of one that is drawn once."""
        size, key = math.prod(s.shape), (s.dtype, s.shape)
        if key not in self.values:
            self.values[key] = sample(s.dtype, (size + 1000,), np.random.default_rng(self.seed))
        return self.values[key][offset : offset + size].reshape(s.shape).copy()

    def arguments(self, call: Call, blocks: Sequence[Any]) -> list[Any]:
        s = call.signature
        return [*([{"a": list(blocks)}] if s.pytree else blocks), *([] if s.number is None else [s.number])]

    def keep(self, call: Call, results: Sequence[Any], kept: list[Any]) -> None:
        """Drop what was donated, and keep some of the results."""
        s = call.signature
        if s.donated:
            for source, place in call.data[: s.nargs if s.pytree else 1]:
                if source == "kept":
                    kept[place] = None
        for y, place in zip(results, call.keeps, strict=False):
            if place >= 0:
                kept[place] = y


def digest(block: np.ndarray) -> int:
    flat = np.ascontiguousarray(block).reshape(-1)
    return zlib.crc32(flat.view(np.uint8).data, zlib.crc32(f"{block.dtype}{block.shape}".encode()))


def expected(stream: Stream) -> np.ndarray:
    """By call, rank and leaf of the result, the digest of what virtual devices make."""
    n = math.prod(stream.axes.values())
    mesh, kept = Mesh(stream.axes, range(n)), [None] * MOST_KEPT
    functions = {id(s): s.jitted(mesh) for s in stream.signatures}
    digests = np.zeros((stream.calls, n, MOST_RESULTS), np.uint32)
    for call in stream.program(kept):
        blocks = [kept[at] if source == "kept" else stream.value(call.signature, at) for source, at in call.data]
        results = fc.tree.leaves(functions[id(call.signature)](*stream.arguments(call, blocks)))
        for k, y in enumerate(results):
            known: dict[int, int] = {}
            for r, shard in enumerate(y.shards):
                address = shard.__array_interface__["data"][0]
                digests[call.number, r, k] = known[address] if address in known else known.setdefault(address, digest(shard))
        stream.keep(call, results, kept)
    return digests


# ---------------------------------------------------------------- on a rank


WAYS = ["plain", "device_put", "from_local", "strided", "transposed", "reversed", "offset", "unaligned", "read-only"]


class Player:
    """Plays a stream on one rank."""

    def __init__(self, stream: Stream, mesh: Mesh, wanted: np.ndarray, kept_long: int):
        self.stream, self.mesh, self.wanted = stream, mesh, wanted
        self.rank, self.own = fc.rank(), random.Random(f"{stream.seed} {fc.rank()}")
        self.kept: list[Any] = [None] * MOST_KEPT
        self.held: list[tuple[np.ndarray, int, str]] = []
        """Views of results, with their digests and what they are of."""
        self.most_held = kept_long
        self.failure: BaseException | None = None

    def play(self) -> None:
        functions = {id(s): s.jitted(self.mesh) for s in self.stream.signatures}
        for call in self.stream.program(self.kept):
            s, ways = call.signature, []
            blocks, spoiled = [], []
            for source, at in call.data:
                if source == "kept":
                    blocks.append(self.kept[at])
                    ways.append(f"result {at}")
                else:
                    ways.append(self.own.choice(WAYS))
                    block, memory = self.passed(s, self.stream.value(s, at), ways[-1])
                    blocks.append(block)
                    spoiled.append(memory)
            what = f"call {call.number} of seed {self.stream.seed}: {s}, {ways}"
            try:
                result = functions[id(s)](*self.stream.arguments(call, blocks))
            except BaseException as error:
                error.add_note(f"rank {self.rank}, {what}")
                raise
            for memory in spoiled:  # results share no memory with arguments
                memory.fill(0xA5)
            results = fc.tree.leaves(result)
            for k, y in enumerate(results):
                found, wanted = digest(y.local), int(self.wanted[call.number, self.rank, k])
                assert found == wanted, f"rank {self.rank}, result {k} of {what}: digest {found}, and not {wanted}"
                if self.own.random() < 0.3 and self.most_held:
                    self.hold(y, what)
            self.stream.keep(call, results, self.kept)
            del result, results, blocks, y
            self.sometimes()
        while self.held:
            self.drop()

    def passed(self, s: Signature, value: np.ndarray, way: str) -> tuple[Any, np.ndarray]:
        """The argument, and the bytes from which it was made."""
        if way == "device_put":
            return fc.device_put(value, self.mesh, s.spec), value.reshape(-1).view(np.uint8)
        if way == "from_local":
            rows = s.shape[0] // self.mesh.size
            return fc.from_local(value[rows * self.rank : rows * (self.rank + 1)], self.mesh, s.spec), _bytes(value)
        rows, columns = s.shape
        if way in ("strided", "offset"):
            memory = np.zeros((2 * rows + 1, columns), s.dtype)
            view = memory[1::2] if way == "strided" else memory[1 : rows + 1]
        elif way == "transposed":
            memory = np.zeros((columns, rows), s.dtype)
            view = memory.T
        elif way == "unaligned":
            memory = np.zeros(value.nbytes + 1, np.uint8)
            view = memory[1:].view(s.dtype).reshape(s.shape)
        else:
            memory = np.empty_like(value)
            view = memory[::-1] if way == "reversed" else memory[...] if way == "read-only" else memory
        view[...] = value
        view.flags.writeable = way != "read-only"
        return view, _bytes(memory)

    def hold(self, y: Any, what: str) -> None:
        """Keep a view of a result, in place of the Array."""
        view = y.local
        if view.size and self.own.random() < 0.5:
            view = view.reshape(-1)[self.own.randrange(view.size) :: self.own.choice([1, 2])]
        elif self.own.random() < 0.3:
            view = np.frombuffer(memoryview(_bytes(view)), np.uint8) if view.size else view
        self.held.append((view, digest(view), what))
        while len(self.held) > self.most_held:
            self.drop()

    def drop(self) -> None:
        view, before, what = self.held.pop(self.own.randrange(len(self.held)))
        assert digest(view) == before, f"rank {self.rank}: a result of {what} was overwritten while a view of it was held"

    def sometimes(self) -> None:
        draw = self.own.random()
        if draw < 0.0003:
            fc.clear_caches()
        elif draw < 0.003:
            gc.collect()
        elif draw < 0.01:
            self.most_held = self.own.randrange(12)
            while len(self.held) > self.most_held:
                self.drop()


def _bytes(array: np.ndarray) -> np.ndarray:
    return array.reshape(-1).view(np.uint8)


def play(paths: Sequence[str], streams: Sequence[Stream]) -> int:
    """Play the first two streams one after the other, then the others in a thread each; returns the number of calls."""
    players = [Player(s, fc.make_mesh(s.axes), np.load(path), 8) for s, path in zip(streams, paths, strict=True)]
    for player in players[:2]:
        player.play()

    def beside(player: Player) -> None:
        try:
            player.play()
        except BaseException as error:
            player.failure = error

    threads = [threading.Thread(target=beside, args=(player,)) for player in players[2:]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for player in players:
        if player.failure is not None:
            raise player.failure
    return sum(s.calls for s in streams)


def streams(seed: int, n: int, calls: int) -> list[Stream]:
    """Those of a job of n ranks: over one axis, over two where it can, and twice a few that two threads play."""
    square, few = {"a": 2, "b": 2} if n == 4 else {"d": n}, max(calls // 20, 5)
    drawn = [
        (seed, {"d": n}, calls // 2),
        (seed + 1000, square, calls // 2 - 2 * few),
        (seed + 2000, square, few),
        (seed + 3000, {"d": n}, few),
    ]
    return [Stream(s, axes, count, min(40, 1 + count // 25)) for s, axes, count in drawn]


def record(seed: int, n: int, calls: int, folder: Path) -> list[str]:
    """The paths of what virtual devices make of the streams."""
    paths = []
    for i, stream in enumerate(streams(seed, n, calls)):
        paths.append(str(folder / f"{seed}-{n}-{i}.npy"))
        np.save(paths[-1], expected(stream))
    return paths


def play_drawn(paths: Sequence[str], seed: int, n: int, calls: int) -> int:
    return play(paths, streams(seed, n, calls))


# ---------------------------------------------------------------- by hand


def share_from(nbytes: int) -> None:
    """Let ranks share the results of this many bytes, before there is a heap: such large ones are few."""
    for module in (arena, heap, plan):
        module.SHAREABLE = nbytes
    planned_collective.NON_TEMPORAL = 0


def run(paths: Sequence[str], seed: int, n: int, calls: int, native: str, share_from: int) -> list[int]:
    """The exit codes of n ranks."""
    shared = {**os.environ, NATIVE: native, "FUNCCOLL_WORLD_SIZE": str(n), "FUNCCOLL_RUN_ID": secrets.token_hex(8)}
    command = [sys.executable, "-m", "tests.support.cases.call_fuzz"]
    command += [
        "--play",
        *paths,
        "--seed",
        str(seed),
        "--ranks",
        str(n),
        "--calls",
        str(calls),
        "--share-from",
        str(share_from),
    ]
    ranks = [subprocess.Popen(command, env={**shared, "FUNCCOLL_RANK": str(rank)}) for rank in range(n)]
    return [rank.wait() for rank in ranks]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=10_000, help="of each number of ranks, in Python and in C each")
    parser.add_argument("--ranks", default="2,3,4")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--native", default="1,0" if extension is not None else "0", help=f"values of {NATIVE}")
    parser.add_argument("--share-from", type=int, default=0, help="bytes from which on ranks share results, where it is not 0")
    parser.add_argument("--play", nargs="+", help=argparse.SUPPRESS)
    given = parser.parse_args()
    ranks = [int(n) for n in given.ranks.split(",")]
    if given.play and given.share_from:
        share_from(given.share_from)
    if given.play:
        play_drawn(given.play, given.seed, ranks[0], given.calls)
        return 0
    failed = 0
    for n in ranks:
        with tempfile.TemporaryDirectory() as folder:
            began = time.monotonic()
            paths = record(given.seed, n, given.calls, Path(folder))
            print(f"seed {given.seed}, {n} ranks: virtual devices took {time.monotonic() - began:.0f} s", flush=True)
            for native in given.native.split(","):
                began = time.monotonic()
                codes = run(paths, given.seed, n, given.calls, native, given.share_from)
                failed += any(codes)
                took = f"{given.calls} calls took {time.monotonic() - began:.0f} s"
                print(f"seed {given.seed}, {n} ranks, {NATIVE}={native}: {took}, exit codes {codes}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
