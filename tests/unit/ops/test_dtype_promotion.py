"""Dtype promotion: NumPy's rule stays, and what it widens is listed, warned of once, or refused."""

import pickle
import re
import sys
import warnings

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import funccoll as fc
from funccoll import nn, optim
from funccoll.errors import DTypeError
from funccoll.primitives.special import scipy_ufunc
from tests.support.groups import in_groups

pytestmark = [
    pytest.mark.filterwarnings("error::funccoll.core.dtype_promotion.DTypePromotionWarning"),
    pytest.mark.covers("dtype-promotion"),
]

F16, F32, F64 = (np.ones(3, dtype) for dtype in (np.float16, np.float32, np.float64))
BF16 = np.ones(3, fc.bfloat16)
C64, C128 = np.ones(3, np.complex64), np.ones(3, np.complex128)
I32, BOOL = np.ones(3, np.int32), np.ones(3, bool)


def here(offset=0):
    return f"{__file__.rpartition('/')[2]}:{sys._getframe(1).f_lineno + offset}"


def lines(fn, *args, **options):
    """The widenings of a function, as text, without a warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fc.DTypePromotionWarning)
        return [*map(str, fc.jit(fn, **options).lower(*args).widenings)]


def warned(fn, *args):
    """The warnings that a call shows."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always", fc.DTypePromotionWarning)
        fn(*args)
    return found


def attention(x):
    s = x @ x.T
    e = np.exp(s / np.sqrt(32))
    return e @ x


class TestWarning:
    def test_whole(self):
        line = attention.__code__.co_firstlineno + 2
        (found,) = warned(fc.jit(attention), np.ones((4, 3), np.float32))
        file = "test_dtype_promotion.py"
        assert found.category is fc.DTypePromotionWarning and (found.filename, found.lineno) == (__file__, line)
        assert str(found.message) == (
            f"float32 becomes float64 at {file}:{line} (attention), by np.float64 5.65685; one more line widens floats. What "
            "is computed from it is float64 too, at twice the bytes: write np.float32(...) around the number, or "
            "x.astype(np.float64) if you mean float64. The jitted function's .lower(...) lists the lines, and "
            'fc.jit(..., dtype_promotion="strict") makes them errors.'
        )

    def test_once(self):
        step = fc.jit(lambda x: x * np.float64(2))
        assert len(warned(step, F32)) == 1
        assert not warned(step, F32)
        assert not warned(step, np.ones(5, np.float32))  # another program of the same lines
        assert not warned(step.lower, F32)

    def test_new_lines_warn(self):
        def f(x):
            if x.ndim == 2:
                x = x[0] * np.float64(3)
            return x * np.float64(2)

        step = fc.jit(f)
        assert "by np.float64 2.0." in str(warned(step, F32)[0].message)
        assert "by np.float64 3.0." in str(warned(step, F32[None])[0].message)
        assert not warned(step, F32)

    def test_counts(self):
        def f(x):
            a = x + np.float64(1)
            b = x + np.float64(2)
            c = x + np.float64(3)
            return a, b, c

        assert "by np.float64 1.0; 2 more lines widen floats." in str(warned(fc.jit(f), F32)[0].message)

    def test_python_shows_equal_ones_once(self):
        """A function that is jitted anew in a loop prints its warning once."""
        shown = []
        with warnings.catch_warnings():
            warnings.simplefilter("default", fc.DTypePromotionWarning)
            warnings.showwarning = lambda *args, **kwargs: shown.append(args)
            for _ in range(3):
                fc.jit(lambda x: x * np.float64(2))(F32)
        assert len(shown) == 1

    def test_a_line_that_runs_often_is_one(self):
        def f(x):
            out = []
            for i in range(3):
                out.append(x * np.float64(i))
            return out

        assert lines(f, F32) == [f"float32 becomes float64 at {here(-3)} (f), by np.float64 0.0"]

    def test_once_in_a_job(self):
        for process, count in ((None, 1), (0, 1), (1, 0)):
            mesh = fc.Mesh({"i": 2}, process=process)
            step = fc.jit(lambda x: x * np.float64(2), mesh=mesh, in_specs=fc.P("i"), out_specs=fc.P("i"))
            assert len(warned(step.trace, np.ones(4, np.float32))) == count

    def test_as_an_error(self):
        step = fc.jit(lambda x: x * np.float64(2))
        for _ in range(2):  # the second call is no more quiet than the first
            with pytest.raises(fc.DTypePromotionWarning):
                step(F32)

    def test_sixteen_bits_are_listed_alone(self):
        f = lambda x, y: x + y
        assert not warned(fc.jit(f), F16, F32)
        place = f"{here(-2)} (<lambda>)"
        mixed = lambda x, y: (x + y) * np.float64(2)
        assert "float32 becomes float64" in str(warned(fc.jit(mixed), F16, F32)[0].message)
        assert lines(f, F16, F32) == [f"float16 becomes float32 at {place}, by float32[3], an argument of <lambda>"]

    def test_the_result_is_numpy_s(self):
        f = lambda x: x / np.sqrt(32)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            out = np.asarray(fc.jit(f)(F32))
        assert out.dtype == np.float64
        np.testing.assert_array_equal(out, f(F32))


TABLE = np.ones(3)
WIDENINGS = {
    "NumPy scalar": (lambda x: x * np.float64(0.1), (F32,), "float32 becomes float64", "np.float64 0.1"),
    "NumPy integer": (lambda x: x / np.prod((2, 3)), (F32,), "float32 becomes float64", "np.int64 6"),
    "reflected": (lambda x: np.float64(2) - x, (F32,), "float32 becomes float64", "np.float64 2.0"),
    "in place": (lambda x: np.add(np.ones((), np.float64), x), (F32,), "float32 becomes float64", "np.float64 1.0"),
    "array": (lambda x: x + TABLE, (F32,), "float32 becomes float64", "an array of float64[3]"),
    "argument": (lambda x, y: x + y, (F32, F64), "float32 becomes float64", "float64[3], an argument of <lambda>"),
    "product": (lambda x, y: x @ y, (F32, F64), "float32 becomes float64", "float64[3], an argument of <lambda>"),
    "einsum": (lambda x, y: np.einsum("i,i", x, y), (F32, F64), "float32 becomes float64", "float64[3], an argument"),
    "where": (lambda x, y: np.where(x > 0, x, y), (F32, F64), "float32 becomes float64", "float64[3], an argument"),
    "list": (lambda x: np.stack([x[0], 2.0]), (F32,), "float32 becomes float64", "np.float64 2.0"),
    "concatenate": (lambda x: np.concatenate([x, TABLE]), (F32,), "float32 becomes float64", "an array of float64[3]"),
    "clip": (lambda x: np.clip(x, np.float64(0), np.float64(1)), (F32,), "float32 becomes float64", "np.float64 0.0"),
    "mask": (lambda x, m: np.sum(x) / np.sum(m), (F32, BOOL), "float32 becomes float64", "int64[], made at "),
    "int32": (lambda x, i: x * i, (F32, I32), "float32 becomes float64", "int32[3], an argument of <lambda>"),
    "complex": (lambda x: x * np.complex128(1j), (C64,), "complex64 becomes complex128", "np.complex128 1j"),
    "float to complex": (lambda x, y: x * y, (F32, C128), "float32 becomes complex128", "complex128[3], an argument"),
    "complex by float": (lambda x, y: x * y, (C64, F64), "complex64 becomes complex128", "float64[3], an argument"),
    "float16": (lambda x: x * np.float64(2), (F16,), "float16 becomes float64", "np.float64 2.0"),
    "bfloat16": (lambda x: x * np.float64(2), (BF16,), "bfloat16 becomes float64", "np.float64 2.0"),
    "atan2": (lambda x, y: np.arctan2(x, y), (F32, F64), "float32 becomes float64", "float64[3], an argument"),
    "quantile": (lambda x: np.quantile(x, np.float64(0.5)), (F32,), "float32 becomes float64", "np.float64 0.5"),
}


@in_groups("name", WIDENINGS)
def test_widenings(name):
    fn, args, what, cause = WIDENINGS[name]
    place = f" at test_dtype_promotion.py:{fn.__code__.co_firstlineno} (<lambda>)"
    found = lines(fn, *args)
    assert found
    assert found[0].startswith(f"{what}{place}, by {cause}")
    assert len(warned(fc.jit(fn), *args)) == 1
    with pytest.raises(DTypeError, match=re.escape(f"would become {what.split()[-1]}, by {cause}")) as error:
        fc.jit(fn, dtype_promotion="strict").trace(*args)
    assert error.value.source.line == fn.__code__.co_firstlineno
    expected = fn(*args)
    assert expected.dtype == np.dtype(what.split()[-1])  # NumPy itself does the same


SILENT = {
    "Python numbers": (lambda x: 2 * x**2 / 3.5 + 1 - 0.1, (F32,)),
    "complex number": (lambda x: x * 2j, (F32,)),
    "astype": (lambda x: x.astype(np.float64) * np.float64(2), (F32,)),
    "dtype=": (lambda x, y: np.add(x, y, dtype=np.float64) + np.sum(x, dtype=np.float64), (F32, F64)),
    "float64 alone": (lambda x, y: x * y / np.sqrt(32), (F64, F64)),
    "float64 and narrower integers": (lambda x, i: x * i, (F64, I32)),
    "integers alone": (lambda i, j: i / 3 + np.mean(i) * np.sqrt(j), (I32, I32)),
    "booleans": (lambda x, m: x * m, (F32, BOOL)),
    "int16": (lambda x: x * np.int16(3), (F32,)),
    "comparison": (lambda x, y: (x < y) & (x == np.float64(2)) & (np.float64(2) >= x), (F32, F64)),
    "isclose": (lambda x, y: np.isclose(x, y) & np.allclose(x, y), (F32, F64)),
    "isin": (lambda x, y: np.isin(x, y), (F32, F64)),
    "searchsorted": (lambda x, y: np.searchsorted(x, y) + np.digitize(y, x), (F32, F64)),
    "interp": (lambda x: np.interp(x, TABLE, TABLE), (F32,)),
    "float_power": (lambda x: np.float_power(x, 2), (F32,)),
    "special function without a loop of 16 bits": (lambda x: scipy_ufunc("_zeta")(x + 1, 2.5), (F16,)),
    "quantile": (lambda x: np.quantile(x, 0.5) + np.median(x), (F32,)),
    "quantile of float32": (lambda x: np.nanquantile(x, np.float32(0.5)), (F32,)),
    "at": (lambda x, y: fc.at(x)[0].set(y[0]), (F32, F64)),
    "constants": (lambda x: x * np.float32(np.float32(2) * np.float64(2)), (F32,)),
    "float16 with float16": (lambda x: x / np.float16(2) + nn.softmax(x), (F16,)),
    "bfloat16": (lambda x: x * 2.5 + nn.layer_norm(x) + nn.gelu(x), (BF16,)),
}


@in_groups("name", SILENT)
def test_silent(name):
    fn, args = SILENT[name]
    assert lines(fn, *args) == []
    fc.jit(fn, dtype_promotion="strict").trace(*args)


FLOATS = st.sampled_from([F16, BF16, F32, F64, C64, C128])
BITS = {
    np.dtype(d): b
    for d, b in (
        (np.float16, 16),
        (ml_dtypes.bfloat16, 16),
        (np.float32, 32),
        (np.float64, 64),
        (np.complex64, 32),
        (np.complex128, 64),
    )
}


@given(st.lists(st.one_of(FLOATS, st.sampled_from([I32, BOOL, I32.astype(np.int8)])), min_size=2, max_size=3))
def test_exactly_what_has_more_bits_in_the_result(arrays):
    def total(*xs):
        out = xs[0]
        for x in xs[1:]:
            out = out + x
        return out

    def widens(*xs):
        """By NumPy's own dtypes, step by step."""
        out, found = xs[0], False
        for x in xs[1:]:
            new = out + x
            found |= any(BITS.get(v.dtype, 99) < BITS.get(new.dtype, 0) for v in (out, x))
            out = new
        return found, out.dtype

    expected, dtype = widens(*arrays)
    found = lines(total, *arrays)
    assert bool(found) == expected
    if found:
        assert f"becomes {dtype}" in found[-1] or len(arrays) > 2
        with pytest.raises(DTypeError, match="strict"):
            fc.jit(total, dtype_promotion="strict").trace(*arrays)


class TestGradients:
    @pytest.mark.parametrize(
        "transform",
        [
            fc.grad,
            fc.value_and_grad,
            lambda f: fc.vmap(fc.grad(f)),
            fc.hessian,
            lambda f: lambda x: fc.jvp(f, (x,), (x,)),
            lambda f: fc.grad(fc.checkpoint(f)),
        ],
    )
    def test_forward_lines_alone(self, transform):
        def f(x):
            y = np.sum(x * np.float64(2))
            z = x.astype(np.float64) * np.float64(3)
            z = np.tanh(z) * np.prod(x, dtype=np.float64)  # whose rule multiplies x by float64
            return y * np.sum(z) + np.float64(1) * np.sum(np.where(z > 0, z, 0))

        first = f.__code__.co_firstlineno
        (found,) = lines(transform(f), np.ones((2, 2), np.float32))
        assert found == f"float32 becomes float64 at test_dtype_promotion.py:{first + 1} (f), by np.float64 2.0"

    def test_mixed_arguments(self):
        def f(w, x):
            return np.sum((x @ w) ** 2)

        line = f.__code__.co_firstlineno + 1
        for fn in (f, fc.grad(f), fc.value_and_grad(f, argnums=(0, 1))):
            (found,) = lines(fn, np.ones((3, 3), np.float32), np.ones((2, 3)))
            assert found.startswith(f"float32 becomes float64 at test_dtype_promotion.py:{line} (f), by float64[2, 3]")

    def test_strict_gradients_of_a_clean_function(self):
        def f(w, x):
            h = nn.gelu(nn.layer_norm(x @ w)) * 0.5
            return np.mean(np.logaddexp(h, 0) ** 2) + np.sum(np.abs(w)) / w.size

        step = fc.jit(fc.value_and_grad(f), dtype_promotion="strict")
        loss, grads = step(np.ones((3, 3), np.float32), np.ones((2, 3), np.float32))
        assert loss.dtype == grads.dtype == np.float32

    def test_control_flow(self):
        def f(x):
            return fc.scan(lambda c, v: (c, v * np.float64(2)), x[0], x)[1]

        for fn in (f, fc.grad(lambda x: np.sum(f(x)))):
            (found,) = lines(fn, F32)
            assert f"test_dtype_promotion.py:{f.__code__.co_firstlineno + 1} (<lambda>), by np.float64 2.0" in found


class TestStrict:
    def test_message(self):
        step = fc.jit(attention, dtype_promotion="strict")
        with pytest.raises(DTypeError) as error:
            step(np.ones((4, 3), np.float32))
        assert str(error.value).startswith(
            'attention is jitted with dtype_promotion="strict", and float32 would become float64, by np.float64 5.65685. Write '
            "np.float32(...) around the number, or x.astype(np.float64) if you mean float64.\n"
            f"  at {__file__}:{attention.__code__.co_firstlineno + 2} in attention"
        )

    def test_remedy_of_a_number(self):
        for number in (np.float64(2), np.ones(1), np.int64(3)):
            with pytest.raises(DTypeError, match=re.escape("Write np.float32(...) around the number, or x.astype(np.float64)")):
                fc.jit(lambda x: x * number, dtype_promotion="strict")(F32)

    @pytest.mark.parametrize(
        ("args", "remedy"),
        [
            ((F32, F64), "Convert the operand with .astype(np.float32), or write x.astype(np.float64) if you mean float64."),
            ((C64, F64), "Convert the operand with .astype(np.float32), or write x.astype(np.complex128) if you mean"),
            ((F32, C128), "Convert the operand with .astype(np.complex64), or write x.astype(np.complex128) if you mean"),
            ((BF16, F32), "Convert the operand with .astype(fc.bfloat16), or write x.astype(np.float32) if you mean"),
            ((F16, BF16), "Convert the operand with .astype(np.float16), or write x.astype(np.float32) if you mean"),
            ((F16, C64), "Write x.astype(np.complex64) if you mean complex64."),
        ],
    )
    def test_remedies_work(self, args, remedy):
        step = fc.jit(lambda x, y: x * y, dtype_promotion="strict")
        with pytest.raises(DTypeError, match=re.escape(remedy)):
            step(*args)
        narrow, target = args[0], re.search(r"x.astype\((\S+)\)", remedy).group(1)
        names = {"np": np, "fc": fc}
        wide = eval(target, names)
        if args[1].dtype.itemsize > 2:  # both are narrower
            fc.jit(lambda x, y: x.astype(wide) * y, dtype_promotion="strict")(*args)
        found = re.search(r"with .astype\((\S+)\)", remedy)
        if found:
            out = fc.jit(lambda x, y: x * y.astype(eval(found.group(1), names)), dtype_promotion="strict")(*args)
            assert BITS[out.dtype] == BITS[narrow.dtype]

    def test_jitted_inside_another(self):
        inner = fc.jit(lambda x: x * np.float64(2), dtype_promotion="strict")
        with pytest.raises(DTypeError, match="<lambda> is jitted with"):
            fc.jit(lambda x: inner(x))(F32)

    def test_options(self):
        for wrong in ("Strict", None, True, "float32"):
            with pytest.raises(DTypeError, match=re.escape(f'dtype_promotion={wrong!r}: it is "standard"')):
                fc.jit(lambda x: x, dtype_promotion=wrong)
        standard = fc.jit(lambda x: x, dtype_promotion="standard")
        np.testing.assert_array_equal(np.asarray(standard(F32)), F32)

    def test_on_a_mesh(self, line):
        def f(x):
            return fc.all_reduce(np.sum(x), "data") / fc.axis_size("data") + fc.axis_index("data").astype(np.float32)

        fc.jit(f, mesh=line, in_specs=fc.P("data"), out_specs=fc.P("data"), dtype_promotion="strict").trace
        g = lambda x: x * fc.axis_index("data")
        options = {"mesh": line, "in_specs": fc.P("data"), "out_specs": fc.P("data")}
        assert lines(g, np.ones(4, np.float32), **options)[0].partition(", by ")[2].startswith("int32[], made at ")
        with pytest.raises(DTypeError, match=re.escape("int32[], made at")):
            fc.jit(g, dtype_promotion="strict", **options).trace(np.ones(4, np.float32))


class TestListing:
    def test_text(self):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            lowered = fc.jit(attention).lower(np.ones((4, 3), np.float32))
        first = attention.__code__.co_firstlineno
        expected = (
            "\n\nwidened by NumPy's promotion:\n"
            f"  float32 becomes float64 at test_dtype_promotion.py:{first + 2} (attention), by np.float64 5.65685\n"
            f"  float32 becomes float64 at test_dtype_promotion.py:{first + 3} (attention), by float64[4, 4], made at "
            f"test_dtype_promotion.py:{first + 2} (attention)"
        )
        assert str(lowered) == lowered.program.text() + expected
        assert "float64[4, 4], made at" in lowered._repr_html_()
        clean = fc.jit(attention).lower(np.ones((4, 3)))
        assert str(clean) == clean.program.text()

    def test_named_scope(self):
        def f(x):
            with fc.named_scope("scores"):
                return x * np.float64(2)

        assert "(f) in scores, by np.float64 2.0" in lines(f, F32)[0]

    def test_fingerprint_and_cache(self):
        """Lines are not part of what a program is."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            a = fc.jit(lambda x: x * np.float64(2)).lower(F32)
            b = fc.jit(lambda x: x * np.float64(2)).lower(F32)
        assert str(a.widenings) != str(b.widenings) and a.fingerprint == b.fingerprint

    def test_pickled(self):
        step = fc.jit(np.negative, dtype_promotion="strict")
        assert pickle.loads(pickle.dumps(step))._function.options.dtype_promotion == "strict"


class TestOwnCode:
    """What funccoll computes itself widens nothing on the way."""

    @pytest.mark.parametrize("dtype", [np.float16, fc.bfloat16, np.float32])
    def test_nn(self, dtype):
        x, c = np.ones((2, 4, 4, 3), dtype), np.ones(3, dtype)

        def f(x, c, weights):
            y, stats = nn.sync_batch_norm(x, c, c, axis=None, weights=weights)
            running = nn.update_running_stats((c.astype(np.float32), c.astype(np.float32)), stats)
            z = nn.batch_norm(x, c, c, mean=c, var=c)
            q = nn.attention(x, x, x)
            pooled = nn.avg_pool(x, 2), nn.max_pool(x, 2)
            losses = nn.log_softmax(x), nn.gelu(x), nn.silu(x), nn.layer_norm(x, c, c), nn.rms_norm(x, c)
            return y, running, z, q, pooled, losses

        total = lambda *args: sum(np.sum(leaf) for leaf in fc.tree.leaves(f(*args)))
        fc.jit(f, dtype_promotion="strict").trace(x, c, np.ones(2, bool))
        if dtype == np.float32:  # the sum would mix
            fc.jit(fc.grad(total, (0, 1)), dtype_promotion="strict").trace(x, c, np.ones(2, np.float32))

    @pytest.mark.parametrize("dtype", [np.float16, np.float32])
    def test_optim(self, dtype):
        optimizer = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(optim.cosine_decay_schedule(1e-3, 10)))
        params = {"w": np.ones((3, 3), dtype)}
        step = fc.jit(lambda p, s: optim.apply(optimizer, p, s, p), dtype_promotion="strict")
        step(params, optimizer.init(params))

    def test_running_statistics_keep_their_precision(self):
        stats = nn.BatchStats(np.float32([0.5]), np.float32([2.0]), np.float32(4))
        for dtype in (np.float32, np.float64):
            running = np.zeros(1, dtype), np.ones(1, dtype)
            mean, var = fc.jit(lambda r, s: nn.update_running_stats(r, s, 0.1), dtype_promotion="strict")(running, stats)
            assert mean.dtype == var.dtype == dtype
            np.testing.assert_allclose(np.asarray(mean), [0.05], rtol=1e-6)
            np.testing.assert_allclose(np.asarray(var), [0.9 + 0.1 * 2.0 * 4 / 3], rtol=1e-6)

    def test_eps_is_added_in_float32(self):
        x, c = np.zeros((2, 3), np.float16), np.zeros(3, np.float16)
        out = fc.jit(lambda x, c: nn.batch_norm(x + np.float16(1), mean=c, var=c, eps=1e-9))(x, c)
        np.testing.assert_allclose(np.asarray(out), 31623.0, rtol=1e-3)  # in float16 eps is 0
