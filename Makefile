# Every target sets the environment up first, once; VENV names where. timm asks for torchvision, which has no build for
# torch on the CPU, and works without.
PYTHON ?= python3
VENV ?= .venv
JOBS ?= 2
PYTEST_ARGS ?=
# The release of torch that an environment gets; `make test-torch TORCH=2.9.1` makes one of its own.
TORCH ?= $(shell sed -n 's/^torch==//p' constraints.txt)
BENCH_ARGS ?=
# A further index for torch. If no GPU answers and PyTorch's index of builds for the CPU does, it is that one, which saves
# several GB; `make setup TORCH_INDEX=` takes what pip finds by itself.
CPU_INDEX = https://download.pytorch.org/whl/cpu
PROBE = import signal, urllib.request as r; signal.alarm(5); r.urlopen("$(CPU_INDEX)/torch/", timeout=3)
TORCH_INDEX ?= $(shell nvidia-smi -L >/dev/null 2>&1 || { $(PYTHON) -c '$(PROBE)' 2>/dev/null && echo $(CPU_INDEX); })

BIN = $(VENV)/bin
STAMP = $(VENV)/.torchboost-stamp
# A worker gets the tests of a file together, in the order of tests/conftest.py.
PYTEST = $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder --max-worker-restart 0

.PHONY: setup demo test test-torch test-all lint format type layers docs check bench bench-gpu bench-gpu-files package clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	sed 's/^torch==.*/torch==$(TORCH)/' constraints.txt > $(VENV)/constraints.txt
	$(BIN)/python -m pip install --disable-pip-version-check --quiet -c $(VENV)/constraints.txt \
		$(addprefix --extra-index-url ,$(TORCH_INDEX)) -e '.[dev]'
	$(BIN)/python -m pip install --disable-pip-version-check --quiet -c $(VENV)/constraints.txt --no-deps timm
	touch $@

demo: setup
	$(BIN)/torchboost bench docstrings --contestants stock,hand,O1 --seeds 3 --pairs 10 --out out/demo --force

test: setup
	$(PYTEST) $(PYTEST_ARGS)

test-torch:
	$(MAKE) test VENV=$(VENV)-torch-$(TORCH) TORCH=$(TORCH)

test-all: setup
	$(PYTEST) -m "not gpu" $(PYTEST_ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

type: setup
	$(BIN)/pyright --pythonpath $(BIN)/python

layers: setup
	$(BIN)/lint-imports

docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

check: lint type layers test docs

bench: setup
	$(BIN)/python benchmarks/run.py $(BENCH_ARGS)
	$(BIN)/python benchmarks/tables.py

# On somebody else's machine: no environment is made, so torch and the rest are those of PYTHON.
bench-gpu:
	$(PYTHON) benchmarks/gpu.py $(BENCH_ARGS)

# Before the files are copied to a machine without git and network, which runs this version of Python.
GPU_PYTHON ?= 3.12
bench-gpu-files: setup
	PYTHONPATH=src $(BIN)/python -c "from torchboost.measure.stopwatch import environment as e; print(e().commit)" > COMMIT
	$(BIN)/python -m pip download --disable-pip-version-check --quiet --dest wheels --only-binary :all: \
		--python-version $(GPU_PYTHON) pydantic lazy-loader safetensors

package: setup
	$(BIN)/python -m build --outdir dist

clean:
	rm -rf $(VENV) out build dist site .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find src tests benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
