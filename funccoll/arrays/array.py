"""Array: a global array, its sharding, and the shards this process holds."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..core.c_extension import extension
from ..core.interpreter import Traced, current_interpreter
from ..core.sharding import Sharding
from ..core.types import ArrayType, bfloat16, dtype_name
from ..errors import DeletedArrayError, InPlaceError, MeshError, MissingMethodError, hide_frames, user_frames
from ..ops.indexing import getitem_traced
from ..ops.registry import has_traced
from ..tracing.trace import split_value
from .array_layout import ArrayLayout
from .array_operators import add_operators
from .shared_mapping import read_only
from .value_hash import value_hash

__all__ = ["Array"]

_OWN_BLOCK = -1
_eager = user_frames(every=True)
"""Decorator of what users call on Arrays outside of traced functions: an exception shows none of funccoll's frames."""
_ELSEWHERE = {
    "addressable_shards": "arr.shards, or arr.local",
    "cpu": "np.asarray(arr)",
    "cuda": "fc.device_put(arr, mesh, spec, device='cuda')",
    "detach": "arr itself",
    "full_tensor": "fc.process_allgather(arr)",
    "numpy": "np.asarray(arr)",
    "permute": "np.transpose(arr, axes)",
    "redistribute": "fc.redistribute(arr, spec)",
    "to_local": "arr.local",
    "unsqueeze": "np.expand_dims(arr, axis)",
}
"""Method of torch's and JAX's arrays -> its equivalent here."""


class _ArrayMeta(type):
    """Traced arrays are instances of Array too, so that one annotation, `Float[fc.Array, "n m"]`, fits both."""

    def __instancecheck__(cls, instance: object) -> bool:
        return type.__instancecheck__(cls, instance) or isinstance(instance, Traced)


class _Base:
    """The fields of an Array, for use without `ArrayBase` of `_native.c`."""

    __slots__ = ("_copies", "layout")

    @property
    def local(self) -> np.ndarray:
        """This process's block, if the process is one device: read-only, on a GPU a CuPy array."""
        if self.layout.is_one_block and type(copies := self._copies) is np.ndarray:
            return read_only(copies)
        try:
            return self.find_local()
        except BaseException as error:  # this frame is funccoll's too
            hide_frames(error)
            raise

    def find_local(self) -> Any:
        """See `Array`."""
        raise NotImplementedError


_ArrayBase: Any = _Base if extension is None else extension.ArrayBase


class Array(_ArrayBase, metaclass=_ArrayMeta):
    """A global array over a mesh: its shape, dtype, sharding, and the blocks that this process holds.

    `fc.device_put`, `fc.from_local` and jitted functions make Arrays; they never change. `np.asarray(arr)` is the global value.
    If this process holds only a part of it, that raises MeshError: use `arr.local`, or `fc.process_allgather(arr)`.

    NumPy functions and operators on Arrays compute on the global value and return NumPy arrays. On a GPU, blocks are CuPy
    arrays, which you must not write to; operators and methods return CuPy arrays, and `np.asarray` waits and copies.

    Example:
        >>> mesh = fc.make_mesh({"data": 2})
        >>> x = fc.device_put(np.arange(6.0), mesh, P("data"))
        >>> x.shape, x.dtype, x.sharding.spec
        ((6,), dtype('float64'), P('data'))
        >>> np.asarray(x) + 1
        array([1., 2., 3., 4., 5., 6.])
    """

    __slots__ = ("__weakref__", "_given")
    _copies: Any
    layout: ArrayLayout
    _given: int
    """A hash of the global value that this process was given, if it keeps only a part of it; 0 if it keeps the whole;
    _OWN_BLOCK if it was given its block. Not set if the value was computed."""
    __array_priority__ = 100

    def __init__(self, layout: ArrayLayout, copies: Any):
        self.layout = layout
        self._copies = copies

    def __reduce__(self) -> Any:
        copies = self.take_copies()
        return Array, (self.layout, list(map(read_only, copies)) if type(copies) is list else read_only(copies))

    def __copy__(self) -> Array:
        return Array(self.layout, self.take_copies())

    # ------------------------------------------------------------ attributes

    @property
    def shape(self) -> tuple[int, ...]:
        """The global shape."""
        return self.layout.shape

    @property
    def dtype(self) -> np.dtype:
        """The element type."""
        return self.layout.dtype

    @property
    def weak(self) -> type | None:
        """int, float or complex if the Array stands for a Python scalar, else None. It stays weak when you pass it on."""
        return self.layout.weak

    @property
    def sharding(self) -> Sharding:
        """Its mesh and partition spec."""
        return self.layout.sharding

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.layout.shape)

    @property
    def size(self) -> int:
        """Number of elements of the global value."""
        return int(np.prod(self.layout.shape, dtype=np.int64))

    @property
    def nbytes(self) -> int:
        """Bytes of the global value."""
        return self.size * self.dtype.itemsize

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return self.dtype.itemsize

    def is_deleted(self) -> bool:
        """True after the Array was donated to a jitted function."""
        return self._copies is None

    @_eager
    def block_until_ready(self) -> Array:
        """Return this Array when its values are ready. Calls on GPUs are asynchronous; on CPUs they are synchronous.

        Raises:
            CollectiveTimeout, PeerFailure, DeviceError: If a call on GPUs failed.
        """
        self.take_copies()
        if self.sharding.mesh.transport is not None:
            self.sharding.mesh.transport.device.wait()
        return self

    @property
    def is_one_of_several_blocks(self) -> bool:
        """True if this process holds one block, and others hold the rest of the global value."""
        mesh = self.sharding.mesh
        return not mesh.is_fully_addressable and any(mesh.shape[a] > 1 for a in self.sharding.varying)

    def give_up(self) -> None:
        """Drop the data: the Array is donated."""
        if self._copies is not None:
            self._copies = None
            # A layout that is not another Array's: no call cache contains it, so a later use raises.
            self.layout = self.layout.of_deleted

    def take_copies(self) -> Any:
        """Return the distinct copies, for a runtime. Raises DeletedArrayError after a donation."""
        copies = self._copies
        if copies is None:
            raise DeletedArrayError(
                f"this Array {dtype_name(self.dtype)}{list(self.shape)} was donated, to a jitted function (donate_argnums) or "
                "a step of fc.DataParallel, and no longer has data. Use the result (model.params after a step), or copy it "
                "before with np.array."
            )
        return copies

    def note_given(self, value: Any) -> None:
        """Note that all processes are given the same global value. Only its hash is kept, at most."""
        if type(value) is np.ndarray:
            self._given = 0 if self.layout.is_whole and type(self._copies) is np.ndarray else value_hash(value)

    def note_given_block(self) -> None:
        """Note that some other processes are given the same block."""
        if type(self._copies) is np.ndarray:
            self._given = _OWN_BLOCK

    @property
    def is_of_given_block(self) -> bool:
        """True if `given_hash` is the hash of this process's block."""
        return getattr(self, "_given", 0) == _OWN_BLOCK

    def given_hash(self) -> int:
        """Return a hash of what this process was given, the global value or its block, at least 1.

        It is 0 if the value was computed, or if no other process has the block. Computed values are not compared: ranks on
        different machines may round them differently.
        """
        try:
            given = self._given
        except AttributeError:
            return 0
        return given if given > 0 else value_hash(self.take_copies())

    def _copy_list(self) -> Sequence[Any]:
        copies = self.take_copies()
        return [copies] if len(self.layout.indices) == 1 else copies

    @property
    @_eager
    def shards(self) -> tuple[np.ndarray, ...]:
        """Each device's block, in device order: read-only views, on GPUs CuPy arrays. In a job, the block of this process."""
        copies = [read_only(c) for c in self._copy_list()]
        mesh = self.sharding.mesh
        return tuple((copies[i] for i in self.layout.copy_of_device) if mesh.is_fully_addressable else copies)

    if TYPE_CHECKING:

        @property
        def local(self) -> np.ndarray:
            """This process's block, if the process is one device: read-only, on a GPU a CuPy array."""
            ...

    @_eager
    def find_local(self) -> Any:
        """Return the value of `local` in all cases. Raises MeshError if this process plays several devices."""
        if self.layout.is_one_block and self._copies is not None:
            return read_only(self._copies)
        if not self.layout.is_one_block:
            raise MeshError(
                f"this process plays all {self.sharding.mesh.size} devices of {self.sharding.mesh!r}, so it has no single "
                "local block: use arr.shards[device], or np.asarray(arr)."
            )
        return self.shards[0]

    # ------------------------------------------------------------ conversions

    @_eager
    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        self.take_copies()
        if current_interpreter().calls_meshes and self.sharding.varying:
            raise split_value("NumPy reads", ArrayType(self.shape, self.dtype), self.sharding)
        return self._to_numpy(dtype, copy)

    def _to_numpy(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        copies = self._copy_list()
        if self.is_one_of_several_blocks:
            raise MeshError(
                f"this process holds one block of the Array {dtype_name(self.dtype)}{list(self.shape)}, split as "
                f"{self.sharding.spec!r} over {self.sharding.mesh.size} processes. Use arr.local for the block, or, on all "
                "processes, fc.redistribute(arr, spec) to split it in another way, or fc.process_allgather(arr) for the whole."
            )
        on_gpu = self.sharding.mesh.device_type != "cpu"
        if copy is False and (len(copies) > 1 or on_gpu):
            what = "on a GPU" if on_gpu else "split over devices"
            raise ValueError(f"this Array is {what}: np.asarray has to copy its blocks into one array.")
        if on_gpu:
            self.block_until_ready()
            copies = [_on_host(block) for block in copies]
        if len(copies) == 1:
            whole, copy = read_only(copies[0]), copy and not on_gpu
        else:
            whole, copy = self._joined(copies, np.empty(self.shape, self.dtype)), False
        if dtype is not None and np.dtype(dtype) != whole.dtype:
            return whole.astype(dtype)
        return np.array(whole) if copy else whole

    @property
    @_eager
    def __array_interface__(self) -> dict[str, Any]:
        # NumPy asks for this before `__array__`. The data is an object, so the consumer keeps it alive.
        if self.dtype == bfloat16:
            raise AttributeError("bfloat16 has no type string")  # NumPy reads `__array__` next
        whole = np.ascontiguousarray(self.__array__())
        return {"version": 3, "shape": self.shape, "typestr": whole.dtype.str, "data": whole}

    def _joined(self, copies: Sequence[Any], whole: Any) -> Any:
        """Return the global value, written into `whole`."""
        for index, block in zip(self.layout.indices, copies, strict=True):
            whole[index] = block
        return whole

    @_eager
    def on_gpu(self) -> Any:
        """Return the global value of an Array on GPUs as one CuPy array, which must not be written to."""
        copies = self._copy_list()
        if len(copies) == 1 and not self.is_one_of_several_blocks:
            return copies[0]
        if self.is_one_of_several_blocks:
            raise BufferError(f"this process holds one block of {self!r}: use arr.local.")
        return self._joined(copies, self.sharding.mesh.transport.device.allocate(self.shape, self.dtype))

    def _whole(self) -> Any:
        return np.asarray(self) if self.sharding.mesh.device_type == "cpu" else self.on_gpu()

    @_eager
    def __dlpack__(self, **kwargs: Any) -> Any:
        on_gpu = self.sharding.mesh.device_type != "cpu"
        return (self.on_gpu() if on_gpu else np.array(self)).__dlpack__(**kwargs)

    def __dlpack_device__(self) -> tuple[int, int]:
        on_gpu = self.sharding.mesh.device_type != "cpu"
        return self._copy_list()[0].__dlpack_device__() if on_gpu else (1, 0)  # 1: host memory

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        # The consumer keeps this Array alive, and so its block. A split Array has no single block to keep.
        if self.sharding.mesh.device_type == "cpu" or len(self._copy_list()) > 1:
            raise AttributeError("only an Array on a GPU that is one block has __cuda_array_interface__")
        return self._copy_list()[0].__cuda_array_interface__

    @_eager
    def __float__(self) -> float:
        return float(np.asarray(self))

    @_eager
    def __int__(self) -> int:
        return int(np.asarray(self))

    @_eager
    def __complex__(self) -> complex:
        return complex(np.asarray(self))

    @_eager
    def __bool__(self) -> bool:
        return bool(np.asarray(self))

    @_eager
    def __index__(self) -> int:
        return operator.index(np.asarray(self).item())

    @_eager
    def __round__(self, ndigits: int | None = None) -> Any:
        return round(self.item()) if ndigits is None else round(self.item(), ndigits)

    @_eager
    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of an Array without dimensions")
        return self.shape[0]

    @_eager
    def __iter__(self) -> Any:
        return iter(np.asarray(self))

    @_eager
    def __getitem__(self, index: Any) -> Any:
        return getitem_traced(self, index) if has_traced(index) else np.asarray(self)[index]

    @_eager
    def __setitem__(self, index: Any, value: Any) -> None:
        raise InPlaceError("an Array never changes. Use x = fc.at(np.asarray(x))[index].set(value), or a jitted function.")

    @_eager
    def item(self) -> Any:
        """The value of a one-element array as a Python scalar."""
        return np.asarray(self).item()

    @_eager
    def tolist(self) -> Any:
        """The global value as nested lists."""
        return np.asarray(self).tolist()

    @property
    @_eager
    def T(self) -> np.ndarray:
        """The global value with its dimensions reversed, as a NumPy array."""
        return np.asarray(self).T

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # NumPy asks for several in each call. A variable with the error would make a cycle
            raise AttributeError(f"an Array has no attribute {name!r}.")
        with _eager:
            if name in _ELSEWHERE:
                raise MissingMethodError(f"an Array has no .{name}; here it is {_ELSEWHERE[name]}.")
            if hasattr(np.ndarray, name):
                remedy = f"use np.asarray(arr).{name}, the global value as a NumPy array"
                raise MissingMethodError(f"an Array has no .{name}: {remedy}.")
            raise AttributeError(f"an Array has no attribute {name!r}.")

    @_eager
    def astype(self, dtype: Any) -> np.ndarray:
        """The global value with another dtype, as a NumPy array."""
        return np.asarray(self).astype(dtype)

    # ------------------------------------------------------------ display

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if self.size == 1 and spec else str(self)

    def __str__(self) -> str:
        if self.is_deleted():
            return "<deleted Array>"
        return repr(self) if self.is_one_of_several_blocks else str(self._to_numpy())

    def __repr__(self) -> str:
        head = f"{dtype_name(self.dtype)}[{','.join(map(str, self.shape))}], {self.sharding.spec!r} on {self.sharding.mesh!r}"
        if self.is_deleted():
            return f"Array(deleted, {head})"
        head = f"weak {head}" if self.weak else head
        what = f"block {self.sharding.mesh.process} of {self.sharding.mesh.size}: " if self.is_one_of_several_blocks else ""
        shown = self.local if what else self._to_numpy()  # also in a gradient around jitted functions
        values = np.array2string(shown, separator=", ", threshold=20, edgeitems=2, prefix=f"Array({what}")
        return f"Array({what}{values}, {head})"

    def _repr_html_(self) -> str:
        from ..core.display import array_table

        return array_table(self)


add_operators(Array)
Array.__hash__ = None  # type: ignore[assignment]  # == is elementwise, as of an ndarray


def _on_host(block: Any) -> np.ndarray:
    return np.asarray(block) if isinstance(block, (np.ndarray, np.generic)) else block.get()
