"""Compiled kernels on disk: only what this user (or root) wrote is executed, and no other user can write it."""

from __future__ import annotations

import ctypes
import gc
import hashlib
import importlib.metadata
import os
import shutil
import stat
import subprocess
import sys
import threading
import warnings
import weakref
from pathlib import Path

import numpy as np
import pytest

import funccoll
import funccoll as fc
from funccoll.core import private_files
from funccoll.kernels import cpu, object_cache
from funccoll.kernels.kernel_context import WORD
from funccoll.kernels.native import machine_code
from funccoll.kernels.object_cache import address_of, cache_directory

pytestmark = pytest.mark.covers("shared-memory")

MINE = os.geteuid()
root = pytest.mark.skipif(MINE != 0, reason="only root can give files to another user")


def build():
    from numba import types

    def twice(x):
        return x + x

    return twice, types.int64(types.int64)


@pytest.fixture(scope="module")
def code():
    """A small kernel, compiled."""
    return object_cache._compile(*build())


@pytest.fixture
def kernel(code, monkeypatch, tmp_path):
    """A function that gets the kernel, calls it, and tells whether it was compiled."""
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "given"))
    object_cache._warn.cache_clear()

    def get():
        compiled = []
        monkeypatch.setattr(object_cache, "_compile", lambda *_: compiled.append(True) or code)
        found = ctypes.c_int64()
        function = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)
        function(address_of("twice", build))(ctypes.byref(found), None, 21)
        assert found.value == 42
        return bool(compiled)

    yield get
    object_cache._warn.cache_clear()


def mode(path):
    return stat.S_IMODE(os.stat(path).st_mode)


@pytest.mark.parametrize("umask", [0, 0o22, 0o77, 0o277])
def test_only_this_user_can_write_what_is_kept(kernel, umask, tmp_path):
    before = os.umask(umask)
    try:
        if umask == 0o277:  # Python could not write in folders that it makes on the way
            (tmp_path / "given").mkdir()
            (tmp_path / "given").chmod(0o755)
        assert kernel() and not kernel()
    finally:
        os.umask(before)
    folder = tmp_path / "given" / "funccoll"
    (file,) = folder.iterdir()
    assert (mode(folder), mode(file)) == (0o700, 0o600) and cache_directory() == folder


@pytest.mark.parametrize("how", [0o720, 0o702, 0o777])
def test_a_folder_that_others_can_write_is_not_used(kernel, how, tmp_path):
    assert kernel()
    folder = tmp_path / "given" / "funccoll"
    folder.chmod(how)
    words = rf"funccoll: compiled kernels are not kept: users other than its owner can write .*/funccoll \(mode {how:o}\)"
    with pytest.warns(RuntimeWarning, match=words) as told:
        assert kernel()
    assert len(told) == 1 and "NUMBA_CACHE_DIR" in str(told[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert kernel()  # once is enough
    folder.chmod(0o700)
    assert not kernel()


@root
def test_a_folder_of_another_user_is_not_used(kernel, tmp_path):
    folder = tmp_path / "given" / "funccoll"
    folder.mkdir(parents=True, mode=0o755)
    os.chown(folder, 65534, 65534)
    with pytest.warns(RuntimeWarning, match=r"/funccoll belongs to user 65534"):
        assert kernel()
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("how", ["mode", pytest.param("owner", marks=root), "link", "cut"])
def test_a_file_that_is_not_ours_alone_is_not_executed(kernel, how, tmp_path):
    assert kernel()
    (file,) = (tmp_path / "given" / "funccoll").iterdir()
    if how == "mode":
        file.chmod(0o620)
    if how == "owner":
        os.chown(file, 65534, 65534)
    if how == "link":
        file.rename(tmp_path / "elsewhere")
        file.symlink_to(tmp_path / "elsewhere")
    if how == "cut":
        file.write_bytes(file.read_bytes()[:-10])
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert kernel()
    texts = [str(w.message) for w in told]
    assert len(texts) == (how in ("mode", "owner", "link")) and all("a kernel is compiled anew: " in text for text in texts)
    assert not kernel() and not file.is_symlink() and mode(file) == 0o600  # it was replaced


def test_a_file_that_is_not_whole_is_never_loaded(kernel, tmp_path):
    """Whichever byte is wrong or missing: LLVM would end the process."""
    assert kernel()
    (file,) = (tmp_path / "given" / "funccoll").iterdir()
    whole = file.read_bytes()
    assert object_cache._read(f"twice-{object_cache._key()}.o") is not None
    _, symbol, code = whole.split(b"\n", 2)
    empty, digest = symbol + b"\n", object_cache._digest
    places = [*range(120), *range(120, len(whole), 7), len(whole) - 1]  # all of the head, which names the symbol
    changed = [whole[:i] for i in places] + [whole[:i] + bytes([whole[i] ^ 1 << i % 8]) + whole[i + 1 :] for i in places]
    changed += [
        symbol + b" " + hashlib.sha256(b"").hexdigest().encode() + b"\n",
        digest(file.name, empty) + b"\n" + empty,
        digest("another-kernel.o", symbol + b"\n" + code) + b"\n" + symbol + b"\n" + code,
        whole + b"\0",
        b"\n\n",
    ]
    for content in changed:
        file.write_bytes(content)
        assert object_cache._read(f"twice-{object_cache._key()}.o") is None, content
    file.write_bytes(b"")
    assert kernel() and not kernel() and file.read_bytes() == whole


def test_where_nothing_is_given_it_is_beside_the_package_or_at_home(monkeypatch, tmp_path):
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    beside = Path(funccoll.__file__).parent / "kernels" / "__pycache__" / "objects"
    assert list(object_cache._candidates()) == [beside, tmp_path / "funccoll"]
    assert cache_directory() in (beside, tmp_path / "funccoll")


STRANGER = """
import os, sys, warnings
import numpy, funccoll.transports.shm.heap, importlib.metadata
import funccoll.kernels.object_cache as cache
os.setgroups([]); os.setgid(54321); os.setuid(54321)
warnings.simplefilter("error")
print(len(list(cache._candidates())), cache.cache_directory())
"""


@root
def test_a_user_without_a_home():
    """As in a container that runs as any user; the package's folder is not this user's either."""
    variables = {k: v for k, v in os.environ.items() if k not in ("HOME", "XDG_CACHE_HOME", "NUMBA_CACHE_DIR")}
    done = subprocess.run([sys.executable, "-c", STRANGER], env=variables, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout == "1 None\n", done


@pytest.mark.slow
def test_kernels_of_a_kept_file_compute(monkeypatch, tmp_path):
    cpu.interpreter(np.zeros(WORD.size, np.int64).ctypes.data)
    (interpreter,) = cache_directory().glob(f"interpret_cpu-{object_cache._key()}.o")  # it takes seconds to compile
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "cache"))
    shutil.copy(interpreter, cache_directory())
    script = tmp_path / "script.py"
    script.write_text(
        "import funccoll as fc, numpy as np\n"
        "mesh = fc.make_mesh({'d': fc.world_size()})\n"
        "step = fc.jit(lambda x: fc.all_reduce(x, 'd'), mesh=mesh, in_specs=fc.P('d'), out_specs=fc.P())\n"
        "print(float(np.asarray(step(np.arange(4.0)))[0]))\n"
    )
    for _ in range(2):
        done = subprocess.run([sys.executable, "-m", "funccoll", "run", "-n", "2", str(script)], capture_output=True, text=True)
        assert done.returncode == 0 and sorted(done.stdout.splitlines()) == ["[0] 2.0", "[1] 2.0"], done
    assert len(list((tmp_path / "cache/funccoll").iterdir())) == 2


ANSWER = "define i64 @answer() {\n  ret i64 42\n}\n"


@pytest.mark.skipif(machine_code.why_not() is not None, reason=str(machine_code.why_not()))
def test_hosts_that_share_a_folder_share_fused_kernels(monkeypatch, tmp_path):
    """The kind of processor and llvmlite are in the key. The processor itself, and Numba, are not."""
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    compiled, real = [], machine_code.object_code
    monkeypatch.setattr(machine_code, "object_code", lambda text, cpu: compiled.append(cpu) or real(text, cpu))

    def answers():
        before = len(compiled)
        address = machine_code.address_of(ANSWER, "answer", machine_code.LEVELS[0])
        assert ctypes.CFUNCTYPE(ctypes.c_int64)(address)() == 42
        return len(compiled) > before

    def no_numba(name):
        raise importlib.metadata.PackageNotFoundError(name)

    assert answers() and not answers()
    monkeypatch.setattr(object_cache, "_processor", lambda: ("another", ""))
    monkeypatch.setattr(importlib.metadata, "version", no_numba)
    object_cache._key.cache_clear()
    assert not answers()
    machine_code.address_of(ANSWER, "answer", "x86-64")  # another kind is another file
    assert compiled == [machine_code.LEVELS[0], "x86-64"]
    monkeypatch.setattr(machine_code, "compiler", lambda: "llvmlite 0.0.0 (LLVM 19.0.0)")
    machine_code._key.cache_clear()
    assert answers()
    machine_code._key.cache_clear()
    object_cache._key.cache_clear()


@pytest.mark.skipif(machine_code.why_not() is not None, reason=str(machine_code.why_not()))
def test_fused_kernels_that_others_can_write_are_not_executed(monkeypatch, tmp_path):
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    object_cache._warn.cache_clear()
    machine_code.address_of(ANSWER, "answer")
    (file,) = (tmp_path / "funccoll").iterdir()
    before = file.stat().st_ino
    file.chmod(0o666)
    with pytest.warns(RuntimeWarning, match="a kernel is compiled anew"):
        machine_code.address_of(ANSWER, "answer")
    assert file.stat().st_ino != before and mode(file) == 0o600
    object_cache._warn.cache_clear()


@pytest.mark.skipif(machine_code.why_not() is not None, reason=str(machine_code.why_not()))
def test_a_machine_without_numba_has_fused_kernels(tmp_path):
    script = (
        "import sys\nsys.modules['numba'] = None\nimport numpy as np\nimport funccoll as fc\n"
        "f = fc.jit(lambda x: np.sum(np.exp(x) / (1 + np.exp(x))))\nprint(f(np.zeros(1000, np.float32)))\n"
    )
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path), "FUNCCOLL_FUSE": "1"}
    done = subprocess.run([sys.executable, "-W", "error", "-c", script], capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stdout, done.stderr) == (0, "500.0\n", "")
    assert list((tmp_path / "funccoll").glob("native-*.o"))


# ---------------------------------------------------------------- bounds


def aged(folder, names, size=10):
    """Write files, the first one the oldest."""
    folder.mkdir(exist_ok=True)
    for age, name in enumerate(reversed(names)):
        (folder / name).write_bytes(bytes(size))
        os.utime(folder / name, (10**9 - age, 10**9 - age))


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize(("files", "size", "kept"), [(8, 80, 8), (7, 80, 5), (8, 79, 5), (1, 80, 0)])
def test_the_least_recently_used_files_go(files, size, kept, tmp_path):
    names = [f"{i}.o" for i in range(8)]
    aged(tmp_path, names)
    aged(tmp_path, ["profile.json"])
    private_files.drop_oldest(tmp_path, ".o", files, size)
    assert names_in(tmp_path) == [*names[8 - kept :], "profile.json"]


def test_drafts_of_killed_processes_go(tmp_path):
    aged(tmp_path, [".funccoll-old"])
    (tmp_path / ".funccoll-now").write_bytes(b"")
    private_files.drop_oldest(tmp_path, ".o", 8, 80)
    assert names_in(tmp_path) == [".funccoll-now"]


def test_several_processes_bound_a_folder_together(tmp_path):
    """What one has removed is not an error for another one."""
    names = [f"{i:03}.o" for i in range(400)]
    aged(tmp_path, names)
    barrier = threading.Barrier(4)

    def drop():
        barrier.wait()
        private_files.drop_oldest(tmp_path, ".o", 100, 10**6)

    threads = [threading.Thread(target=drop) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    left = names_in(tmp_path)
    assert left == names[-len(left) :] and len(left) in (75, 100)  # one that begins when another is at 100 leaves these


def test_what_is_read_is_used(code, tmp_path, monkeypatch):
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(object_cache, "_MOST_FILES", 3)
    monkeypatch.setattr(object_cache, "_digest", lambda file, rest: b"00")  # each write looks at all files
    for name in "abc":
        object_cache._write(f"{name}.o", *code)
        os.utime(tmp_path / "funccoll" / f"{name}.o", (ord(name), ord(name)))
    assert object_cache._read("a.o") == code
    object_cache._write("d.o", *code)
    assert names_in(tmp_path / "funccoll") == ["a.o", "d.o"]


@pytest.mark.skipif(machine_code.why_not() is not None, reason=str(machine_code.why_not()))
@pytest.mark.parametrize("clears", [True, False])
def test_machine_code_is_freed_with_its_program(clears, monkeypatch):
    engines, engine_of = [], object_cache.engine_of

    def noted(code):
        made = engine_of(code)
        engines.append(weakref.ref(made))
        return made

    monkeypatch.setattr(object_cache, "engine_of", noted)
    f, x = fc.jit(lambda x: np.exp(x) + np.sum(np.exp(x), axis=1, keepdims=True)), np.ones((30, 40), np.float32)
    wanted = np.asarray(f(x))
    (engine,) = engines
    if clears:
        fc.clear_caches()
        gc.collect()
        assert engine() is None and np.array_equal(f(x), wanted)
    else:
        del f
        gc.collect()
        assert engine() is None
