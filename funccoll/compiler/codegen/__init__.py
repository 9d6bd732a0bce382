"""Generated Python code: a program's compute between its collectives, with its loops and branches.

It imports `passes` and `runtime`.
"""
