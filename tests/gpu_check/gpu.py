"""A check of a machine with a GPU, with the packages that it has: `make gpu-check PYTHON=python3 OUT_DIR=folder`.

Each trial is a process with a limit of its own, and a part is stopped after 8 minutes. What is found is printed and written as
it comes, to `gpu.json`, `summary.txt` and `log.txt`. Parts that an earlier run has left in `gpu.json` stay there, with the
commit that they were of, and its log is continued. Parts that need what is not there are skipped, with the reason. Exit code 1
when something fails.

The part `first` has what teaches most, in 8 minutes; no other part has its trials again. `rest` stands for all others.

    python -m tests.gpu_check.gpu --parts first --total 480 --out folder
    python -m tests.gpu_check.gpu --parts rest --out folder
    python -m tests.gpu_check.gpu --parts machine,kernels --total 560 --out folder
    python -m tests.gpu_check.gpu --join one/gpu.json other/gpu.json --out folder      # several runs as one
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from tests.gpu_check.gpu_parts import FACTS, PARTS, Part, Trial
from tests.gpu_check.gpu_summary import first_line, path_lines, summary
from tests.gpu_check.gpu_trial import MARK, ROOT, SKIPPED, TRIAL, environment, own_place

LIMIT = 480.0
"""Seconds of one part."""
_LEAST = 2.0
"""Seconds without which a trial is not begun."""
_TO_END = 10.0
"""Seconds that processes may take to die: where a GPU hangs, the driver may not let go of them."""
_SHOWN = 15
"""Lines of a trial's output that are printed when it fails."""


class Check:
    """One run: the processes of its trials, and the files that it leaves."""

    def __init__(self, out: Path, limit: float = LIMIT, total: float | None = None, rehearses: bool = False, commit: str = ""):
        self.out, self.limit, self.rehearses = out, limit, rehearses
        self.end = math.inf if total is None else time.monotonic() + total
        out.mkdir(parents=True, exist_ok=True)
        self.file, self.lock = out / "gpu.json", threading.RLock()
        self.report: dict[str, Any] = json.loads(self.file.read_text()) if self.file.exists() else {}
        self.running: dict[subprocess.Popen[str], str] = {}
        self.about = {"date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), "commit": commit or _commit()}
        self.log: TextIO = (out / "log.txt").open("a", encoding="utf-8")
        self.told_to_stop = False

    def run(self, parts: Mapping[str, Part]) -> int:
        """Run the machine's facts and these parts, and write the summary, also when told to stop. Returns the exit code."""
        self.log.write(f"\n=== {self.about['date']}, commit {self.about['commit']}: {', '.join(parts)}\n")
        previous = {number: signal.signal(number, self.stop) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            for name, part in {"facts": FACTS, **parts}.items():
                self.run_part(name, part)
        finally:
            self.stop()
            page = summary(self.report)
            (self.out / "summary.txt").write_text(page)
            self.log.close()
            print(f"\n{page}\n{self.out}: gpu.json, summary.txt, log.txt", flush=True)
            for number, handler in previous.items():
                signal.signal(number, handler)
        states = [trial["state"] for name in parts for trial in self.report[name]["trials"].values()]
        return int(any(state in ("failed", "stopped") for state in states))

    def stop(self, *_: Any) -> None:
        """End the trials that run, and begin no more."""
        self.told_to_stop = True
        for process, name in list(self.running.items()):
            _end(process, name)

    def run_part(self, name: str, part: Part) -> None:
        """Run a part's trials, as many at once as it says."""
        began = time.monotonic()
        until = min(began + self.limit, self.end)
        self.report[name] = {**self.about, "about": part.about, "trials": {}}
        if name != "facts":  # whose finding is the first line
            self.say(f"\n{name}: {part.about}")
        with ThreadPoolExecutor(part.at_once) as pool:
            list(pool.map(lambda trial: self.run_trial(name, trial, until), part.trials))
        self.report[name]["seconds"] = round(time.monotonic() - began, 1)
        self.write()
        (self.out / "summary.txt").write_text(summary(self.report))

    def run_trial(self, part: str, trial: Trial, until: float) -> None:
        """Run one trial until it ends, or its time is over."""
        result: dict[str, Any] = {"state": "running", "findings": []}
        with self.lock:
            self.report[part]["trials"][trial.name] = result
        self.write()  # a check that is killed has said which trial ran
        began = time.monotonic()
        seconds = min(trial.seconds, self.limit, until - began)
        if seconds < _LEAST or self.told_to_stop:
            state, why = "not run", "no time was left"
        else:
            timed_out, tail = self._follow(part, trial, seconds, result)
            result["seconds"] = round(time.monotonic() - began, 1)
            state, why = _outcome(result, tail)
            if timed_out or (self.told_to_stop and state == "failed"):
                state, why = "stopped", f"after {result['seconds']:.0f} s{place_in(tail)}"
            if left := result.get("left"):
                why = f"{why or 'it ended'}; processes {left} of it cannot be ended"
            if state in ("failed", "stopped"):
                result["output"] = tail
        with self.lock:
            result.update(state=state, **({"why": why} if why else {}))
        if part != "facts" or state != "done":
            took = f", {result['seconds']} s" if "seconds" in result else ""
            shown = [f"    | {line[:200]}" for line in result.get("output", "").splitlines()[-_SHOWN:]]
            self.say(f"  {trial.name}: {state}{took}{f': {why}' if why else ''}"[:600], *shown)
        self.write()

    def _follow(self, part: str, trial: Trial, seconds: float, result: dict[str, Any]) -> tuple[bool, str]:
        """Read what a trial's process prints: (True when its time was over, the end of its output).

        The trial and all that it has started have ended then, or are named in the result: none of them holds up the others.
        """
        command = [sys.executable, str(Path(__file__).with_name("gpu_trial.py")), trial.function, json.dumps(trial.arguments)]
        variables = environment(seconds, self.rehearses)
        process = subprocess.Popen(
            command,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            process_group=0,
        )
        self.running[process] = variables[TRIAL]
        timed_out, tail = False, deque[str](maxlen=40)

        def read() -> None:
            assert process.stdout is not None
            with process.stdout:
                for line in process.stdout:
                    if line.startswith(MARK):
                        self._note(part, trial, json.loads(line.removeprefix(MARK)), result)
                    elif line.strip():
                        tail.append(line)
                        with self.lock, suppress(ValueError):  # the log is closed: this process could not be ended
                            self.log.write(f"{part}, {trial.name}: {line}")

        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            timed_out = True
        left = _end(process, variables[TRIAL])  # and what it has started, so that the pipe ends
        reader.join(_TO_END)
        del self.running[process]
        result["exit code"] = process.poll()
        if left:
            result["left"] = left
        return timed_out, "".join(tail)[-3000:]

    def _note(self, part: str, trial: Trial, finding: dict[str, Any], result: dict[str, Any]) -> None:
        with self.lock:
            result["findings"].append(finding)
        if part == "facts":
            self.say(first_line(finding), finding["says"], *path_lines(finding))
        elif "skipped" not in finding:
            place = f" ({finding['at']})" if "at" in finding else ""
            words = f"FAILED{place}: {finding['failed']}" if "failed" in finding else finding["says"] or "found"
            self.say(f"  {trial.name}: {finding['what']}: {words}"[:400])
        self.write()

    def say(self, *lines: str) -> None:
        """Print lines, whole: trials may run at the same time."""
        with self.lock:
            print("\n".join(lines), flush=True)

    def write(self) -> None:
        """Write all that was found so far. A reader sees the file before or after, whole."""
        with self.lock:
            text = json.dumps(self.report, indent=1, ensure_ascii=False, default=str) + "\n"
            part = self.file.with_suffix(".part")
            part.write_text(text)
            part.replace(self.file)
            self.log.flush()


def _end(process: subprocess.Popen[str], trial: str) -> list[int]:
    """End a trial's process, and all that it has started: ranks have process groups of their own. Returns those that stay."""
    until = time.monotonic() + _TO_END
    while True:
        left = [*_marked(trial), *([process.pid] if process.poll() is None else [])]
        for pid in left:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if not left or time.monotonic() > until:
            return sorted({*left})
        time.sleep(0.02)


def _marked(trial: str) -> list[int]:
    """The processes, which have not ended, with a trial's name in their environment."""
    found, mark = [], f"{TRIAL}={trial}\0".encode()
    for path in Path("/proc").glob("[0-9]*/environ"):  # of one that has ended it cannot be read, or is empty
        with suppress(OSError):
            if mark in path.read_bytes() + b"\0":
                found.append(int(path.parent.name))
    return found


def place_in(output: str) -> str:
    """Words on the line of this repository where the main thread was when `faulthandler` printed it; "" where it did not."""
    threads = output.split("(most recent call first):")
    lines = re.findall(r'File "([^"]+)", line (\d+) in (\S+)', threads[-1]) if len(threads) > 1 else []
    place = next(filter(None, (own_place(*line) for line in lines)), "")
    return f", at {place}" if place else ""


def _commit() -> str:
    """The checkout's commit; a copy of a working tree may have none."""
    try:
        told = [
            subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=True).stdout.strip()
            for words in (("rev-parse", "--short", "HEAD"), ("status", "--porcelain", "--", "funccoll"))
        ]
    except (OSError, subprocess.CalledProcessError):
        return "not known"
    return told[0] + ("+changes" if told[1] else "")


def _outcome(result: dict[str, Any], tail: str) -> tuple[str, str]:
    """(state, why) of a trial that has ended by itself. The finding of one that was skipped is the reason."""
    findings, code = result["findings"], result["exit code"]
    if code == SKIPPED and findings and "skipped" in findings[-1]:
        return "skipped", findings.pop()["skipped"]
    failures = [finding for finding in findings if "failed" in finding]
    if failures:
        return "failed", failures[0]["failed"] + (f" ({failures[0]['at']})" if "at" in failures[0] else "")
    if code:
        return "failed", f"it ended with exit code {code}" + (f": {tail.strip().splitlines()[-1][:300]}" if tail else "")
    return "done", ""


def options(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command's options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gpu-check"), help="folder for the files")
    parser.add_argument("--parts", default=",".join(PARTS), help=f"some of {', '.join(PARTS)}; rest: all but first")
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds of one part")
    parser.add_argument("--total", type=float, help="seconds of all parts: what does not fit is not begun")
    parser.add_argument("--join", nargs="+", type=Path, metavar="FILE", help="gpu.json of several runs, to be made one")
    parser.add_argument("--commit", default="", help="what is checked, where the checkout has no history of its own")
    parser.add_argument("--rehearse", action="store_true", help="on the CPU in place of a GPU, to test this program")
    given = parser.parse_args(arguments)
    names = [name for part in given.parts.split(",") for name in ([*PARTS][1:] if part == "rest" else [part])]
    unknown = set(names) - PARTS.keys()
    if unknown:
        parser.error(f"no part {', '.join(sorted(unknown))}: choose from {', '.join(PARTS)}, rest")
    given.parts = list(dict.fromkeys(names))
    return given


def main(arguments: list[str] | None = None) -> int:
    """Run the parts that are asked for. The machine's facts come first, whatever the parts are."""
    given = options(arguments)
    if given.join:
        joined: dict[str, Any] = {}
        for file in given.join:
            joined |= json.loads(file.read_text())
        given.out.mkdir(parents=True, exist_ok=True)
        (given.out / "gpu.json").write_text(json.dumps(joined, indent=1, ensure_ascii=False) + "\n")
        (given.out / "summary.txt").write_text(summary(joined))
        print(summary(joined))
        return 0
    chosen = {name: PARTS[name] for name in given.parts}
    return Check(given.out, given.limit, given.total, given.rehearse, given.commit).run(chosen)


if __name__ == "__main__":
    sys.exit(main())
