"""`funccoll tune`: measure this host, and keep times and the cost model's parameters as its machine profile."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ...config import MACHINE_PROFILE
from ...core import machine_profile
from ...core.machine_profile import MachineProfile
from ...errors import CalibrationError, FunccollError
from ...job import host
from ...job.job_context import rank, world_size
from ...job.launch import launch
from ..calibration.direct_read_timings import time_direct_reads
from ..calibration.network_tuning import HostsPlan, combined, measure_hosts
from ..calibration.timed_cases import QUICK_SIZES, SIZES, Case, cases, default_ranks, fitting_sizes
from ..calibration.tuning import PASSES, measure, profile_of
from . import run_command
from .tune_tables import print_profile

__all__ = ["main"]

_MOST_RANKS = 256
_INTERRUPTED = 130  # a shell's exit code for Ctrl-C


def main(words: Sequence[str]) -> int:
    """Run `funccoll tune` with these arguments, and return the exit code."""
    parser = _parser()
    options = parser.parse_args(words)
    path = options.out or machine_profile.default_path()
    if path is None:
        parser.error("this user has no home directory for a machine profile: name a file with --out, or set XDG_CACHE_HOME")
    if options.show or options.delete:
        return _show(path, options.json) if options.show else _delete(path)
    if options.n and (options.hosts or world_size() > 1):
        parser.error("-n is for one host: a job over several hosts is measured with all its processes")
    if options.hosts:
        return _start_job(options.hosts, words)
    if world_size() > 1:
        return _tune_job(path, options)
    ranks = options.n or ([2] if options.quick else default_ranks(host.cores()))
    sizes = QUICK_SIZES if options.quick else SIZES
    memory = host.available_memory()
    plan = {n: cases(n, fitting_sizes(sizes, n, memory)) for n in ranks}
    try:
        _keep(machine_profile.check_place, path)  # before measuring takes half a minute
        profile = _measure(plan, 3 if options.quick else 7, 0.001, options.anyway)
        _keep(machine_profile.save, profile, path)
    except KeyboardInterrupt:
        kept = "the old one stays" if path.exists() else "there is none yet"
        return _complain(f"interrupted: no machine profile was stored, {kept}.", _INTERRUPTED)
    except FunccollError as error:
        return _complain(str(error).partition("\n  at ")[0], 1)
    _tell(profile, path, options)
    return 0


def _tell(profile: MachineProfile, path: Path, options: argparse.Namespace) -> None:
    print_profile(profile, options.json)
    if not options.json:
        variable = f"{MACHINE_PROFILE}={path}"
        use = f"To use it, set {variable}." if options.out else "Costs and choices of algorithms use it from now on."
        print(f"Stored in {path}. {use}")


# ---------------------------------------------------------------- a job on several hosts


def _start_job(hosts: str, words: Sequence[str]) -> int:
    """Run this command again in a job on these hosts. Only rank 0 prints to stdout."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--hosts")
    _, rest = parser.parse_known_args(words)
    return run_command.main(["--hosts", hosts, "-m", "funccoll", "tune", *rest], plain=True)


def _tune_job(path: Path, options: argparse.Namespace) -> int:
    """Measure the hosts of this process's job. Rank 0 keeps the profile and prints."""
    is_first = rank() == 0
    try:
        if is_first:
            _keep(machine_profile.check_place, path)
        plan = HostsPlan(QUICK_SIZES if options.quick else SIZES[:-1])
        with _ProgressLines(len(plan), is_first) as told:
            times, load = measure_hosts(plan, 3 if options.quick else 7, 0.001, told.advance)
        if is_first:
            profile = combined(times, plan.hosts, load, _kept(path))
            _keep(machine_profile.save, profile, path)
            _tell(profile, path, options)
    except KeyboardInterrupt:
        return _complain("interrupted: no machine profile was stored.", _INTERRUPTED) if is_first else _INTERRUPTED
    except FunccollError as error:
        return _complain(str(error).partition("\n  at ")[0], 1)
    return 0


def _kept(path: Path) -> MachineProfile | None:
    """Return the profile that is kept already, if it can be used."""
    try:
        return machine_profile.load(path)
    except (FileNotFoundError, ValueError):
        return None


class _ProgressLines:
    """The progress of rank 0: a bar on a terminal, else a line for each tenth, which passes through a launcher's pipes."""

    def __init__(self, total: int, shown: bool):
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        console = Console(stderr=True)
        self.total, self.done, self.lines = total, 0, shown and not console.is_terminal
        self.bar = Progress(*columns, console=console, transient=True, disable=not (shown and console.is_terminal))
        self.task = self.bar.add_task("all ranks", total=total)

    def __enter__(self) -> _ProgressLines:
        self.bar.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.bar.stop()

    def advance(self) -> None:
        """Count one more measurement."""
        self.done += 1
        self.bar.advance(self.task)
        tenths = 10 * self.done // self.total
        if self.lines and tenths > 10 * (self.done - 1) // self.total:
            bar = f"{'━' * tenths}{'╌' * (10 - tenths)}"
            print(f"funccoll tune: {bar} {self.done}/{self.total} measurements", file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="funccoll tune",
        allow_abbrev=False,
        description="Measure the collectives of this machine and fit the cost model's parameters to the times. Keep both as "
        "this host's machine profile, for the choice of algorithms and for explain(). It takes about half a minute. As the "
        "program of a job on several hosts (mpirun ... funccoll tune) it measures the hosts and their network, and keeps the "
        "profile on the host of rank 0.",
    )
    parser.add_argument(
        "-n",
        type=_ranks,
        metavar="RANKS",
        help="numbers of ranks, such as 2,4 (default: powers of two up to the cores, and twice the cores if these are few)",
    )
    parser.add_argument("--hosts", metavar="A:N,B:N", help="measure a job on these hosts, with N processes on each")
    parser.add_argument("--quick", action="store_true", help="few sizes, short turns, 2 ranks: a rough profile in seconds")
    parser.add_argument("--anyway", action="store_true", help="measure even if other processes keep the machine busy")
    parser.add_argument("--out", type=Path, metavar="FILE", help="keep the profile in FILE, not in the user's cache directory")
    parser.add_argument("--json", action="store_true", help="print the profile as JSON")
    kept = parser.add_mutually_exclusive_group()
    kept.add_argument("--show", action="store_true", help="print the kept profile, without measuring")
    kept.add_argument("--delete", action="store_true", help="delete the kept profile, without measuring")
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
        direct_reads = launch(time_direct_reads, min(plan), turns)[0]
    return profile_of(times, load, direct_reads)


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
        return _complain(f"the machine profile {path} is ignored: {error}. `funccoll tune` measures again.", 1)
    print_profile(profile, as_json)
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
