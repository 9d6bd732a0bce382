"""Arrays on a mesh, and their layouts.

They import `ops` and `tracing`, because an Array takes part in NumPy's functions; `compiler.placement` makes them.
"""
