"""The notebooks: what is committed was run from top to bottom and is fit to be read; they run again, and print the same."""

import ast
import importlib.util
import os
import re
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from tests.support.lazy_modules import LazyModule, lazily, need
from tests.support.processes_left import VARIABLE, marked, wait_until_gone

pytestmark = pytest.mark.covers("notebooks")

need("nbclient", "the notebooks need: pip install 'funccoll[notebooks]'")
# Both take 1.5 s: they compile the grammar of URLs.
nbformat, exceptions = lazily("nbformat"), lazily("nbclient.exceptions")

FOLDER = Path(__file__).parents[2] / "notebooks"
PATHS = sorted(FOLDER.glob("*.ipynb"))
QUICK = ("01_",)
FIGURES = {"application/vnd.plotly.v1+json", "image/png", "image/svg+xml"}


def load():
    spec = importlib.util.spec_from_file_location("notebooks_execute", FOLDER / "execute.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


execute = LazyModule(load)
by_name = pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)


def read(path):
    return nbformat.read(path, as_version=4)


@pytest.fixture
def mark(monkeypatch):
    """Kernels and their processes carry this mark; at the end none is left."""
    mark = uuid.uuid4().hex
    monkeypatch.setenv(VARIABLE, mark)
    yield mark
    assert not marked(mark)


# ---------------------------------------------------------------- what is committed


def test_the_notebooks_are_numbered():
    assert [path.name[:3] for path in PATHS] == [f"{n:02}_" for n in range(1, len(PATHS) + 1)]
    assert execute.NOTEBOOKS == PATHS


@by_name
def test_it_was_run_as_it_is_and_is_fit_to_be_committed(path):
    notebook = read(path)
    assert execute.faults(notebook) == [], f"remedy: make notebooks-run NAMES={path.stem[:2]}"
    assert nbformat.writes(execute.tidied(read(path))) == nbformat.writes(notebook)
    assert path.stat().st_size <= execute.MOST_BYTES
    figures = [o for cell in execute.code_cells(notebook) for o in cell.outputs if FIGURES & set(o.get("data", ()))]
    assert len(figures) >= 2


@by_name
def test_its_first_cell_says_what_the_reader_will_be_able_to_do(path):
    first = read(path).cells[0]
    assert first.cell_type == "markdown"
    title, sentence, *_ = first.source.split("\n\n")
    assert re.fullmatch("# .+", title) and sentence.startswith("After this notebook you can ") and "." in sentence


@by_name
def test_its_links_and_code_follow_the_rules(path):
    notebook = read(path)
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            for name in re.findall(r"\]\(([^)#:]+)\)", cell.source):
                assert (FOLDER / name).exists(), f"a link to {name}"
        else:
            ast.parse(cell.source)
            assert max(map(len, cell.source.split("\n"))) <= 120
            assert len(cell.source.split("\n")) <= 30, "a cell has one idea"


def test_they_import_only_the_extra():
    """What `make notebooks` installs is enough: NumPy, the extra's packages, and this folder's modules."""
    known = {*sys.stdlib_module_names, "numpy", "funccoll", "matplotlib", "plotly", "sklearn", "digits"}
    for path in PATHS:
        for cell in execute.code_cells(read(path)):
            for node in ast.walk(ast.parse(cell.source)):
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                names += [node.module] if isinstance(node, ast.ImportFrom) else []
                assert {name.split(".")[0] for name in names} <= known


# ---------------------------------------------------------------- they run


def shown(cell):
    """The outputs of a cell as text and the kinds of data that it showed; of cells that measure, only the kinds."""
    kinds = [sorted(o.get("data", {o.get("name"): 0})) for o in cell.outputs]
    return kinds, None if execute.MEASURED in cell.metadata.get("tags", []) else execute.texts(cell)


def slow_unless_quick(path):
    return pytest.param(path, marks=() if path.name.startswith(QUICK) else pytest.mark.slow, id=path.stem)


@pytest.mark.processes
@pytest.mark.parametrize("path", [slow_unless_quick(path) for path in PATHS])
def test_it_runs_and_prints_what_is_committed(path, mark):
    committed = read(path)
    executed = execute.execute(committed)
    assert execute.faults(executed) == []
    for old, new in zip(execute.code_cells(committed), execute.code_cells(executed), strict=True):
        assert shown(new) == shown(old), f"{old.source}\nremedy: make notebooks-run NAMES={path.stem[:2]}"


# ---------------------------------------------------------------- execute.py itself


def small(*sources, **metadata):
    of = nbformat.v4
    cells = [of.new_markdown_cell("# Title"), *(of.new_code_cell(source, metadata=metadata) for source in sources)]
    return of.new_notebook(cells=cells)


def finished(source="print(1)", *outputs, count=1):
    """A notebook as it is after it was run, with these outputs of its cell."""
    notebook = small(source)
    notebook.cells[1].execution_count = count
    notebook.cells[1].outputs = list(outputs)
    return execute.tidied(notebook)


def printed(text, name="stdout"):
    return nbformat.v4.new_output("stream", name=name, text=text)


def figure(**data):
    return nbformat.v4.new_output("display_data", data=data)


def test_a_good_notebook_has_no_faults():
    links = "see http://www.w3.org/2000/svg and train.py:12, 3/tmp, a/home/x"
    good = finished("print(1)", printed(links), figure(**{"image/svg+xml": '<svg xmlns="http://www.w3.org/2000/svg"/>'}))
    assert execute.faults(good) == []


@pytest.mark.parametrize(
    ("make", "fault"),
    [
        (lambda: finished("1", printed("at /tmp/ipykernel_1/2.py")), "a path of this machine: /tmp/i"),
        (lambda: finished("1", figure(**{"text/html": "<a href='/home/me/x'>"})), "a path of this machine"),
        (lambda: finished("1", printed("<f at 0x7f00aa00bb00>")), "an object's address"),
        (lambda: finished("1", figure(**{"text/html": '<script src="https://cdn.plot.ly/p.min.js">'})), "would load"),
        (lambda: finished("1", figure(**{"application/vnd.plotly.v1+json": {"data": ["https://a.b/c.js"]}})), "would load"),
        (lambda: finished("1", figure(**{"image/svg+xml": '<image xlink:href="x" src="http://a.b/c.png"/>'})), "would load"),
        (lambda: finished("1", printed("no such thing", "stderr")), "wrote an error: no such thing"),
        (lambda: finished("1", nbformat.v4.new_output("error", ename="E", evalue="why", traceback=[])), "wrote an error: why"),
        (lambda: finished("1", count=2), "their counts are [2]"),
        (lambda: finished("1", count=None), "their counts are [None]"),
        (lambda: finished("1", printed("1" * 1_000_000)), "bytes, and may have 1,000,000"),
    ],
)
def test_faults_are_found(make, fault):
    (found,) = execute.faults(make())
    assert fault in found


def test_changed_code_is_found():
    notebook = finished()
    notebook.cells[1].source += " "
    assert execute.faults(notebook) == ["its code was changed after it was run"]


def test_what_belongs_to_one_run_is_taken_away():
    notebook = small("print(1)", execution={"iopub.execute_input": "2026-11-23"}, tags=["measured"], collapsed=False)
    notebook.metadata.language_info = {"name": "python", "version": "3.11.7"}
    text = nbformat.writes(execute.tidied(notebook))
    assert "2026" not in text and "3.11" not in text and '"measured"' in text and "collapsed" not in text


@pytest.mark.processes
def test_a_notebook_with_a_fault_is_left_as_it_was(tmp_path, mark):
    path = tmp_path / "07_bad.ipynb"
    nbformat.write(small("import os", "print('/home/' + 'me')"), path)
    before = path.read_bytes()
    with pytest.raises(SystemExit, match=r"07_bad.ipynb is left as it was:\n  an output of cell 2 has a path of this machine"):
        execute.rewrite(path)
    assert path.read_bytes() == before and os.listdir(tmp_path) == [path.name]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("source", "error", "timeout"),
    [
        ("raise ValueError('in a cell')", "CellExecutionError", 60),
        pytest.param("import time; time.sleep(600)", "CellTimeoutError", 1, marks=pytest.mark.slow),
        pytest.param("import os; os._exit(7)", "DeadKernelError", 60, marks=pytest.mark.slow),
    ],
)
def test_kernels_end_when_a_cell_fails(source, error, timeout, mark):
    with pytest.raises(getattr(exceptions, error)):
        execute.execute(small(source), timeout=timeout)
    wait_until_gone(mark)


@pytest.mark.slow
@pytest.mark.processes
def test_kernels_end_with_the_process_that_started_them(mark, tmp_path):
    """Killed in the middle of a cell: nothing can be cleaned up any more, and the kernel and its ranks end by themselves."""
    began, path = tmp_path / "began", tmp_path / "01_long.ipynb"
    os.mkfifo(began)
    rank = f"lambda: (open({str(began)!r}, 'w').write('x'), time.sleep(600))"
    nbformat.write(small(f"import time, funccoll as fc\nfc.launch({rank}, 1)"), path)
    code = "import sys, pathlib, execute; execute.rewrite(pathlib.Path(sys.argv[1]))"
    process = subprocess.Popen([sys.executable, "-c", code, path], env={**os.environ, "PYTHONPATH": str(FOLDER)})
    try:
        assert began.read_text() == "x"  # a rank of the cell is running
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    wait_until_gone(mark)


def test_unknown_names_are_refused(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["execute.py", "9"])
    monkeypatch.setattr(execute, "NOTEBOOKS", [Path("01_one.ipynb"), Path("02_two.ipynb")])
    with pytest.raises(SystemExit) as caught:
        execute.main()
    assert caught.value.code == 2
    assert "no notebook's name begins with '9'; there are: 01_one, 02_two" in capsys.readouterr().err
