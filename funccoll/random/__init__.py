"""Counter-based randomness: pure functions of a key, the same values on any number of processes.

It imports `ops`, and `transforms` for the gradients of draws.

Use a key (uint64, shape (2,)) once. For more draws, split it or fold numbers into it. Inside a traced function
`fc.random.fold_in(key, fc.axis_index("data"))` is a different key on each device.

Source: Philox4x64-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011), NumPy's implementation.

Example:
    >>> first, second = fc.random.split(fc.random.key(0))
    >>> print(fc.random.normal(first, (2, 3)).round(2))
    [[ 0.93  0.08 -0.63]
     [-1.2   0.57 -0.35]]
    >>> print(fc.random.permutation(second, 4))
    [2 1 3 0]
"""

from typing import TYPE_CHECKING

from ..core.public_names import directory
from .continuous import exponential, gumbel, laplace, normal, truncated_normal, uniform
from .discrete import bernoulli, categorical, choice, permutation, randint, shuffle
from .gammas import beta, dirichlet, gamma, loggamma
from .keys import bits, fold_in, key, split

__all__ = [
    "bernoulli",
    "beta",
    "bits",
    "categorical",
    "choice",
    "dirichlet",
    "exponential",
    "fold_in",
    "gamma",
    "gumbel",
    "key",
    "laplace",
    "loggamma",
    "normal",
    "permutation",
    "randint",
    "shuffle",
    "split",
    "truncated_normal",
    "uniform",
]


if not TYPE_CHECKING:
    __dir__, __getattr__ = directory(
        globals(),
        {
            "PRNGKey": "fc.random.key(seed)",
            "seed": "fc.random.key(seed), a key that you pass to each function",
            "manual_seed": "fc.random.key(seed), a key that you pass to each function",
            "default_rng": "fc.random.key(seed), a key that you pass to each function",
            "rand": "fc.random.uniform(key, shape)",
            "randn": "fc.random.normal(key, shape)",
            "randperm": "fc.random.permutation(key, n)",
        },
    )
