"""One record per primitive: type rule, gradient rule, NumPy reference."""
