"""The kernel of a GPU without one: it is compiled for several architectures, and runs in a simulator.

PTX alone does not check inline assembly, so that it is assembled as well. The simulator runs the same templates, plans and
transport over host memory, on the table of collectives.
"""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
import textwrap
import threading
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import funccoll as fc
from funccoll.core.types import bfloat16
from funccoll.kernels.cuda import compile_kernel, load_kernel
from funccoll.kernels.cuda_compiler import Kernel, Operations, assemble, compile_template
from funccoll.kernels.kernel_context import FAILED, WORD
from funccoll.schedules.streams.instructions import Opcode, disassemble
from funccoll.transports.cuda import virtual_devices
from tests.support.cases.combine_operands import operations
from tests.support.fakes.cuda_simulation import Simulated, SimulatedGpu, run_case, set_word
from tests.support.fakes.cuda_simulation_faults import FAULTS, said
from tests.support.oracles.cuda_assembly import check
from tests.support.ranks.ranks import forked

pytest.importorskip("numba_cuda", reason="numba-cuda is not installed: pip install 'funccoll[cuda13]'")

# numba-cuda 0.30 is not yet made for NumPy 2.5.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The 'generic' unit for NumPy timedelta:DeprecationWarning"),
    pytest.mark.covers("cuda-kernel"),
]
SLOW = pytest.mark.slow
ROOT = Path(__file__).parents[2]
TWO = (("sum", np.dtype(np.int8)), ("max", np.dtype(bfloat16)))
"""Combines of one kernel."""


compiled = functools.cache(compile_kernel)


def check_stores(kernel: Kernel, *dtypes: np.dtype) -> None:
    """A copy stores bytes and words; a combine stores elements, whatever type Numba gives to what is computed from them."""
    stored = {int(bits) for bits in re.findall(r"st\.global(?:\.v\d)?\.[a-z](\d+)", kernel.ptx)}
    assert stored == {8, 32, *(8 * np.empty(0, dtype).real.itemsize for dtype in dtypes)}


@pytest.mark.parametrize(
    "cc",
    [
        pytest.param((8, 0), marks=SLOW),
        (9, 0),
        pytest.param((10, 0), marks=pytest.mark.exhaustive),
    ],
    ids=["sm_80", "sm_90", "sm_100"],
)
def test_the_kernel_is_assembled_without_spills(cc):
    kernel = compiled(TWO, cc, "gpu")
    check(kernel)
    check_stores(kernel, *(dtype for _, dtype in TWO))
    for words in ("%globaltimer", "ld.global.v4", "st.global.v4"):
        assert words in kernel.ptx, words


def synchronization(kernel: Kernel) -> list[str]:
    """The instructions by which threads wait for others, in the order of the kernel's text."""
    kinds = r"bar(?:rier)?|fence|membar|atom|red|ld\.(?:acquire|relaxed|volatile)|st\.(?:release|relaxed|volatile)"
    return re.findall(rf"\b(?:{kinds})\b[^\s;]*", kernel.ptx)


@pytest.mark.parametrize(
    ("combines", "scope"),
    [
        pytest.param(TWO, "gpu", id="gpu"),
        pytest.param((), "sys", id="sys", marks=SLOW),
    ],
)
def test_all_threads_share_one_loop_and_scopes_are_as_narrow_as_the_plan_allows(combines, scope):
    """Each barrier of the source stands once: none has been copied into a branch. The report is for the host, always."""
    kernel = compiled(combines, (9, 0), scope)
    check(kernel)
    assert not re.search(r"\b(?:div|rem)\.[su]64", kernel.ptx)  # a hundred instructions each
    found = Counter(synchronization(kernel))
    assert found.pop("bar.sync") == 4
    if scope == "gpu":
        assert (found.pop("ld.acquire.sys.global.b64"), found.pop("st.release.sys.global.b64")) == (1, 1)
    assert set(found) == {f"ld.acquire.{scope}.global.b64", f"st.release.{scope}.global.b64"}, found


SOME = {
    "bool": ["xor", "max"],
    "int8": ["and", "or", "min", "prod"],
    "bfloat16": ["sum", "max", "mean"],
    "float64": ["min", "prod"],
    "complex64": ["sum", "prod", "mean"],
}
"""The other dtypes are compiled in the same ways: of these, each operation of each kind of number."""


@pytest.mark.parametrize(
    "combines",
    [
        pytest.param({np.dtype(name): ops for name, ops in SOME.items()}, id="some", marks=SLOW),
        *(pytest.param({d: operations(d)}, id=d.name, marks=pytest.mark.exhaustive) for d in map(np.dtype, SOME)),
    ],
)
def test_combines_are_assembled_without_spills(combines):
    """Where a product meets a sum, no fused instruction rounds them once."""
    kernel = compiled(tuple((op, dtype) for dtype, ops in combines.items() for op in ops), (9, 0), "gpu")
    check(kernel)
    check_stores(kernel, *combines)
    assert not re.search(r"\bfma\.rn\.f", kernel.ptx)


def test_a_misspelt_instruction_is_an_error():
    ptx = compiled(TWO, (9, 0), "gpu").ptx
    with pytest.raises(RuntimeError, match=r"Unknown modifier '\.acquired'"):
        assemble(ptx.replace("ld.acquire.sys", "ld.acquired.sys"), (9, 0))


@pytest.fixture
def older_nvjitlink() -> str:
    """The path of nvJitLink 13.0, which `make test` puts beside the environment's own."""
    path = Path(sys.prefix, "nvjitlink130", "nvidia", "cu13", "lib", "libnvJitLink.so.13")
    if not path.exists():
        pytest.skip("nvJitLink 13.0 is not installed: make .venv/.nvjitlink130")
    return str(path)


def test_ptx_of_a_newer_nvvm_is_assembled_as_the_version_that_nvjitlink_knows():
    ptx = compiled(TWO, (9, 0), "gpu").ptx
    newer = re.sub(r"(?m)^\.version .*", ".version 99.0", ptx)
    assert newer != ptx
    code, log = assemble(newer, (9, 0))
    assert code[:4] == b"\x7fELF" and "0 bytes spill stores" in log
    words = r"(?s)Unknown modifier '\.acquired'.*newer NVVM: Unsupported \.version 99\.0; current"
    with pytest.raises(RuntimeError, match=words):
        assemble(newer.replace("ld.acquire.sys", "ld.acquired.sys"), (9, 0))


@pytest.mark.slow
def test_the_compilers_are_found_in_a_toolkit(tmp_path):
    """As where numba-cuda is installed without its extra, beside a toolkit that no variable names."""
    wheels = Path(sys.prefix, "lib", f"python3.{sys.version_info.minor}", "site-packages", "nvidia", "cu13", "lib")
    if not (wheels / "libnvvm.so.4").exists():
        pytest.skip("the packages of NVVM are not installed")
    for folder, library in (
        ("nvvm/lib64", "libnvvm.so.4"),
        ("lib64", "libnvJitLink.so.13"),
        ("lib64", "libnvrtc.so.13"),
        ("lib64", "libcudart.so.13"),
    ):
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        (tmp_path / folder / library).symlink_to(wheels / library)
    script = """
        import sys
        from pathlib import Path
        from types import SimpleNamespace
        import numpy as np
        from cuda.pathfinder._dynamic_libs import search_platform
        from cuda.pathfinder._dynamic_libs import load_nvidia_dynamic_lib as search
        # The packages are not there, and the linker knows nothing of CUDA, whatever this machine has.
        search_platform.find_sub_dirs_all_sitepackages = lambda sub_dirs: []
        loads = {name: getattr(search.LOADER, name) for name in dir(search.LOADER) if not name.startswith("_")}
        search.LOADER = SimpleNamespace(**{**loads, "load_with_system_search": lambda library: None})
        search.resolve_ctk_root_via_canary = lambda name: None
        from funccoll import errors
        from funccoll.kernels import cuda_toolkit
        from funccoll.kernels.cuda_compiler import compile_template
        def nothing(address):
            pass
        compiled = lambda: compile_template(lambda operations: nothing, 1, (9, 0))
        cuda_toolkit._USUAL = ()
        try:
            compiled()
        except errors.DeviceError as error:
            print(error)  # two lines
        cuda_toolkit._USUAL = (sys.argv[1],)
        print(cuda_toolkit.find("libnvvm.so"), cuda_toolkit.find("libcublas.so"))
        print(compiled().code[:4] == b"\\x7fELF")
        print(*sorted({line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libnv" in line}))
    """
    clean = {name: value for name, value in os.environ.items() if name not in ("CUDA_PATH", "CUDA_HOME", "CONDA_PREFIX")}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), str(tmp_path)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=clean,
    )
    assert done.returncode == 0, done.stderr
    refused, _, found, compiles, mapped = done.stdout.splitlines()
    words = "NVVM and nvJitLink, and one is missing: libnvvm.so is neither installed with pip nor in a CUDA toolkit. pip"
    assert words in refused
    assert found == f"{tmp_path / 'nvvm' / 'lib64' / 'libnvvm.so.4'} None" and compiles == "True"
    assert all(library in mapped for library in ("libnvvm.so.4", "libnvJitLink.so.13", "libnvrtc.so.13"))


def test_an_older_nvjitlink_that_was_loaded_first_assembles_our_kernels(older_nvjitlink):
    """As where torch is imported first: its nvJitLink stays, and NVVM is what numba-cuda has found."""
    script = """
        import ctypes, sys
        ctypes.CDLL(sys.argv[1])
        from cuda.bindings import nvjitlink, nvvm
        from funccoll.kernels.cuda_compiler import assemble
        from funccoll.kernels.cuda_toolkit import load_compilers
        load_compilers()
        assert nvvm.version() and nvjitlink.version() == (13, 0), nvjitlink.version()
        ptx = sys.stdin.read()
        assert ".version 9.0" not in ptx, "NVVM is as old as nvJitLink here"
        code, log = assemble(ptx, (9, 0))
        print(code[:4] == b"\\x7fELF", log)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), older_nvjitlink],
        capture_output=True,
        text=True,
        cwd=ROOT,
        input=compiled(TWO, (9, 0), "gpu").ptx,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("True") and "0 bytes spill stores, 0 bytes spill loads" in done.stdout


def test_threads_compile_one_after_another():
    """Numba is changed meanwhile, and is afterwards what it was."""

    def nothing(address: Any) -> None:
        pass

    compile_template(lambda operations: nothing, 1, (9, 0))
    from numba.cuda import dispatcher

    before = dispatcher.get_current_device
    first_is_in, second_is_in, first_has_ended = (threading.Event() for _ in range(3))

    def first(operations: Operations) -> Any:
        first_is_in.set()
        second_is_in.wait(0.5)  # which does not come
        return nothing

    def second(operations: Operations) -> Any:
        second_is_in.set()
        first_has_ended.wait(60)
        return nothing

    found = []
    threads = [
        threading.Thread(target=lambda t=t, cc=cc: found.append(compile_template(t, 1, cc)))
        for t, cc in ((first, (9, 0)), (second, (10, 0)))
    ]
    threads[0].start()
    assert first_is_in.wait(60)
    threads[1].start()
    threads[0].join()
    first_has_ended.set()
    threads[1].join()
    assert dispatcher.get_current_device is before
    assert [kernel.ptx.count(f".target sm_{cc}") for kernel, cc in zip(found, (90, 100), strict=True)] == [1, 1]


def test_a_kernel_is_compiled_once_on_a_machine(monkeypatch, tmp_path):
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    asked = []
    kernel = Kernel("function", b"machine\ncode", "", "")
    monkeypatch.setattr("funccoll.kernels.cuda.compile_kernel", lambda *what: asked.append(what) or kernel)
    whats = (TWO, (9, 0), "gpu"), (TWO, (10, 0), "gpu"), (TWO[:1], (9, 0), "gpu"), (TWO, (9, 0), "sys")
    for what in (whats[0], *whats):
        assert load_kernel(*what) == ("function", b"machine\ncode")
    assert asked == list(whats)


def test_the_simulator_finds_races_missed_barriers_and_scopes_that_are_too_narrow():
    """It takes a sound kernel, and refuses that kernel without any one of its barriers, its release, or its acquire."""
    unordered = r"(a data race at \w+: thread \d of block \d \w+, .*|a word is read that nothing has written, \w+)"
    wanted = {
        "no fault": "nothing",
        **{f"without barrier {number}": unordered for number in range(4)},
        "two barriers": r"the threads of a block wait at several barriers: \['run:\d+', .*",
        "a thread leaves": "thread 1 has ended, and others of its block wait for it",
        "a plain store for the release": r"a data race at \w+: thread 0 of .* acquires, thread 0 of block \d writes",
        "a plain load for the acquire": r"a data race at \w+: thread 0 of block \d reads, thread 0 of block \d releases",
        "a report for the GPU alone": r"a \.gpu access to \w+, which the host or another process uses, too",
        "a release in shared memory": r"\w+ is in shared memory, not in global memory",
    }
    faults = {"no fault": nullcontext(), **FAULTS}
    assert faults.keys() == wanted.keys()
    for name, words in wanted.items():
        found = said(faults[name])
        assert re.fullmatch(words, found), (name, found)


def test_a_block_that_begins_after_another_has_ended_early_executes_nothing():
    class After(SimulatedGpu):
        def launch(self, combines, blocks, contexts, *others):
            rows = contexts[: blocks * WORD.size].reshape(blocks, WORD.size)
            before = rows.copy()
            for address in {*rows[:, WORD.ended].tolist()}:
                set_word(address, 1)
            super().launch(combines, blocks, contexts, *others)
            assert (rows[:, WORD.status] == FAILED).all()
            assert (rows[:, WORD.pc] == before[:, WORD.pc]).all()
            self.launches.append(blocks)

    gpu = After(0)
    gpu.launches = []
    mesh = Simulated(gpu).mesh({"x": 2})
    y = fc.jit(lambda x: fc.all_reduce(x, "x"), mesh=mesh, in_specs=fc.P("x"), out_specs=fc.P())(np.ones(8, np.float32))
    assert gpu.launches and (np.asarray(y.shards[0]).view(np.uint8) == 0xA5).all()  # as it was allocated


@pytest.mark.parametrize(
    "case",
    [
        "collectives 2 9",
        *[
            pytest.param(case, marks=SLOW)
            for case in (
                "fewest 2 2 bfloat16 complex64",
                "fewest 3 3 float32 int32",
                "forced 3 6",
                "nans 2 8",
                "staged 2 10",
            )
        ],
        *[
            pytest.param(case, marks=pytest.mark.exhaustive)
            for case in (
                "table 2 2 bfloat16 complex64",
                "table 3 3 float32",
                "table 2 1 int32",
                "programs 4 7",
            )
        ],
    ],
)
def test_the_simulator_gives_the_bits_of_the_cpu(case):
    name, n, seed, *dtypes = case.split()
    run_case(name, int(n), Simulated(SimulatedGpu(int(seed))), *dtypes)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        "fewest 2 2 float32",
        "collectives 2 9",
        "programs 4 7",
        *[pytest.param(case, marks=pytest.mark.exhaustive) for case in ("table 2 2 float32", "programs 2 1")],
    ],
)
def test_programs_through_cupy_and_their_graphs_give_the_bits_of_the_cpu(case):
    name, n, seed, *dtypes = case.split()
    forked(f"from tests.support.fakes import gpu_simulation\ngpu_simulation.main({name!r}, {n}, {seed}, *{dtypes})")


@pytest.mark.parametrize(
    ("kind", "algorithm", "left"),
    [
        ("all_reduce", "one_shot", 0),
        ("all_reduce", "ring", 5),
        ("all_gather", "ring", 2),
        ("all_to_all", None, 0),
    ],
)
def test_devices_of_one_launch_wait_for_what_others_write_alone(kind, algorithm, left, monkeypatch):
    """All have entered when it begins, and what comes after it begins when all have left."""
    plans, build = [], virtual_devices.build_launch_plan
    monkeypatch.setattr(virtual_devices, "build_launch_plan", lambda *given: plans.append(build(*given)) or plans[-1])
    options, specs = ({"split_dim": 0, "concat_dim": 0}, fc.P("x")) if kind == "all_to_all" else ({}, fc.P())
    mesh = Simulated(SimulatedGpu(0)).mesh({"x": 4})
    step = lambda x: getattr(fc, kind)(x, "x", algorithm=algorithm, **options)
    fc.jit(step, mesh=mesh, in_specs=fc.P("x"), out_specs=specs).lower(np.ones(64, np.float32)).compile()
    (plan,) = plans
    assert plan.waits == bool(left)
    for code in plan.codes:
        opcodes = Counter(instruction.opcode for instruction in disassemble(code.tolist()))
        assert [opcodes[each] for each in (Opcode.WAIT, Opcode.SIGNAL, Opcode.ADVANCE)] == [left, left, bool(left)]
