"""NCCL: collectives between the GPUs of a job, one per process, through CuPy."""
