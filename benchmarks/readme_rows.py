"""The six rows of README's table of speed, from benchmarks/results/*.json: one of each kind, two of them lost to a peer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).with_name("results")


def _load(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def _time(us: float) -> str:
    return f"{us:.1f} µs" if us < 1e3 else f"{us / 1e3:.1f} ms"


def _row(what: str, ours: str, peer: str, ratio: float) -> str:
    return f"| {what} | {ours} | {peer} | {ratio:.2g}× {'faster' if ratio > 1 else '(**slower**)'} |"


def _virtual_devices() -> str:
    (case,) = (c for c in _load("core")["cases"] if c["name"] == "all_reduce in a jitted step, 8 devices, 4 KiB each")
    ours, peer = _time(case["ours"]["median_us"]), f"JAX {_time(case['peer']['median_us'])}"
    return _row("a jitted `all_reduce` of 4 KiB, 8 virtual devices", ours, peer, case["ratio"]["median"])


def _mean(goals: list[dict[str, Any]], start: str, **where: Any) -> dict[str, Any]:
    return next(g for g in goals if g["goal"].startswith(start) and all(g[k] == v for k, v in where.items()))


def _one_host() -> str:
    found = _mean(_load("host")["goals"], "jitted call, geometric mean", ranks=2)
    return _row(f"jitted collectives of 2 processes, mean of {found['at']}", "", "mpi4py, Open MPI", found["reached"])


def _several_hosts() -> str:
    found = _mean(_load("mpi")["goals"], "geometric mean over everything", vendor="openmpi", layout="2 x 1")
    return _row("native collectives of 2 hosts over TCP, mean of all sizes", "", "Open MPI", found["reached"])


def _training() -> str:
    case = next(c for c in _load("ddp")["cases"] if c["network"].startswith("4 x 1024"))
    ours, torch = case["ours"][case["best"]], case["torch"][case["torch_best"]]
    peer = f"torch DDP, Gloo {_time(torch['median_us'])}"
    return _row("a training step of an MLP 4 × 1024, 2 processes", _time(ours["median_us"]), peer, torch["ratio"]["median"])


def _scan() -> str:
    rows = (r for line in _load("language")["lines"].values() for r in line["rows"])
    row = next(r for r in rows if r["measure"] == "run" and r["name"].endswith("scan, 1,000 steps, batch 1"))
    ours, peer = _time(row["ours"]["median"] * 1e6), f"JAX {_time(row['jax']['median'] * 1e6)}"
    return _row("`scan` of an RNN, 1,000 steps with batch 1, one CPU", ours, peer, 1 / row["times_jax"]["median"])


def _gpu() -> str:
    trial = _load("gpu/h200")["speed"]["trials"]["MLP 4 × 1024 step"]
    found = next(f for f in trial["findings"] if ", JAX " in f["says"])
    ours, peer = (found["numbers"][side]["median_us"] / found["steps_between_waits"] for side in ("ours", "peer"))
    return _row("a training step of an MLP 4 × 1024, one H200", _time(ours), f"JAX {_time(peer)}", peer / ours)


def table() -> str:
    """The table: what, our time, the peer's, and the peer's over ours."""
    rows = [_virtual_devices(), _one_host(), _several_hosts(), _training(), _scan(), _gpu()]
    return "\n".join(["| what | funccoll | peer | peer's time / ours |", "|---|---|---|---|", *rows])
