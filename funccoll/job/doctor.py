"""Findings of `funccoll doctor`: each thing that a job needs or can use, tried out, and the remedy if it fails."""

from __future__ import annotations

import ctypes
import difflib
import errno
import importlib
import mmap
import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Literal

from .. import config
from .._version import __version__
from ..core.c_extension import why_not
from ..core.display import size_text
from ..kernels import cuda_toolkit
from ..kernels.native import machine_code
from ..user_lines import PACKAGE
from . import host, process_memory
from .checks import Check
from .mpi_findings import mpi_findings
from .mpirun import find_program

__all__ = ["examine"]

_ROOMY = 64 << 30  # bytes of address space that a rank's memory may take
_EXTRAS = (
    # distribution, its present or future use, the extra of funccoll that installs it today
    ("torch", "funccoll.torch", "torch"),
    ("jax", "its adapter is planned", ""),
    ("scikit-learn", "the demo", "demo"),
    ("matplotlib", "notebooks", "notebooks"),
)
_GPU_PARTS = (
    # name, distributions that bring it, use, how to install it
    ("CuPy", ("cupy-cuda13x", "cupy-cuda12x", "cupy"), "arrays of a GPU", "'funccoll[cuda13]'"),
    ("numba-cuda", ("numba-cuda",), "the kernel's compiler", "'funccoll[cuda13]'"),
    ("NVVM", ("nvidia-nvvm", "nvidia-cuda-nvcc-cu12"), "the kernel's compiler", "'funccoll[cuda13]'"),
    ("nvJitLink", ("nvidia-nvjitlink", "nvidia-nvjitlink-cu12"), "its assembler", "'funccoll[cuda13]'"),
    ("nvrtc", ("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12"), "CuPy's compiler", "'funccoll[cuda13]'"),
    ("cuBLAS", ("nvidia-cublas", "nvidia-cublas-cu12"), "products of matrices", "'funccoll[cuda13]'"),
    ("NCCL", ("nvidia-nccl-cu13", "nvidia-nccl-cu12"), "several GPUs are in development", "nvidia-nccl-cu13"),
)
_TOOLKIT_FILES = {"NVVM": "libnvvm.so", "nvJitLink": "libnvJitLink.so", "nvrtc": "libnvrtc.so", "cuBLAS": "libcublas.so"}
"""Those in a CUDA toolkit."""
_CUPY_BUILDS = {"cupy-cuda12x": 12, "cupy-cuda13x": 13}
"""CuPy's distributions, and the CUDA version that the driver needs for them."""
_LAUNCHERS = ("torchrun", "srun")


def examine() -> list[Check]:
    """All findings, in the order of the page. The trials leave nothing behind."""
    return [*_software(), *_variables(), *_machine(), *_kernel(), *mpi_findings(), *_optional(), *_gpus()]


def _software() -> Iterator[Check]:
    section = "Software"
    yield Check(section, "funccoll", f"{__version__} ({Path(PACKAGE)})")
    yield Check(section, "Python", f"{platform.python_version()} ({sys.executable})")
    for name, use in (("numpy", ""), ("numba", " (compiles the kernels)")):
        try:
            yield Check(section, name, f"{importlib.import_module(name).__version__}{use}")
        except Exception as error:  # numba rejects a NumPy that is too new with more than ImportError
            yield Check(
                section, name, f"cannot be imported: {error}", "wrong", f"Install it anew: pip install --upgrade {name}"
            )
    if why_not:
        unset = why_not.startswith(config.NATIVE)
        advice = f"Unset {config.NATIVE}." if unset else "Install a C compiler and Python's headers, then funccoll anew."
        yield Check(section, "C extension", f"not used: {why_not}; calls run in Python, 2 µs more each", "absent", advice)
    else:
        yield Check(section, "C extension", "used: calls run without the interpreter")
    yield _compute(section)
    try:
        from ..kernels.object_cache import cache_directory

        folder = cache_directory()
    except Exception:  # llvmlite, which numba needs, may fail with any of its own
        return
    if folder is None:
        yield Check(
            section,
            "kernels",
            "cannot be kept: every process compiles its own, which takes seconds",
            "warning",
            "Set NUMBA_CACHE_DIR to a folder that can be written.",
        )
    else:
        yield Check(section, "kernels", f"{len(list(folder.glob('*.o')))} kept in {folder}")


def _compute(section: str) -> Check:
    """Say whether compiled programs compute in fused kernels, and how to have them."""
    name, mode = "compute", machine_code.compute_mode()
    if mode.startswith("fused kernels"):
        return Check(section, name, f"{mode} by {machine_code.compiler()} for {machine_code.processor_level()}")
    value = f"{mode}: a pass over memory for each operation"
    if config.FUSE in mode:
        return Check(section, name, value, "absent", f"Unset {config.FUSE}.")
    if "llvmlite" in mode:
        return Check(section, name, value, "warning", "Install newer ones: pip install --upgrade numba llvmlite.")
    return Check(section, name, value, "warning", "A virtual machine may hide AVX2 and FMA: give it the host's processor.")


def _variables(environment: Mapping[str, str] = os.environ) -> Iterator[Check]:
    """The variables that are set, and those that begin like ours and mean nothing."""
    section = "Environment variables"
    for name in sorted(name for name in environment if name.startswith(config.PREFIX)):
        known = config.VARIABLES.get(name)
        if known is not None:
            yield Check(section, name, f"{environment[name]!r} ({known.meaning})")
            continue
        near = difflib.get_close_matches(name, [name for name, v in config.VARIABLES.items() if not v.own], 1, 0.8)
        meant = [config.VARIABLES[name] for name in near]
        advice = f"Did you mean {meant[0]}: {meant[0].meaning}?" if meant else "funccoll.config has all that are read."
        yield Check(section, name, "is not a variable of funccoll, and changes nothing", "warning", advice)


def _machine() -> Iterator[Check]:
    section = "Machine"
    usable, there = host.cores(), os.cpu_count() or 1
    less = f" of {there}: this process's affinity or its container's limit" if usable < there else ""
    yield Check(section, "cores", f"{usable} usable{less}")
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = host.memory_limit()
    less = f"; this container's limit is {size_text(limit)}" if limit is not None and limit < total else "; no limit below it"
    yield Check(section, "memory", size_text(total) + less)
    space = resource.getrlimit(resource.RLIMIT_AS)[0]
    if space != resource.RLIM_INFINITY:
        yield Check(
            section,
            "address space",
            f"limited to {size_text(space)}",
            "ok" if space >= _ROOMY else "warning",
            "Less room for the arrays that ranks share; `ulimit -v unlimited` lifts the limit.",
        )


def _kernel() -> Iterator[Check]:
    section = "Between processes"
    yield _tried(
        section,
        "memfd",
        "works: shared memory without files",
        _try_memory,
        "A Linux kernel with memfd_create and fallocate is needed; gVisor and old kernels lack them.",
    )
    yield _tried(
        section,
        "sockets",
        "work: abstract Unix sockets that pass descriptors",
        _try_sockets,
        "The sandbox must allow AF_UNIX sockets; check its seccomp or AppArmor profile.",
    )
    yield _tried(
        section,
        "pidfd",
        "works: a rank's end is noticed at once",
        lambda: os.close(os.pidfd_open(os.getpid())),
        "Linux 5.3 has it; without it, funccoll run looks every 50 ms.",
        "warning",
    )
    yield _direct_reads(section)
    yield Check(section, "not needed", "/dev/shm, a network, root")


def _direct_reads(section: str) -> Check:
    copied, name = "Large NumPy arguments are copied to shared memory first, which costs time and nothing else.", "direct reads"
    if config.DIRECT_READS.read() == "0":
        return Check(section, name, f"switched off: {config.DIRECT_READS}=0", "absent", copied)
    try:
        with subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as child:
            maps = Path(f"/proc/{child.pid}/maps").read_text()
            process_memory.read(child.pid, int(maps.partition("-")[0], 16), 1)
    except (OSError, ValueError) as error:
        number = getattr(error, "errno", None) or errno.EIO
        return Check(section, name, process_memory.refusal(number), "warning", copied)
    parent = " of one launcher (Yama allows no others)" if process_memory.yama_scope() else ""
    return Check(section, name, f"work: peers{parent} read large NumPy arguments where they are")


def _tried(
    section: str,
    name: str,
    works: str,
    attempt: Callable[[], object],
    advice: str,
    state: Literal["warning", "wrong"] = "wrong",
) -> Check:
    try:
        attempt()
    except (OSError, AttributeError) as error:
        return Check(section, name, f"fails: {error}", state, advice)
    return Check(section, name, works)


def _try_memory() -> None:
    descriptor = os.memfd_create("funccoll doctor", os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, mmap.PAGESIZE)
        os.posix_fallocate(descriptor, 0, mmap.PAGESIZE)
        with mmap.mmap(descriptor, mmap.PAGESIZE) as memory:
            memory[:1] = b"x"
    finally:
        os.close(descriptor)


def _try_sockets() -> None:
    address = f"\0funccoll-doctor-{os.getpid()}"
    with (
        socket.socket(socket.AF_UNIX) as listener,
        socket.socket(socket.AF_UNIX) as one,
        open(os.devnull, "rb") as null,
    ):
        listener.bind(address)
        listener.listen(1)
        one.connect(address)
        other, _ = listener.accept()
        with other:
            other.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
            socket.send_fds(one, [b"x"], [null.fileno()])
            for descriptor in socket.recv_fds(other, 1, 1)[1]:
                os.close(descriptor)


def _optional() -> Iterator[Check]:
    section = "Other launchers (on one host, funccoll run needs none)"
    for name in _LAUNCHERS:
        path = find_program(name)
        yield Check(section, name, path or "not found", "ok" if path else "absent")
    section = "Optional libraries"
    for name, use, extra in _EXTRAS:
        found = _version(name)
        how = f": pip install 'funccoll[{extra}]'" if extra else ""
        if found:
            yield Check(section, name, f"{found} ({use})")
        else:
            yield Check(section, name, f"not installed ({use}{how})", "absent")


def _version(distribution: str) -> str:
    """The version of an installed distribution; "" if it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""


def _gpus() -> Iterator[Check]:
    section = "GPUs (several, and NCCL, have not run yet: make gpu-check tries what there is)"
    yield from _nvidia(section)
    yield _driver(section)
    for name, distributions, use, how in _GPU_PARTS:  # found without loading anything of CUDA
        found = [(one, text) for one in distributions if (text := _version(one))]
        if found:
            yield Check(section, name, f"{found[0][1]}, {found[0][0]} ({use})")
        elif name in _TOOLKIT_FILES and (path := cuda_toolkit.find(_TOOLKIT_FILES[name])):
            yield Check(section, name, f"{path} ({use})")
        else:
            missing = "neither in a CUDA toolkit nor installed" if name in _TOOLKIT_FILES else "not installed"
            yield Check(section, name, f"{missing} with pip ({use}: pip install {how})", "absent")


def _driver(section: str) -> Check:
    """The CUDA version that the driver knows, beside the one that CuPy is built for."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return Check(section, "driver", "not found (libcuda.so.1)", "absent")
    version = ctypes.c_int()
    if code := library.cuDriverGetVersion(ctypes.byref(version)):
        return Check(section, "driver", f"fails with error {code}", "warning", "nvidia-smi says more.")
    known = version.value // 1000
    value = f"knows CUDA {known}.{version.value % 1000 // 10}"
    newer = [name for name, built in _CUPY_BUILDS.items() if built > known and _version(name)]
    if newer:
        advice = f"Install the one for this driver, pip install 'funccoll[cuda{known}]', or a newer driver."
        return Check(section, "driver", f"{value}, and {newer[0]} needs a newer one", "warning", advice)
    return Check(section, "driver", value)


def _nvidia(section: str) -> Iterator[Check]:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        if any(Path("/dev").glob("nvidia[0-9]*")):
            advice = "Install the driver's tools; in a container start it with --gpus all."
            yield Check(section, "NVIDIA", "devices, but no nvidia-smi", "warning", advice)
        else:
            yield Check(section, "NVIDIA", "none found", "absent")
        return
    try:
        done = subprocess.run([tool, "-L"], capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        yield Check(section, "NVIDIA", f"nvidia-smi fails: {error}", "warning", "Driver and kernel module must match.")
        return
    for line in filter(None, done.stdout.splitlines()):
        name, _, text = line.partition(":")
        yield Check(section, name, text.split("(UUID")[0].strip())
