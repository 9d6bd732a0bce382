# %% [markdown]
# # Train a classifier with data and tensor parallelism
#
# The data are scikit-learn's bundled digits: 1,797 real images of 8 x 8 pixels. This one file runs in both ways:
#
#     python notebooks/digits.py --devices 8           # virtual devices in this process
#     funccoll run -n 8 notebooks/digits.py            # processes that share memory, one for each device
#
# and cell by cell in Jupyter. At the end some things are checked; when one fails, the script exits with status 1.
# `--save FILE` writes the trained parameters, `--compare FILE` checks that they are equal to those, bit by bit:
# `make demo` trains on 2 processes, then again on 2 virtual devices, and compares.

# %%
import argparse
import os
import sys
import time

# On matrices this small, threads only wait for each other. And NumPy's bits may depend on how many there are.
os.environ["OPENBLAS_NUM_THREADS"] = "1"

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


def make_mesh(devices, hosts=None):
    """A mesh of `devices` devices: data parallel, and tensor parallel over pairs when there are 4, 8, ..."""
    model = 2 if devices % 4 == 0 else 1
    return fc.make_mesh({"data": devices // model, "model": model}, hosts=hosts)


def make_step(mesh):
    batch = P("data")

    @fc.jit(mesh=mesh, in_specs=(PLACEMENT, PLACEMENT, batch, batch), out_specs=(PLACEMENT, PLACEMENT, P()))
    def step(params, velocity, images, labels):
        loss, gradients = fc.value_and_grad(fc.data_parallel(loss_fn, axis="data"))(params, images, labels)
        params, velocity = update(params, velocity, gradients)
        return params, velocity, loss

    return step


def train(mesh, data, epochs=EPOCHS, progress=None):
    """Train; return the parameters, the velocity, and one loss and one time in seconds for each step."""
    step = make_step(mesh)
    params = {name: fc.device_put(value, mesh, PLACEMENT[name]) for name, value in initial_params().items()}
    velocity = {name: fc.device_put(np.zeros(p.shape, p.dtype), mesh, PLACEMENT[name]) for name, p in params.items()}
    devices = f"{mesh.size} {'processes' if fc.world_size() > 1 else 'devices' if mesh.size > 1 else 'device'}"
    bar = progress.add_task(devices, total=epochs) if progress else None
    losses, seconds = [], []
    for epoch in range(epochs):
        for images, labels in minibatches(data, epoch):
            start = time.perf_counter()
            params, velocity, loss = step(params, velocity, images, labels)
            seconds.append(time.perf_counter() - start)
            losses.append(float(loss))
        if progress:
            progress.update(bar, advance=1, description=f"{devices}, loss {losses[-1]:.5f}")
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
    """Table of what one step communicates, and by which schedules, read from its lowered program."""
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

    `blocks` has an array for each parameter and device.
    """
    pairs = []
    for name, placement in PLACEMENT.items():
        copied_over = [axis for axis in mesh.axis_names if axis not in placement.axes]
        for first, *others in mesh.groups(copied_over):
            pairs += [(name, first, d) for d in others if blocks[name][d].tobytes() != blocks[name][first].tobytes()]
    return pairs


def unequal_replicas(mesh, params, velocity, data):
    """`unequal` for the trained parameters, and once more after one more update that each device does on its own.

    Every device returns its copy (`pvary`: from here on the copies may differ), and the copies are gathered. Virtual
    devices hold a value that is equal on all of them once, so comparing it with itself says little: each device also
    computes an update of its own.
    """

    @fc.jit(mesh=mesh, in_specs=(PLACEMENT, PLACEMENT, P("data"), P("data")), out_specs=P(mesh.axis_names))
    def held_and_updated(params, velocity, images, labels):
        gradients = fc.grad(fc.data_parallel(loss_fn, axis="data"))(params, images, labels)
        own_params, own_velocity = fc.pvary((params, velocity), mesh.axis_names)
        updated, _ = update(own_params, own_velocity, gradients)
        return fc.tree.map(lambda p: p[None], (own_params, updated))

    both = held_and_updated(params, velocity, *next(minibatches(data, EPOCHS)))
    held, updated = fc.tree.map(fc.process_allgather, both)
    return unequal(mesh, held) + unequal(mesh, updated)


# %%
def compared(params, file):
    """(message, True when equal) of these parameters compared with those of another run."""
    with np.load(file) as other:
        by = str(other["by"])
        differ = [name for name, value in params.items() if value.tobytes() != other[name].tobytes()]
    if differ:
        return f"parameters differ from those that {by} trained: {', '.join(differ)}", False
    count = sum(value.size for value in params.values())
    return f"all {count:,} parameters bitwise equal to those that {by} trained", True


def options():
    parser = argparse.ArgumentParser(description="Train a classifier of digits on several devices.")
    parser.add_argument("--devices", type=int, default=8, help="virtual devices, in one process (8)")
    parser.add_argument("--hosts", type=int, help="equal hosts that the virtual devices stand for (one)")
    parser.add_argument("--save", metavar="FILE", help="write the trained parameters (.npz)")
    parser.add_argument("--compare", metavar="FILE", help="check that the parameters are those in FILE")
    return parser.parse_args([] if "ipykernel" in sys.modules else None)


def main(given):
    began = time.perf_counter()
    processes = fc.world_size()
    console = Console(highlight=False, quiet=fc.rank() != 0)  # only rank 0 prints
    training, testing = load_data()
    mesh = make_mesh(processes if processes > 1 else given.devices, given.hosts)
    console.print(collectives_table(mesh, training))
    with Progress(console=console) as progress:
        params, velocity, losses, seconds = train(mesh, training, progress=progress)
        if processes == 1:
            _, _, expected, _ = train(make_mesh(1), training, progress=progress)

    tested = accuracy(mesh, params, testing)
    pairs = unequal_replicas(mesh, params, velocity, training)
    whole = {name: fc.process_allgather(value) for name, value in params.items()}
    checks = {
        f"test accuracy {tested:.2%} ({len(testing[1])} images)": tested >= 0.95,
        f"replicas {f'differ: {pairs}' if pairs else 'bitwise equal'}: the parameters, and the {mesh.size} copies after one\n"
        "     more update that each device does on its own": not pairs,
    }
    if processes == 1:
        deviation = np.max(np.abs(losses - expected))
        text = f"loss curve of {len(losses)} steps within {deviation:.1e} of the same model on one device"
        checks[text] = deviation <= 1e-3  # rounding decides on which side of 0 an activation is, once in some hundred steps
    if given.compare:
        text, equal = compared(whole, given.compare)
        checks[text] = equal
    for text, passed in checks.items():
        console.print(f"{'[green]ok[/]  ' if passed else '[red]FAIL[/]'} {text}")
    what = f"{mesh.size} processes" if processes > 1 else f"{mesh.size} virtual devices in one process"
    console.print(
        f"{1e3 * np.median(seconds):.2f} ms per step (median), {what}; first step {1e3 * seconds[0]:.0f} ms\n"
        f"{time.perf_counter() - began:.1f} s in all",
    )
    if given.save and fc.rank() == 0:
        np.savez(given.save, by=what, **whole)
    if not all(checks.values()):
        raise SystemExit(1)


if __name__ == "__main__":
    main(options())
