"""barrier: no device goes on before all have come. It has no operands: an effect, which every pass keeps in its place.

Cost: at least ⌈log₂ p⌉α and no bytes; dissemination attains it (Hensgen, Finkel and Manber 1988).
"""

from __future__ import annotations

from ...ir import Primitive

__all__ = ["barrier_p"]

barrier_p = Primitive("barrier", lambda *, axes, size, algorithm: [], list, multiple=True, kind="effect")
