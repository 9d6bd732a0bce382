"""Programs on one axis: normalisation, attention, exchanges, reductions over devices (see jax_programs.py)."""

from __future__ import annotations

import math

from tests.support.cases.jax_programs import COLUMNS, LINE, RING, ROWS, program, whole
from tests.support.oracles.jax_sides import Input


@program(LINE, Input((8, 4), ROWS))
def batch_norm(b, x):
    mean = b.all_reduce(b.np.mean(x, axis=0), "data", op="mean")
    variance = b.all_reduce(b.np.mean((x - mean) ** 2, axis=0), "data", op="mean")
    y = (x - mean) / b.np.sqrt(variance + 1e-5)
    return b.all_reduce(b.np.sum(b.np.tanh(y + x)), "data"), [y]


@program(LINE, Input((3, 16), COLUMNS))
def logsumexp_over_devices(b, x):
    top = b.stop_gradient(b.all_reduce(b.np.max(x, axis=1), "data", op="max"))
    out = b.np.log(b.all_reduce(b.np.sum(b.np.exp(x - top[:, None]), axis=1), "data")) + top
    return b.np.sum(out**2), [out]


@program(LINE, Input((3, 16), COLUMNS))
def softmax_with_a_differentiated_max(b, x):
    top = b.all_reduce(b.np.max(x, axis=1, keepdims=True), "data", op="max")
    e = b.np.exp(x - top)
    s = e / b.all_reduce(b.np.sum(e, axis=1, keepdims=True), "data")
    return b.all_reduce(b.np.sum(s * b.np.sin(x)), "data") + b.np.sum(top), [s]


@program(LINE, whole(6, 4), Input((4, 16), COLUMNS), Input((6,), labels=16))
def vocabulary_cross_entropy(b, h, table, labels):
    """The vocabulary is split: each device holds the logits of its words."""
    logits = h @ table
    top = b.stop_gradient(b.all_reduce(b.np.max(logits, axis=1), "data", op="max"))
    total = b.np.log(b.all_reduce(b.np.sum(b.np.exp(logits - top[:, None]), axis=1), "data")) + top
    own = b.nn.one_hot(labels - 4 * b.axis_index("data"), 4)
    return b.np.mean(total - b.all_reduce(b.np.sum(own * logits, axis=1), "data")), [total]


@program(LINE, Input((16, 4), ROWS), Input((6,), labels=16))
def vocabulary_embedding(b, table, labels):
    at = labels - 4 * b.axis_index("data")
    inside = (at >= 0) & (at < 4)
    rows = b.np.where(inside[:, None], b.np.take(table, b.np.where(inside, at, 0), axis=0), 0.0)
    return b.np.sum(b.np.tanh(b.all_reduce(rows, "data"))), []


@program(LINE, Input((8, 6), ROWS), whole(6, 6))
def sequence_parallel_attention(b, x, w):
    everyone = b.all_gather(b.nn.layer_norm(x), "data")
    attention = b.nn.softmax(x @ w @ everyone.T / math.sqrt(6), axis=-1)
    out = x + attention @ everyone
    return b.all_reduce(b.np.sum(b.nn.gelu(out)), "data"), [out]


@program(LINE, Input((8, 4), ROWS), Input((8, 4), ROWS), Input((8, 4), ROWS))
def ring_attention(b, q, k, v):
    """Keys and values travel around the ring; the softmax is accumulated with a running maximum."""
    top, total, out = q @ k[0] - 1e3, 0.0, 0.0
    for _ in range(4):
        scores = q @ k.T
        higher = b.stop_gradient(b.np.maximum(top, b.np.max(scores, axis=1)))
        weights = b.np.exp(scores - higher[:, None])
        shrink = b.np.exp(b.stop_gradient(top) - higher)
        total = total * shrink + b.np.sum(weights, axis=1)
        out = (out * shrink[:, None] if _ else 0.0) + weights @ v
        top = higher
        k, v = b.permute((k, v), "data", pairs=RING)
    out = out / total[:, None]
    return b.all_reduce(b.np.sum(b.np.sin(out)), "data"), [out]


@program(LINE, Input((4, 8), ROWS), Input((8, 4), ROWS))
def ring_matmul(b, x, w):
    """x is split by rows, w by its inner dimension: blocks of w go round."""
    out, block = 0.0, w
    here = b.axis_index("data")
    for step in range(4):
        owner = (here - step) % 4
        part = b.np.take(x, 2 * owner + b.np.arange(2, dtype="int32"), axis=1)
        out = out + part @ block
        block = b.permute(block, "data", pairs=RING)
    return b.all_reduce(b.np.sum(b.np.tanh(out)), "data"), [out]


@program(LINE, Input((16, 4), ROWS), Input((4, 4, 4), ROWS))
def experts_by_all_to_all(b, x, w):
    """Block j of each device's tokens goes to expert j and comes back."""
    sent = b.all_to_all(x, "data", split_dim=0, concat_dim=0)
    done = b.nn.relu(sent @ w[0]) + sent
    back = b.all_to_all(done, "data", split_dim=0, concat_dim=0)
    return b.all_reduce(b.np.sum(b.np.tanh(back + x)), "data"), [back]


@program(LINE, Input((8, 4, 3), ROWS))
def heads_by_all_to_all(b, x):
    """Sequence-split to head-split and back, with attention between (Ulysses)."""
    h = b.all_to_all(x, "data", split_dim=1, concat_dim=0)
    scores = b.nn.softmax(b.np.einsum("ihd,jhd->hij", h, h), axis=-1)
    out = b.all_to_all(b.np.einsum("hij,jhd->ihd", scores, h), "data", split_dim=0, concat_dim=1)
    return b.all_reduce(b.np.sum(out**2), "data"), [out]


@program(LINE, Input((16, 3), ROWS), whole(3))
def halo_convolution(b, x, kernel):
    """A three-point stencil whose neighbours' rows are exchanged; zeros beyond the ends."""
    left = b.permute(x[-1:], "data", pairs=[(i, i + 1) for i in range(3)])
    right = b.permute(x[:1], "data", pairs=[(i + 1, i) for i in range(3)])
    padded = b.np.concatenate([left, x, right], axis=0)
    y = kernel[0] * padded[:-2] + kernel[1] * padded[1:-1] + kernel[2] * padded[2:]
    return b.all_reduce(b.np.sum(b.np.tanh(y)), "data"), [y]


@program(LINE, Input((4, 3, 3), ROWS), whole(2, 3))
def pipeline(b, w, x):
    """Device i is layer i; the activation passes through all of them."""
    h = b.pvary(x, "data")
    for _ in range(4):
        h = b.permute(b.np.tanh(h @ w[0]), "data", pairs=RING)
    return b.np.sum(b.broadcast(h, "data", root=0) ** 2), [h]


@program(LINE, Input((8, 3), ROWS))
def prefix_sum(b, x):
    sums = b.all_gather(b.np.sum(x, axis=0), "data", stack=True)
    before = (b.np.arange(4, dtype="int32") < b.axis_index("data")).astype("float32")
    y = b.np.cumsum(x, axis=0) + before @ sums
    return b.all_reduce(b.np.sum(b.np.sin(y)), "data"), [y]


@program(LINE, Input((4, 5), ROWS))
def product_of_probabilities(b, x):
    p = b.all_reduce(b.nn.sigmoid(x[0]), "data", op="prod")
    return b.np.sum(b.np.log(p) * p), [p]


@program(LINE, Input((8, 3), ROWS))
def min_max_scaling(b, x):
    high = b.all_reduce(b.np.max(x, axis=0), "data", op="max")
    low = b.all_reduce(b.np.min(x, axis=0), "data", op="min")
    y = (x - low) / (high - low)
    return b.all_reduce(b.np.sum(y**3), "data"), [y, high, low]


@program(LINE, Input((8, 3), ROWS))
def root_normalises(b, x):
    y = b.scatter(b.nn.layer_norm(b.gather(x, "data", root=3).T, eps=0.1).T, "data", root=3)
    return b.all_reduce(b.np.sum(y * b.np.tanh(x)), "data"), [y]


@program(LINE, Input((4, 3), ROWS))
def reductions_to_root(b, x):
    y = [b.reduce(x, "data", root=r, op=op) for r, op in enumerate(("sum", "mean", "max", "prod"))]
    return b.all_reduce(b.np.sum(b.np.sin(sum(y)) * x), "data"), y


@program(LINE, Input((8, 4), ROWS), Input((8, 4), ROWS))
def contrastive(b, x, y):
    """Every device's negatives are all devices' samples."""
    unit = lambda z: z / b.np.sqrt(b.np.sum(z * z, axis=1, keepdims=True) + 1e-3)
    logits = unit(x) @ b.all_gather(unit(y), "data").T * 3
    labels = 2 * b.axis_index("data") + b.np.arange(2, dtype="int32")
    return b.all_reduce(-b.np.mean(b.nn.log_softmax(logits) * b.nn.one_hot(labels, 8)), "data", op="mean"), [logits]


@program(LINE, whole(8, 2), Input((8, 3), ROWS))
def own_block_of_parameters(b, w, x):
    return b.all_reduce(b.np.sum(b.np.tanh(b.own_slice(w, "data").T @ x)), "data"), []


@program(LINE, whole(3, 3), Input((5, 8, 3), COLUMNS))
def recurrent(b, w, xs):
    h = 0.0 * xs[0]
    for t in range(5):
        h = b.np.tanh(h @ w + xs[t])
    return b.all_reduce(b.np.mean(h), "data", op="mean"), [h]


@program(LINE, Input((8, 3), ROWS))
def clipped_gradient(b, x):
    @b.custom_vjp
    def clipped(x):
        return x

    clipped.defvjp(lambda x: (x, None), lambda _, ct: (b.np.clip(ct, -0.3, 0.3),))
    return b.all_reduce(b.np.sum(clipped(x) ** 2), "data"), []


@program(LINE, whole(3), Input((16, 3), ROWS), Input((16,), ROWS))
def conjugate_gradients(b, start, a, y):
    """Two steps on the normal equations: every inner product over rows is an all_reduce."""
    normal = lambda v: b.all_reduce(a.T @ (a @ v), "data") / 16 + v
    w, r = start, b.all_reduce(a.T @ y, "data") / 16 - normal(start)
    d = r
    for _ in range(2):
        step = b.np.dot(r, r) / b.np.dot(d, normal(d))
        w, new = w + step * d, r - step * normal(d)
        d, r = new + b.np.dot(new, new) / (b.np.dot(r, r) + 1e-3) * d, new
    return b.np.sum(w**2), [w]
