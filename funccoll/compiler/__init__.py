"""Compilation of traced functions: jit and its stages."""
