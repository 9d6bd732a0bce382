"""`funccoll tune`: measure this host, and keep the times and the cost model's parameters as its machine profile."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from .. import machine_profile
from ..calibration.fit_parameters import predicted
from ..calibration.timed_cases import QUICK_SIZES, SIZES, Case, cases, default_ranks, fitting_sizes
from ..calibration.tuning import PASSES, measure, profile_of
from ..display import seconds_text, size_text
from ..errors import CalibrationError, FunccollError
from ..machine_profile import HostParameters, MachineProfile, MeasuredTimes
from ..runtime.job import host
from ..schedules.schedule import build

__all__ = ["main"]

_MOST_RANKS = 256
_INTERRUPTED = 130  # a shell's exit code for Ctrl-C


def main(words: Sequence[str]) -> int:
    """Run `funccoll tune` with these arguments; returns the exit code."""
    parser = _parser()
    options = parser.parse_args(words)
    path = options.out or machine_profile.default_path()
    if path is None:
        parser.error("this user has no home directory for a machine profile: name a file with --out, or set XDG_CACHE_HOME")
    if options.show or options.delete:
        return _show(path, options.json) if options.show else _delete(path)
    ranks = options.n or ([2] if options.quick else default_ranks(host.cores()))
    sizes = QUICK_SIZES if options.quick else SIZES
    memory = host.available_memory()
    plan = {n: cases(n, fitting_sizes(sizes, n, memory)) for n in ranks}
    try:
        _keep(machine_profile.check_place, path)  # before half a minute is spent on measuring
        profile = _measure(plan, 3 if options.quick else 7, 0.001, options.anyway)
        _keep(machine_profile.save, profile, path)
    except KeyboardInterrupt:
        kept = "the old one stays" if path.exists() else "there is none yet"
        return _complain(f"interrupted: no machine profile was stored, {kept}.", _INTERRUPTED)
    except FunccollError as error:
        return _complain(str(error).partition("\n  at ")[0], 1)
    _print(profile, options.json)
    if not options.json:
        variable = f"{machine_profile.VARIABLE}={path}"
        use = f"To use it, set {variable}." if options.out else "Costs and choices of algorithms use it from now on."
        print(f"Stored in {path}. {use}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="funccoll tune",
        description="Measure the collectives of this machine, fit the cost model's parameters to the times, and keep both as "
        "this host's machine profile, which the choice of algorithms and explain() use. Takes about half a minute.",
    )
    parser.add_argument(
        "-n", type=_ranks, metavar="RANKS",
        help="numbers of ranks, such as 2,4 (default: powers of two up to the cores, and twice the cores if these are few)",
    )  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="few sizes and short turns, 2 ranks: a rough profile in seconds")
    parser.add_argument("--anyway", action="store_true", help="measure beside other processes that keep the machine busy")
    parser.add_argument("--out", type=Path, metavar="FILE", help="keep the profile in FILE, not in the user's cache directory")
    parser.add_argument("--json", action="store_true", help="print the profile as JSON")
    kept = parser.add_mutually_exclusive_group()
    kept.add_argument("--show", action="store_true", help="print the profile that is kept, and measure nothing")
    kept.add_argument("--delete", action="store_true", help="delete the profile that is kept, and measure nothing")
    return parser


def _ranks(text: str) -> list[int]:
    try:
        found = sorted({int(word) for word in text.split(",")})
    except ValueError:
        found = []
    if not found or found[0] < 2 or found[-1] > _MOST_RANKS:
        raise argparse.ArgumentTypeError(f"{text!r} must be numbers of ranks from 2 to {_MOST_RANKS}, such as 2 or 2,4")
    return found


def _measure(plan: dict[int, list[Case]], turns: int, turn_seconds: float, anyway: bool) -> MachineProfile:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        bars = {n: progress.add_task(f"{n} ranks", total=PASSES * len(some)) for n, some in plan.items()}
        times, load = measure(plan, turns, turn_seconds, lambda ranks: progress.advance(bars[ranks]), anyway)
    return profile_of(times, load)


def _keep(function: Callable[..., None], *arguments: Any) -> None:
    try:
        function(*arguments)
    except ValueError as error:
        raise CalibrationError(f"the machine profile cannot be kept: {error}. Name another file with --out.") from None


def _show(path: Path, as_json: bool) -> int:
    try:
        profile = machine_profile.load(path)
    except FileNotFoundError:
        return _complain(f"there is no machine profile {path}: `funccoll tune` measures this host.", 1)
    except ValueError as error:
        return _complain(f"the machine profile {path} is ignored: {error}. `funccoll tune` measures anew.", 1)
    _print(profile, as_json)
    if not as_json:
        print(f"Kept in {path}.")
    return 0


def _delete(path: Path) -> int:
    try:
        path.unlink()
    except FileNotFoundError:
        return _complain(f"there is no machine profile {path}.", 1)
    except OSError as error:
        return _complain(f"{path} cannot be deleted: {error.strerror}.", 1)
    print(f"Deleted {path}. Costs are those of the presets again.")
    return 0


def _complain(message: str, code: int) -> int:
    print(f"funccoll tune: {message}", file=sys.stderr)
    return code


# ---------------------------------------------------------------- tables


def _print(profile: MachineProfile, as_json: bool) -> None:
    if as_json:
        print(json.dumps(profile.to_json(), ensure_ascii=False))
        return
    console = Console(highlight=False)
    others = profile.load.get("others_during")
    busy = "" if others is None else f", beside other processes that kept {others:g} processors busy"
    console.print(Text(f"{profile.host['name']}: {profile.host['cpu']}, {profile.host['cores']} cores"))
    console.print(Text(f"measured {profile.date}{busy}\n"))
    console.print(Text("Parameters of the cost model", style="bold"), _parameters_table(profile.parameters))
    for found in profile.parameters:
        some = [m for m in profile.measured if m.ranks == found.ranks]
        console.print(Text(f"\nMeasured times, {found.ranks} ranks", style="bold"), _times_table(some, found))


def _parameters_table(parameters: Sequence[HostParameters]) -> Table:
    table = Table.grid(padding=(0, 2))
    for head in ("ranks", "start", "α, a wait", "β, bytes", "γ, reductions", "beyond the caches"):
        table.add_column(head, justify="right")
    table.add_row(*(Text(str(column.header), style="dim") for column in table.columns))
    for p in parameters:
        table.add_row(
            str(p.ranks), seconds_text(p.start), seconds_text(p.alpha), _rate(p.beta), _rate(p.gamma),
            "\n".join(f"{size_text(1024 * round(held / 1024))}: +{excess:.0%}" for held, excess in p.caches),
        )  # fmt: skip
    return table


def _rate(seconds_per_byte: float) -> str:
    return f"{1e-9 / seconds_per_byte:.3g} GB/s" if seconds_per_byte else "no time"


def _times_table(times: Sequence[MeasuredTimes], parameters: HostParameters) -> Table:
    """A row for each size, a column for each algorithm; below, the median error of the model's times."""
    table = Table.grid(padding=(0, 1))  # all of it in 80 columns
    table.add_column(justify="right")
    for _ in times:
        table.add_column(justify="right")
    table.add_row("", *(Text(m.kind.replace("_", "_\n", 1), style="dim") for m in times))
    table.add_row("", *(Text(m.algorithm, style="dim") for m in times))
    for n in sorted({n for m in times for n in m.nbytes}):
        found = [m.at(n) if n in m.nbytes else None for m in times]
        table.add_row(size_text(n), *("" if t is None else seconds_text(t) for t in found))
    table.add_row("error", *(f"{_typical_error(m, parameters):.0%}" for m in times))
    return table


def _typical_error(times: MeasuredTimes, parameters: HostParameters) -> float:
    schedule = build(times.kind, times.ranks, times.algorithm)
    pairs = zip(times.nbytes, times.seconds, strict=True)
    return statistics.median(abs(predicted(parameters, schedule, n) / t - 1) for n, t in pairs)
