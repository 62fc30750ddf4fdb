# make demo   set everything up and run the main job
# make test   set everything up and pass the tests
# make tools  programs that the tests need: installed where root and apt-get allow it, else named
# make fuzz   look for examples that break a property, others each time
# make check  format, lint, types, the lock
# make docs   build the documentation site into .cache/site
# make audit  ask a database for vulnerabilities of the locked packages
# make airflow  test the provider in a real Airflow, in an environment of its own
# make frameworks  test with Hugging Face's and Lightning's trainers, in an environment of their own
# make connect  test queries through Spark Connect, whose client needs another protobuf, in an environment of its own
# make chaos  20 chaotic runs of the whole system, half an hour and more; writes docs/benchmarks
# make bench  the slow checks, planning and coverage; writes docs/benchmarks
# make lock   pin the newest versions that work together

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
SETUP  := $(VENV)/.ready

.PHONY: demo test fuzz check docs audit airflow frameworks connect format chaos bench lock lock-airflow lock-frameworks lock-connect java tools clean

demo: $(SETUP) java
	$(BIN)/ebbflow demo $(ARGS)

test: $(SETUP) tools
	scripts/test.sh $(BIN)/python -m pytest $(ARGS)

fuzz: $(SETUP)
	$(BIN)/python -m pytest -n auto -m "not slow and not alone" --hypothesis-profile search --timeout 3600 tests/planners $(ARGS)
	$(BIN)/python -m pytest -n auto -m "not slow and not alone" --hypothesis-profile more --timeout 3600 --ignore tests/planners $(ARGS)

check: $(SETUP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python scripts/check_lock.py

docs: $(SETUP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --clean --quiet
	@echo "open .cache/site/index.html"

audit:
	scripts/audit.sh

airflow:
	scripts/environment-test.sh airflow tests/airflow_provider $(ARGS)

frameworks:
	scripts/environment-test.sh frameworks tests/frameworks $(ARGS)

connect:
	scripts/environment-test.sh connect tests/connect tests/infra/query/test_engine_contract.py -k connect $(ARGS)

format: $(SETUP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(SETUP) tools
	$(BIN)/python -m pytest -m slow
	$(BIN)/python -m tests.benchmarks $(ARGS)

chaos: $(SETUP) tools
	$(BIN)/python -m tests.benchmarks.system_chaos --out docs/benchmarks $(ARGS)

$(SETUP): $(wildcard requirements*.lock) pyproject.toml scripts/setup.sh
	@scripts/setup.sh "$(PYTHON)" "$(VENV)"
	@touch $@

java:
	@scripts/tools.sh java

tools:
	@scripts/tools.sh

lock lock-airflow lock-frameworks lock-connect:
	$(PYTHON) -m venv $(VENV)-lock
	$(VENV)-lock/bin/pip install --quiet uv
	PATH=$(abspath $(VENV)-lock)/bin:$$PATH python scripts/lock.py $(subst lock,,$(subst lock-,,$@))
	rm -rf $(VENV)-lock

clean:
	rm -rf $(VENV) $(VENV)-airflow build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
