"""The parts of `gpu.py`, as a table: each is some trials, functions of the modules beside this one."""

from __future__ import annotations

from typing import Any, NamedTuple

SHARES = 6
"""Processes that share the cases of compute: most of their time is the compiler's."""
LOOP_SHARES = 4
"""Those that share the programs with loops and branches."""


class Trial(NamedTuple):
    """A function that runs in a process of its own, and the most seconds that it may take."""

    name: str
    function: str
    """module:name"""
    arguments: tuple[Any, ...] = ()
    seconds: float = 480


class Part(NamedTuple):
    """Trials that run one after another, or several at once."""

    about: str
    trials: tuple[Trial, ...]
    at_once: int = 1


FACTS = Part("what is installed", (Trial("facts", "gpu_machine:facts", (), 30),))
"""Versions and paths. It comes before all others, whichever are chosen: what it finds are the first lines."""

FIRST_SECONDS = 480
"""Seconds of the facts and the part `first` together, so that each of its trials is begun."""

# fmt: off
PARTS: dict[str, Part] = {
    "first": Part("what teaches most, in that order; the other parts do not have it again", (
        Trial("a barrier in a diverged warp", "gpu_probe:barriers", (), 25),
        Trial("release and acquire between blocks", "gpu_probe:ping_pong", (), 20),
        Trial("one kernel", "gpu_kernels:one_kernel", (), 35),
        Trial("programs, 4 virtual devices", "gpu_kernels:compare", ("programs", 4), 65),
        Trial("collectives, 2 processes", "gpu_jobs:compare", ("collectives", 2), 65),
        Trial("a peer: kill", "gpu_jobs:failure", ("kill",), 30),
        Trial("a peer: killed before its launch", "gpu_jobs:failure", ("launch",), 30),
        Trial("two segments", "gpu_machine:segments", (), 20),
        Trial("tensors of torch", "gpu_interop:with_torch", (), 45),
        Trial("NCCL with one rank", "gpu_jobs:nccl", (1,), 30),
        Trial("small all_reduces", "gpu_speed:small", (), 50),
        Trial("fused groups", "gpu_fusion:first", (), 35),
    )),
    "machine": Part("each thing that is needed of CUDA, on its own", (
        Trial("a kernel of Numba's", "gpu_machine:smallest_kernel", (False, False), 90),
        Trial("a cooperative launch", "gpu_machine:smallest_kernel", (True, False), 90),
        Trial("a CUDA graph", "gpu_machine:smallest_kernel", (False, True), 90),
        Trial("a cooperative launch in a CUDA graph", "gpu_machine:smallest_kernel", (True, True), 90),
        Trial("CUDA IPC", "gpu_machine:interprocess_memory", (), 60),
        Trial("host memory for kernels", "gpu_machine:registered_memory", (), 60),
    )),
    "kernels": Part("collectives between virtual devices: the bits of the CPU", (
        Trial("compile", "gpu_kernels:compile_kernels", (), 240),
        *(Trial(f"table, {n} devices", "gpu_kernels:compare", ("table", n), 240) for n in (2, 4, 8, 1)),
        *(Trial(f"{case}, {n} devices", "gpu_kernels:compare", (case, n), 120) for case, n in (("nans", 2), ("forced", 4))),
        Trial("bad input", "gpu_kernels:bad_input", (), 60),
        Trial("ragged blocks", "gpu_programs:ragged", (), 120),
    )),
    "compute": Part("NumPy functions and gradients against NumPy", (
        *(Trial(f"share {k + 1} of {SHARES}", "gpu_compute:compare", (k, SHARES)) for k in range(SHARES)),
        Trial("random numbers and scatters", "gpu_compute:exact"),
    ), SHARES + 1),
    "programs": Part("loops and branches, convolution and pooling, data parallel steps, wrong indices, Arrays", (
        *(Trial(f"loops, share {k + 1} of {LOOP_SHARES}", "gpu_programs:control", (k, LOOP_SHARES), 240)
          for k in range(LOOP_SHARES)),
        *(Trial(f"loops, {n} devices", "gpu_kernels:compare", ("loops", n), 120) for n in (2, 4)),
        Trial("loops, 2 processes", "gpu_jobs:compare", ("loops", 2), 120),
        *(Trial(f"{case}, 2 devices", "gpu_kernels:compare", (case, 2), 120)
          for case in ("data_parallel", "communication hooks")),
        Trial("convolution and pooling", "gpu_programs:convolution", (), 240),
        Trial("wrong indices", "gpu_programs:indices", (), 120),
        Trial("Arrays", "gpu_programs:arrays", (), 120),
        Trial("Arrays, 2 processes", "gpu_programs:job_arrays", (), 120),
    ), SHARES + 1),
    "fusion": Part("fused groups: each operation and random ones have the bits of CPU kernels; functions and loops with them", (
        *(Trial(f"operations, share {k + 1} of {LOOP_SHARES}", "gpu_fusion:operations", (k, LOOP_SHARES), 120)
          for k in range(LOOP_SHARES)),
        *(Trial(f"functions, share {k + 1} of {SHARES}", "gpu_fusion:with_groups", ("gpu_compute:compare", k, SHARES))
          for k in range(SHARES)),
        *(Trial(f"loops, {k + 1} of {LOOP_SHARES}", "gpu_fusion:with_groups", ("gpu_programs:control", k, LOOP_SHARES), 240)
          for k in range(LOOP_SHARES)),
    ), SHARES + 1),
    "graphs": Part("graphs that make room for others", (Trial("limits", "gpu_programs:graphs", (), 60),)),
    "processes": Part("several processes on one GPU over CUDA IPC: correct, and in turns", (
        Trial("table, 2 processes", "gpu_jobs:compare", ("table", 2), 240),
        Trial("programs, 4 processes", "gpu_jobs:compare", ("programs", 4), 120),
        *(Trial(f"a peer: {what}", "gpu_jobs:failure", (what,), 60) for what in ("mismatch", "raise")),
    )),
    "nccl": Part("NCCL with two ranks on one GPU", (
        Trial("2 ranks on one GPU", "gpu_jobs:nccl", (2,), 120),
        Trial("programs, 2 processes", "gpu_jobs:nccl_programs", (), 120),
    )),
    "digits": Part("the demo, as it is", (Trial("2 virtual devices", "gpu_jobs:digits", (), 240),)),
    "interop": Part("arrays of CuPy and JAX, without a copy", (
        Trial("CuPy", "gpu_interop:with_cupy", (), 60),
        Trial("JAX", "gpu_interop:with_jax", (), 120),
    )),
    "torch": Part("modules of torch in several processes", (
        Trial("2 processes", "gpu_torch:train", (2,), 240),
        Trial("a GPU for each of 2 processes", "gpu_torch:two_gpus", (), 240),
    )),
    "memcheck": Part("compute-sanitizer over a few cases", (Trial("memcheck", "gpu_kernels:memcheck", (), 400),)),
    "speed": Part("beside limits and peers of the same run", (
        Trial("large all_reduces", "gpu_speed:large", (), 120),
        Trial("copies of a graph", "gpu_speed:slots", (), 60),
        Trial("calls behind a busy stream", "gpu_speed:behind", (), 60),
        Trial("first call, nothing compiled", "gpu_speed:first_call", (), 90),
        Trial("digits step", "gpu_steps:compare", ("digits", [64, 128, 10], 128), 120),
        Trial("MLP 4 × 1024 step", "gpu_steps:compare", ("MLP 4 × 1024", [1024] * 5, 1024), 120),
    )),
}
# fmt: on
