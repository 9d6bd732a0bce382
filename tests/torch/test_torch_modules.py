"""Training of many kinds of modules is that of torch's own DistributedDataParallel over Gloo, in the same processes.

On 2 ranks all gradients, parameters and buffers have torch's bits, at each of 4 steps; sums of more than two numbers depend
on their order: on 3 ranks gradients from the same parameters are within 4 ulp of the mean of their absolute values. Always all
ranks have the same bits. The exhaustive tests have 20 steps, and torch against torch as the control.
"""

import json
import re

import pytest

from tests.support.lazy_modules import need
from tests.support.ranks.ranks import JOIN, OVERLAP, TORCH, Ranks

pytestmark = pytest.mark.covers("torch-ddp")

need("torch", "torch is not installed: pip install 'funccoll[torch]'")

SCRIPT = """
import warnings
warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
from tests.support.ranks import torch_ranks
from {wrapper} import DistributedDataParallel
torch_ranks.main(rank, {meeting!r}, {choice!r}, DistributedDataParallel, {steps})
"""
FOUND = {
    "torch's own": ("", "", "neither", "agree"),
    "no communication": (r"0\.weight: 72 of 72 elements", r"0\.weight: .* ulp", "both", "differ"),
    "an element is a bit off": (r"step 2: 0\.weight: 1 of 72 elements", "", "both", "agree"),
    "an element is a bit off on one rank": (r"step 2: 0\.weight: 1 of 72 elements", "", "rank 1", "differ"),
    "an element is far off": (r"step 2: 0\.weight: 1 of 72 elements", r"step 2: 0\.weight: .* ulp", "both", "agree"),
    "a gradient is missing": (*[r"step 2: 0\.bias: None, but torch"] * 2, "both", "agree"),
    "buffers are not broadcast": (*[r"step 0: 1\.running_mean: . of 6 elements"] * 2, "rank 1", "agree"),
}
"""Name in torch_ranks.WRONG -> what is found with 2 ranks, with 3, on which of the first two, and whether gradients agree."""
SLOW, EXHAUSTIVE = pytest.mark.slow, pytest.mark.exhaustive
STEPS, MANY = 4, 20


@pytest.mark.parametrize(
    ("count", "wrapper", "choice", "steps", "before"),
    [
        pytest.param(2, "funccoll.torch", "of every kind", STEPS, "", id="2 ranks"),
        *(
            pytest.param(*case[:4], *case[4:] or [""], marks=mark, id=name)
            for name, (mark, *case) in {
                "2 ranks, others": (SLOW, 2, "funccoll.torch", "others", STEPS),
                "2 ranks, buckets in flight": (SLOW, 2, "funccoll.torch", "all", STEPS, OVERLAP),
                "3 ranks": (SLOW, 3, "funccoll.torch", "of every kind", STEPS),
                "2 ranks, many steps": (EXHAUSTIVE, 2, "funccoll.torch", "all", MANY),
                "3 ranks, many steps": (EXHAUSTIVE, 3, "funccoll.torch", "without kept gradients", MANY),
                "2 ranks, torch against torch, many steps": (EXHAUSTIVE, 2, "torch.nn.parallel", "all", MANY),
            }.items()
        ),
    ],
)
def test_modules(count, wrapper, choice, steps, before, tmp_path):
    script = JOIN + before + SCRIPT.format(wrapper=wrapper, meeting=str(tmp_path / "meeting"), choice=choice, steps=steps)
    wrong = []
    with Ranks(script, range(count), imports=TORCH, MKL_CBWR="COMPATIBLE", OMP_NUM_THREADS="1") as ranks:
        assert set(ranks.lines().values()) == {"in"}
        (names,) = {tuple(json.loads(line)) for line in ranks.lines().values()}
        assert len(names) > 12
        for name in names:
            found = told(ranks, name)
            wrong += [f"{name}, rank {rank}: {f['count']}: {f['differences']}" for rank, f in found.items() if f["count"]]
            if not agree(found):
                wrong.append(f"{name}: the ranks' gradients differ")
            if any(len(f["digests"]) != steps for f in found.values()):
                wrong.append(f"{name}: not trained for {steps} steps")
        for name in FOUND:
            found = told(ranks, name)
            two, three, where, agreement = FOUND[name]
            pattern = two if count == 2 else three
            for rank in range(2):
                expected = bool(pattern) and where in ("both", f"rank {rank}")
                differences = found[rank]["differences"]
                if bool(differences) != expected or (expected and not re.search(pattern, " ".join(differences))):
                    wrong.append(f"{name}: rank {rank} finds {differences}")
            if agree(found) != (agreement == "agree"):
                wrong.append(f"{name}: the ranks' gradients do not {agreement}")
        assert not wrong, "\n".join(wrong)
        ranks.end_well()


def told(ranks, name):
    """What each rank tells of a module."""
    found = {}
    for rank, line in ranks.lines().items():
        said, found[rank] = json.loads(line)
        assert said == name
    return found


def agree(found):
    """Whether all ranks had the same bits at each step."""
    return len({tuple(f["digests"]) for f in found.values()}) == 1
