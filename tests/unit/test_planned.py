"""What is documented and not there yet says so in one sentence, and the module stays an ordinary module."""

import copy
import doctest
import importlib.util
import inspect
import pickle
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import funccoll as fc
from funccoll import api
from funccoll.core import keyword_errors, public_names
from funccoll.errors import MeshError, PlannedError, RendezvousError
from tests.support.groups import in_groups
from tests.support.misuse import check_paths

pytestmark = pytest.mark.covers("errors")

PROMISED = ["distributed", "jax"]
SENTENCE = r"^fc\.{} \([^\n]+\) is planned, not in this version; today [^\n]+\.\n  at .*{}:\d+ in .+$"


MPI = {"MPI": "fc itself", "Allreduce": "fc.all_reduce(x, axis)", "Barrier": "fc.barrier(axis)", "get_rank": "fc.rank()"}


@pytest.mark.parametrize(("name", "here"), MPI.items())
def test_names_of_mpi4py_say_what_they_are_here(name, here):
    assert fc._ELSEWHERE[name].startswith(here)


@in_groups(("name", "here"), fc._ELSEWHERE.items())
def test_names_of_jax_and_torch_say_what_they_are_here(name, here):
    with pytest.raises(AttributeError, match=f"no attribute {name!r}; here it is {re.escape(here)}$"):
        getattr(fc, name)
    check_paths(here)


@pytest.mark.parametrize(
    ("name", "here"),
    [
        ("sort", "np.sort"),
        ("float32", "np.float32"),
        ("split", "np.split"),
        ("softmax", "fc.nn.softmax"),
        ("normal", "fc.random.normal"),
        ("adamw", "fc.optim.adamw"),
        ("disable_jit", "fc.debug.disable_jit"),
    ],
)
def test_names_of_numpy_and_of_public_modules_say_where_they_are(name, here):
    with pytest.raises(AttributeError, match=f"^module 'funccoll' has no attribute {name!r}; here it is {here}$"):
        getattr(fc, name)
    with pytest.raises(ImportError, match=f"^cannot import name {name!r} from 'funccoll'; here it is {here}$"):
        exec(f"from funccoll import {name}")
    assert not hasattr(fc, name)


def test_no_entry_repeats_a_name_of_numpy_or_of_a_public_module():
    derived = {name: here for name in fc._ELSEWHERE if (here := public_names.in_numpy_or(api, name))}
    assert derived == {"save": "np.save", "load": "np.load"}  # whose entries say more


@pytest.mark.parametrize(
    ("module", "name", "here"),
    [
        ("nn", "dot_product_attention", "fc.nn.attention("),
        ("nn", "Linear", "x @ weight + bias"),
        ("nn", "Conv2d", "fc.nn.conv("),
        ("nn", "CrossEntropyLoss", "fc.nn.cross_entropy("),
        ("random", "PRNGKey", "fc.random.key(seed)"),
        ("random", "randn", "fc.random.normal(key"),
        ("optim", "Adam", "fc.optim.adam("),
        ("tree", "tree_map", "fc.tree.map"),
        ("tree", "register_pytree_node", "fc.tree.register("),
        ("nn", "functional", "fc.nn itself"),
        ("optim", "clip_grad_norm_", "fc.optim.clip_by_global_norm(max_norm)"),
    ],
)
def test_names_of_other_libraries_in_public_modules(module, name, here):
    found = importlib.import_module(f"funccoll.{module}")
    with pytest.raises(AttributeError, match=f"module 'funccoll.{module}' has no attribute {name!r}; here it is ") as caught:
        getattr(found, name)
    assert here in str(caught.value)
    assert not hasattr(found, name) and not hasattr(found, "no_such_name")
    check_paths(str(caught.value))


@pytest.mark.parametrize(
    ("module", "name", "here"),
    [
        ("funccoll", "psum", "fc.all_reduce(x, axis)"),
        ("funccoll", "PartitionSpec", "fc.P"),
        ("funccoll.nn", "Linear", "x @ w"),
        ("funccoll.optim", "AdamW", "fc.optim.adamw(learning_rate)"),
        ("funccoll.tree", "tree_map", "fc.tree.map"),
        ("funccoll", "numpy", "NumPy: fc.jit traces np's functions"),
    ],
)
def test_imports_of_names_of_other_libraries_say_what_they_are_here(module, name, here):
    for statement in (f"from {module} import {name}", f"def f():\n  from {module} import {name} as x\nf()"):
        with pytest.raises(ImportError, match=f"^cannot import name '{name}' from '{module}'; here it is {re.escape(here)}"):
            exec(statement, {})
    found = importlib.import_module(module)
    assert not hasattr(found, name) and getattr(found, name, None) is None  # an ImportError would go through
    with pytest.raises(AttributeError):
        exec(f"import {module} as m\nm.{name}", {})


def test_imports_of_other_names_are_pythons_own():
    with pytest.raises(ImportError, match=r"^cannot import name 'no_such' from 'funccoll' \(.*__init__.py\)$"):
        exec("from funccoll import no_such", {})
    with pytest.raises(ImportError, match=r"^cannot import name 'no_such' from 'funccoll.optim' \(.*__init__.py\)$"):
        exec("from funccoll.optim import no_such", {})


@pytest.mark.parametrize(
    "module",
    [
        "",
        ".nn",
        ".random",
        ".optim",
        ".tree",
        ".draw",
        ".schedules",
        ".profiling",
        ".linalg",
        ".special",
        ".debug",
    ],
)
def test_dir_lists_public_names_alone(module):
    """Those of funccoll.torch are in tests/torch/test_torch_singular_derivatives.py."""
    package = importlib.import_module(f"funccoll{module}")
    shown = [name for name in dir(package) if not name.startswith("__")]
    assert shown == sorted(n for n in package.__all__ if not n.startswith("__"))
    assert all(hasattr(package, name) for name in shown)


def test_no_module_of_the_implementation_has_the_name_of_a_function_of_jax():
    jax = pytest.importorskip("jax")
    for ours, theirs in ((fc, jax), (fc.nn, jax.nn), (fc.random, jax.random)):
        modules = [m.name for m in pkgutil.iter_modules(ours.__path__)]
        shown = {n for n in modules if callable(getattr(theirs, n, None)) and not callable(getattr(ours, n, None))}
        assert not shown


def test_the_table_is_the_promise():
    assert sorted(fc._PLANNED) == sorted(PROMISED)


@pytest.mark.parametrize("name", PROMISED)
def test_a_planned_name(name):
    with pytest.raises(PlannedError, match=SENTENCE.format(name, re.escape(__file__))) as caught:
        getattr(fc, name)
    assert isinstance(caught.value, (fc.FunccollError, NotImplementedError))
    assert not hasattr(fc, name)
    assert getattr(fc, name, None) is None
    assert name not in dir(fc)
    assert name not in fc.__all__
    # An entry leaves the table when the feature comes.
    assert name not in vars(fc)
    assert importlib.util.find_spec(f"funccoll.{name}") is None


def test_calling_a_planned_function():
    with pytest.raises(PlannedError, match=r"fc\.jax .* is planned"):
        fc.jax(lambda carry, x: (carry, x), 0, [1, 2])


def test_importing_a_planned_name():
    with pytest.raises(ImportError, match=r"^fc\.distributed .* is planned, not in this version; today use the collectives"):
        from funccoll import distributed  # noqa: F401
    with pytest.raises(ModuleNotFoundError, match=r"funccoll\.distributed"):
        importlib.import_module("funccoll.distributed")


def test_several_hosts_need_mpi(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(MeshError, match=r"WORLD_SIZE=2, and nothing that names the run"):
        fc.make_mesh({"data": 2})
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    monkeypatch.setenv("MASTER_PORT", "1")
    with pytest.raises(RendezvousError, match=r"2 processes, 1 of them on this host, needs MPI, and torchrun started this job"):
        fc.make_mesh({"data": 2})


@pytest.mark.parametrize("name", ["lauch", "__wrapped__", "__path_", "_private", "__dataclass_fields__"])
def test_unknown_names_are_ordinary_attribute_errors(name):
    with pytest.raises(AttributeError, match=f"^module 'funccoll' has no attribute '{name}'$") as caught:
        getattr(fc, name)
    assert not isinstance(caught.value, PlannedError)


@pytest.mark.parametrize(
    "ask",
    [
        lambda: fc.AdamW,
        lambda: fc.nn.Linear,
        lambda: fc.psum,
        lambda: getattr(fc, next(iter(fc._PLANNED), "no_name")),
        lambda: exec("from funccoll import psum"),
    ],
)
def test_names_that_are_not_there_show_no_frames_of_ours(ask):
    with pytest.raises((AttributeError, ImportError)) as caught:
        ask()
    assert {entry.path for entry in caught.traceback} <= {Path(__file__), "<string>"}


def test_public_names_exist_and_are_listed():
    assert len(set(fc.__all__)) == len(fc.__all__)
    for name in fc.__all__:
        assert getattr(fc, name) is not None
    own = {n for n, v in vars(fc).items() if not n.startswith("_") and not inspect.ismodule(v)}
    assert own - set(fc.__all__) <= {"TYPE_CHECKING", "Any"}
    namespace: dict = {}
    exec("from funccoll import *", namespace)
    assert set(fc.__all__) <= set(namespace)


def test_supported_functions_are_numpys():
    names = fc.supported_functions()
    assert names == sorted(set(names)) and {"np.add", "np.where", "np.linalg.norm"} <= set(names)
    for name in names:
        found = np
        for part in name.split(".")[1:]:
            found = getattr(found, part)
        assert callable(found)


def test_tools_that_look_at_modules_work():
    assert dict(inspect.getmembers(fc))["jit"] is fc.jit
    assert inspect.getdoc(fc)
    assert inspect.unwrap(fc) is fc
    assert doctest.DocTestFinder().find(fc, "funccoll") is not None
    assert pickle.loads(pickle.dumps(fc.all_reduce)) is fc.all_reduce
    assert copy.deepcopy(fc.P("data")) == fc.P("data")
    assert repr(fc).startswith("<module 'funccoll'")


def test_submodules_import_in_any_order():
    names = ("errors", "collectives.functions", "compiler.passes.combine_collectives", "nn")
    for name in (f"funccoll.{name}" for name in names):
        done = subprocess.run([sys.executable, "-W", "error", "-c", f"import {name}"], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("call", "here"),
    [
        (lambda x: fc.all_gather(x, "data", tiled=True), "'tiled'; here it is always True, along dim: drop it; tiled"),
        (lambda x: fc.reduce_scatter(x, "data", tiled=True), "'tiled'; here it is always True: dim keeps its place"),
        (
            lambda x: fc.all_to_all(x, "data", split_dim=0, concat_dim=0, tiled=True),
            "'tiled'; here it is always True: each device's parts are concatenated along concat_dim; drop it",
        ),
        (lambda x: fc.permute(x, "data", perm=[(0, 1)]), "'perm'; here it is pairs=[(source, destination), ...]"),
        (lambda x: fc.all_reduce(x, axis_name="data"), "'axis_name'; here it is axis, the name of a mesh axis"),
        (lambda x: fc.all_reduce(x, "data", keepdims=True), "'keepdims'. It has algorithm, axis, groups, op, x"),
    ],
)
def test_keywords_of_jax_and_torch_say_what_they_are_here(call, here, line):
    with pytest.raises(TypeError, match=rf"^fc\.\w+ has no argument {re.escape(here)}"):
        fc.jit(call, mesh=line, in_specs=fc.P("data"))(np.ones(4))


ONE, LABEL = np.ones((1, 2)), np.zeros(1, int)


def model(**options):
    return fc.DataParallel({"w": ONE}, lambda p, x: np.sum(p["w"] * x), fc.optim.sgd(0.1), **options)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: fc.optim.adamw(lr=1e-3), "fc.optim.adamw has no argument 'lr'; here it is learning_rate."),
        (lambda: fc.optim.adam(1e-3, betas=(0.9, 0.99)), "fc.optim.adam has no argument 'betas'; here it is b1 and b2."),
        (lambda: fc.jit(abs, in_shardings=fc.P()), "fc.jit has no argument 'in_shardings'; here it is in_specs, of fc.P(...)."),
        (lambda: fc.jit(abs, in_spec=fc.P()), "fc.jit has no argument 'in_spec'; here it is in_specs."),
        (lambda: fc.jit(lambda x: fc.nn.softmax(x, dim=-1))(ONE), "fc.nn.softmax has no argument 'dim'; here it is axis."),
        (lambda: fc.nn.softmax(ONE, stable=True), "fc.nn.softmax has no argument 'stable'. It has axis, x."),
        (
            lambda: fc.nn.cross_entropy(ONE, LABEL, reduction="mean"),
            "here it is the mean of what it returns: np.mean(fc.nn.cross_",
        ),
        (
            lambda: fc.make_mesh((2, 2), ("a", "b")),
            'too many positional arguments. Write fc.make_mesh({"data": 4, "model": 2}).',
        ),
        (lambda: fc.make_mesh(a=2), 'fc.make_mesh has no argument \'a\'. Write fc.make_mesh({"data": 4, "model": 2}).'),
        (
            lambda: model(lr=0.1),
            "fc.DataParallel has no argument 'lr'; here it is the optimizer's: fc.optim.adam(learning_rate).",
        ),
        (lambda: model(bucket_cap=1), "fc.DataParallel has no argument 'bucket_cap'; here it is bucket_cap_mb."),
    ],
)
def test_keywords_of_other_functions(call, words):
    with pytest.raises(TypeError) as caught:
        call()
    assert isinstance(caught.value, fc.FunccollError) and words in str(caught.value)
    assert f"\n  at {__file__}:" in str(caught.value)
    trace = caught.value.__traceback__
    while trace is not None:
        assert trace.tb_frame.f_code.co_filename == __file__  # no frame of funccoll
        trace = trace.tb_next


def test_every_word_of_other_libraries_is_explained_somewhere():
    functions = [fc.jit, fc.DataParallel, fc.data_parallel, fc.all_gather, fc.all_to_all, fc.permute, fc.broadcast]
    functions += [getattr(module, name) for module in (fc.nn, fc.optim) for name in module.__all__]
    known = {name for f in functions if callable(f) for name in inspect.signature(f).parameters}
    for word, texts in keyword_errors._WORDS.items():
        assert set(texts) <= known and word not in texts
        for text in texts.values():
            check_paths(text)


def test_arguments_that_are_missing_and_type_errors_inside_stay_pythons():
    with pytest.raises(TypeError, match=r"adamw\(\) missing 1 required positional argument: 'learning_rate'"):
        fc.optim.adamw()
    with pytest.raises(TypeError, match="bad operand"):
        fc.jit(lambda x: fc.nn.softmax(-"a"))(ONE)
