"""Tools around the library: the commands of `funccoll`, and calibration.

They import everything but `torch`, and nothing imports them.
"""
