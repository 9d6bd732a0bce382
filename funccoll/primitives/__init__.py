"""One record per primitive: type rule, gradient rule, batching rule, NumPy reference.

A record imports `core` alone. The primitives that communicate are in `collectives`.
"""
