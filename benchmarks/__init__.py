"""Benchmarks, a folder for each subject: `python -m benchmarks.one_host.host`. `rank.py` begins the processes of their jobs."""
