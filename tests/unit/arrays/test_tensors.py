"""A tensor of another library, which has dtypes of its own, works as a NumPy array or is refused by its name."""

import numpy as np
import pytest

import funccoll as fc
from funccoll import P
from funccoll.errors import DTypeError, ShapeError, TraceError
from tests.support.misuse import LINE, X, wrong

pytestmark = pytest.mark.covers("arrays")


class Dtype:
    """A dtype that NumPy cannot read, as torch.float32 is."""

    def __repr__(self):
        return "fake.float32"


class Tensor:
    """What a torch tensor in host memory has of the protocols."""

    def __init__(self, values):
        self._values = np.asarray(values)
        self.shape, self.dtype, self.requires_grad, self.device = self._values.shape, Dtype(), False, "cpu"

    def __array__(self, dtype=None, copy=None):
        if self.device != "cpu":
            raise TypeError("can't convert cuda:0 device type tensor to numpy.")
        if self.requires_grad:
            raise RuntimeError("Can't call numpy() on Tensor that requires grad.")
        return self._values if dtype is None else self._values.astype(dtype)

    def __dlpack__(self, **kwargs):
        if self.device != "cpu":
            raise BufferError("Can't export tensors that live on cuda:0")
        if self.requires_grad:
            raise BufferError("Can't export tensors that require gradient, use tensor.detach()")
        return self._values.__dlpack__(**kwargs)

    def __dlpack_device__(self):
        return self._values.__dlpack_device__()


class DlpackTensor:
    """The same through DLPack alone."""

    def __init__(self, values):
        self._tensor = Tensor(values)
        self.shape, self.dtype = self._tensor.shape, self._tensor.dtype

    def __dlpack__(self, **kwargs):
        return self._tensor.__dlpack__(**kwargs)

    def __dlpack_device__(self):
        return self._tensor.__dlpack_device__()


Tensor.__module__, Tensor.__qualname__ = DlpackTensor.__module__, DlpackTensor.__qualname__ = "fake", "Tensor"
BOTH = pytest.mark.parametrize("tensor", [Tensor, DlpackTensor])


def deviation(batch, scale):
    return (batch["x"] - fc.all_reduce(np.mean(batch["x"]), "data", op="mean")) * scale


STEP = fc.jit(deviation, mesh=LINE, in_specs=(P("data"), P()), out_specs=P("data"))


@BOTH
def test_an_argument_of_a_jitted_function(tensor):
    expected = STEP({"x": X}, np.float32(2))
    for call in (STEP, STEP, STEP.lower({"x": tensor(X)}, tensor(np.float32(2))).compile()):
        got = call({"x": tensor(X)}, tensor(np.float32(2)))
        assert got.dtype == np.float32
        np.testing.assert_array_equal(got, expected)


@BOTH
def test_placement_copies_it(tensor):
    values = X.copy()
    put = fc.device_put(tensor(values), LINE, P("data"))
    blocks = fc.from_local([tensor(values[i : i + 2]) for i in range(0, 8, 2)], LINE, P("data"))
    values[:] = -1
    for array in (put, blocks):
        assert array.dtype == np.float32 and array.sharding.spec == P("data")
        np.testing.assert_array_equal(array, X)


@BOTH
def test_a_tensor_is_read_in_each_call(tensor):
    values = X.copy()
    argument = tensor(values)
    double = fc.jit(lambda x: x * 2)
    first = double(argument)
    values += 1
    np.testing.assert_array_equal(double(argument), 2 * (X + 1))
    np.testing.assert_array_equal(first, 2 * X)


def test_a_captured_tensor():
    np.testing.assert_array_equal(fc.jit(lambda x: x * Tensor(X) + np.sum(Tensor(X)))(X), X * X + X.sum())


@pytest.mark.parametrize("attribute", ["device", "requires_grad"])
def test_a_tensor_that_numpy_cannot_read_is_refused_by_its_name(attribute):
    tensor = Tensor(X)
    setattr(tensor, attribute, "cuda:0" if attribute == "device" else True)
    reason = "cuda:0" if attribute == "device" else "requires grad"
    for call, what in (
        (lambda: STEP({"x": tensor}, 1.0), "batch['x'] of deviation"),
        (lambda: fc.device_put(tensor, LINE), "device_put: x"),
        (lambda: fc.from_local([tensor] * 4, LINE), "from_local: block 0"),
    ):
        wrong(TraceError, call, f"{what} is a fake.Tensor that NumPy cannot read", reason, "x.detach().cpu()")


def test_what_its_dtype_or_shape_does_not_fit():
    wrong(DTypeError, lambda: STEP({"x": Tensor(np.array(["a"] * 8))}, 1.0), "batch['x'] of deviation", "<U1")
    compiled = STEP.lower({"x": X}, np.float32(1)).compile()
    wrong(ShapeError, lambda: compiled({"x": Tensor(X[:4])}, np.float32(1)), "batch['x']", "float32[4]", "float32[8]")
