"""Programs as people write them: training steps, and layers on two axes. Each is written once against `b` (see
jax_sides.py) and returns (loss, outputs). jax_layers.py has more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from funccoll import P
from tests.support.oracles.jax_sides import Input, Program

PROGRAMS: dict[str, Program] = {}
LINE, GRID = "line", "grid"
ROWS, COLUMNS = P("data"), P(None, "data")
RING = [(i, (i + 1) % 4) for i in range(4)]


def program(mesh: str, *inputs: Input) -> Callable[[Any], Any]:
    def register(body: Any) -> Any:
        PROGRAMS[body.__name__] = Program(body.__name__, mesh, inputs, body)
        return body

    return register


def whole(*shape: int) -> Input:
    return Input(shape)


def mlp(b: Any, x: Any, w1: Any, b1: Any, w2: Any) -> Any:
    return b.np.tanh(x @ w1 + b1) @ w2


def mse(b: Any, x: Any, y: Any) -> Any:
    return b.np.mean(b.np.square(x - y))


# ---------------------------------------------------------------- training steps


MLP = (whole(3, 8), whole(8), whole(8, 2), Input((8, 3), ROWS), Input((8, 2), ROWS))


@program(LINE, *MLP)
def data_parallel_mlp(b, w1, b1, w2, x, y):
    return b.all_reduce(mse(b, mlp(b, x, w1, b1, w2), y), "data", op="mean"), []


@program(LINE, *MLP)
def data_parallel_in_buckets(b, w1, b1, w2, x, y):
    loss = b.data_parallel(lambda params, x, y: mse(b, mlp(b, x, *params), y))
    return loss((w1, b1, w2), x, y), []


@program(LINE, whole(3, 2), Input((8, 3), ROWS), Input((8, 2), ROWS))
def three_steps_of_sgd(b, w, x, y):
    for _ in range(3):
        w = w - 0.1 * b.grad(lambda w: b.all_reduce(mse(b, b.np.tanh(x @ w), y), "data", op="mean"))(w)
    return b.np.sum(w * w), [w]


@program(LINE, *MLP)
def adam(b, w1, b1, w2, x, y):
    params = {"w1": w1, "b1": b1, "w2": w2}

    def loss(p):
        return b.all_reduce(mse(b, mlp(b, x, p["w1"], p["b1"], p["w2"]), y), "data", op="mean")

    value, g = b.value_and_grad(loss)(params)
    m = b.tree_map(lambda g: 0.1 * g / (1 - 0.9), g)
    v = b.tree_map(lambda g: 0.001 * g * g / (1 - 0.999), g)
    new = b.tree_map(lambda p, m, v: p - 0.1 * m / b.np.sqrt(v + 1e-2), params, m, v)
    return value + loss(new), [new["w1"], new["b1"], new["w2"]]


@program(LINE, *MLP)
def clipped_by_global_norm(b, w1, b1, w2, x, y):
    loss = lambda p: b.all_reduce(mse(b, mlp(b, x, *p), y), "data", op="mean")
    value, g = b.value_and_grad(loss)((w1, b1, w2))
    norm = b.np.sqrt(sum(b.np.sum(v * v) for v in g))
    return value + norm, [v / b.np.maximum(norm, 0.5) for v in g]


@program(LINE, whole(8, 4), Input((8, 8), ROWS))
def zero_step(b, w, x):
    """Gradients are scattered, each device updates its block, blocks are gathered."""
    mine = lambda w: b.np.mean(b.np.tanh(x @ w) ** 2)
    g = b.grad(mine)(b.pvary(w, "data"))
    block = b.own_slice(w, "data") - 0.5 * b.reduce_scatter(g, "data", op="mean")
    new = b.all_gather(block, "data")
    return b.all_reduce(mine(new), "data", op="mean"), [new, block]


@program(LINE, Input((8, 4), ROWS), Input((8, 8), ROWS))
def fully_sharded(b, w, x):
    return b.all_reduce(b.np.mean(b.np.tanh(x @ b.all_gather(w, "data")) ** 2), "data", op="mean"), []


@program(LINE, whole(4, 4), Input((8, 4), ROWS))
def gradient_variance(b, w, x):
    """Each device's own gradient, and how they differ."""
    own = b.grad(lambda w: b.np.mean(b.np.tanh(x @ w)))(b.pvary(w, "data"))
    mean = b.all_reduce(own, "data", op="mean")
    return b.np.sum(b.all_reduce((own - mean) ** 2, "data", op="mean")), [own, mean]


@program(LINE, whole(4, 4), Input((8, 4), ROWS))
def broadcast_from_root(b, w, x):
    """Devices start with different weights; root's win."""
    w = b.broadcast(w * (1 + b.axis_index("data").astype("float32")), "data", root=2)
    return b.all_reduce(b.np.sum(b.np.tanh(x @ w)), "data"), [w]


@program(LINE, whole(4, 4), whole(4, 4), Input((8, 4), ROWS))
def target_network(b, w, target, x):
    online, fixed = b.np.tanh(x @ w), b.stop_gradient(b.np.tanh(x @ target))
    return b.all_reduce(mse(b, online, fixed), "data", op="mean"), [fixed]


@program(LINE, whole(4, 4), Input((8, 4), ROWS))
def gradient_penalty(b, w, x):
    """The gradient in the inputs is itself part of the loss."""
    slope = b.grad(lambda x: b.all_reduce(b.np.sum(b.np.tanh(x @ w)), "data"))(x)
    return b.all_reduce(b.np.mean((b.np.sqrt(b.np.sum(slope**2, axis=-1) + 0.1) - 1) ** 2), "data", op="mean"), [slope]


@program(LINE, whole(4, 3), whole(4, 3), Input((8, 4), ROWS))
def hessian_vector_product(b, w, v, x):
    slope = lambda w: b.np.sum(b.grad(lambda w: b.all_reduce(b.np.sum(b.np.tanh(x @ w) ** 3), "data"))(w) * v)
    return slope(w), [b.grad(slope)(w)]


@program(LINE, whole(3, 2), Input((8, 3), ROWS), Input((8, 2), ROWS))
def gradient_with_aux(b, w, x, y):
    def loss(w):
        z = b.np.tanh(x @ w)
        return b.all_reduce(mse(b, z, y), "data", op="mean"), {"z": z, "top": b.all_reduce(b.np.max(z), "data", op="max")}

    (value, aux), g = b.value_and_grad(loss, has_aux=True)(w)
    return value + b.np.sum(g * g), [aux["z"], aux["top"], g]


@program(LINE, whole(3, 2), whole(2), Input((8, 3), ROWS))
def gradient_in_some_arguments(b, w, c, x):
    loss = lambda c, x, w: b.all_reduce(b.np.sum(b.np.tanh(x @ w + c)), "data")
    gw, gc = b.grad(loss, argnums=(2, 0))(c, x, w)
    return b.np.sum(gw**2) + b.np.sum(gc**3), [gw, gc]


@program(LINE, Input((8, 4), ROWS), Input((8, 4), ROWS))
def pullback(b, x, y):
    z, pull = b.vjp(lambda x, y: b.permute(x * y, "data", pairs=RING), x, y)
    gx, gy = pull(b.np.cos(z))
    return b.all_reduce(b.np.sum(gx * y + gy**2), "data"), [gx, gy]


# ---------------------------------------------------------------- two axes


SHARDED = (Input((4, 8), P(None, "model")), Input((8, 4), P("model")), Input((8, 4), ROWS), Input((8, 4), ROWS))


@program(GRID, *SHARDED)
def tensor_parallel_mlp(b, w1, w2, x, y):
    """w1 by columns, w2 by rows: one all_reduce in the middle axis, one for the mean loss."""
    z = b.all_reduce(b.nn.gelu(x @ w1) @ w2, "model")
    return b.all_reduce(mse(b, z, y), "data", op="mean"), [z]


@program(GRID, *SHARDED)
def sgd_on_two_axes(b, w1, w2, x, y):
    loss = lambda p: b.all_reduce(mse(b, b.all_reduce(b.np.tanh(x @ p[0]) @ p[1], "model"), y), "data", op="mean")
    g = b.grad(loss)((w1, w2))
    new = (w1 - 0.1 * g[0], w2 - 0.1 * g[1])
    return loss(new), list(new)


@program(GRID, *SHARDED[:2], Input((8, 6, 4), P("data", "model")))
def sequence_and_tensor_parallel(b, w1, w2, x):
    """Between layers the sequence is split over the model axis: all_gather in, reduce_scatter out."""
    h = b.all_gather(b.nn.layer_norm(x), "model", dim=1)
    y = x + b.reduce_scatter(b.nn.relu(h @ w1) @ w2, "model", dim=1)
    return b.all_reduce(b.np.sum(b.np.tanh(y)), ("data", "model")), [y]


@program(GRID, *SHARDED[:3])
def megatron_pair(b, w1, w2, x):
    """Identity forward and all_reduce backward, written by hand; the other way round after."""

    @b.custom_vjp
    def enter(x):
        return b.pvary(x, "model")

    enter.defvjp(lambda x: (b.pvary(x, "model"), None), lambda _, ct: (b.all_reduce(ct, "model"),))
    z = b.all_reduce(b.np.tanh(enter(x) @ w1) @ w2, "model")
    return b.all_reduce(b.np.sum(z**2), "data"), [z]


@program(GRID, Input((6, 8), P(None, "model")), Input((8, 6), P("model")), Input((8, 6), ROWS))
def heads_over_the_model_axis(b, qkv, out, x):
    q = b.np.reshape(x @ qkv, (2, 2, 2))
    a = b.nn.softmax(b.np.einsum("ihd,jhd->hij", q, q), axis=-1)
    y = b.all_reduce(b.np.reshape(b.np.einsum("hij,jhd->ihd", a, q), (2, 4)) @ out, "model")
    return b.all_reduce(b.np.sum(b.np.sin(y)), "data"), [y]


@program(GRID, Input((8, 4), P("data", "model")), Input((4, 6), P("data", "model")))
def matmul_on_a_grid(b, x, w):
    """Rows of x are gathered over the model axis, columns of w over the data axis."""
    y = b.all_gather(x, "model", dim=1) @ b.all_gather(w, "data")
    return b.all_reduce(b.np.sum(b.np.tanh(y)), ("model", "data")), [y]


@program(GRID, Input((16, 4), P(("data", "model"))))
def reductions_in_steps(b, x):
    """reduce_scatter on one axis, all_reduce on the other, all_gather on the first: an all_reduce in all."""
    part = b.all_reduce(b.reduce_scatter(x, "model"), "data")
    y = b.all_gather(part, "model")
    return b.np.sum(b.np.sin(y)), [y, b.all_reduce(x, ("data", "model"))]


@program(GRID, Input((16, 3), P(("data", "model"))), Input((16, 3), P(("model", "data"))))
def tuples_of_axes_in_both_orders(b, x, y):
    g = b.all_gather(x, ("data", "model")) * b.all_gather(y, ("model", "data"))
    s = b.reduce_scatter(b.pvary(b.np.tanh(g), ("data", "model")), ("model", "data"))
    r = b.broadcast(x, ("model", "data"), root=3) + b.all_reduce(y, ("model", "data"), op="max")
    return b.all_reduce(b.np.sum(s * y), ("model", "data")) + b.np.sum(r**2), [g, s, r]


@program(GRID, Input((8, 8), P("data", "model")), Input((8,), P("model")))
def layer_norm_of_split_features(b, x, scale):
    mean = b.all_reduce(b.np.mean(x, axis=1, keepdims=True), "model", op="mean")
    variance = b.all_reduce(b.np.mean((x - mean) ** 2, axis=1, keepdims=True), "model", op="mean")
    y = (x - mean) / b.np.sqrt(variance + 1e-3) * scale
    return b.all_reduce(b.np.sum(b.np.tanh(y)), ("data", "model")), [y]


@program(GRID, whole(4, 4), Input((4, 8), P(None, "model")), Input((8,), ROWS, labels=8), Input((8, 4), ROWS))
def language_model_step(b, w, table, labels, x):
    logits = b.np.tanh(x @ w) @ table
    top = b.stop_gradient(b.all_reduce(b.np.max(logits, axis=1), "model", op="max"))
    total = b.np.log(b.all_reduce(b.np.sum(b.np.exp(logits - top[:, None]), axis=1), "model")) + top
    own = b.nn.one_hot(labels - 4 * b.axis_index("model"), 4)
    picked = b.all_reduce(b.np.sum(own * logits, axis=1), "model")
    return b.all_reduce(b.np.mean(total - picked), "data", op="mean"), [picked]


@program(GRID, Input((8, 8), P("data", "model")), whole(8))
def power_iteration(b, a, v):
    """A matrix in blocks times a vector, three times: all_reduce over one axis, all_gather over the other."""
    for _ in range(3):
        v = b.all_gather(b.all_reduce(a @ b.own_slice(v, "model"), "model"), "data")
        v = v / b.np.sqrt(b.np.sum(v * v))
    return b.np.sum(v * b.np.cos(v)), [v]


@program(GRID, Input((3, 4), P(None, "model")), Input((16, 4), P("data", "model")))
def soft_k_means(b, centres, x):
    """Points are split over data, features over model."""
    distance = b.all_reduce(b.np.sum((x[:, None] - centres) ** 2, axis=2), "model")
    weights = b.nn.softmax(-distance, axis=1)
    total = b.all_reduce(b.np.sum(weights, axis=0), "data")
    new = b.all_reduce(weights.T @ x, "data") / total[:, None]
    return b.all_reduce(b.np.sum(new**2), "model") + b.np.sum(total**2), [new, weights]


@program(GRID, Input((4, 4), P("model")), Input((8, 4), ROWS))
def ensemble(b, w, x):
    """Model-parallel members vote: the best of each sample, and a mean weighted by agreement."""
    y = x @ w.T
    best = b.all_reduce(b.np.max(y, axis=1), "model", op="max")
    worst = b.all_reduce(b.np.min(y, axis=1), "model", op="min")
    return b.all_reduce(b.np.sum(b.np.tanh(best - worst)), "data"), [best, worst]


@program(LINE, whole(4, 3), Input((8, 3), ROWS))
def equal_operands(b, w, x):
    """Collectives of a value that is equal on all devices: some are the value, some move a copy of each device."""
    same = b.all_reduce(w, "data", op="mean") + b.broadcast(w * w, "data", root=2)
    best = b.all_reduce(b.np.max(w, axis=0), "data", op="max") - b.all_reduce(w[0], "data", op="min")
    moved = b.permute(b.np.tanh(w), "data", pairs=[(0, 1), (1, 3)]) @ x.T
    exchanged = b.all_to_all(w * 2, "data", split_dim=0, concat_dim=1)
    loss = b.all_reduce(b.np.sum(moved**2) + b.np.sum(exchanged * x[0, 0]), "data")
    return loss + b.np.sum(same * best), [same, best, moved, exchanged]
