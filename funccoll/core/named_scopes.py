"""Named scopes: names for parts of a function that is traced, which its texts, drawings and profiles show."""

from __future__ import annotations

from contextlib import ContextDecorator

from ..errors import SCOPE, TraceError

__all__ = ["named_scope", "outside_scopes"]


class named_scope(ContextDecorator):
    """Name what is traced in a block, or in a function, in texts, tables, drawings and profiles of the program.

        with fc.named_scope("attention"):
            scores = softmax(q @ k.T)          # in a program's text: model.py:12 (layer) in attention

        @fc.named_scope("mlp")
        def mlp(params, x): ...

    Scopes inside each other are joined: "block0/attention". The gradient of an operation has the operation's scope. A scope
    counts where operations are traced: around the call of a jitted function, or in one that is not traced, it does nothing.
    Names change neither a program's fingerprint nor what it computes, so that ranks may name alike or not.

    Source: `jax.named_scope`. Raises TraceError for a name that is not a text of one line, or is empty.
    """

    def __init__(self, name: str):
        if not isinstance(name, str) or not name.strip() or len(name.splitlines()) > 1:
            raise TraceError(f'named_scope takes a name in one line, such as "attention", not {name!r:.60}.')
        self.name = name

    def __enter__(self) -> named_scope:
        SCOPE.set((*SCOPE.get(), self.name))
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        SCOPE.set(SCOPE.get()[:-1])


class outside_scopes:
    """Context manager: what is traced inside does not depend on the named scopes around it."""

    __slots__ = ("token",)

    def __enter__(self) -> None:
        self.token = SCOPE.set(())

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        SCOPE.reset(self.token)
