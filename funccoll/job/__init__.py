"""The processes of a job: how they start, find each other, agree, fail and end.

It imports `runtime` and `platforms`, and loads the job's transport by name.
"""
