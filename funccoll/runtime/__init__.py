"""The interfaces between a compiled program and what executes it: collective calls, transports, started work, the recorder.

They import `platforms`; `job`, `transports` and `compiler` import them.
"""
