"""The core: meshes, shardings, types, the IR and its text, pytree paths, display, timelines; every other folder builds on it.

It imports `config` and `errors` alone.
"""
