"""GPUs of one process, or of the processes of a host: collectives by kernels over their memory.

It imports the other transports: processes with a GPU agree through one of the host's.
"""
