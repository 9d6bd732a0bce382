"""Layers of the package: the tables of what may import what, and the reading of imports from the source.

The tables are changed together with docs/design/folders.md. `test_layering.py` holds the package to them.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import funccoll

ROOT = Path(funccoll.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))

# fmt: off
ORDERS: dict[str, tuple[tuple[str, ...], ...]] = {
    "": (
        ("_version", "config", "user_lines"), ("errors",), ("core",), ("mesh", "tree"), ("primitives",), ("schedules", "ops"),
        ("kernels", "tracing"), ("collectives", "arrays"), ("platforms", "transforms"), ("linalg", "random"), ("nn",),
        ("special",), ("runtime",), ("job",),
        ("compiler",), ("transports",), ("debug", "optim", "profiling", "ragged"), ("parallel",), ("draw",), ("api",),
        ("torch", "jax", "distributed", "tools"), ("__main__",),
    ),
    "core": (
        ("c_extension", "array_order", "block_ranges", "host_identity", "private_files", "public_names", "pytree_paths",
         "weak_values"),
        ("partition_spec", "pytree_differences"), ("keyword_errors", "mesh", "named_scopes"), ("sharding", "types"),
        ("display",), ("machine_profile", "timeline"), ("ir",),
        ("interpreter",), ("dtype_promotion", "program_text", "traced_ranks"), ("program_difference",),
    ),
    "primitives": (
        ("batch_rules", "tangent_rules"), ("operand_rules", "shaping"), ("elementwise", "indexing", "reductions", "varying"),
        (
            "piece_sums", "linalg", "linear_systems", "fourier", "special", "randomness", "combining", "convolution",
            "higher_order", "optimizers", "control_flow", "sorting", "accumulations", "shard_map_call", "debugging",
        ),
        ("fused", "pooling", "decompositions"), ("least_squares",),
    ),
    "ops": (
        ("registry",), ("elementwise",), ("decompositions", "fourier", "linalg", "indexing", "reductions", "shaping"),
        ("norms",), ("accumulations", "creation", "joining", "pointwise", "sorting", "statistics", "nanfunctions"),
    ),
    "tracing": (
        ("future", "global_draws", "tracer"), ("trace",), ("closed_programs", "batched_evaluation", "result_types"),
        ("batched_control",),
    ),
    "collectives": (
        ("pair_blocks",), ("record",), ("arg_reduce", "argument_checks", "axis_groups"), ("all_reduce", "inclusive_scan"),
        (
            "all_gather", "all_to_all", "barrier", "broadcast", "exclusive_scan", "gather", "permute", "reduce",
            "ragged_all_gather", "ragged_all_to_all", "ragged_reduce_scatter", "reduce_scatter", "scatter",
        ),
        ("functions",), ("started",),
    ),
    "transforms": (("batching",), ("autodiff",), ("callbacks", "control"), ("custom_primitives",)),
    "transforms.autodiff": (
        ("backward", "varying_losses"), ("reverse", "varying_programs"),
        ("checkpoint_policies", "custom_rules", "control_rules", "forward"),
        ("rematerialization", "control_tangents", "jacobians"),
    ),
    "random": (("keys",), ("continuous",), ("*",)),
    "nn": (("batch_normalization", "half_precision"), ("*",)),
    "schedules": (
        ("collective",), ("moves", "registry"), ("columns", "host_map", "runs", "chunk_layout"), ("schedule",),
        ("library", "schedule_algorithm", "side_by_side"), ("reference_memory",), ("proof",), ("assign_rounds",),
        ("split_hosts",), ("streams",), ("shared_results",), ("model",),
        ("export",),
    ),
    "schedules.export": (
        ("access_order", "msccl_format", "read_text"), ("msccl_graph", "msccl_parser"),
        ("goal", "json_schedule", "msccl_export", "msccl_import"),
    ),
    "schedules.library": (
        ("combinators", "host_ranks"), ("trees",),
        ("all_reduce", "gathering", "all_to_all", "permute_and_barrier", "rooted", "scans"), ("several_hosts",),
    ),
    "schedules.proof": (("expressions",), ("symbolic",), ("prove",)),
    "schedules.streams": (
        ("instructions",), ("symmetry",), ("happens_before",), ("streams",), ("check_hosts",), ("lower", "verify", "interpret"),
    ),
    "schedules.model": (("topology",), ("cost",), ("event_loop", "select", "simulation"), ("explanation", "simulate")),
    "kernels": (
        ("builtin_functions", "kernel_context", "variants", "intrinsics", "conversions"),
        ("direct_reads", "stream_interpreter", "reductions", "block"),
        ("cpu_fold", "object_cache", "cuda_intrinsics", "cuda_toolkit"), ("native",), ("cpu", "cuda_compiler"),
        ("cuda", "cuda_compute", "cuda_groups"),
    ),
    "kernels.native": (
        ("counted_loops", "group", "ir_text", "ptx_code"), ("machine_code", "thread_text"),
        ("elementary", "fast_call", "products", "strided_copies", "transposed_copies"),
        ("convolutions", "packed_products", "powers", "quotients", "row_quotients", "loop"), ("angles",), ("operations",),
        ("gpu_rows", "group_kernel"), ("gpu_group", "loop_kernel"),
        ("compiled_groups",),
    ),
    "arrays": (("array_layout", "array_operators", "shared_mapping", "value_hash"), ("array",), ("array_like",)),
    "platforms": (
        ("blas", "device", "float_environment", "free_list", "native_convolution"), ("array_library", "native_product"),
        ("gpu", "host_device"),
    ),
    "platforms.gpu": (
        ("captured_program", "cublas", "cupy_kernels", "cupy_ufuncs", "deferred_checks", "pairwise_einsum"),
        ("cupy_indexing", "cupy_windows"), ("cupy_library",), ("array_fold", "cupy_gpu"),
    ),
    "runtime": (("collective_call", "row_file", "work"), ("recorder",), ("transport",)),
    "job": (
        ("host", "packets", "deferred_signals", "reports", "stacks", "calling_thread", "failure", "process_memory", "strangers",
         "time_limit", "torch_variables"),
        ("handshake", "processes", "excepthook", "exit_code", "forking", "tcp", "rpc"), ("checks", "mpirun"),
        ("mpi_findings", "missing_ranks"), ("doctor",),
        ("coordinator", "launchers", "torch_group"), ("rendezvous", "failure_detector", "identity"),
        ("across_hosts", "membership"), ("job_context",), ("launch", "process_allgather", "process_group"),
    ),
    "compiler": (
        ("loop_views",), ("loop_plan",), ("loop_calls",), ("passes", "placement"), ("codegen",),
        ("arguments", "fast_paths", "choose_schedules", "debug_modes", "garbage_collection", "layout_rules", "report",
         "optimizer_steps", "padded_blocks", "resharding"),
        ("choose_overlap",), ("dispatcher", "generate", "output_layouts", "signature"), ("overlap_report", "stages"),
        ("function_on_mesh", "program_calls"), ("eager_execution",),
        ("jit", "compile_spmd", "redistribute"), ("background_calls",),
    ),
    # The pipeline in its order: docs/design/compiler.md.
    "compiler.passes": (
        ("rewrite",), ("snapshots",), ("inline",), ("dead_code",), ("simplify",), ("common_subexpressions",), ("algebra",),
        ("combine_collectives",), ("choose_algorithms",), ("group_collectives",), ("drop_barriers",), ("group_drafts",),
        ("rematerialize",), ("fuse",), ("fuse_loops",), ("operand_views",), ("result_places",), ("buffers",),
        ("overlap",),
    ),
    "compiler.codegen": (
        ("bad_index", "calls_in_flight", "fused_calls", "loop_code", "non_finite", "recorded_program",
         "transposed_products"),
        ("segments",),
        ("program_builder",), ("generated_program",),
    ),
    "transports": (("local", "plans"), ("shm",), ("mpi",), ("nccl",), ("cuda",)),
    "transports.plans": (
        ("control_block", "staging", "transit"), ("message_table", "planned_collective"), ("plan_writer",),
        ("eager", "ragged_words"),
    ),
    "transports.local": (("ordered_reduction",), ("local_transport",)),
    "transports.shm": (
        (
            "agreement", "compiled_programs", "leases", "progress_engine", "thread_ownership", "uninterrupted", "wait_limits",
        ), ("arena",),
        ("forked_copies", "memory_file"), ("heap",),
        ("peer_access", "remote_waits", "wait_graph"), ("plan",),
        ("decision_log", "passed_arguments"), ("process_notes",),
        ("communicators", "results", "recorded_kernel"), ("diagnosis", "plan_fast_path", "ragged_call", "suspicion"),
        ("shared_buffers", "decisions", "first_calls"), ("shared_memory_executable",),
        ("gathered_values", "host_barrier", "ragged_executable"),
        ("shm_transport",),
    ),
    "transports.mpi": (("mpi_library",), ("mpi_collectives",), ("mpi_transport",)),
    "transports.nccl": (
        ("gpu_arrays",), ("native", "message_rounds", "watchdog"), ("nccl_job",), ("nccl_transport",),
    ),
    "transports.cuda": (
        ("block_contexts", "launch_plan", "launch_reports", "peer_shutdown"), ("peer_plan", "virtual_devices"),
        ("peer_segments",), ("peer_memory",), ("job_gpus",), ("cuda_transport",),
    ),
    "torch": (
        (
            "tensors", "tensor_kinds", "grad_bucket", "process_groups", "forward_passes", "in_backward_optimizers",
            "local_gradients", "module_changes", "gradient_hooks",
        ),
        ("announcements", "tensor_memory"), ("parameters", "tensor_programs"),
        ("sparse_gradients", "started_buckets", "tensor_collectives"), ("slot_reducer",), ("functional_hook", "future_hook"),
        ("communication_hooks",),
        ("join", "reducer", "module_state"), ("module_checks", "torch_interface"), ("*",),
    ),
    "draw": (
        ("themes", "scene"), ("page_layout", "lanes", "plotly_traces"), ("static_figure", "plotly_figure"), ("drawing",),
        ("moved_data", "graph_layout"), ("*",),
    ),
    "tools": (("calibration",), ("commands",), ("cli",)),
    "profiling": (("rank_record",), ("causes",), ("measured_profile", "recording"),),
    "tools.calibration": (
        ("fit_parameters", "machine_load", "timed_cases"), ("direct_read_timings", "fit_network", "rank_timings"),
        ("tuning",), ("network_tuning",),
    ),
    "tools.commands": (
        ("equal_tracebacks", "first_failure", "schedule_figures", "standard_output", "tune_tables"),
        ("printed_traceback", "hosts_job"),
        ("run_command",), ("*",),
    ),
    "ragged": (("exact_blocks", "grouped_rows"), ("row_collectives",)),
    "optim": (("learning_rates", "tree_utils"), ("transformation",), ("gradients", "state_layout", "steps")),
    "parallel": (
        ("batch_placement", "buckets", "checkpoint", "replicas", "uneven"), ("comm_hooks", "gradient_reducer"), ("loss_call",),
        ("traced_reducer",), ("bucket_plan",), ("data_parallel_function",), ("data_parallel_model",),
    ),
}
# fmt: on
"""Package -> its modules and folders in lines. What stands in one line imports only from the lines before it.

"*" stands for all others of the package. Imports inside functions count. Imports for type checkers alone do not.
"""

PLANNED = {
    "jax",
    "distributed",
}
"""Modules that have a place in ORDERS, and no file yet."""

EXCEPTIONS = {
    ("core.c_extension", "_native"): "the C extension, which imports nothing, and is not there without a C compiler",
    ("core.mesh", "core.display"): "_repr_html_, only in a notebook; display names dtypes, so it stands after types",
    ("schedules.schedule", "schedules.proof.prove"): "Schedule.prove only forwards",
    ("schedules.schedule", "schedules.streams.lower"): "Schedule.streams only forwards",
    ("schedules.schedule", "schedules.model.cost"): "Schedule.cost only forwards",
    ("schedules.schedule", "schedules.model.simulate"): "Schedule.simulate only forwards",
    ("schedules.schedule", "schedules.export.msccl_export"): "Schedule.to_msccl_xml only forwards",
    ("schedules.schedule", "schedules.export.goal"): "Schedule.to_goal only forwards",
    ("schedules.schedule", "schedules.export.json_schedule"): "Schedule.to_json only forwards",
    ("schedules.streams.streams", "schedules.streams.verify"): "Streams.verify only forwards",
    ("schedules.schedule", "draw"): "Schedule.draw only forwards",
    ("schedules.model.simulation", "draw"): "Simulation.draw only forwards",
    ("core.timeline", "draw"): "Timeline.draw only forwards",
    ("core.mesh", "core.sharding"): "pickles written before Sharding had a module of its own look for it in mesh",
    ("core.sharding", "draw"): "Sharding.draw only forwards",
    ("core.ir", "draw"): "Program.draw only forwards",
    ("core.ir", "core.program_text"): "Program.text and names only forward",
}
"""(importer, imported) -> why the import may go against the order. Each is in use."""

LOADS_BY_NAME = {
    "__init__": "modules and public names, when one is used",
    "transports.mpi.mpi_transport": "mpi4py, which type checkers need not find",
    "api": "what is slow to import, when it is used",
    "tools.cli": "the command that is named",
    "job.doctor": "libraries that may be missing",
    "runtime.transport": "a transport, when a job uses it",
}
"""The only modules that import others by a name in a string, which ORDERS does not see."""

OPTIONAL = {
    "numba": ("kernels/", "schedules/model/event_loop.py"),
    "llvmlite": (
        "kernels/conversions.py",
        "kernels/cuda_intrinsics.py",
        "kernels/intrinsics.py",
        "kernels/object_cache.py",
        "kernels/native/machine_code.py",
        "kernels/native/ptx_code.py",
    ),
    "mpi4py": ("transports/mpi/mpi_transport.py",),
    "scipy": ("primitives/special.py",),
    "cupy": ("transports/nccl/", "transports/cuda/", "platforms/gpu/"),
    "torch": ("torch/",),
    "jax": ("jax/",),
    "rich": ("tools/commands/",),
    "sklearn": (),
    "matplotlib": ("draw/static_figure.py",),
    "PIL": ("draw/static_figure.py",),
    "plotly": ("draw/plotly_figure.py",),
    "pandas": (),
    "tqdm": (),
}
"""Optional library -> the only files that may import it."""


@dataclass(frozen=True)
class Import:
    """One import statement: of what, at which line, whether inside a function, whether for type checkers only."""

    target: str
    line: int
    lazy: bool
    typing: bool


def name_of(path: Path) -> str:
    """`.../funccoll/ops/linalg.py` -> `funccoll.ops.linalg`; a package has the name of its folder."""
    parts = ("funccoll", *path.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path) for path in FILES}


FOLDERS: dict[str, list[Path]] = {}
"""The files in each folder of the package; those beside the folders are in "funccoll"."""
for _file in FILES:
    FOLDERS.setdefault(_file.relative_to(ROOT.parent).parts[:-1][-1 if _file.parent == ROOT else 1], []).append(_file)


def statements(parent: ast.AST) -> Iterator[ast.stmt]:
    """Every statement in a node, at any depth; no expression has one in it."""
    for name in ("body", "handlers", "orelse", "finalbody", "cases"):
        for child in getattr(parent, name, ()):
            if isinstance(child, ast.stmt):
                yield child
            yield from statements(child)


@cache
def imports_of(source: str, module: str, is_package: bool) -> list[Import]:
    """Every import in a module's source, absolute names, wherever it stands."""
    package = module if is_package else module.rpartition(".")[0]
    found: list[Import] = []

    def targets(node: ast.ImportFrom) -> list[str]:
        base = package.rsplit(".", node.level - 1)[0] if node.level else ""
        target = ".".join(filter(None, [base, node.module]))
        names = [f"{target}.{alias.name}" for alias in node.names]
        if target == "funccoll":  # `from . import a` names a module
            return names
        return sorted({name if name in MODULES else target for name in names})

    def visit(node: ast.AST, lazy: bool, typing: bool) -> None:
        if isinstance(node, ast.Import):
            found.extend(Import(alias.name, node.lineno, lazy, typing) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            found.extend(Import(target, node.lineno, lazy, typing) for target in targets(node))
        inside = lazy or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            checked, executed = (node.orelse, node.body) if isinstance(node.test, ast.UnaryOp) else (node.body, node.orelse)
            for child in checked:
                visit(child, inside, True)
            for child in executed:
                visit(child, inside, typing)
            return
        for name in ("body", "handlers", "orelse", "finalbody", "cases"):  # no expression has an import in it
            for child in getattr(node, name, ()) if not isinstance(node, ast.expr) else ():
                visit(child, inside, typing)

    visit(ast.parse(source), False, False)
    return found


def line_of(package: str, child: str) -> int | None:
    """The number of the line in which a package's order names a child; None where it names none."""
    lines = enumerate(ORDERS.get(package, ()))
    found = {name: number for number, line in lines for name in line}
    return found.get(child, found.get("*"))


def goes_upwards(importer: str, imported: str) -> str | None:
    """The reason why one module may not import another, or None. Names without `funccoll.`; exceptions do not count here."""
    mine, theirs = importer.split("."), imported.split(".")
    common = 0
    while common < min(len(mine), len(theirs)) and mine[common] == theirs[common]:
        common += 1
    if common == len(mine):  # its own modules, which a package imports as it likes
        return None
    if common == len(theirs):
        return f"{imported} is a package around it"
    package, above, below = ".".join(mine[:common]), mine[common], theirs[common]
    lines = [line_of(package, child) for child in (above, below)]
    where = package or "funccoll"
    for child, line in zip((above, below), lines, strict=True):
        if line is None:
            return f"{child!r} has no place in the order of {where}"
    if lines[1] == lines[0]:
        return f"{below} stands beside {above} in {where}"
    return f"{below} stands after {above} in {where}" if lines[1] > lines[0] else None
