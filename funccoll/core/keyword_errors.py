"""Explanations of arguments that a public function does not have: keywords of other libraries, and misspelt ones."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from ..errors import UnsupportedError, hide_frames

__all__ = ["explains_keywords", "renamed"]

Params = ParamSpec("Params")
R = TypeVar("R")

_WORDS: dict[str, dict[str, str]] = {
    # a keyword of JAX, torch, MPI or optax -> for a function with one of these parameters, its equivalent here. The first
    # parameter that the function has counts.
    "all_gather_dimension": {"dim": "dim"},
    "async_op": {"axis": "a start, such as fc.all_reduce_start(x, axis), whose result fc.done takes"},
    "attn_mask": {"mask": "mask"},
    "axis_index_groups": {
        "groups": "groups",
        "axis": "axis: a mesh with one more axis has groups along each, such as fc.make_mesh({'group': 2, 'each': 4})",
    },
    "axis_name": {"axis": "axis, the name of a mesh axis"},
    "betas": {"b1": "b1 and b2"},
    "comm": {"axis": "axis: the devices along a mesh axis are a communicator"},
    "concat_axis": {"concat_dim": "concat_dim"},
    "device_ids": {"mesh": "mesh=fc.make_mesh({...})"},
    "dim": {"axis": "axis"},
    "dst": {"root": "root"},
    "group": {"axis": "axis: the devices along a mesh axis are a group"},
    "in_shardings": {"in_specs": "in_specs, of fc.P(...)"},
    "lr": {
        "learning_rate": "learning_rate",
        "optimizer": "the optimizer's: fc.optim.adam(learning_rate)",
    },
    "out_shardings": {"out_specs": "out_specs, of fc.P(...)"},
    "p": {"rate": "rate"},
    "params": {"learning_rate": "an argument of fc.optim.apply(optimizer, grads, state, params)"},
    "perm": {"pairs": "pairs=[(source, destination), ...]"},
    "reduction": {"labels": "the mean of what it returns: np.mean(fc.nn.cross_entropy(logits, labels))"},
    "scatter_dimension": {"dim": "dim"},
    "split_axis": {"split_dim": "split_dim"},
    "src": {"root": "root"},
    "tiled": {
        "stack": "always True, along dim: drop it; tiled=False is stack=True",
        "split_dim": "always True: each device's parts are concatenated along concat_dim; drop it",
        "dim": "always True: dim keeps its place and is split, or concatenated; drop it",
    },
}


def explains_keywords(
    name: str = "", *, example: str = "", extends: Callable[..., Any] | None = None
) -> Callable[[Callable[Params, R]], Callable[Params, R]]:
    """Decorate a public function. If a call's arguments do not fit, the error explains them and shows no frame of funccoll.

    A call that fits costs no check of its arguments: the decorator explains Python's own TypeError.

    Args:
        name: The function's name, as users write it. By default `fc.` and its own.
        example: A call, for a function that other libraries call with other kinds of arguments.
        extends: The function to which it passes other keywords. That function's keywords are checked first.
    """

    def decorate(fn: Callable[Params, R]) -> Callable[Params, R]:
        shown = name or f"fc.{fn.__name__}"

        @functools.wraps(fn)
        def explaining(*args: Params.args, **kwargs: Params.kwargs) -> R:
            try:
                try:
                    if extends is not None and (told := _explained(shown, fn, extends, example, args, kwargs)) is not None:
                        raise told
                    return fn(*args, **kwargs)
                except TypeError as error:
                    of_this_call = type(error) is TypeError and error.__traceback__ and error.__traceback__.tb_next is None
                    if not of_this_call or (told := _explained(shown, fn, None, example, args, kwargs)) is None:
                        raise
                    raise told from None
            except BaseException as error:
                error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next  # without this frame
                hide_frames(error)
                raise

        return explaining

    return decorate


def renamed(**names: str) -> Callable[[Callable[Params, R]], Callable[Params, R]]:
    """Decorate a function whose keywords have old names, such as `renamed(each="ranks_per_host")`. These stay aliases."""

    def decorate(fn: Callable[Params, R]) -> Callable[Params, R]:
        @functools.wraps(fn)
        def renaming(*args: Params.args, **kwargs: Params.kwargs) -> R:
            for old in names.keys() & kwargs.keys():
                kwargs[names[old]] = kwargs.pop(old)
            return fn(*args, **kwargs)

        return renaming

    return decorate


def _explained(
    shown: str, fn: Callable[..., Any], extends: Callable[..., Any] | None, example: str, args: Any, kwargs: dict[str, Any]
) -> UnsupportedError | None:
    """Make the error for a keyword that a function lacks, or for a call unlike its example; else return None."""
    write = f" Write {example}." if example else ""
    signatures = [inspect.signature(f) for f in (fn, extends) if f is not None]
    found = [p for s in signatures for p in s.parameters.values() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    known = {p.name for p in found if p.kind != p.POSITIONAL_ONLY and p.name != "self"}
    unknown = sorted(kwargs.keys() - known)
    if not unknown:
        try:
            signatures[0].bind(*args, **kwargs)
        except TypeError as error:
            return UnsupportedError(f"{shown}: {error}.{write}") if example else None
        return None
    word = unknown[0]
    here = next((text for parameter, text in _WORDS.get(word, {}).items() if parameter in known), None)
    if here is None and (close := difflib.get_close_matches(word, known, 1, 0.8)):
        here = close[0]
    rest = f"; here it is {here}." if here else f".{write}" if write else f". It has {', '.join(sorted(known))}."
    return UnsupportedError(f"{shown} has no argument {word!r}{rest}")
