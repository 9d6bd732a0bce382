"""Virtual devices: collectives between the devices that one process plays, in the order of their schedules.

It imports no other transport.
"""
