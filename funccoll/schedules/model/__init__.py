"""Cost and simulation of schedules on a model of the machine.

It imports schedules and their streams, and measures nothing.
"""
