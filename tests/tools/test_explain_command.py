"""`funccoll explain`: what it shows of a script's programs, and that the script runs as Python would run it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from funccoll.compiler.stages import compile_observers
from funccoll.tools.cli import main
from tests.support.machine_profiles import in_use, parameters, profile, times

pytestmark = pytest.mark.covers("commands")

HEAD = """
import sys
import numpy as np
import funccoll as fc
from funccoll import P
mesh = fc.make_mesh({"data": 4})
"""
STEP = (
    HEAD
    + """
@fc.jit(mesh=mesh, in_specs=P("data"), out_specs=P())
def total(x):
    return fc.all_reduce(x, "data")

for _ in range(3):
    total(np.ones((8, 2)))
"""
)


@pytest.fixture
def explain(capfd, tmp_path, monkeypatch):
    """Runs `funccoll explain` on a script in this process; returns (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)

    def run(code: str | None, *words: str, options: tuple[str, ...] = ()) -> tuple[int, str, str]:
        if code is not None:
            Path("train.py").write_text(code)
        before = sys.argv[:], sys.path[:]
        try:
            result = main(["explain", *options, "train.py", *words])
        except SystemExit as exit:
            result = int(str(exit.code))
        assert (sys.argv, sys.path) == before and not compile_observers
        return result, *capfd.readouterr()

    return run


def words(text: str) -> str:
    """A text with single spaces."""
    return " ".join(text.split())


def test_a_program_is_shown_once_at_its_first_call(explain):
    code, out, err = explain(STEP)
    assert (code, err) == (0, "") and out.count("program ") == 1
    text = words(out)
    assert "program 1: total defined at train.py:8 (total), called at train.py:13 (<module>) on data=4;" in text
    assert "1 equation, 1 collective, predicted" in text
    assert "collective axes bytes/device algorithm predicted from why all_reduce sum data 32 one_shot" in text
    assert "train.py:10 (total) costs least; next two_shot: " in text and "× the time" in text


def test_a_program_for_each_signature(explain):
    code, out, _ = explain(STEP + "total(np.ones((4, 2)))\ntotal(np.ones((8, 2), np.float32))\n")
    heads = [line for line in out.splitlines() if line.startswith("program")]
    assert code == 0 and heads == [f"program {i}: total" for i in (1, 2, 3)]


def test_programs_stand_between_what_the_script_prints(explain):
    code, out, _ = explain(
        HEAD
        + """
double = fc.jit(lambda x: 2 * x, mesh=mesh)
print("before", __name__, sys.argv, __file__)
double(1.0)
print("after")
""",
        "a",
        "--json",
        "-x",
    )
    assert code == 0 and words(out) == (
        "before __main__ ['train.py', 'a', '--json', '-x'] train.py program 1: <lambda> defined at train.py:8 (<lambda>), "
        "called at train.py:10 (<module>) on data=4; 1 equation, 0 collectives after"
    )


def test_the_reasons_for_algorithms(explain):
    code, out, _ = explain(
        HEAD
        + """
@fc.jit(mesh=mesh, in_specs=P("data"), out_specs=P("data"))
def move(x):
    x = fc.all_gather(x, "data", algorithm="ring")[:2]
    fc.barrier("data")
    return fc.permute(x, "data", pairs=[(0, 1)])
move(np.ones((8, 2)))
"""
    )
    text = words(out)
    assert code == 0 and "the program names it; else direct (ring: shared memory: forwards what can be read" in text
    assert "permute data 32 direct" in text and "the only one" in text and "barrier" in text


def test_collectives_that_redistribute_an_argument_are_a_program(explain):
    code, out, _ = explain(
        HEAD
        + """
whole = fc.jit(lambda x: x + 1, mesh=mesh, in_specs=P(), out_specs=P())
whole(fc.device_put(np.ones(8), mesh, P("data")))
"""
    )
    assert code == 0 and "program 2: redistribute" in out and "train.py:9 (x of <lambda>: P('data') -> P())" in out


def test_gradients_and_data_parallel(explain):
    code, out, _ = explain(
        HEAD
        + """
def loss_fn(params, x):
    return np.mean((x @ params) ** 2)

dp = fc.data_parallel(loss_fn, axis="data")
@fc.jit(mesh=mesh, in_specs=(P(), P("data")), out_specs=(P(), P()))
def step(params, x):
    loss, gradient = fc.value_and_grad(dp)(params, x)
    return params - gradient, loss
step(np.ones((16, 4)), np.ones((8, 16)))
"""
    )
    text = words(out)
    assert code == 0 and "program 1: step defined at train.py:12 (step)" in text
    assert "all_reduce mean data 8" in text and "all_reduce sum data 512" in text


def test_programs_of_the_library_have_the_line_that_calls_them(explain):
    code, out, _ = explain(
        HEAD
        + """
model = fc.DataParallel({"w": np.ones((16, 4))}, lambda p, x: np.mean((x @ p["w"]) ** 2), fc.optim.sgd(0.1), mesh=mesh)
model.step(np.ones((8, 16)))
"""
    )
    text = words(out)
    assert code == 0 and "step called at train.py:9 (<module>) on data=4" in text and "all_reduce sum data 512" in text
    assert "steps.py" not in text and "data_parallel_model.py" not in text


def test_json_is_one_object_and_the_script_prints_elsewhere(explain):
    script = STEP + "import os, subprocess\nprint('hello')\nsubprocess.run(['echo', 'child'])\nos.write(1, b'raw\\n')\n"
    code, out, err = explain(script, options=("--json",))
    found = json.loads(out)
    assert code == 0 and set(err.split()) == {"hello", "child", "raw"}
    assert (found["script"], found["exit_code"], found["error"]) == ("train.py", 0, None)
    (program,) = found["programs"]
    assert (program["name"], program["defined"], program["mesh"]) == ("total", "train.py:8 (total)", {"data": 4})
    (row,) = program["collectives"]
    assert (row["collective"], row["algorithm"], row["bytes"], row["devices"]) == ("all_reduce sum", "one_shot", 32, 4)
    assert row["predicted_seconds"] == program["predicted_seconds"] > 0 and row["source"] == "train.py:10 (total)"


def test_lines_that_widen_floats(explain):
    script = HEAD + "fc.jit(lambda x, y: x / np.sqrt(32) + y)(np.ones(3, np.float32), np.ones(3, np.float16))\n"
    lines = [
        "float32 becomes float64 at train.py:7 (<lambda>), by np.float64 5.65685",
        "float16 becomes float64 at train.py:7 (<lambda>), by float64[3], made at train.py:7 (<lambda>)",
    ]
    code, out, _ = explain(script)
    assert code == 0 and "\n".join(f"  {line}" for line in lines) in out
    assert json.loads(explain(script, options=("--json",))[1])["programs"][0]["widenings"] == lines


def test_measured_times_have_a_column_where_there_are_any(explain):
    with in_use(profile(parameters(4), measured=[times(ranks=4, algorithm=a) for a in ("two_shot", "one_shot")])):
        code, out, _ = explain(STEP.replace("np.ones((8, 2))", "np.ones((512, 8), np.float32)"))
        assert code == 0 and "algorithm predicted measured from why all_reduce sum data 4,096" in words(out) and " 2 µs " in out


# ---------------------------------------------------------------- how scripts end


def test_a_script_that_raises(explain):
    code, out, err = explain(STEP + "def fail():\n    raise KeyError('lost')\nfail()\n")
    assert code == 1 and out.startswith("program 1: total")
    lines = err.splitlines()
    assert lines[0] == "Traceback (most recent call last):" and "train.py" in lines[1] and lines[-1] == "KeyError: 'lost'"
    assert "runpy" not in err and "explain_command" not in err
    found = json.loads(explain(None, options=("--json",))[1])
    assert len(found["programs"]) == 1 and (found["exit_code"], found["error"]) == (1, "KeyError: 'lost'")


def test_an_error_of_ours_points_to_the_script(explain):
    code, out, err = explain(HEAD + "fc.jit(lambda x: fc.all_reduce(x, 'dat'), mesh=mesh, in_specs=P('data'))(np.ones(8))\n")
    assert code == 1 and "compiled no program" in out and "train.py:7 in <lambda>" in err.replace('"', "")


def test_a_script_that_is_not_python(explain):
    code, _, err = explain("def (:\n")
    assert code == 1 and "SyntaxError" in err and 'train.py", line 1' in err and "explain_command" not in err


@pytest.mark.parametrize(
    ("statement", "code", "err"),
    [
        ("sys.exit(7)", 7, ""),
        ("sys.exit()", 0, ""),
        ("sys.exit('gone')", 1, "gone\n"),
        ("raise SystemExit(-1)", 255, ""),
        ("raise KeyboardInterrupt", 130, ""),
    ],
)
def test_exit_codes_pass(explain, statement, code, err):
    assert explain(f"import sys\n{statement}\n")[::2] == (code, err)


def test_a_script_without_programs_says_so(explain):
    code, out, _ = explain("print('nothing')")
    assert code == 0 and out.startswith("nothing\ntrain.py compiled no program in this process. Programs are compiled at the")
    assert json.loads(explain(None, options=("--json",))[1])["programs"] == []


def test_a_script_that_joins_a_job_is_alone(explain):
    code, out, _ = explain(HEAD + "fc.init()\nprint(fc.world_size(), fc.rank(), mesh.size)\n")
    assert code == 0 and out.startswith("1 0 4")


def test_imports_from_the_script_s_folder(explain, tmp_path):
    (tmp_path / "beside_the_script.py").write_text("value = 5")
    try:
        assert explain("from beside_the_script import value\nprint(value)")[1].startswith("5\n")
    finally:
        sys.modules.pop("beside_the_script", None)


@pytest.mark.parametrize(
    ("line", "what"),
    [
        (["no_such.py"], "there is no file 'no_such.py' in /"),
        ([], "the following arguments are required: script"),
        (["."], "there is no file '.' in /"),
        (["--jso", "x.py"], "there is no file 'x.py'|ambiguous|unrecognized"),
        (["--frobnicate", "train.py"], "unrecognized arguments: --frobnicate|required: script"),
    ],
)
def test_what_explain_refuses(capfd, tmp_path, monkeypatch, line, what):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as exit:
        main(["explain", *line])
    err = capfd.readouterr().err
    assert exit.value.code == 2 and err.startswith("usage: funccoll explain [--json] script.py [arguments ...]")
    assert re.search(what, err), err


@pytest.mark.parametrize(
    ("variables", "what"),
    [
        ({"FUNCCOLL_RANK": "0", "FUNCCOLL_WORLD_SIZE": "4"}, "this is one of 4 processes of a job, .* without a launcher"),
        ({"RANK": "1", "WORLD_SIZE": "2"}, "this is one of 2 processes"),
        ({"RANK": "x", "WORLD_SIZE": "2"}, "which is not a job"),
    ],
)
def test_a_launcher_is_refused(explain, monkeypatch, variables, what):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    code, out, err = explain(STEP)
    assert (code, out) == (2, "") and re.search(what, words(err)), err


def test_the_command_in_a_process_of_its_own(tmp_path):
    (tmp_path / "train.py").write_text(STEP + "sys.exit(3)")
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "funccoll", "explain", str(tmp_path / "train.py")],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (done.returncode, done.stderr) == (3, "") and done.stdout.startswith(
        "program 1: total\n  defined at train.py:8 (total)"
    )


def test_what_runs_while_a_collective_is_in_flight(explain):
    script = HEAD + "def fn(x):\n    h = fc.all_reduce_start(x, 'data')\n    y = np.tanh(x) * 2\n    return y + fc.done(h)\n"
    script += "fc.jit(fn, mesh=mesh, in_specs=P('data'), out_specs=P('data'), overlap=True)(np.ones(4))\n"
    code, out, _ = explain(script)
    assert code == 0
    assert re.search(
        r"all_reduce at train.py:8 \(fn\), predicted .*s, is in flight while 2 operations run \(67% of the arithmetic\), until "
        r"train.py:10 \(fn\)",
        out,
    )
