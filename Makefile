# Everything a newcomer needs: `make demo`, `make test`, `make lint` set themselves up.
PYTHON ?= python3
# `make test TORCH=2.6.0` tests with that version of torch, in an environment of its own.
VENV := .venv$(if $(TORCH),-torch-$(TORCH))
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready
COMPLETE := $(VENV)/.complete
SETUP := VENV="$(VENV)" TORCH="$(TORCH)" PYTHON="$(PYTHON)" bash scripts/setup.sh
EXTENSION_SOURCES := CMakeLists.txt pyproject.toml $(wildcard csrc/*)

# The tests and the demo use the cores that this process may use, whatever a launcher has set; and they keep byte code,
# without which each of the tests' many processes compiles all of dos, and each worker rewrites the asserts of all tests.
unexport OMP_NUM_THREADS PYTHONDONTWRITEBYTECODE

.PHONY: demo experiments docs quick test test-slow test-races lint format wheel clean

demo: $(STAMP)
	$(BIN)/python -m experiments.train

# The paper's experiments in simulation: docs/results.md with its pictures.
experiments: $(STAMP)
	$(BIN)/python -m experiments.sweep --report

# The site in out/site; a warning is an error.
docs: $(COMPLETE)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# While you work: lint, the layers, and the tests of one package, such as `make quick PACKAGE=tests/dos/weights`.
PACKAGE ?= tests/dos/torch_internals
quick: lint
	CUDA_VISIBLE_DEVICES= OMP_WAIT_POLICY=passive $(BIN)/python -m pytest -q -m "not clock and not slow" tests/test_layering.py $(PACKAGE)

# A GPU is hidden from all but tests/cuda: ranks, emulated devices and forks are meant to be on the CPU.
# One process skips tests/cuda where there is no GPU: each worker would import all of it first.
# Five workers: tests wait a fifth of their time. Long files first, during which other workers would be idle at the end.
test: $(COMPLETE)
	CUDA_VISIBLE_DEVICES= OMP_WAIT_POLICY=passive $(BIN)/python -m pytest -q -m "not clock and not slow" -n 5 --dist loadfile --no-loadscope-reorder tests/simdev tests/experiments tests/project tests --ignore tests/cuda
	$(BIN)/python -m pytest -q -r s -n $(if $(wildcard /dev/nvidia0 /dev/kfd /dev/dxg),2,0) --dist load tests/cuda

# What takes minutes: documented commands at their smallest size, and properties with four times as many examples; and
# what compares with a clock, which other work on the machine can spoil.
test-slow: $(COMPLETE)
	CUDA_VISIBLE_DEVICES= OMP_WAIT_POLICY=passive $(BIN)/python -m pytest -q -m clock
	OMP_WAIT_POLICY=passive DOS_EXAMPLES=100 DOS_CALLS=48 $(BIN)/python -m pytest -q -m "(slow or hypothesis) and not clock"

# Two accesses of memory that nothing orders fail a test of the library, whatever the timing was.
test-races: $(COMPLETE)
	CUDA_VISIBLE_DEVICES= OMP_WAIT_POLICY=passive DOS_RACES=1 $(BIN)/python -m pytest -q -m "not clock and not slow" -n 2 tests/dos

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Wheels in dist/ for Python 3.10, 3.11 and, as one, 3.12 and later, as far as these are installed; or for PYTHON alone.
# For manylinux where auditwheel and patchelf are installed.
wheel:
	PYTHON="$(if $(filter command environment,$(firstword $(origin PYTHON))),$(PYTHON))" bash scripts/wheel.sh --config-settings "build-dir=build/wheel-{wheel_tag}"

$(STAMP): scripts/setup.sh constraints.txt $(EXTENSION_SOURCES)
	$(SETUP)
	touch $@

# Besides, what the documentation and the examples need, and the tools that tests let loose on models.
$(COMPLETE): $(STAMP)
	$(SETUP) docs examples tools
	touch $@

clean:
	rm -rf .venv .venv-torch-* build dist out .pytest_cache .mypy_cache .ruff_cache .hypothesis
