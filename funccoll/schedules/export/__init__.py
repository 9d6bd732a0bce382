"""Schedules as files of other tools, and back: MSCCL XML, GOAL, JSON. What comes in is proved before it can run.

It imports all of `schedules`.
"""
