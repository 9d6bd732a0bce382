"""Cross-entropy, attention and dropout: against plain formulas in float64, JAX, and finite differences."""

from __future__ import annotations

import numpy as np
import pytest

import funccoll as fc
from funccoll import P, nn
from funccoll.errors import DTypeError, ShapeError
from tests.support.cases.numpy_cases import BF16
from tests.support.groups import in_groups
from tests.support.oracles.numpy_oracle import numerical

pytestmark = pytest.mark.covers("nn-models")

RNG = np.random.default_rng(0)

# ---------------------------------------------------------------- cross-entropy


def plain_losses(logits, targets):
    """-Σ p log softmax(logits), along the last dimension."""
    top = logits.max(-1, keepdims=True)
    logs = logits - top - np.log(np.exp(logits - top).sum(-1, keepdims=True))
    return -np.where(targets == 0, 0, targets * np.where(targets == 0, 0, logs)).sum(-1)


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, BF16], ids=str)
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
def test_cross_entropy(smoothing, dtype):
    for scale in (1, 1e4):
        logits = (scale * RNG.normal(size=(3, 4, 5))).astype(dtype)
        labels = RNG.integers(0, 5, (3, 4))
        probabilities = RNG.dirichlet(np.ones(5), (3, 4))
        probabilities[0, 0] = [0, 1, 0, 0, 0]
        for given, targets in [
            (labels, np.eye(5)[labels]),
            (labels.astype(np.uint8), np.eye(5)[labels]),
            (probabilities, probabilities),
        ]:
            want = plain_losses(logits.astype(np.float64), (1 - smoothing) * targets + smoothing / 5)
            got = fc.jit(lambda x, y: nn.cross_entropy(x, y, label_smoothing=smoothing))(logits, given)
            assert got.dtype == dtype and got.shape == (3, 4)
            eps = {8: 1e-14, 4: 1e-6, 2: 1e-2}[np.dtype(dtype).itemsize]
            np.testing.assert_allclose(np.asarray(got).astype(np.float64), want, rtol=eps, atol=eps)
            moved = np.moveaxis(given, -1, 0) if given.ndim == 3 else given
            other = nn.cross_entropy(np.moveaxis(logits, -1, 0), moved, label_smoothing=smoothing, axis=0)
            np.testing.assert_allclose(other.astype(np.float64), want, rtol=eps, atol=eps)


def test_gradients_of_cross_entropy():
    logits, labels, weights = RNG.normal(size=(2, 4)), np.array([3, 0]), RNG.normal(size=2)
    first = fc.grad(lambda x: np.sum(weights * nn.cross_entropy(x, labels)))
    np.testing.assert_allclose(first(logits), weights[:, None] * (nn.softmax(logits) - np.eye(4)[labels]), atol=1e-15)
    targets = RNG.dirichlet(np.ones(4), 2)
    loss = lambda x, p: np.sum(weights * nn.cross_entropy(x, p, label_smoothing=0.2))
    got = fc.grad(loss, (0, 1))(logits, targets)
    for g, n in zip(got, numerical(loss, [logits, targets], (0, 1), 1e-6), strict=True):
        np.testing.assert_allclose(g, n, rtol=1e-6, atol=1e-8)
    along = lambda x: np.sum(first(x) ** 2)
    np.testing.assert_allclose(fc.grad(along)(logits), numerical(along, [logits], [0], 1e-6)[0], rtol=1e-5, atol=1e-8)


def test_excluded_classes():
    logits = np.array([[1.0, -np.inf, 2.0], [-np.inf, 0.0, -np.inf]])
    want = [np.log(1 + np.e) - 0.0, 0.0]
    for labels in (np.array([0, 1]), np.array([[1.0, 0, 0], [0, 1, 0]])):
        np.testing.assert_allclose(nn.cross_entropy(logits, labels), want, rtol=1e-15)
        gradient = fc.grad(lambda x: np.sum(nn.cross_entropy(x, labels)))(logits)
        assert np.isfinite(gradient).all() and gradient[0, 1] == 0 and not gradient[1].any()
    assert nn.cross_entropy(logits, np.array([1, 0])).tolist() == [np.inf, np.inf]


@pytest.mark.parametrize(
    ("labels", "found"),
    [([0, 1, 97], 97), ([0, 65, 1], 65), ([1, -1, 0], -66), ([-100, 0, 0], -165), ([0, 0, -65], -130)],
)
def test_a_label_that_is_not_there_is_an_error_in_the_call(labels, found):
    """As an index is that is out of range, and as it is in torch. A NaN showed in the loss alone."""

    def loss(x, y):
        return np.mean(nn.cross_entropy(x, y))

    labels, x = np.array(labels, np.int8), np.zeros((3, 65), np.float32)
    line = rf"test_nn_models.py:{loss.__code__.co_firstlineno + 1} in loss"

    def check(call):
        with pytest.raises(IndexError, match=f"index {found} is out of bounds for axis 0 with size 65") as raised:
            call(x, labels)
        assert any(note.endswith(line) for note in raised.value.__notes__), raised.value.__notes__
        assert any("a label of fc.nn.cross_entropy (y of loss) is not one" in note for note in raised.value.__notes__)

    check(fc.jit(loss))
    check(fc.jit(fc.value_and_grad(loss)))
    with fc.debug.nans():
        check(fc.jit(loss))
    with fc.debug.disable_jit(), pytest.raises(IndexError, match=f"index {found}"):  # the traceback shows the line
        fc.jit(loss)(x, labels)
    assert np.isfinite(fc.jit(loss)(x, np.array([0, 64, 3], np.int8)))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda x: nn.cross_entropy(x, np.array([0, 3])),
            r"label 3 at index 1 is outside \[0, 3\), the numbers of the classes\.",
        ),
        (lambda x: nn.cross_entropy(x, np.array([-1, 0])), r"label -1 at index 0 is outside \[0, 3\)"),
        (lambda x: nn.cross_entropy(x, np.array([0, 1, 2])), r"labels of shape \(3,\) for logits of shape \(2, 3\).*\(2,\)"),
        (lambda x: nn.cross_entropy(x, np.ones(2)), r"probabilities of shape \(2,\).*must be equal"),
        (lambda x: nn.cross_entropy(x, np.array([0, 1]), label_smoothing=1.5), "label_smoothing=1.5"),
        (lambda x: nn.cross_entropy(x[0, 0], np.array(0)), "scalar"),
        (lambda x: nn.dropout(fc.random.key(0), x, 1.5), "rate=1.5 is not a probability"),
        (lambda x: nn.dropout(fc.random.key(0), x, float("nan")), "not a probability"),
        (lambda x: nn.dropout(fc.random.key(0), x, np.array([0.5])), "must be a scalar"),
        (lambda x: nn.attention(x, x, np.ones((3, 3))), r"\(2, 3\), \(2, 3\), \(3, 3\); they must be"),
        (lambda x: nn.attention(x, x[:, :2], x), r"\(2, 3\), \(2, 2\)"),
        (lambda x: nn.attention(x, x, x, mask=np.ones((3, 2), bool)), r"mask.*\(3, 2\)"),
        (lambda x: nn.attention(x, x, x, block_size=0), "block_size=0"),
    ],
)
def test_bad_input(call, words):
    x = np.ones((2, 3))
    for run in (call, fc.jit(call)):
        with pytest.raises(ShapeError, match=words):
            run(x)


def test_wrong_dtypes():
    x = np.ones((2, 3))
    with pytest.raises(DTypeError, match="integers or probabilities"):
        nn.cross_entropy(x.astype(int), np.array([0, 1]))
    with pytest.raises(DTypeError, match="real floats"):
        nn.attention(x.astype(int), x, x)
    with pytest.raises(DTypeError, match="bool"):
        nn.attention(x, x, x, mask=np.zeros((2, 2)))


# ---------------------------------------------------------------- attention


def plain_attention(q, k, v, mask, causal, scale):
    scores = (q.astype(np.float64) * scale) @ np.swapaxes(k, -1, -2).astype(np.float64)
    mask = np.ones(scores.shape, bool) if mask is None else mask
    allowed = np.broadcast_to(mask, np.broadcast_shapes(mask.shape, scores.shape))
    if causal:
        allowed = allowed & (np.arange(q.shape[-2])[:, None] >= np.arange(k.shape[-2]))
    powers = np.where(allowed, np.exp(scores - scores.max()), 0)
    total = powers.sum(-1, keepdims=True)
    return (powers / np.where(total > 0, total, 1)) @ v.astype(np.float64)


CASES = {
    "plain": ((2, 5, 3), (2, 5, 3), (2, 5, 4), None, False),
    "causal": ((2, 5, 3), (2, 5, 3), (2, 5, 4), None, True),
    "fewer keys, causal": ((7, 3), (4, 3), (4, 2), None, True),
    "more keys, causal": ((3, 3), (6, 3), (6, 2), None, True),
    "mask": ((2, 2, 4, 3), (2, 2, 5, 3), (2, 2, 5, 2), (2, 1, 4, 5), False),
    "mask of keys": ((2, 4, 3), (2, 5, 3), (2, 5, 2), (5,), True),
    "mask adds dimensions": ((4, 3), (5, 3), (5, 2), (2, 4, 5), False),
    "shared keys": ((2, 3, 4, 3), (4, 3), (3, 4, 2), (4, 1), True),
}


def arguments(name):
    *shapes, mask, causal = CASES[name]
    rng = np.random.default_rng(len(name))
    if mask is not None:
        mask = rng.random(mask) < 0.6
        if mask.ndim > 1:
            mask[..., 0, :] = False  # a query without a key
    return [rng.normal(size=s) for s in shapes], mask, causal


@pytest.mark.parametrize("block_size", [None, 1, 2, 3, 100])
@in_groups("name", CASES)
def test_attention(name, block_size):
    """Values; and gradients against the plain formula's differences along a direction, to the second order."""
    (q, k, v), mask, causal = arguments(name)
    ours = lambda q, k, v: nn.attention(q, k, v, mask=mask, causal=causal, scale=0.7, block_size=block_size)
    plain = lambda q, k, v: plain_attention(q, k, v, mask, causal, 0.7)
    want = plain(q, k, v)
    np.testing.assert_allclose(np.asarray(fc.jit(ours)(q, k, v)), want, rtol=1e-12, atol=1e-14)
    if block_size in (1, 100):
        return
    ct = np.cos(np.arange(want.size)).reshape(want.shape)
    step, directions = 1e-5, [np.random.default_rng(i).normal(size=x.shape) for i, x in enumerate((q, k, v))]
    moved = lambda t: [x + t * d for x, d in zip((q, k, v), directions)]
    loss = lambda f, *xs: np.sum(ct * f(*xs))
    slope = lambda *xs: sum(np.sum(g * d) for g, d in zip(fc.grad(lambda *a: loss(ours, *a), (0, 1, 2))(*xs), directions))
    np.testing.assert_allclose(slope(q, k, v), (loss(plain, *moved(step)) - loss(plain, *moved(-step))) / (2 * step), rtol=1e-6)
    if block_size == 2:
        bent = sum(np.sum(g * d) for g, d in zip(fc.grad(slope, (0, 1, 2))(q, k, v), directions))
        np.testing.assert_allclose(bent, (slope(*moved(step)) - slope(*moved(-step))) / (2 * step), rtol=1e-5)


@pytest.mark.parametrize("block_size", [None, 2])
def test_attention_far_out(block_size):
    """Large scores do not overflow, and a query without a key gets zeros and no gradient, in 16 bits too."""
    for dtype in (np.float32, np.float16, BF16):
        q, k, v = (np.array(x, dtype) for x in ([[100.0], [-100], [3]], [[200.0], [-200], [1]], [[1.0], [2], [4]]))
        mask = np.array([[True, True, True], [True, True, True], [False, False, False]])
        f = lambda q, k, v: nn.attention(q, k, v, mask=mask, scale=1.0, block_size=block_size)
        out, pull = fc.vjp(f, q, k, v)
        assert out.dtype == dtype
        np.testing.assert_array_equal(out, [[1], [2], [0]])
        gradients = pull(np.ones((3, 1), dtype))
        assert all(np.isfinite(g.astype(np.float64)).all() and g.dtype == dtype for g in gradients)
        np.testing.assert_array_equal(gradients[0][2], [0])


def test_shared_keys_on_a_mesh_have_the_sum_of_the_gradients():
    """Queries differ between devices, keys and values do not; in blocks and whole."""
    mesh = fc.make_mesh({"data": 4})
    q, k, v = RNG.normal(size=(8, 3, 2)), RNG.normal(size=(5, 2)), RNG.normal(size=(5, 2))
    for block_size in (None, 2):
        loss = lambda q, k, v: np.sum(np.sin(nn.attention(q, k, v, causal=True, block_size=block_size)))

        @fc.jit(mesh=mesh, in_specs=(P("data"), P(), P()), out_specs=(P("data"), P(), P()))
        def gradients(q, k, v):
            return fc.grad(lambda *a: fc.all_reduce(loss(*a), "data"), (0, 1, 2))(q, k, v)

        for g, want in zip(gradients(q, k, v), fc.grad(loss, (0, 1, 2))(q, k, v), strict=True):
            np.testing.assert_allclose(np.asarray(g), want, rtol=1e-12, atol=1e-14)


def test_blocks_never_hold_all_scores():
    """No value of the program, forwards and backwards, is as large as the scores."""
    q, k, v = (RNG.normal(size=(64, 4)).astype(np.float32) for _ in range(3))
    gradient = fc.grad(lambda q, k, v: np.sum(nn.attention(q, k, v, causal=True, block_size=16) ** 2), (0, 1, 2))
    program = fc.jit(gradient).trace(q, k, v).lower().program
    assert max(var.type.size for eqn in program.equations for var in eqn.outputs) == 64 * 4
    whole = fc.grad(lambda q, k, v: np.sum(nn.attention(q, k, v, causal=True) ** 2), (0, 1, 2))(q, k, v)
    for a, b in zip(fc.jit(gradient)(q, k, v), whole, strict=True):
        np.testing.assert_allclose(np.asarray(a), b, rtol=1e-4, atol=1e-5)


def test_against_jax():
    jax = pytest.importorskip("jax")
    import jax.numpy as jnp

    from tests.support.oracles.jax_sides import COMPILER_OPTIONS

    q, k, v = (RNG.normal(size=(2, 5, 3, 4)).astype(np.float32) for _ in range(3))  # JAX: length before heads
    x, labels = RNG.normal(size=(6, 5)).astype(np.float32), RNG.integers(0, 5, 6)
    heads = lambda a: jnp.swapaxes(a, 1, 2)

    def theirs(q, k, v, x):
        attended = heads(jax.nn.dot_product_attention(heads(q), heads(k), heads(v), is_causal=True))
        chosen = -jnp.take_along_axis(jax.nn.log_softmax(x), labels[:, None], 1)[:, 0]
        return [attended, chosen, jax.nn.silu(x), jax.nn.softplus(x), jax.nn.log_softmax(x * 50)]

    def ours(q, k, v, x):
        attended = nn.attention(q, k, v, causal=True)
        return [attended, nn.cross_entropy(x, labels), nn.silu(x), nn.softplus(x), nn.log_softmax(x * 50)]

    args = [np.swapaxes(a, 1, 2).copy() for a in (q, k, v)] + [x]
    found, pull = fc.vjp(ours, *args)
    cts = [np.cos(np.arange(y.size, dtype=np.float32)).reshape(y.shape) for y in found]
    lowered = jax.jit(lambda *a: (theirs(*a), jax.vjp(theirs, *a)[1](cts))).lower(*args)
    want, gradients = lowered.compile(compiler_options=COMPILER_OPTIONS)(*args)
    for ours, jaxs in zip([*found, *pull(cts)], [*want, *gradients], strict=True):
        np.testing.assert_allclose(ours, jaxs, rtol=1e-5, atol=2e-5)


# ---------------------------------------------------------------- dropout


def test_dropout():
    key, x = fc.random.key(3), RNG.normal(size=(300, 300)).astype(np.float32)
    for dtype in (np.float32, np.float16, BF16, np.float64):
        out = nn.dropout(key, x.astype(dtype), 0.25)
        assert out.dtype == dtype
        kept = out != 0
        assert abs(kept.mean() - 0.75) < 5 * np.sqrt(0.75 * 0.25 / x.size)
        np.testing.assert_array_equal(out[kept], (x.astype(dtype) * np.asarray(1 / 0.75, dtype))[kept])
    np.testing.assert_array_equal(nn.dropout(key, x, 0.0), x)
    assert not nn.dropout(key, np.full(5, np.inf, np.float32), 1.0).any()
    gradient = fc.grad(lambda x: np.sum(nn.dropout(key, x, 0.25)))(x)
    np.testing.assert_array_equal(gradient, np.where(nn.dropout(key, x, 0.25) != 0, np.float32(1 / np.float32(0.75)), 0))
    traced = fc.jit(nn.dropout)(key, x, np.float32(0.25))
    np.testing.assert_array_equal(np.asarray(traced), nn.dropout(key, x, 0.25))


def test_each_device_drops_its_own():
    mesh = fc.make_mesh({"data": 4})

    @fc.jit(mesh=mesh, in_specs=(P(), P("data")), out_specs=P("data"))
    def drop(key, x):
        return nn.dropout(fc.random.fold_in(key, fc.axis_index("data")), x, 0.5)

    key, x = fc.random.key(1), np.ones((4, 50), np.float32)
    want = [nn.dropout(fc.random.fold_in(key, i), x[i : i + 1], 0.5) for i in range(4)]
    np.testing.assert_array_equal(np.asarray(drop(key, x)), np.concatenate(want))
