"""Cost and simulation of schedules on a model of the machine."""
