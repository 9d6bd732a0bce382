"""Processes of several hosts: messages by MPI, and MPI's own collectives.

It imports `plans` and `shm`; only this folder loads mpi4py.
"""
