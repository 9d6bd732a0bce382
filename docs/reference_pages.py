"""The pages of the reference: functions by topic, environment variables, errors, and the command line, from the code."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import io
import os
import re
from pathlib import Path
from typing import Any

import funccoll
from funccoll import config, errors

TOPICS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    # page: (title, what it has, names of funccoll; a name with a dot is a module, of which all public names follow)
    "arrays": (
        "Meshes and arrays", "Devices with named axes, and arrays that are placed on them.",
        ("make_mesh", "abstract_mesh", "Mesh", "P", "Sharding", "Array", "ArrayType", "bfloat16", "asarray", "device_put",
         "from_local", "spec_like", "redistribute", "process_allgather"),
    ),
    "collectives": (
        "Collectives", "Pure functions over mesh axes, called in a function that `fc.jit` traces.",
        ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "permute", "broadcast", "reduce", "gather", "scatter",
         "inclusive_scan", "exclusive_scan", "arg_reduce", "barrier", "axis_index", "axis_size", "own_slice", "pvary",
         ".ragged"),
    ),
    "started_collectives": (
        "Started collectives", "Collectives that travel while the program computes; see the guide of overlap.",
        ("all_reduce_start", "all_gather_start", "reduce_scatter_start", "all_to_all_start", "permute_start",
         "broadcast_start", "reduce_start", "gather_start", "scatter_start", "inclusive_scan_start", "exclusive_scan_start",
         "arg_reduce_start", "done", "Future"),
    ),
    "transformations": (
        "Transformations", "Functions of functions: compiled, differentiated, batched.",
        ("jit", "grad", "value_and_grad", "vjp", "jvp", "linearize", "jacfwd", "jacrev", "hessian", "vmap", "checkpoint",
         "checkpoint_name", "custom_vjp", "grad_hook", "stop_gradient", "custom_primitive",
         "pure_callback", "eval_shape", "start", "Work", "clear_caches", ".checkpoint_policies"),
    ),
    "control_flow": (
        "Loops and branches", "Control flow whose length or way depends on values.",
        ("scan", "fori_loop", "while_loop", "cond", "switch"),
    ),
    "numpy": (
        "Beside NumPy", "What NumPy lacks in a traced function; NumPy's own functions are called as they are.",
        ("at", "full", "top_k", "unique", "supported_functions", ".linalg", ".special", ".random"),
    ),
    "data_parallel": (
        "Data parallelism", "Training on several devices, with gradients reduced in buckets.",
        ("data_parallel", "DataParallel", "uneven_batches", ".comm_hooks"),
    ),
    "models": ("Model functions", "Layers and losses, and optimizers.", (".nn", ".optim")),
    "jobs": (
        "Processes", "Jobs of processes: starting, joining and leaving, and groups of them.",
        ("launch", "init", "finalize", "rank", "world_size", "group", "ProcessGroup"),
    ),
    "schedules": ("Schedules", "Communication schedules: built, proved, costed, simulated.", (".schedules", ".draw")),
    "looking": (
        "Debugging and profiling", "Values and times, seen.", ("profile", "named_scope", ".debug", ".profiling"),
    ),
    "torch": ("PyTorch", "Modules and tensors of torch: `import funccoll.torch`.", (".torch",)),
    "trees": ("Pytrees", "Nested containers of arrays.", (".tree",)),
}  # fmt: skip
LEFT_OUT = {
    "AUTO", "errors", "FunccollError", "PlannedError", "PlannedNameError", "DTypePromotionWarning", "GlobalRandomWarning",
    "TracedRankWarning", "__version__",
}  # fmt: skip
"""Public names without an entry of their own: those of pages below."""
COMMANDS = ("run", "doctor", "tune", "schedule", "explain", "profile")


def write(folder: Path) -> None:
    """Write all pages that differ from what they should have, and remove those that are left of an earlier build."""
    folder.mkdir(exist_ok=True)
    pages = {name: _topic(*topic) for name, topic in TOPICS.items()}
    pages |= {"environment": _environment(), "errors": _errors(), "command_line": _command_line()}
    pages["index"] = _index(pages)
    for name, text in pages.items():
        path = folder / f"{name}.md"
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
    for path in folder.glob("*.md"):
        if path.stem not in pages:
            path.unlink()


def described() -> set[str]:
    """The public names that the pages describe."""
    return {name.lstrip(".") for _, _, names in TOPICS.values() for name in names} | LEFT_OUT


def _directive(kind: str, name: str) -> str:
    return f"```{{eval-rst}}\n.. {kind}:: {name}\n```\n"


def _entry(module: str, name: str) -> str:
    thing = _member(module, name)
    kind = "autoclass" if inspect.isclass(thing) else "autofunction" if callable(thing) else "autodata"
    return _directive(kind, f"{module}.{name}")


def _member(module: str, name: str) -> Any:
    return getattr(importlib.import_module("funccoll.torch") if module == "funccoll.torch" else _public(module), name)


def _public(module: str) -> Any:
    """A module of users, which may be defined elsewhere: `funccoll.comm_hooks`."""
    return getattr(funccoll, module.partition(".")[2]) if "." in module else funccoll


def _summary(thing: Any) -> str:
    """The first sentence of a docstring, for a cell of a table."""
    first = " ".join((inspect.getdoc(thing) or "").partition("\n\n")[0].split())
    return re.split(r"(?<=[.!?]) (?=[A-Z])", first)[0].removesuffix(":").replace("|", "\\|")


def _table(entries: list[tuple[str, str]]) -> str:
    """The names of a page with what they are, linked to their entries."""
    own = lambda thing: inspect.isclass(thing) or inspect.isfunction(thing) or inspect.isbuiltin(thing)
    things = [(f"{module}.{name}", _member(module, name)) for module, name in entries]
    rows = [f"| {{py:obj}}`{full} <{full}>` | {_summary(thing) if own(thing) else ''} |" for full, thing in things]
    return "\n".join(["| name | |", "|---|---|", *rows]).replace("`funccoll.", "`fc.") + "\n"


def _topic(title: str, about: str, names: tuple[str, ...]) -> str:
    own = [("funccoll", name) for name in names if not name.startswith(".")]
    parts = [f"# {title}\n\n{about}\n"]
    if own:
        parts += [_table(own), *(_entry(*entry) for entry in own)]
    for name in (name for name in names if name.startswith(".")):
        found = importlib.import_module("funccoll.torch") if name == ".torch" else _public(f"funccoll{name}")
        head = (inspect.getdoc(found) or "").partition("\n\n")[0]
        members = [(f"funccoll{name}", each) for each in found.__all__ if not inspect.ismodule(getattr(found, each))]
        parts += [f"## `{'funccoll' if name == '.torch' else 'fc'}{name}`\n\n{head}\n", _table(members)]
        parts += [_entry(*entry) for entry in members]
    return "\n".join(parts)


def _environment() -> str:
    rows = [(str(v), v.default or "not set", v.meaning) for v in config.VARIABLES.values() if not v.own]
    table = "\n".join(f"| `{name}` | {default} | {meaning} |" for name, default, meaning in sorted(rows))
    own = ", ".join(f"`{v}`" for v in sorted(map(str, (v for v in config.VARIABLES.values() if v.own))))
    return (
        "# Environment variables\n\n"
        "`funccoll doctor` lists the ones that are set, and warns about names which look like one and are not.\n\n"
        f"| variable | default | meaning |\n|---|---|---|\n{table}\n\n"
        f"Launchers and ranks set these for each other: {own}.\n"
    )


def _errors() -> str:
    found = [(name, getattr(errors, name)) for name in errors.__all__]
    named = [(name, thing) for name, thing in found if inspect.isclass(thing) and issubclass(thing, (Exception, Warning))]
    rows = [f"| {{py:exc}}`{name} <funccoll.errors.{name}>` | {_summary(thing)} |" for name, thing in named]
    return "\n".join(
        [
            "# Errors\n",
            "Each message names the line of your code and the remedy. All exceptions are in `fc.errors`. They derive from",
            "`fc.FunccollError`, and from the built-in exception that fits (`ValueError`, `TypeError`, ...).\n",
            "| exception | cause |",
            "|---|---|",
            *rows,
            "",
            # With (), so that Sphinx does not look for a signature, which built-in exceptions lack.
            *(_directive("autoexception", f"funccoll.errors.{name}()") for name, _ in named),
        ]
    )


def _command_line() -> str:
    parts = ["# Command line\n\n`funccoll COMMAND --help` prints these pages.\n"]
    for command in COMMANDS:
        main = importlib.import_module(f"funccoll.tools.commands.{command}_command").main
        text = io.StringIO()
        with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):
            os.environ["NO_COLOR"] = "1"
            main(["--help"])
        parts.append(f"## `funccoll {command}`\n\n```text\n{text.getvalue().rstrip()}\n```\n")
    return "\n".join(parts)


def _index(pages: dict[str, str]) -> str:
    listed = "\n".join(pages)
    rows = []
    for page, (title, _, names) in TOPICS.items():
        has = ", ".join("`funccoll.torch`" if name == ".torch" else f"`fc.{name.lstrip('.')}`" for name in names)
        rows.append(f"| [{title}]({page}.md) | {has} |")
    rows += [
        "| [Environment variables](environment.md) | FUNCCOLL_TIMEOUT, FUNCCOLL_DEBUG, ... |",
        "| [Errors](errors.md) | each exception with its cause and its remedy |",
        "| [Command line](command_line.md) | " + ", ".join(f"`funccoll {name}`" for name in COMMANDS) + " |",
    ]
    return "\n".join(
        [
            "# Reference\n",
            "These pages are generated from the code. `help(fc.all_reduce)` prints the same text.\n",
            "| page | has |",
            "|---|---|",
            *rows,
            "",
            "```{toctree}",
            ":hidden:",
            "",
            listed,
            "```",
            "",
        ]
    )
