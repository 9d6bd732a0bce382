"""Plans: the code of collectives for the stream interpreter, on whatever machine it runs.

It imports `kernels` and `schedules`, and no transport.
"""
