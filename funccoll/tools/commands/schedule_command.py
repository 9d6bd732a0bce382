"""`funccoll schedule`: show, explain, draw and export the schedule of a collective."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import re
import stat
import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ... import schedules
from ...errors import FunccollError, system_reason
from ...schedules.collective import KINDS, check_kind, similar
from ...schedules.registry import Algorithm, find, known
from ...schedules.schedule import Schedule
from .schedule_figures import figures_of, summary

__all__ = ["main"]

_MOST_RANKS = 1024
"""The most ranks for which the command builds schedules. Above it some take minutes and gigabytes."""
_MOST_PIECES = 1 << 17
"""Ranks times chunks times channels, for the same reason."""
_SIZES = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}
_FORMATS = ("msccl", "goal", "perfetto", "json")


class _WrongOption(Exception):
    """An option with a value that does not fit. The text says which values fit."""


def main(words: Sequence[str]) -> int:
    """Print the schedule. Return 2 if options do not fit."""
    parser = _parser()
    options = parser.parse_args(words)
    try:
        if options.list:
            _list(options)
        else:
            _show(options)
    except _WrongOption as error:
        parser.error(str(error))
    except FunccollError as error:
        parser.error(str(error).partition("\n  at ")[0])
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="funccoll schedule",
        allow_abbrev=False,
        usage="funccoll schedule COLLECTIVE --ranks P [--algorithm NAME] [options]\n"
        "       funccoll schedule --list [--ranks P]",
        description="Show the schedule of a collective: rounds, moves, bytes, predicted time, its proof, and which rank reads "
        "which. Without --algorithm, show the cost of each algorithm and the one that is chosen.",
        epilog="For example: funccoll schedule all_reduce --ranks 8 --algorithm ring --bytes 1MiB --draw ring.svg",
    )
    parser.add_argument("collective", nargs="?", help=f"one of {', '.join(KINDS)}")
    parser.add_argument("--list", action="store_true", help="list all collectives and algorithms (for --ranks, if given)")
    parser.add_argument("--ranks", type=_count, metavar="P", help="the number of ranks")
    parser.add_argument("--algorithm", metavar="NAME", help="see --list")
    parser.add_argument(
        "--bytes",
        type=_bytes,
        default=1 << 20,
        metavar="N",
        help="bytes of the larger of one rank's input and output, such as 4096, 64KiB, 1MiB (the default), 2GB",
    )
    parser.add_argument("--dtype", metavar="NAME", help="element type for the choice: 16-bit floats round partial sums")
    parser.add_argument(
        "--topology",
        metavar="NAME[:SHAPE]",
        help=f"the machine of the cost model: {', '.join(_TOPOLOGIES)} (default: one_host, or --hosts). SHAPE is hosts x ranks "
        "per host, such as ethernet:4x2, or the sizes of a torus, torus:4x4x2",
    )
    parser.add_argument("--root", type=int, default=0, metavar="R", help="the root of broadcast, reduce, gather, scatter (0)")
    parser.add_argument(
        "--pairs", type=_pairs, default=(), metavar="S:D,...", help="source and destination ranks of a permute: 0:1,1:0"
    )
    parser.add_argument("--reverse", action="store_true", help="a scan from the last rank to the first")
    parser.add_argument("--chunks", type=_count, metavar="N", help="chunks per block, for algorithms that take a number")
    parser.add_argument("--channels", type=_count, default=1, metavar="N", help="streams of each rank (1)")
    parser.add_argument(
        "--hosts",
        type=_hosts,
        metavar="HxE",
        help="hosts x ranks per host, such as 2x4, or the host of each rank, such as 0,0,0,1. It is for the machine, unless "
        "--topology names one, and for a hierarchical algorithm",
    )
    parser.add_argument(
        "--levels", type=_levels, metavar="HxE", help="hosts x ranks per host of a hierarchical algorithm, such as 2x4"
    )
    parser.add_argument("--draw", metavar="FILE", help="draw it to FILE.svg or FILE.png")
    parser.add_argument(
        "--drawing", default="space_time", metavar="KIND", help="space_time (default), link_matrix or chunk_table"
    )
    parser.add_argument(
        "--export", metavar="FORMAT", help="print it as msccl (XML), goal (LogGOPSim), perfetto (simulated) or json"
    )
    parser.add_argument("--out", metavar="FILE", help="write the export to FILE, and print the tables")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    return parser


# ---------------------------------------------------------------- options


def _count(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,18}", text) or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r:.60} must be a number, at least 1, in digits alone.")
    return int(text)


def _bytes(text: str) -> int:
    found = re.fullmatch(r"([0-9]{1,18}(?:\.[0-9]{1,9})?) ?([A-Za-z]*)", text)
    unit = _SIZES.get(found[2].upper()) if found else None
    number = float(found[1]) * unit if found and unit else 0.5
    if number != int(number) or not 0 <= number < 1 << 62:
        raise argparse.ArgumentTypeError(f"{text!r:.60} must be a whole number of bytes, such as 4096, 64KiB, 1.5MiB or 2GB.")
    return int(found[1]) * unit if found and unit and "." not in found[1] else int(number)


def _pairs(text: str) -> tuple[tuple[int, int], ...]:
    if not re.fullmatch(r"[0-9]{1,9}:[0-9]{1,9}(,[0-9]{1,9}:[0-9]{1,9})*", text):
        raise argparse.ArgumentTypeError(f"{text!r:.60} must be pairs of ranks, source:destination, such as 0:1,1:0.")
    return tuple((int(s), int(d)) for s, d in (pair.split(":") for pair in text.split(",")))


def _levels(text: str) -> tuple[int, int]:
    if not re.fullmatch(r"[0-9]{1,9}x[0-9]{1,9}", text):
        raise argparse.ArgumentTypeError(f"{text!r:.60} must be hosts x ranks per host, such as 2x4.")
    hosts, ranks_per_host = text.split("x")
    return int(hosts), int(ranks_per_host)


def _hosts(text: str) -> tuple[int, ...]:
    if re.fullmatch(r"[0-9]{1,9}x[0-9]{1,9}", text):
        hosts, ranks_per_host = _levels(text)
        if 0 < hosts * ranks_per_host <= _MOST_RANKS:
            return tuple(r // ranks_per_host for r in range(hosts * ranks_per_host))
    elif re.fullmatch(r"[0-9]{1,6}(,[0-9]{1,6})*", text):
        return tuple(map(int, text.split(",")))
    raise argparse.ArgumentTypeError(
        f"{text!r:.60} must be hosts x ranks per host, such as 2x4, or a host for each rank, such as 0,0,0,1."
    )


def _on_one_host(make: Callable[[int], schedules.Topology]) -> Callable[..., schedules.Topology]:
    def topology(p: int, shape: tuple[int, ...]) -> schedules.Topology:
        if shape:
            raise _WrongOption("--topology: a topology of one host has no shape; leave out the colon and the shape.")
        return make(p)

    return topology


def _on_hosts(make: Callable[[int, int], schedules.Topology], each: int) -> Callable[..., schedules.Topology]:
    def topology(p: int, shape: tuple[int, ...]) -> schedules.Topology:
        hosts = shape or ((p // each, each) if p % each == 0 else (1, p) if p < each else ())
        if len(hosts) != 2:
            raise _WrongOption(
                f"--topology: {p} ranks are not hosts of {each}; give hosts x ranks per host after a colon, such as :2x4."
            )
        return make(*hosts)

    return topology


_TOPOLOGIES: dict[str, Callable[..., schedules.Topology]] = {
    "one_process": _on_one_host(schedules.Topology.one_process),
    "one_host": _on_one_host(schedules.Topology.one_host),
    "one_gpu": _on_one_host(schedules.Topology.one_gpu),
    "nvlink": _on_one_host(schedules.Topology.nvlink),
    "nvlink_infiniband": _on_hosts(schedules.Topology.nvlink_infiniband, 8),
    "ethernet": _on_hosts(schedules.Topology.ethernet, 1),
    "torus": lambda p, shape: schedules.Topology.torus(shape or (p,)),
}
"""Name -> the topology for a number of ranks and a shape, () if none is given."""


def _topology(text: str, p: int) -> schedules.Topology:
    name, _, sizes = text.partition(":")
    if name not in _TOPOLOGIES:
        raise _WrongOption(f"unknown topology {name!r}.{similar(name, _TOPOLOGIES)} There are: {', '.join(_TOPOLOGIES)}.")
    if (":" in text) != bool(re.fullmatch(r"[0-9]{1,9}(x[0-9]{1,9})*", sizes)):
        raise _WrongOption(f"--topology {text}: a shape is sizes with x between them, such as {name}:4x2.")
    found = _TOPOLOGIES[name](p, tuple(map(int, sizes.split("x"))) if sizes else ())
    if found.nranks != p:
        raise _WrongOption(f"--topology {text} has {found.nranks} ranks, and --ranks is {p}. Make them agree.")
    return found


# ---------------------------------------------------------------- the list


def _list(options: argparse.Namespace) -> None:
    kinds = list(KINDS) if options.collective is None else [check_kind(options.collective)]
    rows = [_row(a) for kind in kinds for a in known(kind) if options.ranks is None or not a.refusal(options.ranks)]
    if options.json:
        print(json.dumps(rows))
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("collective", "algorithm", "ranks", "options", "what it does"):
        table.add_column(name, no_wrap=name != "what it does")
    before = ""
    for row in rows:
        options_of = " ".join(f"--{o}" for o in row["options"])
        table.add_row(
            "" if row["collective"] == before else row["collective"],
            row["algorithm"],
            row["ranks"],
            options_of,
            Text(row["text"]),
        )
        before = row["collective"]
    _console().print(table)


def _row(algorithm: Algorithm) -> dict[str, Any]:
    fixed = algorithm.schedule
    ranks = f"{fixed.nranks}" if fixed is not None else "powers of two" if algorithm.power_of_two else "any"
    text = schedules.describe(algorithm.kind, algorithm.name).partition("\n\n")[2].partition("\n")[0]
    names = [o for o in ("root", "pairs", "chunks", "hosts", "levels") if o in algorithm.options]
    return {"collective": algorithm.kind, "algorithm": algorithm.name, "ranks": ranks, "options": names, "text": text}


# ---------------------------------------------------------------- a schedule


def _show(options: argparse.Namespace) -> None:
    kind, p = _checked(options)
    if options.hosts is not None and len(options.hosts) != p:
        raise _WrongOption(f"--hosts names the hosts of {len(options.hosts)} ranks, and --ranks is {p}. Make them agree.")
    topology = _topology(options.topology or "one_host", p)
    given = options.topology is None and options.hosts is not None
    if given:
        topology = schedules.Topology.of_hosts(options.hosts or ())
    nbytes = 0 if not KINDS[kind].carries_data else options.bytes
    asked: dict[str, Any] = {
        "dtype": _dtype(options.dtype),
        "root": options.root,
        "pairs": options.pairs,
        "hosts": options.hosts,
        "levels": options.levels,
        "reverse": options.reverse,
    }
    explanation = None
    if options.algorithm is None:
        if options.chunks is not None or options.channels != 1:
            raise _WrongOption("--chunks and --channels are for one algorithm: name it with --algorithm.")
        explanation = schedules.explain(kind, topology, nbytes, **asked)
        schedule = schedules.select(kind, topology, nbytes, **asked)
    else:
        takes = not given or find(kind, options.algorithm, p).is_hierarchical  # otherwise the hosts are only the machine's
        schedule = schedules.build(
            kind,
            p,
            options.algorithm,
            channels=options.channels,
            root=options.root,
            chunks=options.chunks,
            hosts=options.hosts if takes else None,
            levels=options.levels,
            pairs=options.pairs,
            reverse=options.reverse,
        )
    figures = figures_of(schedule, topology, nbytes, asked["dtype"])
    text = _exported(schedule, options.export, topology, nbytes) if options.export else None
    if text is not None and options.out is None:
        sys.stdout.write(text)
    else:
        if text is not None:
            _write(options.out, text)
        figures["export"] = None if text is None else {"format": options.export, "file": options.out}
    if options.draw:
        _draw(schedule, options)
    figures["drawing"] = options.draw
    if text is not None and options.out is None:
        return
    if options.json:
        choice = None if explanation is None else [dataclasses.asdict(row) for row in explanation]
        print(json.dumps({**figures, "candidates": choice}))
        return
    if explanation is not None:
        print(f"{explanation}\n")
    _print(schedule, figures)
    for what, path in (("exported to", options.out if text is not None else None), ("drawn to", options.draw)):
        if path:
            print(f"{what} {path}")


def _checked(options: argparse.Namespace) -> tuple[str, int]:
    """Return the collective and the number of ranks. Raise _WrongOption if options do not fit each other."""
    if options.collective is None:
        raise _WrongOption(f"name a collective ({', '.join(KINDS)}), or list all algorithms with --list.")
    kind = check_kind(options.collective)
    if options.ranks is None:
        raise _WrongOption(f"give the number of ranks: funccoll schedule {kind} --ranks 8")
    if options.ranks > _MOST_RANKS:
        raise _WrongOption(
            f"--ranks {options.ranks:,}: this command takes at most {_MOST_RANKS:,}, since more need gigabytes. In "
            f"Python fc.schedules.build({kind!r}, {options.ranks}, ...) has no limit."
        )
    pieces = options.ranks * (options.chunks or 1) * options.channels
    if pieces > _MOST_PIECES:
        raise _WrongOption(
            f"ranks × chunks × channels = {options.ranks:,} × {options.chunks or 1:,} × {options.channels:,}: this command "
            f"takes at most {_MOST_PIECES:,}, since more take minutes and gigabytes."
        )
    if options.export is not None and options.export not in _FORMATS:
        meant = similar(options.export, _FORMATS)
        raise _WrongOption(f"unknown format {options.export!r}.{meant} There are: {', '.join(_FORMATS)}.")
    if options.out is not None and options.export is None:
        raise _WrongOption(f"--out needs --export, one of {', '.join(_FORMATS)}.")
    if options.json and options.export is not None and options.out is None:
        raise _WrongOption("--export prints the file, and --json the figures: write the file with --out.")
    return kind, options.ranks


def _dtype(name: str | None) -> Any:
    if name is None:
        return None
    from ...core.types import bfloat16

    try:
        return bfloat16 if name == "bfloat16" else np.dtype(name)
    except TypeError:
        raise _WrongOption(f"unknown dtype {name!r}. Use float32, float16, bfloat16, int32, ...") from None


def _exported(schedule: Schedule, format: str, topology: schedules.Topology, nbytes: int) -> str:
    if format == "msccl":
        return schedule.to_msccl_xml()
    if format == "goal":
        return schedule.to_goal(nbytes, gamma=topology.gamma)
    return schedule.to_json() if format == "json" else schedule.to_perfetto(None, topology, nbytes)


def _draw(schedule: Schedule, options: argparse.Namespace) -> None:
    if not options.draw.endswith((".svg", ".png")):
        raise _WrongOption(f"--draw {options.draw}: the file's name must end in .svg or .png.")
    drawing = schedule.draw(options.drawing)
    try:
        drawing.save(options.draw)
    except OSError as error:
        raise _WrongOption(f"cannot write {options.draw!r}: {system_reason(error)}.") from None


def _write(path: str, text: str) -> None:
    """Write a whole file or nothing. A special file such as /dev/stdout is written directly."""
    try:
        if os.path.exists(path) and not stat.S_ISREG(os.stat(path).st_mode):
            with open(path, "w", encoding="utf-8") as file:
                file.write(text)
            return
        handle, name = tempfile.mkstemp(dir=os.path.dirname(path) or ".", prefix=".funccoll-")
        try:
            with open(handle, "w", encoding="utf-8") as file:
                file.write(text)
            mask = os.umask(0)
            os.umask(mask)
            os.chmod(name, 0o666 & ~mask)
            os.replace(name, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(name)
            raise
    except OSError as error:
        raise _WrongOption(f"cannot write {path!r}: {system_reason(error)}.") from None


def _print(schedule: Schedule, figures: dict[str, Any]) -> None:
    console = _console()
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column()
    for name, text in summary(schedule, figures):
        grid.add_row(name, Text(text))
    console.print(grid)


def _console() -> Console:
    # Only a terminal has a width.
    return Console(highlight=False, width=None if sys.stdout.isatty() else 140)
