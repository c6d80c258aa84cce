# make demo: set up and watch a small Llama learn in 3D.   make test: set up, lint, types, tests.
PYTHON ?= python3
BIN := .venv/bin

unexport PYTHONDONTWRITEBYTECODE # each process would compile all that it imports

.PHONY: demo test install lint types pytest shared alone clean

demo: install
	$(BIN)/fivefold train examples/demo.toml --nproc 8 --fresh

# Types are checked while tests wait for their ranks.
test: lint
	@$(MAKE) --no-print-directory -j2 types shared
	@$(MAKE) --no-print-directory alone

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install
	$(BIN)/mypy

# Three at a time on two cores: tests wait for their ranks half of the time. One thread each: OpenMP's spin while they
# wait, for others' cores too. Those that measure time run by themselves.
pytest:
	@$(MAKE) --no-print-directory shared
	@$(MAKE) --no-print-directory alone
shared alone: export OMP_NUM_THREADS = 1
shared: install
	$(BIN)/python -m pytest -n 3 --dist loadscope --no-loadscope-reorder -m "not alone"
alone: install
	$(BIN)/python -m pytest -m alone

# The stamp makes this a no-op until pyproject.toml changes.
install: .venv/installed

.venv/installed: pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "$(PYTHON) is older than Python 3.11; write for example: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[train,dev]"
	touch $@

clean:
	rm -rf .venv
