"""Tracing: from a Python function to a typed program."""
