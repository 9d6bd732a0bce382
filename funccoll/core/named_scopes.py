"""Named scopes: names for parts of a traced function, which texts, drawings and profiles show."""

from __future__ import annotations

from contextlib import ContextDecorator

from ..errors import SCOPE, TraceError

__all__ = ["named_scope", "outside_scopes"]


class named_scope(ContextDecorator):
    """Name a part of a traced function, in texts, tables, drawings and profiles of the program.

    It is a context manager and a decorator. Nested scopes are joined: "block0/attention". The gradient of an operation has the
    operation's scope. A scope names operations while they are traced. Around the call of a jitted function, or in a function
    that is not traced, it does nothing. Names change neither a program's fingerprint nor its results, so ranks may use
    different names.

    Args:
        name: A string of one line, not empty.

    Raises:
        TraceError: If the name is not such a string.

    Example:
        >>> @fc.jit
        ... def layer(x):
        ...     with fc.named_scope("activation"):
        ...         return np.tanh(x)
        >>> print(layer.trace(np.ones(2)))
        { mesh() lambda a:f64[2] . let
            b:f64[2] = tanh a ... in activation
          in (b,) }

    References:
        `jax.named_scope`.
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
    """Context manager: nothing traced inside depends on the named scopes around it."""

    __slots__ = ("token",)

    def __enter__(self) -> None:
        self.token = SCOPE.set(())

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        SCOPE.reset(self.token)
