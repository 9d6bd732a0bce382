"""The driver of ranks: `python benchmarks/rank.py MODULE ARGUMENT...` runs a module of this repository as a script.

funccoll is the interpreter's, or PYTHONPATH's, which may be another checkout: of this repository only `benchmarks` and `tests`
can be imported.
"""

from __future__ import annotations

import runpy
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def rank_words(module: str, checkout: Path = ROOT) -> list[str]:
    """Words after an interpreter which begin a rank: a checkout's driver, or the script of one that is older than that."""
    driver = checkout / "benchmarks" / "rank.py"
    return [str(driver), module] if driver.exists() else [str(driver.with_name(f"{module.rpartition('.')[2]}.py"))]


def main() -> None:
    """Run the module that the command line names, as its `__main__`."""
    del sys.path[0]  # this folder, in which nothing is looked for
    for name in ("benchmarks", "tests"):
        spec = spec_from_file_location(name, ROOT / name / "__init__.py", submodule_search_locations=[str(ROOT / name)])
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
