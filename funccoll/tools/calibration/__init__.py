"""Calibration: measuring this host's collectives, and fitting the cost model's parameters to the times.

It imports `compiler` and `schedules.model`.
"""
