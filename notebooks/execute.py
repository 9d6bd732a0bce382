"""Executes the notebooks of this folder in place, from top to bottom, each in a kernel of its own: `make notebooks-run`.

    python notebooks/execute.py          # all of them
    python notebooks/execute.py 01 03    # those whose names begin so

A notebook is rewritten when all its cells have run and its outputs are fit to be committed: no error, nothing that belongs to
one machine or one moment (times of execution, paths), nothing that a page would have to load, below 1 MB.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import sys
import tempfile
from pathlib import Path

import nbformat
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbformat import NotebookNode

FOLDER = Path(__file__).resolve().parent
NOTEBOOKS = sorted(FOLDER.glob("[0-9][0-9]_*.ipynb"))
MOST_BYTES = 1_000_000
MEASURED = "measured"
"""Tag of cells whose outputs are another time different: what they print was measured, or tells which process it is."""

ENVIRONMENT = {
    "FUNCCOLL_MACHINE_PROFILE": "none",
    "FUNCCOLL_THEME": "light",
    "MPLBACKEND": "module://matplotlib_inline.backend_inline",
}
"""Of every kernel, whatever the user's is: costs are those of presets, and figures are light and shown."""

# A folder of this machine, an object's address, and what a page would load; a host's name is as much as a path.
FORBIDDEN = {
    "a path of this machine": r"(?<![\w.])/(?:home|root|tmp|usr|opt|work|Users|var|mnt)/[\w.]",
    "an object's address": r"\bat 0x[0-9a-f]{6,}",
    "something that a page would load": r"(?i)<(?:script|link|iframe|object|embed)\b|https?://[^\s\"'<>]*\.js\b|\bsrc=[\\\"']+https?:",
}
_ALLOWED = re.compile(r"http://www\.w3\.org/\S+|http://purl\.org/\S+|https://matplotlib\.org/?|<!DOCTYPE[^>]*>")


def execute(notebook: NotebookNode, *, timeout: float = 300) -> NotebookNode:
    """Run a copy of the notebook in a new kernel, and return it with its outputs. The kernel is ended in any case.

    It works in a copy of this folder's modules, which is removed with all that the notebook writes there. `timeout` is in
    seconds, for one cell.
    Raises nbclient's CellExecutionError, CellTimeoutError and DeadKernelError.
    """
    executed = nbformat.reads(nbformat.writes(notebook), as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        for module in FOLDER.glob("*.py"):
            shutil.copy(module, folder)
        # Sockets in the folder: no port of this machine is opened.
        manager = AsyncKernelManager(kernel_name="python3", transport="ipc", ip=os.path.join(folder, "kernel"))
        client = NotebookClient(
            executed,
            km=manager,
            timeout=timeout,
            resources={"metadata": {"path": folder}},
            record_timing=False,
            coalesce_streams=True,
            store_widget_state=False,
        )
        client.execute(cleanup_kc=True, env={**os.environ, **ENVIRONMENT})
    return tidied(executed)


def tidied(notebook: NotebookNode) -> NotebookNode:
    """The notebook without what differs between machines, with a digest of the code that its outputs come from."""
    notebook.metadata = NotebookNode(
        kernelspec=NotebookNode(display_name="Python 3", language="python", name="python3"),
        language_info=NotebookNode(name="python"),
        funccoll=NotebookNode(executed=digest(notebook)),
    )
    for number, cell in enumerate(notebook.cells, 1):
        cell.id = f"cell-{number:02d}"
        tags = cell.metadata.get("tags", [])
        cell.metadata = NotebookNode(tags=tags) if tags else NotebookNode()
        for output in cell.get("outputs", []):
            output.get("metadata", {}).clear()
    return notebook


def code_cells(notebook: NotebookNode) -> list[NotebookNode]:
    """The cells of code, in order."""
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def digest(notebook: NotebookNode) -> str:
    """A sha256 of the cells of code, in order."""
    found = hashlib.sha256()
    for cell in code_cells(notebook):
        found.update(cell.source.encode() + b"\0")
    return found.hexdigest()


def texts(cell: NotebookNode) -> list[str]:
    """The outputs of a cell as text: what it printed, and the text form of what it showed."""
    return [o.text if o.output_type == "stream" else o.get("data", {}).get("text/plain", "") for o in cell.outputs]


def faults(notebook: NotebookNode) -> list[str]:
    """What is wrong with an executed notebook, in words; an empty list when it can be committed."""
    found = []
    size = len(nbformat.writes(notebook).encode())
    if size > MOST_BYTES:
        found.append(f"it has {size:,} bytes, and may have {MOST_BYTES:,}: draw less, or smaller")
    counts = [cell.execution_count for cell in code_cells(notebook)]
    if counts != list(range(1, len(counts) + 1)):
        found.append(f"its cells were not run once from top to bottom: their counts are {counts}")
    if notebook.metadata.get("funccoll", {}).get("executed") != digest(notebook):
        found.append("its code was changed after it was run")
    for number, cell in enumerate(code_cells(notebook), 1):
        for output in cell.outputs:
            if output.output_type == "error" or output.get("name") == "stderr":
                found.append(f"cell {number} wrote an error: {output.get('evalue') or output.get('text')}")
        for text in _strings([o.get("data", o.get("text", "")) for o in cell.outputs]):
            for what, pattern in FORBIDDEN.items():
                if match := re.search(pattern, _ALLOWED.sub("", text)):
                    found.append(f"an output of cell {number} has {what}: {match[0]}")
    return found


def _strings(value: object) -> list[str]:
    """All texts in a tree of dicts and lists, but for those of pictures."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        return [text for key, each in value.items() if key != "image/png" for text in _strings(each)]
    return [text for each in value for text in _strings(each)] if isinstance(value, list) else []


def rewrite(path: Path) -> None:
    """Execute a notebook and replace its file; raises SystemExit, and leaves the file as it was, when it has faults."""
    notebook = execute(nbformat.read(path, as_version=4))
    if found := faults(notebook):
        raise SystemExit(f"{path.name} is left as it was:\n  " + "\n  ".join(found))
    new = path.with_suffix(".new")
    try:
        new.write_text(nbformat.writes(notebook) + "\n")
        os.replace(new, path)
    finally:
        new.unlink(missing_ok=True)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description="Execute the notebooks in place.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="how a notebook's name begins (default: all notebooks)")
    names = parser.parse_args().names
    unknown = [name for name in names if not any(path.name.startswith(name) for path in NOTEBOOKS)]
    if unknown:
        parser.error(f"no notebook's name begins with {unknown[0]!r}; there are: {', '.join(p.stem for p in NOTEBOOKS)}")
    for path in NOTEBOOKS:
        if not names or any(path.name.startswith(name) for name in names):
            print(f"{path.name} ...", end=" ", flush=True)
            rewrite(path)
            print(f"{path.stat().st_size:,} bytes")


if __name__ == "__main__":
    sys.exit(main())
