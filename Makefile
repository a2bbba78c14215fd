# make run: a virtual environment, the requirements, and GRPO on a laptop's CPU.  make test: the same for the tests.
PYTHON ?= python3
JOBS ?= 2
BIN = .venv/bin

run: .venv/run
	$(BIN)/python grpo.py config/grpo_small.py $(ARGS)

test: .venv/dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(JOBS) --dist=worksteal $(ARGS)

lint: .venv/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

bench-gpu: .venv/dev
	$(BIN)/python bench/gpu.py

.venv/run: requirements.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q -r requirements.txt
	touch $@

.venv/dev: requirements-dev.txt .venv/run
	$(BIN)/python -m pip install -q -r requirements-dev.txt
	touch $@

.PHONY: run test lint bench-gpu
