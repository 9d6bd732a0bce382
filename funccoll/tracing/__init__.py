"""Tracing: from a Python function to a typed program.

It imports `ops` and `primitives`: a tracer's operators and methods bind them.
"""
