# make demo    sets up .venv, then trains a small Llama in 3D.
# make check   lint, types, pure tests and two ranks: what to run while working, in about a minute.
# make test    lint, types and all tests but the slow ones: what must hold before a change lands.
# make docs    the documentation as a site, in build/site: open build/site/index.html.
# make prove   the long proofs; make wheel-test: the package in a clean environment; make cluster-test: runs on two hosts
#              and on Slurm; make gpu-test: CUDA and NCCL, on one GPU; make extras-test: a server of object storage, trackers;
#              make others-test: other people's training code; make browser-test: the page in a Chromium;
#              make labs-test: the labs' solutions, mistakes and hostile answers;
#              make recipes: the jobs of recipes/, dry-run; make contributing: CONTRIBUTING's recipes, followed;
#              make soak: random faults, and one loss curve; make docs-test: the site in a Chromium;
#              make notebooks-test: every cell of notebooks/ (make notebooks keeps what they show).
#              Their last transcripts are kept in proofs/.
PYTHON ?= python3
BIN := .venv/bin
KEEP := $(BIN)/python tools/keep.py

unexport PYTHONDONTWRITEBYTECODE # each process would compile all that it imports

.PHONY: demo check test install lint types pure smoke pytest shared waits alone prove cluster-test extras-test others-test labs-test browser-test \
	gpu-test wheel-test recipes contributing docs docs-test notebooks notebooks-test soak clean

demo: install
	$(BIN)/fivefold train examples/demo.toml --nproc 8 --fresh

check: lint
	@$(MAKE) --no-print-directory -j2 types pure
	@$(MAKE) --no-print-directory smoke

# Types are checked while tests wait for their ranks.
test: lint
	@$(MAKE) --no-print-directory -j2 types shared
	@$(MAKE) --no-print-directory waits
	@$(MAKE) --no-print-directory alone

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install
	$(BIN)/mypy

# Tests run with one thread each: OpenMP's threads spin while they wait, and take the cores of other ranks.
pure smoke shared waits alone prove cluster-test extras-test others-test labs-test browser-test docs-test gpu-test notebooks notebooks-test: export OMP_NUM_THREADS = 1

# The tests of packages that need no torch; tests/conftest.py says which.
pure: install
	$(BIN)/python -m pytest -n 2 -m "pure and not slow and not waits and not alone"

# Two real ranks compute the gradients of one process, send what the planner says, and hold the memory it says.
smoke: install
	$(BIN)/fivefold verify --layout dp=2

# Four at a time on two cores: tests wait for their ranks half of the time. Those that wait for a timeout leave the cores
# to each other, and those that measure time run by themselves.
HERE := not slow and not cluster and not extras and not browser and not gpu
pytest:
	@$(MAKE) --no-print-directory shared
	@$(MAKE) --no-print-directory waits
	@$(MAKE) --no-print-directory alone
shared: install
	$(BIN)/python -m pytest -n 4 --dist loadscope --no-loadscope-reorder -m "not alone and not waits and $(HERE)"
waits: install
	$(BIN)/python -m pytest -n 3 -m "waits and $(HERE)"
alone: install
	$(BIN)/python -m pytest -m "alone and $(HERE)"

# Run these before a change of what they prove lands, and commit the transcripts.
prove: install
	$(KEEP) layouts $(BIN)/fivefold verify --all --world 4 --sample 60
	$(KEEP) accuracy $(BIN)/fivefold accuracy --leave-out
	$(KEEP) slow-tests $(BIN)/python -m pytest -n 3 --ignore tests/labs -m "(slow or hypothesis) and not alone" --hypothesis-profile thorough
	$(KEEP) slow-alone $(BIN)/python -m pytest -m "slow and alone"

# On hosts made of namespaces and a Slurm of their own: needs root, iproute2, slurm-wlm and munge.
cluster-test: install
	$(KEEP) cluster $(BIN)/python -m pytest -vv --no-header --durations=0 --durations-min=1 tests/cluster

wheel-test: install
	$(KEEP) wheel $(PYTHON) tools/wheel_test.py

# A server that speaks S3 and its friends, W&B and MLflow; 300 MB that nobody else needs.
extras-test: install
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[s3-test,trackers-test]"
	$(KEEP) extras $(BIN)/python -m pytest -vv --no-header tests/extras

# The adapters of `verify --adapter` with the released packages, and bugs planted in these; 400 MB that nobody else needs.
others-test: install
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[others-test]"
	$(KEEP) others $(BIN)/python -m pytest -vv --no-header -rs --durations=20 -m "extras or slow" tests/foreign

# Every lab: its starter, its solution, more than ten typical mistakes of each, and answers that hang, exit or lie.
labs-test: install
	$(KEEP) labs $(BIN)/python -m pytest -n 2 -vv --no-header --durations=0 --durations-min=1 tests/labs

# What CUDA and NCCL prove, on one GPU that ranks share: eight minutes on an H200 with 16 cores. -rP
# shows what tests print: seconds, and who was named; PyTorch logs much beside it.
gpu-test: install
	$(KEEP) gpu $(BIN)/python -m pytest -n 11 -vv -rP -p no:logging --no-header --durations=15 tests/gpu

# Random faults against small runs, from seeds: make soak SEEDS=1-100 JOBS=4
SEEDS ?= 1-5
JOBS ?= 1
soak: install
	$(KEEP) soak $(BIN)/python tools/soak.py $(SEEDS) --jobs $(JOBS)

# The page in a real browser. What cannot be installed is said by the tests that are skipped.
define chromium
-$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[browser-test]"
-@test -n "$$CHROMIUM" || command -v chromium chromium-browser > /dev/null || \
	{ echo "installing Debian's chromium"; apt-get update -qq && apt-get install -qq --yes --no-install-recommends chromium; }
endef
browser-test: install
	$(chromium)
	$(KEEP) browser $(BIN)/python -m pytest -vv --no-header -rs tests/browser

# Jupyter's kernel and what drives it; 70 MB that nobody else needs.
notebooks-test: install
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[notebooks]"
	$(KEEP) notebooks $(BIN)/python tools/notebooks.py --compare

notebooks: install
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[notebooks]"
	$(BIN)/python tools/notebooks.py

recipes: install
	$(KEEP) recipes $(BIN)/python tools/recipes.py

contributing: install
	$(KEEP) contributing $(BIN)/python tools/contributing.py

# Every build is read once more for dead links and for what would be loaded from elsewhere.
docs: .venv/docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	$(BIN)/python -m website.check build/site

# The site in a Chromium, from the disk and without a network.
docs-test: docs
	$(chromium)
	$(KEEP) docs $(BIN)/python -m pytest -vv --no-header -rs tests/browser/test_docs.py

.venv/docs: .venv/installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[docs]"
	touch $@

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
