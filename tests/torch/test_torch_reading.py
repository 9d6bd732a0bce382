"""Reading a torch tensor leaves it as it is: it can be resized afterwards, and its values are those that torch shows."""

import warnings

import numpy as np
import pytest

import funccoll as fc
from funccoll import P
from funccoll.errors import TraceError
from tests.support.lazy_modules import lazily, need

pytestmark = pytest.mark.covers("torch-collectives")

need("torch", "torch is not installed: pip install 'funccoll[torch]'")
torch, ft, tensors = lazily("torch"), lazily("funccoll.torch"), lazily("funccoll.torch.tensors")
MESH = fc.make_mesh({"d": 1})
JIT = {"mesh": MESH, "in_specs": P(), "out_specs": P()}
READERS = {
    "as_array": lambda x: tensors.as_array(x),
    "a collective of tensors": lambda x: ft.all_reduce(x, MESH, "d"),
    "device_put": lambda x: fc.device_put(x, MESH, P()),
    "from_local": lambda x: fc.from_local(x, MESH, P()),
    "process_allgather": fc.process_allgather,
    "an argument": fc.jit(lambda x: x * 2, **JIT),
    "a captured tensor": lambda x: fc.jit(lambda y: y * x, **JIT)(np.ones(3)),
    "a result": lambda x: fc.jit(lambda y: (x, y), **JIT)(np.ones(3)),
    "asarray": lambda x: fc.jit(lambda y: fc.asarray(x) + y, **JIT)(np.ones(3)),
}


@pytest.mark.parametrize("reader", READERS)
def test_a_tensor_that_was_read_can_be_resized(reader):
    x = torch.arange(3, dtype=torch.float32)
    READERS[reader](x)
    x.resize_(100)  # as observers of quantisation-aware training do
    assert x[:3].tolist() == [0, 1, 2]
    READERS[reader](y := torch.ones(3))
    y.untyped_storage().resize_(0)  # as sharded training does


def test_arrays_over_tensors_have_their_values():
    dtypes = "bool uint8 int8 int16 int32 int64 uint16 uint32 uint64 float16 bfloat16 float32 float64 complex64 complex128"
    for dtype in (getattr(torch, name) for name in dtypes.split()):
        x = torch.arange(12).reshape(3, 4).to(dtype)
        for tensor in (x, x.t(), x[1:, ::2], x[0, 1], x[:0], x[:1].expand(3, 4), torch.nn.Parameter(x, requires_grad=False)):
            array = tensors.as_array(tensor)
            assert array.dtype == tensors.dtype_of(dtype) and array.flags.writeable
            assert array.shape == tensor.shape and (not array.size or array.tolist() == tensor.tolist())
            steps = [s * array.itemsize for n, s in zip(tensor.shape, tensor.stride(), strict=True) if n > 1]
            assert not array.size or steps == [s for n, s in zip(array.shape, array.strides, strict=True) if n > 1]
            assert torch.equal(tensors.as_tensor(array.copy()), tensor)
        tensors.as_array(x)[0, 0] = 1
        assert x[0, 0] == 1  # the same memory
    recorded = torch.ones(3, requires_grad=True) * 2
    assert tensors.as_array(recorded).tolist() == [2, 2, 2]
    z = torch.tensor([1 + 2j])
    assert tensors.as_array(z.conj()).tolist() == [1 - 2j] and tensors.as_array(z.conj().imag).tolist() == [-2]


def test_values_that_are_not_in_memory_are_refused():
    """A fake tensor, zeros without memory, and tensors of transforms: their memory has no values."""
    from torch import _efficientzerotensor
    from torch._subclasses import FakeTensorMode

    refused = pytest.raises((TypeError, RuntimeError, BufferError))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
        with refused:
            tensors.as_array(FakeTensorMode().from_tensor(torch.ones(3)))
    for x in (_efficientzerotensor(3), torch.ones(3, device="meta"), torch.ones(3).to_sparse()):
        with refused:
            tensors.as_array(x)
    with refused:
        torch.vmap(tensors.as_array)(torch.ones(3, 2))
    with pytest.raises(TraceError, match=r"x is a torch.Tensor that NumPy cannot read: can't convert meta"):
        fc.device_put(torch.ones(3, device="meta"), MESH, P())
    with pytest.raises(TraceError, match=r"x.detach\(\).cpu\(\)"):
        fc.device_put(torch.ones(3, requires_grad=True), MESH, P())
