"""A check of a machine with a GPU, with the packages that it has: `make gpu-check PYTHON=python3 OUT_DIR=folder`.

Each part is a process of its own, which is stopped after 8 minutes; what it finds goes to one JSON file, and a summary to
stdout. Parts that need what is not there are skipped, with the reason. Exit code 1 when a part fails.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
LIMIT = 480
"""Seconds of one part."""
PACKAGES = ("numpy", "numba", "numba-cuda", "llvmlite", "optree", "ml_dtypes", "cupy-cuda12x", "cupy-cuda13x", "cuda-bindings",
            "nvidia-nvvm", "nvidia-nvjitlink", "nvidia-cuda-nvrtc", "nvidia-nccl-cu12", "nvidia-nccl-cu13", "torch", "jax",
            "pytest")  # fmt: skip


class Skipped(Exception):
    """The reason why a part cannot run here."""


def machine() -> dict[str, Any]:
    """Versions of what is installed, and the GPU."""
    found: dict[str, Any] = {"python": platform.python_version(), "packages": {}}
    for name in PACKAGES:
        try:
            found["packages"][name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found["packages"][name] = None
    found["driver"] = _driver()
    found["nvvm"] = _tried(lambda: importlib.import_module("cuda.bindings.nvvm").version())
    found["nvjitlink"] = _tried(lambda: importlib.import_module("cuda.bindings.nvjitlink").version())
    found["nvrtc"] = _tried(lambda: importlib.import_module("cupy").cuda.nvrtc.getVersion())
    found["nccl"] = _tried(lambda: importlib.import_module("cupy.cuda.nccl").get_version())
    found["gpu"] = _tried(_gpu)
    return found


def _tried(ask: Callable[[], Any]) -> Any:
    try:
        return ask()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def _driver() -> str:
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "no driver (libcuda.so.1)"
    version = ctypes.c_int()
    code = library.cuInit(0) or library.cuDriverGetVersion(ctypes.byref(version))
    return f"error {code}" if code else f"CUDA {version.value // 1000}.{version.value % 1000 // 10}"


def _gpu() -> dict[str, Any]:
    cupy = importlib.import_module("cupy")
    device = cupy.cuda.Device()
    properties = cupy.cuda.runtime.getDeviceProperties(device.id)
    return {
        "name": properties["name"].decode(), "compute capability": device.compute_capability,
        "multiprocessors": properties["multiProcessorCount"], "bytes": properties["totalGlobalMem"],
    }  # fmt: skip


def _require_gpu() -> Any:
    if _driver().startswith(("no driver", "error")):
        raise Skipped(f"{_driver()}: this machine has no NVIDIA GPU that can be used")
    try:
        return importlib.import_module("cupy")
    except ImportError as error:
        raise Skipped(f"CuPy: {error}; pip install 'funccoll[cuda13]'") from None


def collectives(sizes: tuple[int, ...] = (1, 2, 4, 8)) -> dict[str, Any]:
    """The table of collectives on virtual devices of one GPU: the bits of virtual devices on the CPU."""
    cupy = _require_gpu()
    import numpy as np

    sys.path.insert(0, str(ROOT / "tests"))
    import process_cases

    import funccoll as fc
    from funccoll.mesh import Mesh
    from funccoll.runtime.cuda.cupy_gpu import CupyGpu
    from funccoll.runtime.cuda.virtual_devices import VirtualGpuBackend

    gpu, report = CupyGpu(), {}

    class Same:
        programs = 0
        failures: list[str] = []  # noqa: RUF012

        def mesh(self, axes: dict[str, int]) -> Mesh:
            return Mesh(axes, process_cases.virtual(axes).devices, backend=VirtualGpuBackend(gpu))

        def __call__(self, fn: Any, axes: Any, args: Any, in_specs: Any, out_specs: Any) -> None:
            self.programs += 1
            specs = {"in_specs": in_specs, "out_specs": out_specs}
            try:
                wanted = fc.tree.leaves(fc.jit(fn, mesh=process_cases.virtual(axes), **specs)(*args))
                run = fc.jit(fn, mesh=self.mesh(axes), **specs)
                for _ in range(2):
                    for want, have in zip(wanted, fc.tree.leaves(run(*args)), strict=True):
                        for device, (w, h) in enumerate(zip(want.shards, have.shards, strict=True)):
                            bits = [np.ascontiguousarray(x).tobytes() for x in (w, cupy.asnumpy(h))]
                            assert bits[0] == bits[1], f"other bits on device {device}"
            except Exception as error:
                self.failures.append(f"{axes} {fn}: {type(error).__name__}: {error}"[:600])

    for n in sizes:
        same, began = Same(), time.monotonic()
        same.failures = []
        process_cases.table(n, same, process_cases.FEW)  # type: ignore[arg-type]
        report[f"{n} devices"] = {
            "programs": same.programs, "failed": len(same.failures), "first failures": same.failures[:20],
            "seconds": round(time.monotonic() - began, 1),
        }  # fmt: skip
    if any(found["failed"] for found in report.values()):
        report["failed"] = True
    return report


PARTS = {"machine": machine, "collectives": collectives}


def run_part(name: str) -> dict[str, Any]:
    """Run a part in a process of its own, and return its report."""
    command = [sys.executable, str(Path(__file__).resolve()), "--part", name]
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=LIMIT, env={**os.environ, "PYTHONPATH": paths}
        )
    except subprocess.TimeoutExpired:
        return {"failed": f"stopped after {LIMIT} s"}
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        return {"failed": f"exit code {done.returncode}: {done.stderr[-3000:]}"}
    return json.loads(lines[-1])


def main() -> int:
    """Run the parts, or one of them in this process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("gpu-check"), help="folder for the JSON file")
    parser.add_argument("--parts", default=",".join(PARTS), help="which parts, separated by commas")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        try:
            found = PARTS[options.part]()
        except Skipped as reason:
            found = {"skipped": str(reason)}
        print(json.dumps(found))
        return 0
    report: dict[str, Any] = {}
    for name in options.parts.split(","):
        report[name] = run_part(name)
        if name == "machine":
            tools = ("driver", "nvvm", "nvrtc", "nvjitlink", "nccl")
            print(", ".join(f"{tool} {report[name].get(tool)}" for tool in tools), flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "gpu.json").write_text(json.dumps(report, indent=1) + "\n")
    for name, found in report.items():
        state = "FAILED" if "failed" in found else "done"
        print(f"{name}: " + (f"skipped. {found['skipped']}" if "skipped" in found else state))
    return int(any("failed" in found for found in report.values()))


if __name__ == "__main__":
    sys.exit(main())
