# Everything a person does with this tree. Each target makes what it needs in .venv first; a second run is quick.
#   make run ARGS="-c config/examples/minimal.yaml"      make test ARGS="-k breaker -x"

SHELL := /bin/sh
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

VENV := .venv
PY := $(VENV)/bin/python
# Errors only: pip warns about every index a machine is set up with that lacks a package.
PIP := $(PY) -m pip --disable-pip-version-check --quiet --quiet
ARGS ?=
WORKERS ?= 2
export PYTHON # `make PYTHON=…` picks the interpreter; see .ci/python

# A peer of the benchmarks whose pins are not ours.
MITMPROXY := $(VENV)-mitmproxy

CODE := sidecar telemetry config tests benchmarks dashboards

.PHONY: help
help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-18s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: run
run: $(VENV)/.installed ## start the proxy (ARGS="-c file.yaml")
	@exec $(PY) -m sidecar run $(ARGS)

.PHONY: demo
demo: $(VENV)/.installed ## a proxy, a flaky upstream and a client: see something happen
	@exec $(PY) config/examples/demo.py $(ARGS)

.PHONY: test
test: lint ## lint, then every test with branch coverage (ARGS="-k name")
	$(PY) -m pytest --cov -n $(WORKERS) --dist loadfile $(ARGS)

.PHONY: lint
lint: $(VENV)/.installed-dev ## ruff, formatting, mypy
	$(PY) -m ruff check
	$(PY) -m ruff format --check
	$(PY) -m mypy

.PHONY: format
format: $(VENV)/.installed-dev ## let ruff fix and format the code
	$(PY) -m ruff check --fix
	$(PY) -m ruff format

.PHONY: bench
bench: $(VENV)/.installed-dev $(MITMPROXY)/.installed ## ratios against peers on this machine
	@.ci/system-packages wrk=wrk nginx=nginx h2load=nghttp2-client taskset=util-linux
	@PATH="$$PATH:/usr/sbin" $(PY) -m benchmarks.run $(ARGS)

.PHONY: soak
soak: $(VENV)/.installed-dev ## load on a failing upstream, ten minutes with every store full: memory and files stay flat (ARGS="--minutes 30")
	@$(PY) -m tests.soak $(ARGS)

# Panels and alerts are tested on a real Prometheus; without one those tests are skipped and say so.
.PHONY: prometheus
prometheus:
	@.ci/system-packages promtool=prometheus || echo "No Prometheus: tests that need one are skipped, and say so"
test: prometheus

.PHONY: dashboards
dashboards: | $(PY) ## write dashboards/*.json from their code
	@$(PY) dashboards/generate.py

.PHONY: dashboards-preview
dashboards-preview: $(VENV)/.installed-dev ## play an incident and draw the dashboards into dashboards/preview
	@.ci/system-packages prometheus=prometheus
	@$(PIP) install --require-hashes -r dashboards/preview.lock
	@$(PY) dashboards/preview.py

.PHONY: dashboards-grafana
dashboards-grafana: $(VENV)/.installed-dev dashboards/grafana/node_modules/.package-lock.json ## let Grafana's own packages (npm) judge the dashboards
	@$(PY) -m pytest -q tests/test_dashboards_grafana.py

dashboards/grafana/node_modules/.package-lock.json: dashboards/grafana/package-lock.json
	@command -v npm > /dev/null || { echo "npm is needed: install Node.js 20 or newer"; exit 1; }
	@cd dashboards/grafana && npm ci && touch node_modules/.package-lock.json

.PHONY: reloads
reloads: $(VENV)/.installed-dev ## two hundred reloads under load, every second file wrong: no request notices
	@$(PY) -m tests.reloads $(ARGS)

.PHONY: storm
storm: $(VENV)/.installed-dev ## two minutes of 300 apps, upstreams that say too much, reloads: no app gets a byte meant for another
	@$(PY) -m tests.signed $(ARGS)

.PHONY: fuzz
fuzz: $(VENV)/.installed-dev ## 200,000 messages: what our parsers accept, a model of RFC 9112 accepts with the same bodies
	@$(PY) -m tests.framing.fuzz $(ARGS)

.PHONY: ledger
ledger: $(VENV)/.installed-dev ## 2,000 requests that fail at every send phase, then all that is safe is replayed
	@LEDGER_ENTRIES=2000 $(PY) -m pytest -q tests/durability/test_ledger.py

.PHONY: chaos
chaos: $(VENV)/.installed-dev ## kill -9 a writing store a thousand times and a running sidecar fifty; no promise may break
	@$(PY) -m tests.durability.chaos $(ARGS)
	@KILL_ROUNDS=50 $(PY) -m pytest -q -s tests/durability/test_killed_process.py

# The lock files name versions and hashes, never the place they came from. UPGRADE=1 takes newer versions.
COMPILE = $(PY) -m uv pip compile --quiet --universal --python-version 3.11 --generate-hashes \
	--no-emit-index-url --no-emit-find-links --custom-compile-command "make lock" $(if $(UPGRADE),--upgrade)
.PHONY: lock
lock: | $(PY) ## rewrite the lock files from pyproject.toml (UPGRADE=1 for newer versions)
	@$(PY) -c "import uv" 2>/dev/null || $(PIP) install uv
	$(COMPILE) pyproject.toml --output-file requirements.lock
	$(COMPILE) pyproject.toml --group dev --group bench --constraint requirements.lock \
		--output-file requirements-dev.lock
	$(COMPILE) --group build --constraint requirements-dev.lock --output-file requirements-build.lock

.PHONY: clean
clean: ## remove everything these targets made
	rm -rf $(VENV) $(MITMPROXY) dashboards/grafana/node_modules build dist *.egg-info .coverage .coverage.* .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find $(wildcard $(CODE)) -name __pycache__ -type d -prune -exec rm -rf {} +

# A virtual environment whose interpreter has gone (Python was upgraded or removed) is made anew. Decided while
# reading this file, because make looks at a stamp before it looks at what the stamp depends on.
ifneq ($(shell $(PY) -c "print(1)" 2>/dev/null),1)
$(shell rm -f $(PY) $(VENV)/.installed $(VENV)/.installed-dev)
endif

$(PY):
	@python=$$(.ci/python) && rm -rf $(VENV) && echo "Making $(VENV) with $$python" && \
		"$$python" -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

$(VENV)/.installed: requirements.lock | $(PY)
	@echo "Installing requirements.lock"
	@$(PIP) install --require-hashes -r requirements.lock
	@touch $@

$(MITMPROXY)/.installed: benchmarks/mitmproxy.lock | $(PY)
	@echo "Installing benchmarks/mitmproxy.lock"
	@$(PY) -m venv $(MITMPROXY)
	@$(MITMPROXY)/bin/python -m pip --disable-pip-version-check --quiet --quiet install --require-hashes -r $<
	@touch $@

# Every version in requirements.lock is in requirements-dev.lock too, so one install serves both.
$(VENV)/.installed-dev: requirements-dev.lock requirements.lock | $(PY)
	@echo "Installing requirements-dev.lock"
	@$(PIP) install --require-hashes -r requirements-dev.lock
	@touch $(VENV)/.installed $@
