"""fc.launch with real processes: results, failures, what travels, and that nothing is left behind."""

import copyreg
import linecache
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import uuid
from pathlib import Path
from types import CodeType

import cloudpickle
import numpy as np
import pytest

import funccoll as fc
from funccoll import P
from funccoll.errors import FunccollError, LaunchError, LaunchTimeout, PeerFailure, ShapeError
from funccoll.job.reports import EndedRanks
from tests.support.processes_left import VARIABLE, marked, wait_until_gone, zombies

pytestmark = pytest.mark.covers("launch")


@pytest.fixture(autouse=True)
def mark(monkeypatch):
    """Everything that a test starts carries this mark; at its end nothing is left, and no descriptor is open."""
    mark = uuid.uuid4().hex
    monkeypatch.setenv(VARIABLE, mark)
    descriptors = len(os.listdir("/proc/self/fd"))
    yield mark
    assert not marked(mark)
    assert not zombies()
    assert len(os.listdir("/proc/self/fd")) == descriptors


# Functions made here travel by value, like a notebook's: the launched processes then need not import pytest.
def by_value(function):
    function.__module__ = "__main__"
    return function


@by_value
def own_rank():
    """Return what `fc.rank()` does, and import nothing: 0.15 s of processor time in each launched process."""
    return int(os.environ["FUNCCOLL_RANK"])


# ---------------------------------------------------------------- results


def report(scale, word=""):
    print(f"rank {fc.rank()} says {word}")
    print("and complains", file=sys.stderr)
    environment = {k: os.environ[k] for k in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")}
    return fc.rank() * scale, fc.world_size(), os.environ["FUNCCOLL_RUN_ID"], os.getppid(), environment


def test_results_by_rank_and_output_with_prefix(capsys, monkeypatch):
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    found = fc.launch(report, 2, 10, "handshake")  # by name, imported from this file
    assert [f[0] for f in found] == [0, 10]
    assert {f[1] for f in found} == {2}
    assert len({f[2] for f in found}) == 1
    assert {f[3] for f in found} == {os.getpid()}
    threads = str(max(1, len(os.sched_getaffinity(0)) // 2))
    assert found[0][4] == dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), threads)
    output, errors = capsys.readouterr()
    assert sorted(output.splitlines()) == [f"[{r}] rank {r} says handshake" for r in range(2)]
    assert sorted(errors.splitlines()) == [f"[{r}] and complains" for r in range(2)]


def test_closures_large_arrays_threads_and_launching_from_a_launched_process():
    big, secret = np.arange(400_000.0), 41

    @by_value
    def work(x):
        nested = fc.launch(own_rank, 2) if own_rank() == 0 else None
        return secret + 1, x + own_rank(), lambda y: y * secret, nested, x.flags.writeable

    found = []
    thread = threading.Thread(target=lambda: found.extend(fc.launch(work, 2, big)))
    thread.start()
    thread.join()
    for rank, (number, array, function, nested, writable) in enumerate(found):
        assert number == 42 and function(2) == 82 and writable and array.flags.writeable
        np.testing.assert_array_equal(array, big + rank)
        assert nested == ([0, 1] if rank == 0 else None)


SCRIPT = """
import dataclasses, time
import funccoll as fc

@dataclasses.dataclass
class Point:
    x: int

OFFSET = 5

class Odd(Exception):
    pass

def make(base):
    return Point(base + OFFSET + fc.rank())

points = fc.launch(make, 2, 100)          # no `if __name__ == "__main__"`
assert points == [Point(105), Point(106)] and type(points[0]) is Point, points
def refuse():
    raise Odd("no")
try:
    fc.launch(refuse, 1)
except Odd as error:
    assert "in refuse" in error.__notes__[0], error.__notes__
print("fine")
"""


@pytest.mark.parametrize("how", ["script", pytest.param("cell", marks=pytest.mark.slow)])
def test_functions_and_classes_of_main(how, tmp_path):
    """Of a script, and of a notebook's kernel, whose cells are in no file."""
    (tmp_path / "script.py").write_text(SCRIPT)
    cell = "import pathlib; exec(compile(pathlib.Path('script.py').read_text(), '<ipython-input-1>', 'exec'))"
    command = ["script.py"] if how == "script" else ["-c", cell]
    done = subprocess.run([sys.executable, "-W", "error", *command], cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.stdout == "fine\n", done.stderr
    assert done.stderr == ""


# ---------------------------------------------------------------- failures


def test_an_exception_comes_back_with_rank_and_traceback_and_stops_the_others(mark):
    @by_value
    def fail():
        if own_rank() == 1:
            raise ShapeError("the third row")
        time.sleep(1000)

    with pytest.raises(ShapeError, match="the third row") as caught:
        fc.launch(fail, 3)
    (note,) = caught.value.__notes__
    assert note.startswith("Rank 1 raised it")
    assert "in fail" in note and 'raise ShapeError("the third row")' in note
    assert "serve" not in note
    assert not marked(mark)


def test_exceptions_that_cannot_travel_and_exits_are_told_in_words():
    @by_value
    def fail(how):
        class Strange(Exception):
            def __init__(self, one, two):
                super().__init__(f"{one} and {two}")

        if how == "exit":
            sys.exit(3)
        raise Strange(1, 2)

    with pytest.raises(LaunchError, match=r"rank 0 left the function by SystemExit: 3[\s\S]*test_runtime_launch.py:\d+ in"):
        fc.launch(fail, 1, "exit")
    with pytest.raises(LaunchError, match=r"rank 0 left the function by .*Strange: 1 and 2") as caught:
        fc.launch(fail, 1, "strange")
    assert "raise Strange(1, 2)" in caught.value.__notes__[0]


def test_death_of_a_rank():
    @by_value
    def die(how):
        if own_rank() == 0:
            time.sleep(1000)
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        os._exit(0)

    with pytest.raises(LaunchError, match=r"fc.launch\(.*die, 2\): rank 1 was killed by SIGKILL .* before it returned"):
        fc.launch(die, 2, "kill")
    with pytest.raises(LaunchError, match="rank 1 exited with code 0 before it returned"):
        fc.launch(die, 2, "exit")


def test_death_after_the_result():
    @by_value
    def register():
        import atexit

        atexit.register(os._exit, 9)

    with pytest.raises(LaunchError, match="rank 0 exited with code 9 after it had returned"):
        fc.launch(register, 1)


@pytest.mark.parametrize("how", ["raise", *(pytest.param(how, marks=pytest.mark.slow) for how in ("kill", "return"))])
def test_the_cause_is_raised_and_not_what_follows_from_it(how):
    @by_value
    def work(how):
        step = fc.jit(lambda x: fc.all_reduce(x, "d"), mesh=fc.make_mesh({"d": 2}), in_specs=P("d"), out_specs=P())
        step(np.ones(2))
        if fc.rank() == 1:
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if how == "raise":
                raise ValueError("enough")
            return
        step(np.ones(2))

    found = {
        "raise": (ValueError, "enough"),
        "kill": (LaunchError, "rank 1 was killed by SIGKILL"),
        "return": (PeerFailure, "rank 1 left the job"),
    }
    with pytest.raises(found[how][0], match=found[how][1]) as caught:
        fc.launch(work, 2, how)
    if how == "raise":
        assert caught.value.__notes__[0].startswith("Rank 1 raised it")


def test_a_peer_failure_that_is_told_first_is_not_the_cause(tmp_path):
    @by_value
    def work(path):
        if own_rank() == 1:
            path.write_text(str(os.getpid()))
            raise PeerFailure("rank 0 raised ValueError")
        while not (path.exists() and (pid := path.read_text())) or ") Z " not in Path(f"/proc/{pid}/stat").read_text():
            time.sleep(0.01)
        raise ValueError("enough")

    with pytest.raises(ValueError, match="enough") as caught:
        fc.launch(work, 2, tmp_path / "pid")
    assert caught.value.__notes__[0].startswith("Rank 0 raised it")


def test_a_peer_failure_without_another_failure_is_raised():
    @by_value
    def fail():
        raise PeerFailure("rank 7 raised ValueError")

    with pytest.raises(PeerFailure, match="rank 7 raised ValueError"):
        fc.launch(fail, 1)


def test_tracebacks_of_a_notebook_show_lines():
    """Cells are no files: IPython puts their lines into `linecache`."""
    name, lines = "/tmp/ipykernel_123/456.py", ["def cell():\n", "    raise ValueError('in a cell')  # here\n"]
    linecache.cache[name] = (sum(map(len, lines)), None, lines, name)
    namespace = {"__name__": "__main__"}
    exec(compile("".join(lines), name, "exec"), namespace)
    try:
        with pytest.raises(ValueError, match="in a cell") as caught:
            fc.launch(by_value(namespace["cell"]), 1)
    finally:
        del linecache.cache[name]
    assert "line 2, in cell\n    raise ValueError('in a cell')  # here\n" in caught.value.__notes__[0]


def test_timeout_names_the_ranks_that_are_late(mark):
    @by_value
    def late():
        if own_rank() != 1:
            time.sleep(1000)

    begun = time.monotonic()
    fc.launch(by_value(lambda: None), 2)
    seconds = 3 + round(5 * (time.monotonic() - begun))  # of which rank 1 needs a few, on a machine that is busy
    with pytest.raises(LaunchTimeout, match=f"after {seconds} s rank 0 had not returned") as caught:
        fc.launch(late, 2, timeout=seconds)
    assert isinstance(caught.value, TimeoutError)
    assert not marked(mark)


def test_what_cannot_be_sent():
    lock = threading.Lock()
    with pytest.raises(LaunchError, match=r"cannot send .*lambda.*lock.*inside it"):
        fc.launch(lambda: lock, 2)
    with pytest.raises(TypeError, match=r"result of type lock cannot be sent back.*arrays and plain values"):
        fc.launch(by_value(lambda: threading.Lock()), 1)


def test_a_module_that_is_not_there_in_the_child():
    namespace = {"__name__": "nowhere_to_be_found"}
    exec("def f(): return 1", namespace)
    sys.modules["nowhere_to_be_found"] = type(sys)("nowhere_to_be_found")
    sys.modules["nowhere_to_be_found"].f = namespace["f"]
    try:
        with pytest.raises(ModuleNotFoundError, match="nowhere_to_be_found") as caught:
            fc.launch(namespace["f"], 1)
    finally:
        del sys.modules["nowhere_to_be_found"]
    assert "register_pickle_by_value" in "".join(caught.value.__notes__)


@pytest.mark.parametrize(("fn", "n"), [(4, print), (print, 0), (print, True), (print, 2.0), (None, 2)])
def test_wrong_arguments(fn, n):
    with pytest.raises(LaunchError, match=r"takes a function and a number of processes"):
        fc.launch(fn, n)
    assert issubclass(LaunchError, FunccollError)


# ---------------------------------------------------------------- ranks that end before they join


@pytest.mark.parametrize(("first", "joins"), [(0, False), pytest.param(1, True, marks=pytest.mark.slow)])
def test_a_rank_that_returns_before_it_joins_ends_the_others_rendezvous(first, joins, monkeypatch):
    """And one that has left, before the others join again. Nothing waits until the rendezvous times out."""
    monkeypatch.setenv("FUNCCOLL_RENDEZVOUS_TIMEOUT", "1000")

    @by_value
    def work():
        if joins:
            fc.init()
            fc.finalize()
        if own_rank() == first:
            return "gone"
        try:
            fc.init()
        except fc.errors.RendezvousError as error:
            return str(error)
        return "joined"

    found = fc.launch(work, 2)
    assert found.pop(first) == "gone"
    assert all(text.startswith(f"rank {first} ended before the job could begin (run") for text in found), found


def test_a_rank_that_follows_another_is_not_named_as_the_cause():
    """The last one looks when rank 2, which was told that rank 0 had ended, has ended as well."""

    @by_value
    def work():
        if own_rank() == 0:
            return "gone"
        if own_rank() == 1:
            look = EndedRanks.ranks

            def look_at_both(self):
                while not (found := look(self)) >= {0, 2}:
                    time.sleep(0.01)
                return found

            EndedRanks.ranks = look_at_both
        try:
            fc.init()
        except fc.errors.RendezvousError as error:
            return str(error)
        return "joined"

    _, *others = fc.launch(work, 3)
    assert all(text.startswith("rank 0 ended before the job could begin (run") for text in others), others


# ---------------------------------------------------------------- the parent goes away


WAITING = """
import time, funccoll as fc
def wait():
    try:
        print("ready", flush=True)
        time.sleep(1000)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
        raise
fc.launch(wait, 2)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_end_of_the_parent(number, mark, tmp_path):
    (tmp_path / "waiting.py").write_text(textwrap.dedent(WAITING))
    parent = subprocess.Popen(
        [sys.executable, "waiting.py"], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    with parent:
        assert {parent.stdout.readline() for _ in range(2)} == {"[0] ready\n", "[1] ready\n"}
        assert len(marked(mark)) == 3
        parent.send_signal(number)
        wait_until_gone(mark)
        output, errors = parent.stdout.read(), parent.stderr.read()
    assert parent.returncode == -number
    if number == signal.SIGINT:
        assert sorted(output.splitlines()) == ["[0] interrupted", "[1] interrupted"]
        assert "KeyboardInterrupt" in errors


# ---------------------------------------------------------------- lines of the user


def test_files_and_lines_of_functions_that_travel_by_value(monkeypatch):
    """With any version of cloudpickle: 3.1.3 drops the name of a function's file, which is done here with others, too."""
    table = cloudpickle.Pickler.dispatch_table
    reduce = table[CodeType]
    nameless = lambda code: reduce(code.replace(co_filename="<dynamic-code>"))
    monkeypatch.setitem(table.maps[0], CodeType, nameless)

    def task():
        mesh = fc.make_mesh({"i": 1})

        def f(x):
            return fc.all_reduce(x, "j")

        try:
            fc.jit(f, mesh=mesh, in_specs=P("i"), out_specs=P())(np.ones(4))
        except FunccollError as error:
            return str(error.source), f

    (first,) = fc.launch(by_value(task), 1)
    line = task.__code__.co_firstlineno + 4
    assert first[0] == f"test_runtime_launch.py:{line} (f)"
    assert first[1].__code__.co_filename == __file__  # a function that comes back, too

    def raising():
        raise KeyError("here")

    with pytest.raises(KeyError) as caught:
        fc.launch(by_value(raising), 1)
    assert f'File "{__file__}", line {raising.__code__.co_firstlineno + 1}, in raising' in caught.value.__notes__[0]


class Handle:
    """An object that cannot be pickled without a reducer."""

    def __reduce_ex__(self, protocol):
        raise TypeError("no reducer")


def test_reducers_that_are_registered_after_the_import_of_launch(monkeypatch):
    monkeypatch.setitem(copyreg.dispatch_table, Handle, lambda handle: (str, ("reduced",)))
    handle = Handle()
    assert fc.launch(by_value(lambda: handle), 1) == ["reduced"]
