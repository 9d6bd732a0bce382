"""Kinds of modules in situations which users come into: torch's gradients, or an error on every rank that names the cause."""

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
from tests.support.ranks import torch_matrix_ranks
torch_matrix_ranks.main(rank, {meeting!r}, {every})
"""
ERRORS = {
    "replaced parameter": r"ModuleError: '\S+' was (replaced|added) after wrapping.* at \S*torch_\w+\.py:\d+",
    "skipped backward": r"rank 1 skipped the backward pass of its forward \d \(.*torch_\w+\.py:\d+",
}
"""Situation -> the error on every rank; others have torch's gradients, in all bits. (A tied weight keeps its other name.)"""


@pytest.mark.parametrize(
    ("every", "before"),
    [
        pytest.param(2, "", marks=pytest.mark.slow),
        pytest.param(2, OVERLAP, marks=pytest.mark.slow, id="buckets in flight"),
        pytest.param(1, "", marks=pytest.mark.exhaustive),
    ],
)
def test_kinds_in_situations(every, before, tmp_path):
    """All of them, or each kind in half of the situations."""
    wrong, script = [], JOIN + before + SCRIPT.format(meeting=str(tmp_path / "meeting"), every=every)
    with Ranks(script, range(2), imports=TORCH, MKL_CBWR="COMPATIBLE") as ranks:
        assert set(ranks.lines().values()) == {"in"}
        (cells,) = {tuple(map(tuple, json.loads(line))) for line in ranks.lines().values()}
        kinds, situations = map(set, zip(*cells, strict=True))
        assert len(kinds) >= 25 and len(situations) == 6 and abs(len(cells) - len(kinds) * 6 / every) < 1
        for kind, situation in cells:
            for rank, line in ranks.lines().items():
                *cell, found = json.loads(line)
                assert cell == [kind, situation]
                if situation in ERRORS:
                    good = re.search(ERRORS[situation], found["error"], re.DOTALL)
                else:
                    good = found == {"differences": [], "error": "", "torch": ""}
                if not good:
                    wrong.append(f"{kind}, {situation}, rank {rank}: {found}")
        assert not wrong, "\n".join(wrong)
        ranks.end_well()
