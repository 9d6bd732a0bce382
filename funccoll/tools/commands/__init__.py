"""The commands of `funccoll`, one file each. `main(words)` runs a command line and returns the exit code.

They import `calibration`. No other modules import rich.
"""
