"""Derivatives of programs: reverse and forward mode, checkpoints, users' own rules.

It imports `batching` beside what all of `transforms` does.
"""
