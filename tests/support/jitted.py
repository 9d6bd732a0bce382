"""Functions of blocks along one axis, compiled for a mesh."""

import funccoll as fc
from funccoll import P


def jitted(fn, mesh, in_specs=P("d"), out_specs=P()):
    return fc.jit(fn, mesh=mesh, in_specs=in_specs, out_specs=out_specs)
