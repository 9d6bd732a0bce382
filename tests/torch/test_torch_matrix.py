"""Kinds of modules in situations which users come into: torch's gradients, or an error on every rank that names the cause."""

import json
import re

import pytest

from tests.support.lazy_modules import need
from tests.support.ranks.ranks import JOIN, TORCH, Ranks

need("torch", "torch is not installed: pip install 'funccoll[torch]'")

SCRIPT = JOIN + """
import warnings
warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
from tests.support.ranks import torch_matrix_ranks
torch_matrix_ranks.main(rank, {meeting!r})
"""
ERRORS = {
    "replaced parameter": r"ModuleError: '\S+' was (replaced|added) after wrapping.* at \S*torch_\w+\.py:\d+",
    "skipped backward": r"rank 1 skipped the backward pass of its forward \d \(.*torch_\w+\.py:\d+",
}
"""Situation -> the error on every rank; others have torch's gradients, in all bits. (A tied weight keeps its other name.)"""


@pytest.mark.slow
def test_kinds_in_situations(tmp_path):
    wrong = []
    with Ranks(SCRIPT.format(meeting=str(tmp_path / "meeting")), range(2), imports=TORCH, MKL_CBWR="COMPATIBLE") as ranks:
        assert set(ranks.lines().values()) == {"in"}
        ((kinds, situations),) = {tuple(map(tuple, json.loads(line))) for line in ranks.lines().values()}
        assert len(kinds) >= 25 and len(situations) == 6
        for situation in situations:
            for kind in kinds:
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
