"""Calibration: it measures this host's collectives, and fits the cost model's parameters to the times.

It imports `compiler` and `schedules.model`.
"""
