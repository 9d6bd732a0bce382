"""CuPy as the library of a GPU's arrays. The module is passed in.

Every primitive of compute has a rule here, in tables of a few lines each. NumPy's references cannot run on CuPy: most of them
call functions that CuPy lacks or computes differently (reductions by ufuncs, `add.at`, generators, 16-bit floats).

Values agree with NumPy's, with these exceptions:

- Sums and products are rounded in another order.
- The last places of elementary functions differ.
- CuPy's kernels flush subnormal float32 numbers to zero.
- What C leaves undefined: floats that do not fit into an integer, shifts by the width or more.
- argmax and argmin of several NaNs give the position of any of them.

No primitive waits for the GPU, so a CUDA graph can capture every program. Products of float matrices call cuBLAS themselves
(`cublas`), because CuPy 14.2 refuses that in a capture (github.com/cupy/cupy/issues/6290). Kernels are compiled on their
first call, which a capture does not allow, so a program runs once before.

Tests run this module on a fake with the interface of CuPy 14.2.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ...arrays.array import Array
from ...arrays.array_like import device_type_of, to_numpy
from ...core.ir import Equation, Literal, Primitive
from ...core.types import ArrayType, bfloat16, check_dtype
from ...errors import DeviceError, DTypeError, TraceError, UnsupportedError
from ...kernels.native.gpu_group import gpu_group
from ...primitives.convolution import conv_input_p, conv_kernel_p, conv_p
from ...primitives.elementwise import convert_p, divisor_p, erf_p, imag_p, real_p, stop_gradient_p, where_p
from ...primitives.fused import fused_p
from ...primitives.higher_order import checkpoint_name_p
from ...primitives.linalg import einsum_p, matmul_p
from ...primitives.randomness import (
    BITS,
    FOLD_IN,
    SPLIT,
    fold_in_p,
    log_gamma_p,
    random_bits_p,
    random_order_p,
    split_p,
)
from ...primitives.reductions import REDUCTIONS, argmax_p, argmin_p, cumsum_p
from ...primitives.shaping import broadcast_to_p, concatenate_p, pad_p, reshape_p, transpose_p
from ...primitives.varying import axis_index_p, own_slice_p, pvary_p
from .cublas import Cublas
from .cupy_indexing import CupyIndexing
from .cupy_ufuncs import compute_ufunc, is_half, wide
from .cupy_windows import CupyWindows
from .deferred_checks import DeferredChecks
from .pairwise_einsum import contracts, own_terms, pairwise_einsum

__all__ = ["CupyLibrary"]

Compute = Callable[..., Any]

_IDENTITIES: dict[Primitive, int] = {
    REDUCTIONS["sum"]: 0,
    REDUCTIONS["prod"]: 1,
    REDUCTIONS["any"]: 0,
    REDUCTIONS["all"]: 1,
    matmul_p: 0,
    einsum_p: 0,
    conv_p: 0,
    conv_input_p: 0,
    conv_kernel_p: 0,
}
"""Primitives that combine elements -> their result for no elements."""


class CupyLibrary:
    """A GPU's arrays, through CuPy. Its blocks are `cupy.ndarray`.

    `kernels` has our own functions. `random_words(out, key, number, purpose)` writes the words of `primitives.randomness` for a
    key (uint64[2]) and a number (0-d uint64, or None for 0) into a uint64 array. `scatter_add(out, rows, order, values)` does
    `out[rows[i]] += values[order[i]]` in this order, for out (count, width) and values (updates, width), with sorted `rows`.

    `group(group, arrays)` computes a group from the arrays of its inputs, its outputs and its workspace.

    `special` is `cupyx.scipy.special`; if it is None, erf imports it. `load_cublas` is called before the first product of
    matrices. If it returns None, CuPy multiplies.
    """

    specialises = True

    def __init__(self, cupy: Any, kernels: Any, special: Any = None, load_cublas: Callable[[], Cublas | None] = lambda: None):
        self._cupy, self._kernels, self._special, self._load_cublas = cupy, kernels, special, load_cublas
        self.array_type: type = cupy.ndarray
        self.namespace = cupy
        self._has_bfloat16 = "EE->E" in cupy.add.types
        self.checks = DeferredChecks(cupy)
        """Read by `download` and `check`."""
        self._rules: dict[Primitive, Callable[[Equation], Compute]] = {
            where_p: self._where,
            convert_p: lambda eqn: functools.partial(_convert, dtype=eqn.params["dtype"]),
            real_p: lambda eqn: lambda x: x.real,
            imag_p: lambda eqn: lambda x: x.imag,
            divisor_p: self._divisor,
            erf_p: self._erf,
            stop_gradient_p: lambda eqn: lambda x: x,
            checkpoint_name_p: lambda eqn: lambda x: x,
            reshape_p: lambda eqn: lambda x, shape=eqn.params["shape"]: x.reshape(shape),
            transpose_p: lambda eqn: lambda x, order=eqn.params["permutation"]: x.transpose(order),
            broadcast_to_p: lambda eqn: lambda x, shape=eqn.params["shape"]: self._cupy.broadcast_to(x, shape),
            concatenate_p: self._concatenate,
            pad_p: self._pad,
            **{primitive: functools.partial(self._reduction, name) for name, primitive in REDUCTIONS.items()},
            argmax_p: functools.partial(self._position, "argmax"),
            argmin_p: functools.partial(self._position, "argmin"),
            cumsum_p: self._cumsum,
            matmul_p: self._matmul,
            einsum_p: self._einsum,
            random_bits_p: functools.partial(self._random, BITS),
            fold_in_p: functools.partial(self._random, FOLD_IN),
            split_p: functools.partial(self._random, SPLIT),
            random_order_p: lambda eqn: lambda x: self._cupy.argsort(x, axis=-1),
            log_gamma_p: _refuse_gamma,
            fused_p: self._fused,
            # These move nothing: their references index, and the position of the device is an operand.
            pvary_p: lambda eqn: lambda x: x,
            axis_index_p: lambda eqn: eqn.primitive.reference,
            own_slice_p: lambda eqn: functools.partial(
                eqn.primitive.reference, **{k: eqn.params[k] for k in ("dim", "stack", "size")}
            ),
            **CupyIndexing(cupy, kernels, self.checks).rules,
            **CupyWindows(cupy, lambda dtype: self._product(dtype)[0] or cupy.matmul).rules,
        }

    # ------------------------------------------------------------ memory

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> Any:
        """Return a new C-contiguous array with undefined values. Raise MemoryError or DTypeError."""
        self._require(dtype)
        try:
            return self._cupy.empty(shape, dtype)
        except MemoryError as error:
            raise MemoryError(
                f"the GPU has not enough memory for an array of shape {tuple(shape)}, {dtype}: {error} Delete arrays, donate "
                "arguments, or use smaller ones."
            ) from None

    def asarray(self, x: Any, what: str = "x") -> Any:
        """See `ArrayLibrary`. Arrays on this GPU are not copied: CuPy, torch and JAX arrays come by DLPack."""
        cupy = self._cupy
        if device_type_of(x) != "cuda":
            return self.upload(to_numpy(x, what))
        if type(x) is Array:
            return x.on_gpu()
        if not isinstance(x, cupy.ndarray):
            try:
                x = cupy.from_dlpack(x) if hasattr(x, "__dlpack__") else cupy.asarray(x)
            except (TypeError, ValueError, RuntimeError, BufferError) as error:  # a tensor that records gradients, or a dtype
                raise TraceError(
                    f"{what} is a {type(x).__module__}.{type(x).__qualname__} that CuPy cannot read: {str(error).rstrip('.')}. "
                    "Pass a CuPy array, or what has one's memory; for a torch tensor that records gradients x.detach()."
                ) from error
        current = cupy.cuda.Device().id
        if x.device.id != current:
            raise DeviceError(
                f"{what} is on GPU {x.device.id}, and this process computes on GPU {current}. Copy it there: "
                f"with cupy.cuda.Device({current}): x = x.copy()."
            )
        check_dtype(x.dtype, what)
        return x

    def check(self) -> None:
        """See `ArrayLibrary`. Raise IndexError if an index was out of range since the last call."""
        self.checks.raise_failed()

    def upload(self, value: np.ndarray | np.generic) -> Any:
        """Return a new array of the GPU with a host value. You may change the value as soon as this returns."""
        host = np.asarray(value)
        block = self.empty(host.shape, host.dtype)
        host = np.asarray(host, order="C")
        block.set(host)
        # The driver has read pageable memory when its copy returns. It reads pinned memory (of a data loader, for example)
        # later.
        runtime = self._cupy.cuda.runtime
        if host.size and runtime.pointerGetAttributes(host.ctypes.data).type != runtime.memoryTypeUnregistered:
            self._cupy.cuda.get_current_stream().synchronize()
        return block

    def download(self, block: Any) -> np.ndarray:
        """Return a host copy of an array. Raise IndexError if an index was out of range since the last call."""
        value = block.get()
        self.checks.raise_failed()
        return value

    def copy(self, block: Any) -> Any:
        """Return a new C-contiguous array with the same values."""
        return block.copy()

    def literal(self, value: np.ndarray | np.generic, eqn: Equation) -> Any:
        """Return a scalar constant in the form that this equation's function takes: a NumPy scalar, or an array of the GPU."""
        takes_scalars = eqn.primitive.ufunc is not None or eqn.primitive is where_p
        if takes_scalars and not all(type(a) is Literal for a in eqn.inputs):
            return np.asarray(value)[()]
        return self.upload(value)

    # ------------------------------------------------------------ compute

    def compute(self, eqn: Equation) -> Compute:
        """Return the function of an equation of compute over blocks. ufuncs and matmul take `out=`.

        The position of the device is the second operand of `own_slice` and the only one of `axis_index`. Raise DTypeError.
        """
        types, out = [a.type for a in eqn.inputs], eqn.outputs[0].type
        for type in (*types, out):
            self._require(type.dtype)
        if eqn.primitive.kind == "compute" and not eqn.primitive.multiple and not out.size:
            return lambda *operands, out=None, like=out: self.empty(like.shape, like.dtype) if out is None else out
        if eqn.primitive in _IDENTITIES and not all(t.size for t in types):
            return functools.partial(self._filled, out.shape, out.dtype, _IDENTITIES[eqn.primitive])
        if eqn.primitive.ufunc is not None:
            return compute_ufunc(self._cupy, eqn.primitive.ufunc, [t.dtype for t in types], lambda: self._exponents(eqn))
        if eqn.primitive not in self._rules:
            raise UnsupportedError(f"{eqn.primitive} cannot be computed on a GPU.", eqn.source)
        return self._rules[eqn.primitive](eqn)

    def _require(self, dtype: np.dtype) -> None:
        if dtype == bfloat16 and not self._has_bfloat16:
            raise DTypeError(
                f"CuPy {self._cupy.__version__} has no bfloat16 here: it needs CuPy 14, ml_dtypes, and NumPy 2.1.2 or newer. "
                "Update them, or use np.float16 or np.float32."
            )

    def _filled(self, shape: tuple[int, ...], dtype: np.dtype, value: int, *operands: Any, out: Any = None) -> Any:
        out = self.empty(shape, dtype) if out is None else out
        out.fill(value)
        return out

    def _exponents(self, eqn: Equation) -> Callable[[Any], None]:
        words = "Integers to negative integer powers are not allowed."
        return self.checks.below(0, lambda seen: ValueError(words), eqn.source)

    def _where(self, eqn: Equation) -> Compute:
        cupy = self._cupy
        if eqn.outputs[0].type.dtype != bfloat16:
            return cupy.where
        # It has no loop for bfloat16: integers of the same width move the bits.
        return lambda condition, x, y: cupy.where(condition, x.view(np.uint16), y.view(np.uint16)).view(bfloat16)

    def _divisor(self, eqn: Equation) -> Compute:
        dtype = eqn.outputs[0].type.dtype
        inf, zero = (self._cupy.full((), value, wide(dtype)) for value in (np.inf, 0))

        def divisor(x: Any) -> Any:
            x = _convert(x, wide(dtype))
            return _convert(self._cupy.where(self._cupy.equal(x, zero), inf, x), dtype)

        return divisor

    def _erf(self, eqn: Equation) -> Compute:
        if self._special is None:
            from cupyx.scipy import special  # pyright: ignore[reportMissingImports]  (half a second, and few programs need it)

            self._special = special
        erf, dtype = self._special.erf, eqn.outputs[0].type.dtype
        return lambda x: _convert(erf(_convert(x, wide(dtype))), dtype)

    def _concatenate(self, eqn: Equation) -> Compute:
        """Concatenate arrays. For more than 8, CuPy sends addresses from host memory, which a CUDA graph would read again."""
        (out,), dim, start, places = eqn.outputs, eqn.params["dim"], 0, []
        for atom in eqn.inputs:
            stop = start + atom.type.shape[dim]
            places.append((slice(None),) * dim + (slice(start, stop),))
            start = stop

        def concatenate(*xs: Any) -> Any:
            made = self.empty(out.type.shape, out.type.dtype)
            for place, x in zip(places, xs, strict=True):
                made[place] = x
            return made

        return concatenate

    def _pad(self, eqn: Equation) -> Compute:
        out, x = eqn.outputs[0].type, eqn.inputs[0].type
        inside = tuple(slice(low, low + n) for n, (low, _) in zip(x.shape, eqn.params["widths"], strict=True))

        def pad(x: Any, value: Any) -> Any:
            made = self.empty(out.shape, out.dtype)
            made[...] = value
            made[inside] = x
            return made

        return pad

    def _reduction(self, name: str, eqn: Equation) -> Compute:
        dims, dtype, keepdims = (eqn.params[k] for k in ("dims", "dtype", "keepdims"))
        out = eqn.outputs[0].type
        if not dims:
            return lambda x: _convert(x, dtype) if x.dtype != dtype else x.copy()
        if name in ("any", "all"):
            return lambda x: getattr(x, name)(axis=dims, keepdims=keepdims)
        if name in ("max", "min"):
            return lambda x: getattr(_convert(x, dtype), name)(axis=dims, keepdims=keepdims)
        if is_half(dtype):  # CuPy accumulates some float16 sums in float16; this reads and writes 16 bits, too

            def accumulate(x: Any) -> Any:
                made = self.empty(out.shape, dtype)
                getattr(x, name)(axis=dims, dtype=np.float32, out=made, keepdims=keepdims)
                return made

            return accumulate
        return lambda x: getattr(x, name)(axis=dims, dtype=dtype, keepdims=keepdims)

    def _position(self, name: str, eqn: Equation) -> Compute:
        dim, keepdims = eqn.params["dim"], eqn.params["keepdims"]
        dtype = wide(eqn.inputs[0].type.dtype)
        return lambda x: getattr(_convert(x, dtype), name)(axis=dim, keepdims=keepdims)

    def _cumsum(self, eqn: Equation) -> Compute:
        """Return cumulative sums. CuPy's scan of an axis has a fixed order; CUB's, without an axis, varies between runs."""
        dim, dtype = eqn.params["dim"], eqn.params["dtype"]
        return lambda x: _convert(self._cupy.cumsum(x, axis=dim, dtype=wide(dtype)), dtype)

    def _fused(self, eqn: Equation) -> Compute:
        """Return a group as one function. Its kernels read whole arrays in C order, with 16 bytes at a time."""
        group, types, kernels = eqn.params["group"], [v.type for v in eqn.outputs], self._kernels
        work, byte = gpu_group(group).workspace_bytes, np.dtype(np.uint8)

        def compute(*operands: Any) -> list[Any]:
            given = [x if x.flags.c_contiguous and x.data.ptr % 16 == 0 else x.copy() for x in operands]
            made = [self.empty(t.shape, t.dtype) for t in types]
            kernels.group(group, [*given, *made, self.empty((work,), byte)])
            return made

        return compute

    @functools.cached_property
    def _cublas(self) -> Cublas | None:
        return self._load_cublas()

    def _matmul(self, eqn: Equation) -> Compute:
        cupy, out = self._cupy, eqn.outputs[0].type
        types = [a.type for a in eqn.inputs]
        product, dtype = self._product(out.dtype)
        if product is None:
            product, dtype = cupy.matmul, out.dtype
            # CuPy multiplies two vectors in 16 bits, and has no stacks of bfloat16.
            if out.size == 1 or max(t.ndim for t in types) > 2:
                dtype = wide(out.dtype)
        if dtype == out.dtype and all(t.dtype == dtype for t in types):
            return product

        def multiply(x: Any, y: Any, out: Any = None, result: np.dtype = out.dtype) -> Any:
            x, y = _convert(x, dtype), _convert(y, dtype)
            if dtype == result:
                return product(x, y, out=out)
            if out is None:
                return product(x, y).astype(result)
            out[...] = product(x, y)
            return out

        return multiply

    def _product(self, dtype: np.dtype) -> tuple[Compute | None, np.dtype]:
        """Return our product of matrices, and the dtype in which it multiplies. Every call uses it, so a graph has its bits.

        It is None for integers, which CuPy 14.2 multiplies with its own kernels, and without cuBLAS.
        """
        blas = self._cublas if dtype.kind in "fc" or dtype == bfloat16 else None
        dtype = dtype if blas is None or dtype in blas.dtypes else wide(dtype)
        return (None if blas is None else blas.matmul), dtype

    def _einsum(self, eqn: Equation) -> Compute:
        cupy, subscripts, dtype = self._cupy, eqn.params["subscripts"], eqn.outputs[0].type.dtype
        types = [a.type for a in eqn.inputs]
        # CuPy's function computes everything without cuBLAS: one operand, integers, and products of elements.
        product = self._product(dtype)[0] if contracts(subscripts) else None
        if product is not None:
            return self._pairwise(subscripts, types, dtype, product)
        # A limit of memory would make CuPy warn. One operand needs no path, and may be a view.
        optimize = ("greedy", 1 << 62) if len(eqn.inputs) > 1 else False
        if is_half(dtype):
            return lambda *xs: cupy.einsum(subscripts, *(x.astype(np.float32) for x in xs), optimize=optimize).astype(dtype)
        return lambda *xs: cupy.einsum(subscripts, *xs, optimize=optimize)

    def _pairwise(self, subscripts: str, types: Sequence[ArrayType], dtype: np.dtype, product: Compute) -> Compute:
        """Return a contraction of several operands by products of matrices. 16-bit floats are rounded once, at the end."""
        terms, (left, right) = subscripts.split("->")[0].split(","), subscripts.split("->")
        kept = own_terms(subscripts)
        used = dtype if len(terms) == 2 and terms == kept and self._product(dtype)[1] == dtype else wide(dtype)
        sizes = dict(zip(left.replace(",", ""), (n for t in types for n in t.shape), strict=True))
        function = pairwise_einsum(f"{','.join(kept)}->{right}", [tuple(sizes[c] for c in term) for term in kept], product)

        def contract(*xs: Any) -> Any:
            given = [_convert(x, used) for x in xs]
            # Diagonals, and sums over an operand's own indices.
            given = [x if t == k else self._cupy.einsum(f"{t}->{k}", x) for t, k, x in zip(terms, kept, given, strict=True)]
            return _convert(function(*given), dtype)

        return contract

    def _random(self, purpose: int, eqn: Equation) -> Compute:
        cupy, kernels, out = self._cupy, self._kernels, eqn.outputs[0].type

        def random(key: Any, *data: Any) -> Any:
            words, key = self.empty(out.shape, out.dtype), cupy.ascontiguousarray(key)
            number = data[0].astype(np.uint64, copy=False) if data else None  # modulo 2**64
            for i in np.ndindex(key.shape[:-1]):  # each key of a stack is used alone
                kernels.random_words(words[i], key[i], None if number is None else number[i], purpose)
            return words

        return random


def _refuse_gamma(eqn: Equation) -> Compute:
    raise UnsupportedError(
        "random.gamma, beta and dirichlet cannot be drawn on a GPU, because no kernel waits for rejected samples. Draw them on "
        "the host, and pass them as arguments.",
        eqn.source,
    )


def _convert(x: Any, dtype: Any) -> Any:
    return x if x.dtype == dtype else x.astype(dtype)
