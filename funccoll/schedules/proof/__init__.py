"""Proofs: schedules run on expressions instead of numbers."""
