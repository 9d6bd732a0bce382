"""Schedules as rounds of nonblocking sends and receives."""
