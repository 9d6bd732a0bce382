"""Derivatives of programs: reverse and forward mode, checkpoints, rules of the user's own.

It imports `batching` beside what all of `transforms` does.
"""
