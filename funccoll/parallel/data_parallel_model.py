"""A model that is trained data parallel: parameters, optimizer and buffers, and the compiled step that updates them."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import is_
from typing import Any

import numpy as np
import optree

from ..arrays.array import Array
from ..arrays.array_like import to_numpy
from ..collectives.argument_checks import Axes
from ..compiler.arguments import AUTO
from ..compiler.jit import jit
from ..compiler.placement import device_put, from_local
from ..core.keyword_errors import explains_keywords
from ..core.mesh import Mesh
from ..core.partition_spec import P, normalize_axes
from ..core.pytree_paths import path_name
from ..core.sharding import Sharding
from ..core.types import dtype_name, is_inexact
from ..errors import (
    CheckpointError,
    FunccollError,
    MeshError,
    NonFiniteGradientError,
    TraceError,
    user_frames,
)
from ..job.job_context import make_mesh, on_device, rank, world_size
from ..job.process_allgather import check_equal_lines, gather_text, process_allgather
from ..optim import GradientTransformation, apply
from .batch_placement import BatchPlacement
from .bucket_plan import BucketPlan
from .buckets import CommHook
from .checkpoint import read_tensors, write_tensors
from .data_parallel_function import Accumulated, data_parallel
from .replicas import on_all_devices

__all__ = ["DataParallel"]


class DataParallel:
    """A model that is trained data parallel: parameters, optimizer and buffers, updated in one compiled step.

    Each `step` averages the gradients over the devices of `axis` and updates `model.params`. To change parameters yourself,
    call `load_state_dict`: a step after an assignment raises. At the start all ranks must have parameters of the same
    structure, shapes and dtypes; the values are those of device 0. Integer parameters are never trained. An array at several
    places of params is one parameter (tied).

    Args:
        model: An object with a pytree of arrays `params`, or the pytree itself. With `buffers` it also has `model.buffers`.
        loss_fn: `loss_fn(params, *batch)` returns the loss of one device's rows. With `buffers`,
            `loss_fn(params, buffers, *batch)` returns `(loss, buffers)`.
        optimizer: One of `fc.optim`, or any pair of pure functions `init(params) -> state` and
            `update(gradients, state, params) -> (updates, state)`, as optax has them.
        mesh: The mesh. None makes one whose `axis` has a device for each process of the job.
        axis: The mesh axis, or a tuple of axes, over which the batch is split.
        trainable: A pytree of bools that is a prefix of params; parameters with False stay as they are.
        check_finite: True makes a step with NaN or infinity in its gradients raise and change nothing.
        **options: Options of `fc.data_parallel`: `bucket_cap_mb`, `first_bucket_mb`, `comm_hook`, `reduction`, `buffers`,
            `overlap`.

    Raises:
        ProgramMismatch: If ranks have different parameters; it names the first one.
        TraceError: If there is nothing to train.
        MeshError: If the mesh does not have the axis.

    Example:
        >>> mesh = fc.make_mesh({"data": 2})
        >>> loss_fn = lambda params, x: np.mean((x @ params["w"] - 1) ** 2)
        >>> dp = fc.DataParallel({"w": np.zeros(2)}, loss_fn, fc.optim.sgd(0.5), mesh=mesh)
        >>> print(dp.step(np.ones((4, 2))))
        1.0
        >>> print(dp.params["w"])
        [1. 1.]
    """

    @explains_keywords("fc.DataParallel", extends=data_parallel)
    def __init__(
        self,
        model: Any,
        loss_fn: Callable[..., Any],
        optimizer: Any,
        *,
        mesh: Mesh | None = None,
        axis: Axes = "data",
        trainable: Any = True,
        check_finite: bool = False,
        **options: Any,
    ):
        if mesh is None:
            if not isinstance(axis, str):
                raise TraceError(f"DataParallel over {axis!r} needs a mesh with these axes: mesh=fc.make_mesh({{...}}).")
            mesh = make_mesh({axis: world_size()})
        _check_axis(mesh, axis)
        for name in ("init", "update"):
            if not callable(getattr(optimizer, name, None)):
                raise TraceError(
                    f"DataParallel: the optimizer has no function {name!r}. Pass one of fc.optim, such as fc.optim.sgd(0.1)."
                )
        self.model, self.mesh, self.optimizer, self.check_finite = model, mesh, optimizer, check_finite
        self._own, self._spec, self._placement = options.get("comm_hook"), P(axis), BatchPlacement(mesh, axis)
        if (torch := sys.modules.get("torch")) is not None and isinstance(model, torch.nn.Module):
            raise TraceError(
                f"DataParallel: {type(model).__name__} is a torch module. Pass it to "
                "funccoll.torch.DistributedDataParallel(module), or its parameters as NumPy arrays and a loss_fn in NumPy."
            )
        params = getattr(model, "params", model)
        leaves, self._tree = optree.tree_flatten(params)
        for i, leaf in enumerate(leaves):
            if not hasattr(leaf, "dtype"):
                to_numpy(leaf, f"DataParallel: {path_name('params', self._tree, i)}")
        names = _names(self._tree)
        chosen = _chosen(params, trainable)
        first: dict[int, str] = {}
        # Only arrays are tied: Python keeps one object for equal numbers.
        self._places = [
            first.setdefault(id(leaf), name) if isinstance(leaf, (np.ndarray, Array)) else name
            for leaf, name in zip(leaves, names, strict=True)
        ]
        """The name of the value of each leaf of params. Tied leaves have one name."""
        values = {place: leaf for place, name, leaf in zip(self._places, names, leaves, strict=True) if place == name}
        lines = [f"{name}: {dtype_name(np.asarray(v).dtype)}{list(np.shape(v))}" for name, v in values.items()]
        check_equal_lines(mesh, lines, "the parameters of DataParallel")
        placed = dict(zip(values, on_all_devices(mesh, list(values.values())), strict=True))
        on = {name for name, yes in zip(self._places, chosen, strict=True) if yes and is_inexact(placed[name].dtype)}
        if not on:
            raise TraceError(f"DataParallel: no parameter is trained. There are {'; '.join(lines) or 'no parameters'}.")
        self._params = {name: value for name, value in placed.items() if name in on}
        self._frozen = {name: value for name, value in placed.items() if name not in on}
        self._buffers: Any = None
        if options.get("buffers") is not None:
            buffers, tree = optree.tree_flatten(model.buffers)
            self._buffers = tree.unflatten(on_all_devices(mesh, buffers))

        places, frozen_tree = self._places, self._tree

        def loss(params: Mapping[str, Any], frozen: Mapping[str, Any], *batch: Any) -> Any:
            return loss_fn(frozen_tree.unflatten([params[n] if n in params else frozen[n] for n in places]), *batch)

        self._loss, self._options = loss, {"axis": axis, **options}
        dp = data_parallel(loss_fn, **self._options)  # it checks the options
        initial: Any = jit(optimizer.init, mesh=mesh, in_specs=P(), out_specs=P())
        self._state = initial(self._params)
        self._hook_state: Any = None
        if isinstance(self._own, CommHook):
            self._hook_state = jit(dp.init, mesh=mesh, in_specs=P(), out_specs=self._spec)(self._params)
        self._accumulated: Accumulated | None = None
        self._synchronizes = True
        self._compiled = self._jit_step()
        self._compiled_accumulate = self._jit_accumulate()
        self._has_compared_rows = False
        self.steps = 0
        """The number of updates so far."""
        self._shown: dict[str, Any] = {}
        """The trees of parameters and buffers that users see."""
        self._seen: dict[str, Sequence[Any]] = {}
        """Their leaves, as they were shown last."""
        self._on_model = {name for name in ("params", "buffers") if hasattr(model, name)}
        self._publish()
        # A property may make new objects at each access; these do not show an assignment.
        self._watched = [name for name, leaves in self._seen.items() if _same(self._reachable(name), leaves)]

    # ---------------------------------------------------------------- the compiled functions

    def _parallel(self, frozen: Any) -> Any:
        """The data-parallel loss of the trained parameters, in a trace."""
        if self._buffers is None:
            return data_parallel(lambda params, *batch: self._loss(params, frozen, *batch), **self._options)
        with_buffers = lambda params, buffers, *batch: self._loss(params, frozen, buffers, *batch)
        return data_parallel(with_buffers, **self._options)

    def _jit_step(self) -> Any:
        def step(
            params: Any, buffers: Any, state: Any, hook_state: Any, accumulated: Any, frozen: Any, active: Any, batch: Any
        ) -> Any:
            given = batch if buffers is None else (buffers, *batch)
            result, gradients, *more = self._parallel(frozen).value_and_grad(
                params, *given, state=hook_state, accumulated=accumulated, active=active
            )
            loss, buffers = (result, None) if buffers is None else result
            updated, after = self._updated(gradients, state, params)
            finite = None
            if self.check_finite:
                finite = np.stack([np.all(np.isfinite(gradients[name])) for name in sorted(gradients)])
                keep = lambda new, old: np.where(np.all(finite), new, old)
                updated, after = optree.tree_map(keep, updated, params), optree.tree_map(keep, after, state)
            return loss, updated, buffers, after, more[0] if more else None, finite

        own = self._spec
        return jit(
            step,
            mesh=self.mesh,
            in_specs=(P(), P(), P(), own, own, P(), own, AUTO),
            donate_argnums=(0, 1, 2, 3, 4),
            out_specs=(P(), P(), P(), P(), own, P()),
        )

    def _updated(self, gradients: Any, state: Any, params: Any) -> Any:
        if isinstance(self.optimizer, GradientTransformation):
            return apply(self.optimizer, gradients, state, params)
        updates, after = self.optimizer.update(gradients, state, params)
        return optree.tree_map(lambda p, u: (p + u).astype(p.dtype), params, updates), after

    def _jit_accumulate(self) -> Any:
        def accumulate(params: Any, buffers: Any, accumulated: Any, frozen: Any, active: Any, batch: Any) -> Any:
            given = batch if buffers is None else (buffers, *batch)
            result = self._parallel(frozen).accumulate(params, *given, active=active)
            made, buffers = (result, None) if buffers is None else result
            total = made if accumulated is None else optree.tree_map(np.add, made, accumulated)
            return made.loss, total, buffers

        own = self._spec
        return jit(
            accumulate,
            mesh=self.mesh,
            in_specs=(P(), P(), own, P(), own, AUTO),
            out_specs=(own, own, P()),
            donate_argnums=(1, 2),
        )

    # ---------------------------------------------------------------- steps

    @user_frames()
    def step(self, *batch: Any, active: Any = None) -> Any:
        """Update the parameters by the gradients of a batch.

        Inside `no_sync` nothing is updated, and each device's own loss is returned.

        Args:
            *batch: The rows of this process's devices; in a job its own, such as `rows[fc.rank() :: fc.world_size()]`.
                One process that plays all devices passes all rows. An Array of the mesh is taken as it is.
            active: Whether this process's rows count, as in `fc.data_parallel`.

        Returns:
            The loss of all devices, a scalar Array.

        Warns:
            EqualRowsWarning: If all processes pass the same rows, at least 2, to the first step.

        Raises:
            NonFiniteGradientError: With `check_finite`, if a gradient has NaN or infinity; it names the parameters.
            ShapeError: If the batch has no rows.
        """
        self._refuse_assigned("step")
        placed = self._placement.place(batch)
        if not self._has_compared_rows:
            self._has_compared_rows = True
            self._placement.compare_rows(batch, active)
        if active is not None:
            active = self._placement.place_rows(np.asarray(active).reshape(-1))
        if not self._synchronizes:
            loss, self._accumulated, self._buffers = self._compiled_accumulate(
                self._params, self._buffers, self._accumulated, self._frozen, active, placed
            )
            self._publish()
            return loss
        loss, self._params, self._buffers, self._state, self._hook_state, finite = self._compiled(
            self._params, self._buffers, self._state, self._hook_state, self._accumulated, self._frozen, active, placed
        )
        self._accumulated = None
        self._publish()
        if finite is not None and not (found := np.asarray(finite)).all():
            names = [name for name, fine in zip(sorted(self._params), found, strict=True) if not fine]
            raise NonFiniteGradientError(
                f"step {self.steps + 1}: the gradients of {', '.join(names)} have NaN or infinity; the loss is "
                f"{float(loss):.6g}. The parameters are those of before."
            )
        self.steps += 1
        return loss

    def skip_if(self, condition: Any) -> bool:
        """Return True in all processes if `condition` is true in any, so that all skip a step together.

        All processes must call it at the same place. A process that skips a step alone would take its next batch into this step
        of the others, and end before them.

            if model.skip_if(not np.isfinite(rows).all()):
                continue
            model.step(rows)

        Args:
            condition: A bool. One process that plays all devices may pass an array with one for each.
        """
        own = bool(np.any(np.asarray(condition)))
        if self.mesh.is_fully_addressable:
            return own
        everywhere = Sharding(on_device(self.mesh, "cpu"), P(self.mesh.axis_names))
        return bool(process_allgather(from_local(np.array([own]), everywhere)).any())

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Return a context in which steps add up gradients without communication.

        The next step outside of it updates the parameters by their sum, so a batch may be cut into several steps:

            with dp.no_sync():
                for part in parts[:-1]:
                    dp.step(part)
            loss = dp.step(parts[-1])
        """
        before, self._synchronizes = self._synchronizes, False
        try:
            yield
        finally:
            self._synchronizes = before

    def _publish(self) -> None:
        """Show the current values. The trees are copies, so an assignment into them changes nothing else."""
        leaves = [self._params[n] if n in self._params else self._frozen[n] for n in self._places]
        self._show("params", leaves, self._tree)
        if self._buffers is not None:
            self._show("buffers", *optree.tree_flatten(self._buffers))

    def _show(self, name: str, leaves: Sequence[Any], tree: optree.PyTreeSpec) -> None:
        self._shown[name] = shown = tree.unflatten(leaves)
        self._seen[name] = leaves
        if name in self._on_model:
            setattr(self.model, name, shown)
            if getattr(self.model, name) is not shown:  # a property that converts
                self._seen[name] = self._reachable(name)

    def _reachable(self, name: str) -> Sequence[Any]:
        """The leaves that users may have assigned: the model's, or else ours."""
        tree: Any = getattr(self.model, name, None) if name in self._on_model else self._shown[name]
        return optree.tree_leaves(tree)

    def _refuse_assigned(self, method: str) -> None:
        """Raise a TraceError, and restore the values, if parameters or buffers were assigned since the last step.

        Assigned values are not used: ranks may have assigned different ones, and the optimizer's state belongs to the previous
        ones.
        """
        for name in self._watched:
            leaves, seen = self._reachable(name), self._seen[name]
            if _same(leaves, seen):
                continue
            place = f"model.{name}" if name in self._on_model else f"{name} of this DataParallel"
            first = 0
            if len(leaves) == len(seen):
                first = next(i for i, (a, b) in enumerate(zip(leaves, seen, strict=True)) if a is not b)
                place = path_name(place, optree.tree_structure(self._shown[name]), first)
            buffers: Any = {"buffers": self._buffers}
            key = f"params.{self._places[first]}" if name == "params" else _names(optree.tree_structure(buffers))[first]
            self._publish()
            raise TraceError(
                f"DataParallel.{method}: {place} was assigned, and DataParallel would go on from the values that it holds, "
                "which are there again. To change them, call in all processes "
                f"dp.load_state_dict({{**dp.state_dict(), {key!r}: value}}), or make a new fc.DataParallel."
            )

    @property
    def params(self) -> Any:
        """The parameters, in their structure: Arrays that are whole on every device. A step replaces and deletes them.

        Use `load_state_dict` to change them.
        """
        return self._shown["params"]

    @property
    def buffers(self) -> Any:
        """The buffers, equal on all devices."""
        return self._shown.get("buffers")

    def explain(self, *batch: Any) -> BucketPlan:
        """Return the plan of the buckets for a batch, as a table: sizes, order and predicted times.

        Args:
            *batch: The rows of all devices.
        """
        given = batch if self._buffers is None else (self._buffers, *batch)
        return self._parallel(self._frozen).explain(self.mesh, self._params, *given)

    # ---------------------------------------------------------------- checkpoints

    def _state_leaves(self) -> dict[str, Any]:
        """Everything that a checkpoint holds, by name."""
        parts: Any = {
            "params": {**self._params, **self._frozen},
            "buffers": self._buffers,
            "optimizer": self._state,
            "comm_hook": self._hook_state,
        }
        leaves, tree = optree.tree_flatten(parts)
        return dict(zip(_names(tree), leaves, strict=True))

    @user_frames()
    def state_dict(self) -> dict[str, np.ndarray]:
        """Return parameters, buffers, states of the optimizer and hook, and the number of steps, by name, as NumPy arrays.

        If a comm_hook has a state, all processes must call it: the states of all devices are gathered.
        """
        self._refuse_assigned("state_dict")
        return {**{n: process_allgather(x) for n, x in self._state_leaves().items()}, "steps": np.array(self.steps)}

    @user_frames()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned, in all processes.

        Args:
            state: Arrays by name. The state of a comm_hook needs the same number of devices.

        Raises:
            CheckpointError: If an array is missing, unknown, or of another shape or dtype; it names the first. Nothing is
                changed then.
        """
        wanted = {**self._state_leaves(), "steps": np.array(self.steps)}
        for name in [*wanted, *state]:
            if name not in state or name not in wanted:
                where = "is not in the state" if name not in state else "is in the state, and not in this model"
                raise CheckpointError(f"DataParallel.load_state_dict: {name} {where}.")
            new, old = np.asarray(state[name]), wanted[name]
            if new.shape != old.shape or new.dtype != old.dtype:
                raise CheckpointError(
                    f"DataParallel.load_state_dict: {name} is {dtype_name(new.dtype)}{list(new.shape)} in the state, and "
                    f"{dtype_name(old.dtype)}{list(old.shape)} in this model."
                )
        parts: Any = {
            "params": self._params,
            "frozen": self._frozen,
            "buffers": self._buffers,
            "optimizer": self._state,
            "comm_hook": self._hook_state,
        }
        leaves, tree = optree.tree_flatten(parts)
        names = [re.sub("^frozen", "params", name) for name in _names(tree)]
        made = [device_put(np.asarray(state[n]), x.sharding) for n, x in zip(names, leaves, strict=True)]
        loaded: Any = tree.unflatten(made)
        self._params, self._frozen, self._buffers = loaded["params"], loaded["frozen"], loaded["buffers"]
        self._state, self._hook_state, self._accumulated = loaded["optimizer"], loaded["comm_hook"], None
        self.steps = int(state["steps"])
        self._publish()

    @user_frames()
    def save(self, path: str | os.PathLike[str]) -> None:
        """Write `state_dict()` to a safetensors file. All processes must call it; rank 0 writes, and all return after it.

        An error on rank 0 is raised on all ranks. It needs `pip install 'funccoll[checkpoint]'`.

        Args:
            path: The file. An existing one is replaced only when the new one is complete.
        """
        state, error = self.state_dict(), None
        if rank() == 0:
            try:
                write_tensors(path, state)
            except Exception as found:
                error = found
        told = gather_text(self.mesh, "" if error is None else f"{type(error).__name__}: {error}")[0]
        if error is not None:
            raise error
        if told:
            raise FunccollError(f"DataParallel.save: rank 0 could not write {os.fspath(path)}: {told}")

    @user_frames()
    def load(self, path: str | os.PathLike[str]) -> None:
        """Read a file that `save` wrote, in all processes.

        Args:
            path: The file, which all processes can read.

        Raises:
            OSError: If the file cannot be read.
            CheckpointError: As `load_state_dict`.
        """
        self.load_state_dict(read_tensors(path))


def _check_axis(mesh: Mesh, axis: Axes) -> None:
    """Raise MeshError if the mesh does not have the axis (or each of them)."""
    if unknown := [a for a in normalize_axes(axis) if a not in mesh.shape]:
        chosen = " or ".join(f"axis={name!r}" for name in mesh.axis_names)
        remedy = f"Pass the axis along which the batch is split: {chosen}." if chosen else f"Add {unknown[0]!r} to the mesh."
        raise MeshError(
            f"DataParallel averages gradients over the axis {unknown[0]!r}, and the mesh has axes {dict(mesh.shape)}. {remedy}"
        )


def _names(tree: optree.PyTreeSpec) -> list[str]:
    """The names of leaves: keys, positions and fields, joined by dots."""
    return [".".join(str(getattr(e, "field", e.entry)) for e in accessor) or "params" for accessor in tree.accessors()]


def _same(leaves: Sequence[Any], others: Sequence[Any]) -> bool:
    """True if these are the same objects."""
    return len(leaves) == len(others) and all(map(is_, leaves, others))


def _chosen(params: Any, trainable: Any) -> Sequence[bool]:
    """For each leaf of params, whether it is trained."""
    try:
        chosen = optree.tree_leaves(optree.tree_broadcast_prefix(trainable, params))
    except ValueError as error:
        raise TraceError(f"DataParallel: trainable must be a pytree of bools that is a prefix of params: {error}") from None
    return list(map(bool, chosen))
