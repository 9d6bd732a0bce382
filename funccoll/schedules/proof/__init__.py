"""Proofs: schedules run on expressions instead of numbers.

It imports `schedule` alone: what it proves does not depend on how schedules are lowered.
"""
