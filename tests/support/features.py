"""Table of the features and of how far each works. Test modules name the features that they cover by the marker `covers`.

`tests/docs/status_page.py` makes the page docs/status.md and the short table of the README from it.
"""

from __future__ import annotations

from dataclasses import dataclass

from funccoll.schedules.collective import KINDS
from funccoll.schedules.registry import algorithms

WORKS, LIMITED, NOT_RUN, PLANNED, NOT_BUILT = "works", "works, with a limit", "not run", "planned", "not built"
STATES = {
    WORKS: "it runs, and its tests pass",
    LIMITED: "it runs, and the note says where it ends",
    NOT_RUN: "it is written, and nothing has run it on the real thing",
    PLANNED: "it is not there yet",
    NOT_BUILT: "it is not there on purpose, and the note says why",
}

H200 = "benchmarks/results/gpu/h200.json"


@dataclass(frozen=True)
class Feature:
    """What users may rely on, and how far."""

    id: str
    title: str
    area: str
    state: str
    note: str = ""
    records: tuple[str, ...] = ()
    """Measurements that are evidence beside the tests."""


AREAS = {
    "programs": ("Programs", "`jit`, gradients, `vmap`, loops, NumPy, `fc.nn`, `fc.random`", "`fc.jax` is planned"),
    "collectives": ("Collectives and schedules", "proofs, costs, exports", "no real cluster and no MSCCL runtime has run them"),
    "training": ("Data parallel training", "buckets, hooks, optimizers, uneven batches", "FSDP helpers are planned"),
    "torch": ("PyTorch", "`DistributedDataParallel`, tensors", "tested on CPUs, and with two processes that share one GPU"),
    "one_host": (
        "Processes of one host",
        "shared memory, launchers, failures",
        "blocks of any sizes are planned",
    ),
    "several_hosts": ("Several hosts", "MPI over TCP", "tried on network namespaces, never on a real cluster"),
    "gpus": ("NVIDIA GPUs", "CuPy, CUDA kernels, NCCL", "ran on one H200; several GPUs, and NCCL between ranks, are untested"),
    "tools": ("Tools", "command line, profiles, drawings, notebooks", "no profiling on GPUs yet"),
}
"""Area -> its title, what it holds, and what limits it: the words of the short table."""

FEATURES = (
    # ------------------------------------------------------------ programs
    Feature("arrays", "Meshes, `P`, shardings, Arrays, DLPack, `__array_interface__`, HTML", "programs", WORKS),
    Feature(
        "redistribute",
        "`fc.redistribute`, and arguments whose split differs from `in_specs`",
        "programs",
        WORKS,
        "Any spec from any other, by proved collectives, on virtual devices and processes.",
    ),
    Feature(
        "uneven-shards",
        "Arrays whose dimensions the devices do not divide: 5 over 4 is 2, 2, 1, 0",
        "programs",
        LIMITED,
        "They are put, made from blocks, read, redistributed, saved, drawn and differentiated. A jitted function takes them by "
        "specs that split them evenly, or not at all.",
    ),
    Feature(
        "jit",
        "`jit`: pytree specs, `fc.AUTO`, static and donated arguments, caching, stages, fingerprints",
        "programs",
        WORKS,
    ),
    Feature(
        "fast-calls",
        "Fast calls of jitted functions: one caller for each signature",
        "programs",
        WORKS,
        "The C extension or Python (FUNCCOLL_NATIVE=0) runs it. CI runs some of the tests without the extension.",
    ),
    Feature("numpy", "NumPy functions in traced code, with first and second derivatives", "programs", WORKS),
    Feature(
        "linalg",
        "`np.linalg`, `np.fft`, sorting, statistics; SciPy's special ufuncs (`funccoll[scipy]`)",
        "programs",
        LIMITED,
        "They run on CPUs, with NumPy's and SciPy's bits. On GPUs they raise an error. The page on NumPy lists them all.",
    ),
    Feature("nn", "`fc.nn`, `fc.random`, `fc.at`, `fc.asarray`", "programs", WORKS),
    Feature(
        "nn-models",
        "`fc.nn`: convolution, pooling, attention, losses; `fc.random`: integers, categories, orders, gamma and others",
        "programs",
        WORKS,
    ),
    Feature(
        "gradients",
        "Gradients: `grad`, `value_and_grad`, `vjp`, `custom_vjp`, `grad_hook`, nested in any way",
        "programs",
        WORKS,
    ),
    Feature(
        "jax-values", "Values and gradients equal those of JAX's `shard_map`", "programs", WORKS, "Tests skip without JAX."
    ),
    Feature(
        "mesh-gradients",
        "`fc.grad`, `fc.value_and_grad`, `fc.vjp` around jitted functions with a mesh",
        "programs",
        LIMITED,
        "Second derivatives work, too. Virtual devices and jobs give the same bits. Inside other transformations, and "
        "on GPUs, they raise an error.",
    ),
    Feature(
        "transformations",
        "`fc.vmap`, `jvp`, `linearize`, `jacfwd`, `jacrev`, `hessian`, `eval_shape`",
        "programs",
        WORKS,
        "Every primitive has a rule. Tests compare the rules with loops, differences and JAX.",
    ),
    Feature(
        "control-flow",
        "Loops and branches: `fc.scan`, `fori_loop`, `while_loop`, `cond`, `switch`, with collectives in them and gradients",
        "programs",
        LIMITED,
        "They work on virtual devices and in jobs. Values and gradients are JAX's in 79 programs; 12 more have "
        "collectives. On one H200, the 79 programs and 63 of their gradients have the CPU's values within 4.2 "
        "roundings. Four programs with collectives ran there on 2 and 4 virtual devices and in 2 processes. CUDA graphs "
        "do not capture 54 of those 142, because values decide their ends or branches.",
        (H200,),
    ),
    Feature("checkpoint", "`fc.checkpoint` with policies, `fc.pure_callback`, `fc.custom_primitive`", "programs", WORKS),
    Feature("errors", "Errors of misuse with your line, shapes, axes and a remedy", "programs", WORKS),
    Feature(
        "passes",
        "Passes: dead code, simplification, common subexpressions, algebra of collectives, combine, buffers",
        "programs",
        WORKS,
    ),
    Feature(
        "dtype-promotion",
        "Silent float64: a warning once, lines in `.lower(...)` and `funccoll explain`, `fc.jit(..., "
        'dtype_promotion="strict")`',
        "programs",
        WORKS,
    ),
    Feature(
        "debug",
        "`fc.debug`: `print`, `callback`, `nans` (FUNCCOLL_DEBUG=nans), `breakpoint`, `disable_jit`",
        "programs",
        LIMITED,
        "They work on CPUs. `print` and `callback` show values of compiled programs, in loops, branches and gradients. "
        "`nans` finds the first NaN or inf. `breakpoint` and `disable_jit` give pdb values, in compiled programs and "
        "eagerly.",
    ),
    Feature(
        "autograd-suite",
        "Programs of others: HIPS/autograd's tests and examples, through an adapter (`tests/autograd/autograd_suite.py`)",
        "programs",
        LIMITED,
        "548 of its 551 gradient tests pass, and none is wrong. 30 of its 31 examples run with autograd's own "
        "gradients: 24 unchanged, 2 with `fc.asarray`, 4 with an edit that autograd itself needs.",
        ("benchmarks/results/autograd_suite.json",),
    ),
    Feature("jax-adapter", "JAX adapter (`fc.jax`)", "programs", PLANNED),
    # ------------------------------------------------------------ collectives and schedules
    Feature(
        "collectives",
        "Collectives over one or several axes, on pytrees",
        "collectives",
        WORKS,
        "All of them run on virtual devices and on processes.",
    ),
    Feature(
        "axis-groups",
        "Groups along an axis (`groups=` of collectives), of any sizes if shapes do not depend on them, with gradients",
        "collectives",
        LIMITED,
        "They run on virtual devices, in processes, and over MPI. Groups of different sizes for `all_gather`, `all_to_all` and "
        "the like need ragged blocks (`fc.ragged`). On GPUs no job has run them.",
    ),
    Feature(
        "ragged",
        "Ragged blocks (`fc.ragged`): all_gather, all_to_all, reduce_scatter, gather and scatter of rows whose numbers differ",
        "collectives",
        LIMITED,
        "They run on virtual devices, in processes, and over MPI, in traced functions, with `groups=`, and outside of them. "
        "Virtual devices of one GPU were simulated. GPUs of several processes are planned.",
    ),
    Feature(
        "started-calls",
        "Started calls (`fc.start`): a call's collectives run while the caller computes, and a `Work` waits for its result",
        "collectives",
        LIMITED,
        "They run in processes of one host and over MPI. In one process, and on GPUs, a call has ended when `start` returns.",
    ),
    Feature(
        "schedules",
        f"Schedules: {sum(len(algorithms(kind)) for kind in KINDS)} algorithms for {len(KINDS)} collectives",
        "collectives",
        WORKS,
        "All are proved. Their streams, and their rounds of messages, are verified.",
    ),
    Feature(
        "stream-interpreter",
        "Streams on real arrays, in random interleavings",
        "collectives",
        WORKS,
        "One process interprets all ranks (`funccoll/schedules/streams/interpret.py`).",
    ),
    Feature(
        "schedule-mutations", "Wrong schedules raise errors", "collectives", WORKS, "All interleavings judge the mutations."
    ),
    Feature(
        "cost-model",
        "Costs, choice of schedules, simulation of slow and lost links",
        "collectives",
        LIMITED,
        "They use a model of the machine. Hosts that are network namespaces were measured, a real cluster was not.",
    ),
    Feature(
        "algorithm-argument",
        "`algorithm=` in collectives; a proved schedule for every collective at `.lower()`",
        "collectives",
        WORKS,
    ),
    Feature(
        "schedule-files",
        "Schedules as MSCCL XML and JSON (both ways, proved when read), GOAL, Perfetto",
        "collectives",
        LIMITED,
        "Code made from the runtimes' sources checks the formats' rules. No MSCCL runtime has executed one.",
    ),
    Feature(
        "mscclpp",
        "MSCCL++ plans, Chakra traces",
        "collectives",
        PLANNED,
        "Their own readers could not be installed here.",
    ),
    # ------------------------------------------------------------ training
    Feature(
        "data-parallel",
        "`data_parallel`: gradient buckets, mean, sum and weighted losses, uneven batches, accumulation, buffers, "
        "communication hooks, the plan of its buckets",
        "training",
        WORKS,
    ),
    Feature(
        "parallel-model",
        "`fc.DataParallel`: a model's parameters, optimizer and buffers in one object; `no_sync`, checkpoints, frozen "
        "and tied parameters",
        "training",
        WORKS,
    ),
    Feature("comm-hooks", "Communication hooks: casts, int8 with error feedback, PowerSGD", "training", WORKS),
    Feature(
        "optim",
        "`fc.optim`: SGD, Adam, AdamW, clipping, schedules, `state_specs`",
        "training",
        WORKS,
        "Values are torch's. The fused step works in place.",
    ),
    Feature("uneven-batches", "`fc.nn.sync_batch_norm`; `fc.uneven_batches` for ranks that run out of data", "training", WORKS),
    Feature(
        "demo",
        "Demo: data and tensor parallel training, on processes and on virtual devices, with the same bits",
        "training",
        WORKS,
    ),
    Feature(
        "overlap",
        "Overlap: started collectives (`fc.all_reduce_start`, `fc.done`), and `overlap=` of `fc.jit` and `fc.data_parallel`",
        "training",
        LIMITED,
        "Between hosts, and on one host with an idle core. Elsewhere started collectives are plain calls.",
    ),
    Feature(
        "ddp-for-functions",
        "DDP's gradients of sparse embeddings, `static_graph`, rebuilt buckets, `gradient_as_bucket_view` and pickling "
        "of the wrapper",
        "training",
        NOT_BUILT,
        "These are not for functions. Gradients are dense, and tracing knows their order. A bucket is a list of the "
        "gradients themselves. You keep a checkpoint instead of the wrapper.",
    ),
    Feature("fsdp", "FSDP and tensor-parallel helpers", "training", PLANNED),
    # ------------------------------------------------------------ torch
    Feature(
        "torch-ddp",
        "`funccoll.torch.DistributedDataParallel` for CPU modules: buckets, overlap with the backward pass, `no_sync`, `join`, "
        "unused parameters, sparse embeddings, `static_graph`, buffers, pickles",
        "torch",
        WORKS,
        "Tested with torch 2.13. The same cases passed with 2.8.0 and 2.15.0.",
    ),
    Feature(
        "torch-collectives",
        "Collectives of torch tensors, with gradients of any order; `SyncBatchNorm` on CPUs",
        "torch",
        WORKS,
    ),
    Feature(
        "torch-hooks",
        "`register_comm_hook` with torch's hooks and with `fc.comm_hooks`",
        "torch",
        WORKS,
        "Torch's hooks run unchanged.",
    ),
    Feature(
        "torch-gpu",
        "`funccoll.torch.DistributedDataParallel` for modules on GPUs: buckets in device memory, `device_ids`, "
        "`no_sync`, `join`, unused parameters, communication hooks",
        "torch",
        LIMITED,
        "With torch 2.11, 2 processes that share one H200 have torch's gradients: 11 cases of 4 steps, on your own "
        "streams, too (buckets, dtypes, batch norm, unused parameters, `static_graph`, hooks). **A GPU for each process "
        "has not run**, nor have `join` and `device_ids` on a GPU. Tests of these use torch's real engine with a device "
        "in host memory, over fakes of CuPy and NCCL.",
        (H200,),
    ),
    Feature(
        "torch-planned",
        "`mixed_precision`, delayed all_reduce and `Join` of several objects; sparse gradients, `SyncBatchNorm`, "
        "collectives of tensors, and overlap for torch on GPUs",
        "torch",
        PLANNED,
    ),
    Feature("distributed", "torch.distributed's surface (`fc.distributed`)", "torch", PLANNED),
    # ------------------------------------------------------------ one host
    Feature(
        "shared-memory",
        "Programs over shared memory, with the bits of virtual devices",
        "one_host",
        WORKS,
        "The whole table of cases runs on 2, 3 and 4 processes, and on 8 with 2 cores. Benchmarks compare it with Open "
        "MPI and Gloo.",
        ("benchmarks/results/host.json",),
    ),
    Feature(
        "collective-groups",
        "Adjacent collectives in one native call; arrays in shared memory; threads, each with its own mesh",
        "one_host",
        WORKS,
    ),
    Feature(
        "transports",
        "One interface of transports (`funccoll/runtime/transport.py`): virtual devices, shared memory",
        "one_host",
        WORKS,
        "A third transport exists only in the tests. Its threads exchange messages, and run the table of collectives.",
    ),
    Feature(
        "direct-reads",
        "Large NumPy arguments: other processes read them in place (`process_vm_readv`) if the system allows it",
        "one_host",
        WORKS,
        "Tests let seccomp forbid it, at the start and in the middle of a job.",
    ),
    Feature(
        "staging",
        "Other NumPy arguments: each process copies the parts that others read, in segments, while they read the one before",
        "one_host",
        WORKS,
        "The benchmarks have the cost.",
        ("benchmarks/results/host.json",),
    ),
    Feature(
        "shared-results",
        "One array for results that are equal on all ranks of a host: large all_gathers and all_reduces, broadcasts of Arrays",
        "one_host",
        LIMITED,
        "Jitted functions of collectives alone have it. The memory is free again when all ranks have dropped their "
        "results. `y.local` is read-only memory for every library: a write into `torch.from_dlpack(y.local)` ends the "
        "process, and changes nothing. `torch.from_dlpack(y)` is a copy.",
    ),
    Feature(
        "clashing-jobs",
        "Separation of jobs and of forked children",
        "one_host",
        WORKS,
        "Two jobs with one name do not mix. Forked children (a DataLoader's workers) keep their arrays as they were. "
        "The copies may take FUNCCOLL_FORK_MIB (1024).",
    ),
    Feature(
        "blas-bits",
        "Products of matrices with the same bits in one process and in many",
        "one_host",
        LIMITED,
        "On several devices NumPy's BLAS has FUNCCOLL_BLAS_THREADS threads (1). It works with OpenBLAS. MKL and BLIS "
        "were not tried.",
    ),
    Feature(
        "job-checks",
        "`fc.init(timeout=)`, FUNCCOLL_TIMEOUT, FUNCCOLL_DEBUG=detail; comparison of the meshes of processes",
        "one_host",
        WORKS,
        "FUNCCOLL_DEBUG=detail compares in every call the arguments that must be equal. NumPy arguments, which are "
        "global values, are compared whole. Without it, only first calls are compared.",
    ),
    Feature(
        "launch",
        "`funccoll run`, `fc.launch`, `fc.init`, `fc.finalize`, `funccoll doctor`",
        "one_host",
        WORKS,
    ),
    Feature(
        "launchers",
        "torchrun and mpirun on one host, with `torch.distributed` (Gloo) and mpi4py in the same script",
        "one_host",
        WORKS,
        "Tested with torch 2.13 and Open MPI 4.1. Tests skip what is not installed.",
    ),
    Feature(
        "exceptions",
        "An exception after the last collective of a step",
        "one_host",
        WORKS,
        "Ranks may retry together. A rank that retries alone raises an error that names it.",
    ),
    Feature(
        "failures",
        "A process that dies, stops, raises, leaves, comes late, runs another program or runs out of memory",
        "one_host",
        LIMITED,
        "The other ranks name it, and nothing is left behind. Tests kill processes at 60 seeded instructions. The "
        "memory limit of a control group is simulated. The record has the times until the others know.",
        ("benchmarks/results/failures.json",),
    ),
    Feature(
        "process-groups",
        'Groups of any processes (`fc.group`, `split`), parts of a mesh (`mesh["data"]`), and failures outside of them',
        "one_host",
        WORKS,
    ),
    Feature("channels", "Several channels between processes", "one_host", PLANNED),
    # ------------------------------------------------------------ several hosts
    Feature(
        "mpi",
        "Programs over MPI: the table of cases, gradients and digits, with the bits of virtual devices",
        "several_hosts",
        LIMITED,
        "mpirun starts 2 to 4 ranks on one host, and on 2 to 4 hosts. Open MPI 5.0.11 and MPICH 5.0.2 were used, over "
        "TCP between network namespaces. It has **never run on a real cluster**. Most of the tests are slow.",
    ),
    Feature(
        "host-schedules",
        "Meshes on several hosts, hierarchical schedules for any map of ranks to hosts, their choice",
        "several_hosts",
        WORKS,
    ),
    Feature(
        "host-failures",
        "A rank on another host that dies, raises, leaves, stops or runs another program; a link that goes down",
        "several_hosts",
        WORKS,
        "All other ranks name it. They also name a cycle of ranks that wait for each other across hosts.",
        ("benchmarks/results/failures_mpi.json",),
    ),
    Feature(
        "mpi-collectives",
        '`algorithm="mpi"`: MPI\'s own collectives',
        "several_hosts",
        WORKS,
        "Every collective, op and dtype that MPI has works on 2 to 4 ranks, with Open MPI 5.0 and MPICH 5.0.",
    ),
    Feature(
        "run-hosts",
        "`funccoll run --hosts a:4,b:4`; `funccoll doctor` on MPI, hosts and links",
        "several_hosts",
        LIMITED,
        "Both work with Open MPI and MPICH. The options for Open MPI 4.1 are written, and were not run.",
    ),
    Feature("network-tuning", "`funccoll tune` in a job on several hosts", "several_hosts", WORKS),
    Feature(
        "srun",
        "`srun`",
        "several_hosts",
        NOT_RUN,
        "There was no Slurm. It needs an MPI with Slurm's PMI (`srun --mpi=pmix` or pmi2), and mpi4py for it.",
    ),
    Feature(
        "persistent-requests",
        "Persistent requests; NumPy arguments in segments on several hosts",
        "several_hosts",
        NOT_BUILT,
        "Persistent requests gained nothing over plain ones (15 ns of 8 µs). Arguments that neighbours read are copied whole.",
    ),
    Feature("gpus-of-hosts", "GPUs of several hosts", "several_hosts", PLANNED),
    # ------------------------------------------------------------ GPUs
    Feature(
        "cuda-kernel",
        "CUDA kernel: blocks of GPU threads run the stream interpreter, between virtual devices of one GPU",
        "gpus",
        LIMITED,
        "On one H200 (sm_90), the table of collectives ran on 1, 2, 4 and 8 devices. Its 1,656 programs, NaNs and "
        "forced algorithms have the CPU's bits in each of three calls. compute-sanitizer finds no memory error in a few "
        "programs, and no race in a ring. For sm_80 and sm_100 the kernel is **assembled and simulated only**.",
        (H200,),
    ),
    Feature(
        "gpu-numpy",
        "Every NumPy function and its gradients through CuPy; products of matrices by cuBLAS; kernels for random "
        "numbers and additions to rows",
        "gpus",
        LIMITED,
        "On one H200, 1,945 values and gradients of NumPy's functions are within 3.1 roundings. 430 more raise an error "
        "(sorting, LAPACK, FFTs). Random numbers and additions to rows have the CPU's bits. Convolution and pooling ran "
        "with second derivatives, in batches and in 16 bits: 24 programs are within 2.2 roundings. Tests run over "
        "strict fakes of CuPy 14.2 (its names, parameters and refusals) and of cuBLAS.",
        (H200,),
    ),
    Feature(
        "gpu-fusion",
        "Fused groups on GPUs, with FUNCCOLL_FUSE=gpu: elementwise operations and reductions as one kernel of PTX",
        "gpus",
        NOT_RUN,
        "They are off unless you ask for them. Random groups and each operation are **assembled for sm_80, sm_90 and sm_100, "
        "simulated** (their text runs thread by thread on a CPU) **and not run on a GPU**. Programs with them are called, "
        "captured and replayed over the fake of CuPy.",
    ),
    Feature(
        "gpu-arrays",
        '`device="cuda"`, CuPy arrays as arguments, asynchronous calls, CUDA graphs, DLPack',
        "gpus",
        LIMITED,
        "On one H200, all compared programs were captured. Arrays of CuPy, torch and JAX come and go without a copy, "
        "and streams wait for each other. Graphs make room for others, and give their memory back. Wrong indices that "
        "only the GPU can see raise errors (32 programs). Arrays are redistributed, donated, pickled and used by 4 "
        "threads. Data parallel steps with hooks have the CPU's values.",
        (H200,),
    ),
    Feature(
        "gpu-peers",
        "Several processes over memory that they map (CUDA IPC)",
        "gpus",
        LIMITED,
        "It works for processes that share one H200. The table of collectives, loops with collectives and redistributed "
        "Arrays ran in 2 processes, programs in 4. The others name a peer that is killed (before its launch, too), "
        "raises or runs another program. **Between GPUs nothing has run**: tests give real processes a simulated GPU "
        "each.",
        (H200,),
    ),
    Feature(
        "nccl",
        "NCCL: native collectives and rounds of messages; the choice between it and our kernel by the cost model",
        "gpus",
        NOT_RUN,
        "NCCL 2.28 takes a GPU for each rank, and there was one. With one rank, CuPy's NCCL module works there, in a "
        "CUDA graph, too. Ours calls it. Tests of native collectives, rounds, watchdog and abort are real processes "
        "over a fake of that module. The model's figures are assumed, not measured.",
    ),
    Feature(
        "gpu-check",
        "`make gpu-check`: all of it on a machine with a GPU",
        "gpus",
        LIMITED,
        "It ran on one H200, which skips the trials of several GPUs and of NCCL's ranks. All trials are rehearsed on "
        "the CPU and over the fakes.",
        (H200,),
    ),
    # ------------------------------------------------------------ tools
    Feature(
        "drawings",
        "Drawings: space-time diagrams, link matrices, chunk tables, cost curves, programs, shardings, timelines, bucket plans",
        "tools",
        WORKS,
        "By matplotlib and plotly.",
    ),
    Feature(
        "profiles",
        "Measured profiles: `fc.profile`, FUNCCOLL_PROFILE, `funccoll profile`",
        "tools",
        LIMITED,
        "They work in processes of one host, and on virtual devices. What runs on GPUs is not recorded. One record is "
        "about blame.",
        ("benchmarks/results/blame.json",),
    ),
    Feature(
        "tune",
        "`funccoll tune`: the cost model fitted to this host, and used",
        "tools",
        WORKS,
        "The benchmarks show how good its predictions are.",
        ("benchmarks/results/calibration.json",),
    ),
    Feature("commands", "Command line: `funccoll schedule`, `explain`, `profile`, `tune`", "tools", WORKS),
    Feature(
        "release",
        "An sdist, wheels with and without the C extension, types for checkers (`py.typed`)",
        "tools",
        LIMITED,
        "`make release` builds and tries them without a compiler. PyPI needs manylinux wheels. Their settings are written, and "
        "have not run.",
    ),
    Feature(
        "notebooks",
        "Six notebooks",
        "tools",
        WORKS,
        "Tests execute them, and open them in JupyterLab in a headless Chromium if there is one.",
    ),
    Feature(
        "site",
        "The site: guides, reference, design, benchmarks (`make docs`)",
        "tools",
        WORKS,
        "Tests run its code, and open its pages in a headless Chromium if there is one.",
    ),
)
