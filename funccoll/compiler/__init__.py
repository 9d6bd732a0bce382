"""From a traced function to what runs on a mesh: stages, passes, generated code, dispatch, placement, layouts.

It imports `transforms`, `runtime` and `job`; transports come to it through `runtime.transport`.
"""
