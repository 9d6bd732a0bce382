"""CuPy over host memory, for machines without a GPU: its interface, and its answers where they differ from NumPy's.

What is here has the names, parameters, loops of ufuncs and refusals of the CuPy that cupy_interface.json records (see
record_cupy_interface.py). Its arrays are of a class of their own, which NumPy cannot read. Where CuPy computes other values
than NumPy, or leaves them to chance, so does this: `floor_divide` divides and rounds, float16 sums are accumulated in float16,
of several values set to one place the first one stays. New memory holds poison.

Every write of memory goes through `launch`, every transfer or wait through `touch_host`. A `recorder` gets both: it may keep
the work and run it later, as a CUDA graph does, because nothing but the work reads memory. Results have their shapes before.
"""

from __future__ import annotations

import ctypes
import json
import math
import operator
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol

import ml_dtypes
import numpy as np

from tests.support.fakes.fake_cupy_ufuncs import Ufunc
from tests.support.fakes.record_cupy_interface import parameters

INTERFACE = json.loads(Path(__file__).with_name("cupy_interface.json").read_text())
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = {*map(np.dtype, "?bhilqBHILQefdFD"), BFLOAT16}
POISON = 0xA7

__version__ = INTERFACE["version"]


class Recorder(Protocol):
    """Something that takes work in place of running it at once."""

    def launch(self, work: Callable[[], None]) -> None: ...
    def touch_host(self, what: str) -> None: ...
    def allocated(self, memory: np.ndarray) -> None: ...
    def use_blas(self) -> None: ...


recorder: Recorder | None = None
host_events: list[str] = []
"""The transfers and waits so far."""
free_bytes = 1 << 40
allocate: Callable[[int], Any] = lambda nbytes: None
"""The allocator: what it returns is kept as long as the array."""


class Order(Protocol):
    """The current stream, as work and the host's reads use it."""

    def enqueue(self, work: Callable[[], None]) -> None: ...
    def drain(self) -> None: ...


class _AtOnce:
    def enqueue(self, work: Callable[[], None]) -> None:
        work()

    def drain(self) -> None:
        pass


current_order: Callable[[], Order] = _AtOnce
"""The stream that work goes to: fake_cuda's current one, where there is that."""


def launch(work: Callable[[], None]) -> None:
    """Run work that writes memory in the order of the current stream, or give it to the recorder."""

    def quiet() -> None:
        with np.errstate(all="ignore"):
            work()

    if recorder is None:
        current_order().enqueue(quiet)
    else:
        recorder.launch(quiet)


def touch_host(what: str) -> None:
    """Note a transfer, or a wait, of the host."""
    host_events.append(what)
    if recorder is not None:
        recorder.touch_host(what)


def use_blas(dtype: np.dtype, size: int) -> None:
    """Note a product that CuPy gives to cuBLAS: of floats, but for one of two vectors."""
    if recorder is not None and size > 1 and (dtype.kind in "fc" or dtype == BFLOAT16):
        recorder.use_blas()


class OutOfMemoryError(MemoryError):
    """As in cupy.cuda.memory."""


class MemoryPointer:
    """As in cupy.cuda: an address on the device."""

    def __init__(self, ptr: int):
        self.ptr, self.device_id = ptr, 0

    def copy_from_device_async(self, src: MemoryPointer, size: int, stream: Any) -> None:
        if recorder is not None:
            launch(lambda: ctypes.memmove(self.ptr, src.ptr, size))
        else:
            stream.enqueue(lambda: ctypes.memmove(self.ptr, src.ptr, size))


class Flags:
    """As in cupy."""

    def __init__(self, host: np.ndarray, owns: bool):
        self.c_contiguous, self.f_contiguous, self.owndata = host.flags.c_contiguous, host.flags.f_contiguous, owns


def supported(dtype: Any) -> np.dtype:
    """A dtype of CuPy's, else ValueError."""
    dtype = np.dtype(dtype)
    if dtype not in DTYPES or not dtype.isnative:
        raise ValueError(f"Unsupported dtype {dtype}")
    return dtype


def new(shape: Any, dtype: Any, like: np.ndarray | None = None) -> ndarray:
    """An array with poison in it; with the order of another one's dimensions in memory."""
    dtype = supported(dtype)
    host = np.empty(shape, dtype) if like is None else np.empty_like(like, dtype, order="K")
    if host.nbytes > free_bytes:
        raise OutOfMemoryError(f"Out of memory allocating {host.nbytes:,} bytes (allocated so far: 0 bytes).")
    pointer = allocate(host.nbytes)
    if pointer is not None and host.nbytes:
        memory = (ctypes.c_uint8 * host.nbytes).from_address(pointer.ptr)
        host = np.ndarray(host.shape, dtype, memory, strides=host.strides)

    def poison() -> None:
        np.reshape(host, -1, order="A").view(np.uint8)[...] = POISON

    if recorder is not None:
        recorder.allocated(host)
    else:
        launch(poison)  # in order: what was enqueued before may use the memory of an array that is gone
    return ndarray(host, pointer=pointer)


def write(out: ndarray, compute: Callable[[], Any]) -> ndarray:
    """Launch work that fills an array, with a cast."""
    launch(lambda: np.copyto(out.host, np.asarray(compute()), casting="unsafe"))
    return out


def _reshaped_view(array: np.ndarray, shape: Any) -> np.ndarray:
    """Return a view of another shape, or raise ValueError if there is none. np.reshape has `copy` from NumPy 2.1 on."""
    if hasattr(np, "unstack"):
        return np.reshape(array, shape, copy=False)
    shaped = array.reshape(shape)
    if array.size and not np.may_share_memory(shaped, array):
        raise ValueError("a copy is needed")
    return shaped


def _refuse(*args: Any, **kwargs: Any) -> Any:
    raise TypeError(
        "Implicit conversion to a NumPy array is not allowed. Please use `.get()` to construct a NumPy array explicitly."
    )


class ndarray:
    """As in cupy. `host` is its memory, for the fake and its kernels alone."""

    __array_priority__ = 100
    __hash__ = None  # type: ignore[assignment]
    __array__ = __array_function__ = __array_ufunc__ = _refuse

    def __init__(self, host: np.ndarray, base: ndarray | None = None, pointer: Any = None):
        self.host, self.base, self._pointer = host, base, pointer

    def __getattr__(self, name: str) -> Any:
        if name in INTERFACE["ndarray"] and not name.startswith("__"):
            raise NotImplementedError(f"the fake of CuPy's ndarray lacks {name}")
        raise AttributeError(f"'ndarray' object of CuPy {__version__} has no attribute {name!r}")

    dtype = property(lambda self: self.host.dtype)
    shape = property(lambda self: self.host.shape)
    size = property(lambda self: self.host.size)
    ndim = property(lambda self: self.host.ndim)
    nbytes = property(lambda self: self.host.nbytes)
    itemsize = property(lambda self: self.host.itemsize)
    strides = property(lambda self: self.host.strides)
    flags = property(lambda self: Flags(self.host, self.base is None))
    data = property(lambda self: MemoryPointer(self.host.__array_interface__["data"][0]))
    device = property(lambda self: SimpleNamespace(id=0))
    T = property(lambda self: self if self.ndim < 2 else self._view(self.host.T))

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        found = {k: v for k, v in self.host.__array_interface__.items() if k in ("shape", "typestr", "descr")}
        data = (self.data.ptr if self.size else 0, False)
        return found | {"data": data, "strides": None if self.flags.c_contiguous else self.strides, "version": 3, "stream": 1}

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0

    def __dlpack__(self, *, stream: Any = None, max_version: Any = None, dl_device: Any = None, copy: Any = None) -> Any:
        return self.host.__dlpack__()

    def _view(self, host: np.ndarray) -> ndarray:
        return ndarray(host, self if self.base is None else self.base)

    # ------------------------------------------------------------ the host

    def get(self, stream: Any = None, order: str = "C", out: Any = None, blocking: bool = True) -> np.ndarray:
        touch_host("get")
        (current_order() if stream is None else stream).drain()  # and no other stream
        return np.array(self.host, order="C")

    def set(self, arr: Any, stream: Any = None) -> None:
        if not isinstance(arr, np.ndarray):
            raise TypeError("Only numpy.ndarray can be set to cupy.ndarray")
        if self.dtype != arr.dtype:
            raise TypeError(f"{arr.dtype} array cannot be set to {self.dtype} array")
        if self.shape != arr.shape:
            raise ValueError(f"Shape mismatch. Old shape: {self.shape}, new shape: {arr.shape}")
        if not (self.flags.c_contiguous or self.flags.f_contiguous):
            raise RuntimeError("Cannot set to non-contiguous array")
        touch_host("set")
        kept = arr.copy()
        if stream is None or recorder is not None:
            write(self, lambda: kept)
        else:
            stream.enqueue(lambda: np.copyto(self.host, kept))

    def item(self) -> Any:
        return self.get().item()

    def tolist(self) -> Any:
        return self.get().tolist()

    __bool__ = lambda self: bool(self.get())
    __int__ = lambda self: int(self.get())
    __float__ = lambda self: float(self.get())
    __index__ = lambda self: operator.index(self.get()[()])
    __len__ = lambda self: len(self.host)

    # ------------------------------------------------------------ views and copies

    def reshape(self, *shape: Any, order: str = "C", copy: bool | None = None) -> ndarray:
        wanted = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
        try:
            return self._view(_reshaped_view(self.host, wanted))
        except ValueError:
            made = new(np.reshape(np.broadcast_to(np.empty((), np.bool_), self.shape), wanted).shape, self.dtype)
            return write(made, lambda: self.host.reshape(made.shape))

    def ravel(self, order: str = "C") -> ndarray:
        return self.reshape(-1)

    def transpose(self, *axes: Any) -> ndarray:
        return self._view(self.host.transpose(*axes))

    def view(self, dtype: Any = None, type: Any = None) -> ndarray:
        return self._view(self.host.view() if dtype is None else self.host.view(supported(dtype)))

    @property
    def real(self) -> ndarray:
        return self._view(np.real(self.host)) if self.dtype.kind == "c" else self

    @property
    def imag(self) -> ndarray:
        return self._view(np.imag(self.host)) if self.dtype.kind == "c" else write(new(self.shape, self.dtype), lambda: 0)

    def copy(self, order: str = "C") -> ndarray:
        return write(new(self.shape, self.dtype), lambda: self.host)

    def astype(self, dtype: Any, order: str = "K", casting: Any = None, subok: Any = None, copy: bool = True) -> ndarray:
        if casting is not None or subok is not None:
            raise TypeError("casting is not supported yet")
        if not copy and self.dtype == np.dtype(dtype):
            return self
        return write(new(self.shape, dtype, self.host), lambda: self.host.astype(dtype))

    def fill(self, value: Any) -> None:
        if isinstance(value, ndarray):
            if value.shape != ():
                raise ValueError("non-scalar cupy.ndarray cannot be used for fill")
            write(self, lambda: value.host)
            return
        kept = np.array(value, dtype=self.dtype)
        if kept.shape != ():
            raise ValueError("non-scalar numpy.ndarray cannot be used for fill")
        write(self, lambda: kept)

    # ------------------------------------------------------------ indexing

    def _index(self, index: Any) -> tuple[tuple, list[int]]:
        """The index as a tuple, and the sizes of the dimensions that its arrays select from."""
        items = index if isinstance(index, tuple) else (index,)
        for item in items:
            if not (item is None or item is Ellipsis or isinstance(item, (int, np.integer, slice, ndarray))):
                raise TypeError(f"the fake of CuPy takes no index {item!r}: CuPy would upload it")
            if isinstance(item, ndarray) and item.dtype.kind == "b":
                raise NotImplementedError("the fake of CuPy has no masks: CuPy waits for the number of their elements")
            if isinstance(item, ndarray) and item.dtype.kind not in "iu":
                raise IndexError(f"arrays used as indices must be of integer or boolean type. (actual: {item.dtype.type})")
        dim, sizes, taken = 0, [], sum(item is not None and item is not Ellipsis for item in items)
        for item in items:
            if isinstance(item, ndarray):
                sizes.append(self.shape[dim])
            dim += self.ndim - taken if item is Ellipsis else item is not None
        return items, sizes

    def _wrapped(self, items: tuple, sizes: list[int]) -> tuple:
        """The index of the memory: CuPy wraps what is out of range."""
        rest = iter(sizes)

        def wrap(a: np.ndarray, n: int) -> np.ndarray:
            return np.asarray(a.astype(object) % n).astype(np.int64)  # in Python's integers: uint64 % int64 is a float

        return tuple(wrap(item.host, next(rest)) if isinstance(item, ndarray) else item for item in items)

    def _selected(self, items: tuple, sizes: list[int]) -> tuple[int, ...]:
        zeros = tuple(np.zeros(item.shape, np.int64) if isinstance(item, ndarray) else item for item in items)
        if 0 in sizes and any(item.size for item in items if isinstance(item, ndarray)):
            raise IndexError("cannot do a non-empty take from an empty axes.")
        return self.host[zeros].shape

    def __getitem__(self, index: Any) -> ndarray:
        items, sizes = self._index(index)
        if not sizes:
            found = self.host[items] if Ellipsis in items else self.host[(*items, Ellipsis)]
            return self._view(found)
        return write(new(self._selected(items, sizes), self.dtype), lambda: self.host[self._wrapped(items, sizes)])

    def __setitem__(self, index: Any, value: Any) -> None:
        items, sizes = self._index(index)
        if not sizes:
            region = self[index]
            if isinstance(value, ndarray):
                shown = np.broadcast_shapes(_squeezed(value).shape, region.shape)
                if shown != region.shape:
                    raise ValueError("Out shape is mismatched")
                write(region, lambda: _squeezed(value).host)
            else:
                region.fill(value)
            return
        if isinstance(value, np.ndarray):
            raise TypeError("the fake of CuPy takes no NumPy array here: CuPy would upload it")
        given = _squeezed(value).astype(self.dtype, copy=False) if isinstance(value, ndarray) else self.dtype.type(value)
        region = self._selected(items, sizes)

        def update() -> None:
            places = np.arange(self.size).reshape(self.shape)[self._wrapped(items, sizes)].reshape(-1)
            values = np.broadcast_to(given.host if isinstance(given, ndarray) else given, region).reshape(-1)
            self.host.flat[places[::-1]] = values[::-1]  # where places repeat, the first one stays: CuPy's order is any

        launch(update)

    # ------------------------------------------------------------ reductions

    def sum(self, axis: Any = None, dtype: Any = None, out: Any = None, keepdims: bool = False) -> ndarray:
        return self._accumulate(np.add, axis, dtype, out, keepdims)

    def prod(self, axis: Any = None, dtype: Any = None, out: Any = None, keepdims: Any = None) -> ndarray:
        return self._accumulate(np.multiply, axis, dtype, out, bool(keepdims))

    def _accumulate(self, ufunc: np.ufunc, axis: Any, dtype: Any, out: Any, keepdims: bool) -> ndarray:
        given = self.dtype if dtype is None else np.dtype(dtype)
        if dtype is None and given.kind in "biu":
            given = np.dtype(np.uint64 if given.kind == "u" else np.int64)
        contiguous = self.flags.c_contiguous or self.flags.f_contiguous

        def compute(axes: tuple[int, ...]) -> Any:
            x = self.host.astype(given)
            if given == np.float16 == self.dtype and contiguous:  # CUB's
                for axis in sorted(axes, reverse=True):
                    last = ufunc.accumulate(x, axis).take([-1], axis)
                    x = last if keepdims else last.squeeze(axis)
                return x
            return ufunc.reduce(
                x, axis=axes, dtype=np.float32 if given.itemsize == 2 and given.kind in "fV" else given, keepdims=keepdims
            )

        return self._reduce(compute, given, axis, out, keepdims)

    def max(self, axis: Any = None, out: Any = None, keepdims: bool = False) -> ndarray:
        return self._extremum(np.maximum, axis, out, keepdims)

    def min(self, axis: Any = None, out: Any = None, keepdims: bool = False) -> ndarray:
        return self._extremum(np.minimum, axis, out, keepdims)

    def _extremum(self, ufunc: np.ufunc, axis: Any, out: Any, keepdims: bool) -> ndarray:
        compute = lambda axes: ufunc.reduce(self.host, axis=axes, keepdims=keepdims)
        return self._reduce(compute, self.dtype, axis, out, keepdims)

    def any(self, axis: Any = None, out: Any = None, keepdims: bool = False) -> ndarray:
        return self._reduce(lambda axes: self.host.astype(np.bool_).any(axes, keepdims=keepdims), np.bool_, axis, out, keepdims)

    def all(self, axis: Any = None, out: Any = None, keepdims: bool = False) -> ndarray:
        return self._reduce(lambda axes: self.host.astype(np.bool_).all(axes, keepdims=keepdims), np.bool_, axis, out, keepdims)

    def argmax(self, axis: Any = None, out: Any = None, dtype: Any = None, keepdims: bool = False) -> ndarray:
        return self._position(np.argmax, axis, keepdims)

    def argmin(self, axis: Any = None, out: Any = None, dtype: Any = None, keepdims: bool = False) -> ndarray:
        return self._position(np.argmin, axis, keepdims)

    def _position(self, function: Any, axis: Any, keepdims: bool) -> ndarray:
        if self.dtype == BFLOAT16:
            raise TypeError("cupy_argmax and cupy_argmin have no loop for bfloat16")
        return self._reduce(lambda axes: function(self.host, axis=axis, keepdims=keepdims), np.dtype("q"), axis, None, keepdims)

    def _reduce(self, compute: Callable[[tuple[int, ...]], Any], dtype: Any, axis: Any, out: Any, keepdims: bool) -> ndarray:
        if not self.size:
            raise NotImplementedError("the fake of CuPy reduces no empty array")
        axes = tuple(range(self.ndim)) if axis is None else np.lib.array_utils.normalize_axis_tuple(axis, self.ndim)
        kept = [1 if d in axes else n for d, n in enumerate(self.shape)]
        shape = tuple(n for d, n in enumerate(kept) if keepdims or d not in axes)
        if out is not None and out.shape != shape:
            raise ValueError("Out shape is mismatched")
        return write(new(shape, dtype) if out is None else out, lambda: compute(axes))

    def argsort(self, axis: int = -1, kind: Any = None) -> ndarray:
        if not self.size:
            raise NotImplementedError("the fake of CuPy sorts no empty array")
        return write(new(self.shape, np.int64), lambda: np.argsort(self.host, axis, kind="stable"))


def _squeezed(x: ndarray) -> ndarray:
    """Without leading dimensions of size 1, as values are assigned."""
    shape = x.shape
    while shape and shape[0] == 1:
        shape = shape[1:]
    return x.reshape(shape)


# ---------------------------------------------------------------- functions


def _function(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of CuPy's: it must have the recorded parameters."""
    recorded = INTERFACE["functions"][function.__name__]
    assert parameters(function) == recorded, (function.__name__, parameters(function), recorded)
    return function


for _name, _recorded in INTERFACE["ndarray"].items():
    _member = vars(ndarray).get(_name)
    if _recorded is not None and callable(_member) and not _name.startswith("__"):
        _own = [p for p in parameters(_member) or () if p not in ("self", "*")]
        assert _own == _recorded, (_name, _own, _recorded)


@_function
def empty(shape: Any, dtype: Any = float, order: str = "C") -> ndarray:
    return new(shape, dtype)


@_function
def zeros(shape: Any, dtype: Any = float, order: str = "C") -> ndarray:
    return write(new(shape, dtype), lambda: 0)


@_function
def full(shape: Any, fill_value: Any, dtype: Any = None, order: str = "C") -> ndarray:
    out = new(shape, np.asarray(fill_value).dtype if dtype is None else dtype)
    out.fill(fill_value)
    return out


@_function
def arange(start: Any, stop: Any = None, step: Any = 1, dtype: Any = None) -> ndarray:
    values = np.arange(*((0, start) if stop is None else (start, stop)), step).astype(dtype)
    return write(new(values.shape, values.dtype), lambda: values)


@_function
def ascontiguousarray(a: Any, dtype: Any = None) -> ndarray:
    if not isinstance(a, ndarray):
        raise TypeError(f"the fake of CuPy uploads nothing by itself: {type(a)}")
    if a.flags.c_contiguous and dtype in (None, a.dtype):
        return a
    return write(new(a.shape, a.dtype if dtype is None else dtype), lambda: a.host)


@_function
def copyto(dst: ndarray, src: Any, casting: str = "same_kind", where: Any = None) -> None:
    assert isinstance(dst, ndarray) and isinstance(src, ndarray) and dst.dtype == src.dtype and where is None
    assert dst.shape == src.shape
    write(dst, lambda: src.host)


def from_dlpack(array: Any) -> ndarray:
    found = array.__dlpack__()  # here: the array itself
    assert isinstance(found, ndarray)
    return found


@_function
def broadcast_to(array: Any, shape: Any) -> ndarray:
    return array._view(np.broadcast_to(array.host, shape))


@_function
def argsort(a: Any, axis: Any = -1, kind: Any = None) -> ndarray:
    return a.argsort(axis=axis, kind=kind)


@_function
def cumsum(a: Any, axis: Any = None, dtype: Any = None, out: Any = None) -> ndarray:
    if axis is None or out is not None or not a.size:
        raise NotImplementedError("the fake of CuPy's cumsum takes an axis, elements, and no out")
    return write(new(a.shape, dtype or a.dtype, a.host), lambda: np.cumsum(a.host, axis, dtype=dtype))


@_function
def where(condition: Any, x: Any = None, y: Any = None) -> ndarray:
    if x is None or y is None:
        raise NotImplementedError("the fake of CuPy's where has no nonzero: CuPy waits for the number of their elements")
    return _where(condition.astype("?", copy=False), x, y)


@_function
def matmul(
    *args: Any,
    axes: Any = None,
    axis: Any = None,
    keepdims: bool = False,
    casting: str = "same_kind",
    dtype: Any = None,
    signature: Any = None,
    order: str = "K",
    out: Any = None,
) -> ndarray:
    x, y = args
    for each in args:
        if not isinstance(each, ndarray):
            raise TypeError(f"Unsupported type {type(each)}")
    if x.dtype != y.dtype or not (x.size and y.size):
        raise NotImplementedError("the fake of CuPy's matmul takes operands of one dtype, with elements")
    result = x.dtype
    if result == BFLOAT16 and max(x.ndim, y.ndim) > 2:
        raise TypeError("CuPy multiplies no stacks of bfloat16")
    probes = [np.broadcast_to(np.empty((), np.bool_), each.shape) for each in args]
    made = new(np.matmul(*probes).shape, result) if out is None else out
    use_blas(result, made.size)
    if made.dtype != result:
        raise TypeError(f"Cannot cast output operand from {result!r} to {made.dtype!r}")
    half = result.itemsize == 2 and result.kind in "fV"

    def compute() -> Any:
        if half and made.size == 1:
            return np.add.accumulate((x.host.astype(result) * y.host.astype(result)).reshape(-1))[-1:].reshape(made.shape)
        wide = np.float32 if half else result
        return np.matmul(x.host.astype(wide), y.host.astype(wide))

    return write(made, compute)


@_function
def einsum(*operands: Any, **kwargs: Any) -> ndarray:
    subscripts, *arrays = operands
    optimize = kwargs.pop("optimize", False)
    assert not kwargs and (optimize in (False, True, "greedy", "optimal") or len(optimize) == 2), (kwargs, optimize)
    result = np.result_type(*(a.dtype for a in arrays))
    sizes = {
        c: n
        for term, a in zip(subscripts.split("->")[0].split(","), arrays, strict=True)
        for c, n in zip(term, a.shape, strict=True)
    }
    shape = tuple(sizes[c] for c in subscripts.split("->")[1])
    if not all(a.size for a in arrays):
        raise NotImplementedError("the fake of CuPy's einsum takes no empty array")
    if len(arrays) > 1 and set(sizes) - set(subscripts.split("->")[1]):
        use_blas(result, math.prod(shape))
    return write(new(shape, result), lambda: np.einsum(subscripts, *(a.host for a in arrays), optimize=len(arrays) > 1))


# ---------------------------------------------------------------- ufuncs

_UFUNCS = {name: Ufunc(name, record, ndarray, new, launch) for name, record in INTERFACE["ufuncs"].items()}
_where = Ufunc("where", INTERFACE["others"]["where"], ndarray, new, launch)
special = SimpleNamespace(erf=Ufunc("erf", INTERFACE["others"]["erf"], ndarray, new, launch))
"""cupyx.scipy.special."""

_OPERATORS = {
    "add": "add",
    "sub": "subtract",
    "mul": "multiply",
    "truediv": "true_divide",
    "floordiv": "floor_divide",
    "mod": "remainder",
    "pow": "power",
    "and": "bitwise_and",
    "or": "bitwise_or",
    "xor": "bitwise_xor",
    "lshift": "left_shift",
    "rshift": "right_shift",
}
_COMPARISONS = {"lt": "less", "le": "less_equal", "gt": "greater", "ge": "greater_equal", "eq": "equal", "ne": "not_equal"}
for _name, _ufunc in _OPERATORS.items():
    setattr(ndarray, f"__{_name}__", lambda self, other, f=_UFUNCS[_ufunc]: f(self, other))
    setattr(ndarray, f"__r{_name}__", lambda self, other, f=_UFUNCS[_ufunc]: f(other, self))
    setattr(ndarray, f"__i{_name}__", lambda self, other, f=_UFUNCS[_ufunc]: f(self, other, out=self))
for _name, _ufunc in _COMPARISONS.items():
    setattr(ndarray, f"__{_name}__", lambda self, other, f=_UFUNCS[_ufunc]: f(self, other))
for _name, _ufunc in {"neg": "negative", "invert": "invert", "abs": "absolute"}.items():
    setattr(ndarray, f"__{_name}__", lambda self, f=_UFUNCS[_ufunc]: f(self))

pinned: set[int] = set()
"""Addresses of host memory that is pinned, from which copies are made later."""


def pointer_attributes(ptr: int) -> Any:
    return SimpleNamespace(type=1 if ptr in pinned else 0)


HOST_MEMORY = {"pointerGetAttributes": pointer_attributes, "memoryTypeUnregistered": 0, "memoryTypeHost": 1}
cuda = SimpleNamespace(
    memory=SimpleNamespace(OutOfMemoryError=OutOfMemoryError),
    runtime=SimpleNamespace(**HOST_MEMORY),
)


def __getattr__(name: str) -> Any:
    if name in _UFUNCS:
        return _UFUNCS[name]
    if name in INTERFACE["functions"]:
        raise NotImplementedError(f"the fake of CuPy lacks {name}: add it with CuPy's parameters")
    raise AttributeError(f"module 'cupy' {__version__} has no attribute {name!r}")


# ---------------------------------------------------------------- funccoll's own kernels


class Kernels:
    """The kernels that `CupyLibrary` takes, over the fake's memory."""

    def random_words(self, out: ndarray, key: ndarray, number: ndarray | None, purpose: int) -> None:
        from funccoll.primitives.randomness import _words

        assert out.dtype == np.uint64 and key.dtype == np.uint64 and key.shape == (2,) and key.flags.c_contiguous
        assert number is None or (number.shape == () and number.dtype in (np.int64, np.uint64))
        count = lambda: 0 if number is None else int(number.host) & (1 << 64) - 1
        write(out, lambda: _words(key.host, out.size, purpose, count()).reshape(out.shape))

    def scatter_add(self, out: ndarray, rows: ndarray, order: ndarray, values: ndarray) -> None:
        assert out.flags.c_contiguous and values.flags.c_contiguous and out.ndim == values.ndim == 2
        assert rows.dtype == order.dtype == np.int64 and rows.shape == order.shape == values.shape[:1]
        assert out.dtype == values.dtype and out.shape[1] == values.shape[1]

        def add() -> None:
            assert (np.diff(rows.host) >= 0).all()
            np.add.at(out.host, rows.host, values.host[order.host])

        launch(add)

    def load_copies(self) -> None:
        assert recorder is None, "machine code is loaded in a capture"

    def copy_blocks(self, table: ndarray, pieces: ndarray) -> None:
        assert table.dtype == pieces.dtype == np.int64 and table.shape[1:] == (2,) and pieces.shape[1:] == (3,)
        assert table.flags.c_contiguous and pieces.flags.c_contiguous

        def copy() -> None:
            for row, begin, nbytes in pieces.host.tolist():
                source, to = table.host[row].tolist()
                ctypes.memmove(to + begin, source + begin, nbytes)

        launch(copy)
