"""Programs before and after lowering, and how they run."""

import functools

import funccoll as fc
from funccoll import P
from funccoll.compiler import choose_schedules
from funccoll.compiler.choose_schedules import schedules_of
from funccoll.compiler.codegen.generated_program import compile_program
from funccoll.compiler.passes.buffers import plan_buffers
from funccoll.compiler.passes.choose_algorithms import choose_algorithms
from funccoll.transports.local.local_transport import LocalTransport

MESH = fc.make_mesh({"data": 4, "model": 2})
choose = functools.partial(choose_schedules.choose, mesh=MESH)


def programs(fn, *args, in_specs=P("data"), out_specs=P("data"), mesh=MESH):
    traced = fc.jit(fn, mesh=mesh, in_specs=in_specs, out_specs=out_specs).trace(*args)
    return traced.program, traced.lower().program


def compiled(program, mesh, buffers):
    """A function that runs a program, whose collectives get schedules, on virtual devices."""
    program = choose_algorithms(program, choose)
    return compile_program(program, mesh, buffers, schedules_of(program, mesh), LocalTransport()).run


def run_program(program, *values, mesh=MESH):
    """A program on per-copy inputs without any pass or buffer reuse: the plain definition."""
    return compiled(program, mesh, plan_buffers(program.replace(equations=())))(*values)
