# %% [markdown]
# # Train a classifier on 8 devices: data parallel over 4, tensor parallel over 2
#
# The data are scikit-learn's bundled digits: 1,797 real images of 8 x 8 pixels. The 8 devices are virtual ones
# in this process. At the end three things are checked; when one fails, the script exits with status 1.
#
# Run it with `make demo`, or `python notebooks/digits.py`, or cell by cell in Jupyter.

# %%
import os
import time

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # on matrices this small, threads only wait for each other

import numpy as np
from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import funccoll as fc
from funccoll import P

EPOCHS, BATCH, HIDDEN = 40, 128, 128
LEARNING_RATE, MOMENTUM = 0.1, 0.9


def load_data():
    """((images, labels) to train on, (images, labels) to test on): float32 in [0, 1] and integers."""
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32)
    train_x, test_x, train_y, test_y = train_test_split(images, labels, test_size=360, stratify=labels, random_state=0)
    return (train_x, train_y), (test_x, test_y)


def minibatches(data, epoch):
    """The same batches for the same epoch, every time and on every mesh."""
    images, labels = data
    order = np.random.default_rng(epoch).permutation(len(labels))
    for start in range(0, len(order) - BATCH + 1, BATCH):
        chosen = order[start : start + BATCH]
        yield images[chosen], labels[chosen]


# %% [markdown]
# ## The model
#
# Ordinary NumPy, written for one device's part of the data and of the weights. `PLACEMENT` says which part that is:
# the first layer is split by columns over "model", the second by rows, so the devices along "model" each hold
# a part of the sum that makes the logits. One `all_reduce` adds the parts.

# %%
PLACEMENT = {"w1": P(None, "model"), "b1": P("model"), "w2": P("model", None), "b2": P()}


def initial_params(seed=0):
    """He initialisation, from funccoll's counter-based random numbers."""
    first, second = fc.random.split(fc.random.key(seed))
    return {
        "w1": fc.random.normal(first, (64, HIDDEN)) * np.float32(np.sqrt(2 / 64)),
        "b1": np.zeros(HIDDEN, np.float32),
        "w2": fc.random.normal(second, (HIDDEN, 10)) * np.float32(np.sqrt(2 / HIDDEN)),
        "b2": np.zeros(10, np.float32),
    }


def logits_of(params, images):
    hidden = fc.nn.relu(images @ params["w1"] + params["b1"])
    return fc.all_reduce(hidden @ params["w2"], "model") + params["b2"]


def loss_fn(params, images, labels):
    """The mean cross-entropy of this device's images."""
    log_probability = fc.nn.log_softmax(logits_of(params, images))
    return -np.mean(np.sum(log_probability * fc.nn.one_hot(labels, 10), axis=-1))


# %% [markdown]
# ## The step
#
# `data_parallel` makes the loss the mean over "data", and reduces the gradients in buckets. Everything, optimiser
# included, is one compiled program.

# %%
def update(params, velocity, gradients):
    """Gradient descent with momentum."""
    velocity = fc.tree.map(lambda v, g: MOMENTUM * v + g, velocity, gradients)
    return fc.tree.map(lambda p, v: p - LEARNING_RATE * v, params, velocity), velocity


def make_step(mesh):
    batch = P("data")

    @fc.jit(mesh=mesh, in_specs=(PLACEMENT, PLACEMENT, batch, batch), out_specs=(PLACEMENT, PLACEMENT, P()))
    def step(params, velocity, images, labels):
        loss, gradients = fc.value_and_grad(fc.data_parallel(loss_fn, axis="data"))(params, images, labels)
        params, velocity = update(params, velocity, gradients)
        return params, velocity, loss

    return step


def train(mesh, data, epochs=EPOCHS, progress=None):
    """Returns the parameters, the velocity, and one loss and one time in seconds for each step."""
    step = make_step(mesh)
    params = {name: fc.device_put(value, mesh, PLACEMENT[name]) for name, value in initial_params().items()}
    velocity = {name: fc.device_put(np.zeros_like(p), mesh, PLACEMENT[name]) for name, p in params.items()}
    bar = progress.add_task(f"{mesh.size} device(s)", total=epochs) if progress else None
    losses, seconds = [], []
    for epoch in range(epochs):
        for images, labels in minibatches(data, epoch):
            start = time.perf_counter()
            params, velocity, loss = step(params, velocity, images, labels)
            seconds.append(time.perf_counter() - start)
            losses.append(float(loss))
        if progress:
            progress.update(bar, advance=1, description=f"{mesh.size} device(s), loss {losses[-1]:.5f}")
    return params, velocity, np.array(losses), np.array(seconds)


# %% [markdown]
# ## The checks

# %%
def accuracy(mesh, params, data):
    @fc.jit(mesh=mesh, in_specs=(PLACEMENT, P("data"), P("data")), out_specs=P())
    def correct(params, images, labels):
        hits = np.argmax(logits_of(params, images), axis=-1) == labels
        return fc.all_reduce(np.mean(hits.astype(np.float32)), "data", op="mean")

    return float(correct(params, *data))


def collectives_table(mesh, data):
    """What one step communicates, and by which schedules, read from its compiled program."""
    params = initial_params()
    lowered = make_step(mesh).lower(params, params, *next(minibatches(data, 0)))
    title = "The collectives of one step; bytes are what one device contributes"
    table = Table(title=title, box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column("collective", no_wrap=True)
    table.add_column("over")
    for number in ("arrays", "bytes"):
        table.add_column(number, justify="right")
    table.add_column("schedule", no_wrap=True)
    table.add_column("from", no_wrap=True)
    for row in lowered.collectives().rows:
        over = f"{', '.join(row.axes)} ({row.size})"
        counts = (str(row.operands), f"{row.nbytes:,}")
        table.add_row(f"{row.kind} {row.op}", over, *counts, row.schedule, str(row.source))
    return table


def unequal(mesh, blocks):
    """Pairs of devices that should hold the same block of a parameter, and do not, bit for bit.

    `blocks` has eight arrays for each parameter, one for each device.
    """
    pairs = []
    for name, placement in PLACEMENT.items():
        copied_over = [axis for axis in mesh.axis_names if axis not in placement.axes]
        for first, *others in mesh.groups(copied_over):
            pairs += [(name, first, d) for d in others if blocks[name][d].tobytes() != blocks[name][first].tobytes()]
    return pairs


def unequal_replicas(mesh, params, velocity, data):
    """`unequal` for the trained parameters, and once more for copies that the devices computed themselves.

    What is the same on all devices is held once when they live in one process, and comparing it with itself says
    little. So every device also makes its own copy of parameters and velocity (`pvary`) and does one more update
    on it; the results come back stacked by device.
    """

    @fc.jit(mesh=mesh, in_specs=(PLACEMENT, PLACEMENT, P("data"), P("data")), out_specs=P(mesh.axis_names))
    def one_more_step(params, velocity, images, labels):
        gradients = fc.grad(fc.data_parallel(loss_fn, axis="data"))(params, images, labels)
        own_params, own_velocity = fc.pvary((params, velocity), mesh.axis_names)
        updated, _ = update(own_params, own_velocity, gradients)
        return fc.tree.map(lambda p: p[None], updated)

    own = one_more_step(params, velocity, *next(minibatches(data, EPOCHS)))
    held = {name: p.shards for name, p in params.items()}
    return unequal(mesh, held) + unequal(mesh, fc.tree.map(np.asarray, own))


# %%
def main():
    began = time.perf_counter()
    console = Console(highlight=False)
    training, testing = load_data()
    mesh = fc.make_mesh({"data": 4, "model": 2})
    one_device = fc.make_mesh({"data": 1, "model": 1})
    console.print(collectives_table(mesh, training))
    with Progress(console=console) as progress:
        params, velocity, losses, seconds = train(mesh, training, progress=progress)
        _, _, expected, _ = train(one_device, training, progress=progress)

    tested = accuracy(mesh, params, testing)
    pairs = unequal_replicas(mesh, params, velocity, training)
    deviation = np.max(np.abs(losses - expected))
    checks = {
        f"test accuracy {tested:.2%} ({len(testing[1])} images)": tested >= 0.95,
        f"replicas {f'differ: {pairs}' if pairs else 'bitwise equal'}: the parameters, and the 8 copies after one\n"
        "     more update that each device does on its own": not pairs,
        f"loss curve of {len(losses)} steps within {deviation:.1e} of the same model on one device": deviation <= 1e-5,
    }
    for text, passed in checks.items():
        console.print(f"{'[green]ok[/]  ' if passed else '[red]FAIL[/]'} {text}")
    console.print(
        f"{1e3 * np.median(seconds):.2f} ms per step (median), 8 virtual devices in one process; "
        f"first step {1e3 * seconds[0]:.0f} ms\n{time.perf_counter() - began:.1f} s in all",
    )
    if not all(checks.values()):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
