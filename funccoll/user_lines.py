"""The search for the user's line at which an error, a warning or an operation of a program points."""

from __future__ import annotations

import functools
import os
import sys
import sysconfig
import warnings
import zlib
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

__all__ = [
    "PACKAGE",
    "SCOPE",
    "SOURCE",
    "Source",
    "call_path",
    "current_source",
    "globals_at",
    "is_attributed",
    "is_users",
    "scope_of",
    "traced_source",
    "user_source",
    "warn_at",
]

PACKAGE = os.path.dirname(os.path.abspath(__file__)) + os.sep
"""The folder of this installation."""
# Frames of libraries that call back into funccoll (NumPy's dispatch, optree's maps, functools), or raise for a traced array
# (JAX), are not the user's.
_FOREIGN = tuple(
    f"{os.sep}site-packages{os.sep}{name}{os.sep}" for name in ("numpy", "scipy", "optree", "jaxtyping", "torch", "jax")
)
_STANDARD = sysconfig.get_path("stdlib") + os.sep
_TYPED_IN = ("<stdin>", "<ipython", "<string>")  # Python's names for code without a file
_VERDICTS: dict[str, bool] = {}
_IN_SCOPE = ") in "


@dataclass(frozen=True, slots=True)
class Source:
    """A place in the user's code. It prints as `train.py:12 (loss_fn)`, in a notebook as `In[5]:12 (loss_fn)`.

    In a `named_scope` it prints as `train.py:12 (loss_fn) in attention/scores`.
    """

    file: str
    line: int
    function: str
    scope: str = ""
    role: str = field(default="", compare=False)
    """The operand of an operation there in errors about its values: "a label of fc.nn.cross_entropy"."""

    def __str__(self) -> str:
        scope = f"{_IN_SCOPE}{self.scope}" if self.scope else ""
        return f"{_cell_name(self.file) or os.path.basename(self.file)}:{self.line} ({self.function}){scope[1:]}"

    @property
    def as_note(self) -> str:
        """The last line of an error's text, with the whole path: `  at /home/me/train.py:12 in loss_fn`."""
        return f"  at {_cell_name(self.file) or self.file}:{self.line} in {self.function}"


def _cell_name(file: str) -> str | None:
    """Return a notebook's cell as its margin shows it, `In[5]`.

    It is `cell` in a process that is not its kernel, and None for other files. Jupyter's kernel names a cell's file by its own
    process and a hash of the cell. A reader could not use that.
    """
    if not os.path.basename(os.path.dirname(file)).startswith("ipykernel_"):
        return None
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    found = shell.compile.format_code_name(file) if shell else None  # ("Cell", "In[5]")
    return found[1] if found else "cell"


def is_users(filename: str) -> bool:
    """True for a file of the user: neither funccoll's nor a library's."""
    verdict = _VERDICTS.get(filename)
    if verdict is None:
        inside = filename.startswith(PACKAGE)
        foreign = any(part in filename for part in _FOREIGN)
        standard = filename.startswith(_STANDARD) and "site-packages" not in filename
        generated = filename.startswith("<") and not filename.startswith(_TYPED_IN)
        _VERDICTS[filename] = verdict = not (inside or foreign or standard or generated)
    return verdict


def user_source(depth: int = 0) -> Source | None:
    """Return the innermost frame that is neither funccoll's nor a library's: the line the user wrote.

    depth: frames, from the caller's outward, that are known not to be the user's.
    """
    frame = sys._getframe(1 + depth)
    while frame is not None:
        code = frame.f_code
        # Methods that dataclasses generate have no file either: their module shows that they are funccoll's.
        if is_users(code.co_filename) and not frame.f_globals.get("__name__", "").startswith("funccoll."):
            return _source(code.co_filename, frame.f_lineno, code.co_name)
        frame = frame.f_back
    return None


def call_path() -> int:
    """Return a hash of the user's lines that call this, innermost first: equal in processes that came the same way."""
    frame, found = sys._getframe(1), 0
    while frame is not None:
        if is_users(frame.f_code.co_filename):
            found = zlib.crc32(f"{frame.f_code.co_filename}:{frame.f_lineno}".encode(), found)
        frame = frame.f_back
    return found


_source = functools.lru_cache(maxsize=1024)(Source)  # one object for a line that records many equations


# Set while rules run on the user's behalf, so that their operations and errors point at the user's line.
SOURCE: ContextVar[Source | None] = ContextVar("funccoll_source", default=None)


def is_attributed() -> bool:
    """True while rules run on the user's behalf: what they record points at the operation that they belong to."""
    return SOURCE.get() is not None


def current_source() -> Source | None:
    """Return the user's line to which operations and errors are attributed now."""
    return SOURCE.get() or user_source()


# The names of the scopes around what is traced now, the outermost first.
SCOPE: ContextVar[tuple[str, ...]] = ContextVar("funccoll_scope", default=())


def traced_source() -> Source | None:
    """Return the user's line of an operation that is traced now, with its named scope."""
    found = SOURCE.get()
    if found is not None:
        return found
    found, scope = user_source(), SCOPE.get()
    return _source(found.file, found.line, found.function, "/".join(scope)) if found is not None and scope else found


def scope_of(text: str) -> str:
    """Return the named scope in the text of a Source; empty if there is none."""
    return text.partition(_IN_SCOPE)[2]


def globals_at(line: Source) -> dict[str, Any]:
    """Return the global names of the running function that contains a line; none if it does not run."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename != line.file:
        frame = frame.f_back
    return {} if frame is None else frame.f_globals


def warn_at(line: Source | None, kind: type[Warning], text: str, namespace: dict[str, Any] | None = None) -> None:
    """Warn at a line of the user. Python keeps in `namespace`, the global names there, what it has shown."""
    found = (globals_at(line) if line else {}) if namespace is None else namespace
    warnings.warn_explicit(
        text,
        kind,
        line.file if line else "<unknown>",
        line.line if line else 1,
        found.get("__name__"),
        found.setdefault("__warningregistry__", {}),
    )
