"""Instruction streams: the lowered form of a schedule, verified on its own.

It imports `schedule`; its verifier does not import the lowering that it checks.
"""
