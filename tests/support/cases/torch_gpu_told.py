"""Cases of `torch_gpu_cases` that take no training: what is refused, and what is not used."""

from tests.support.cases.torch_gpu_cases import CASES as _CASES
from tests.support.cases.torch_gpu_cases import begin

__all__ = ["CASES", "begin"]
CASES = {name: _CASES[name] for name in ("unused_parameters", "refusals", "backward_in_another_thread")}
