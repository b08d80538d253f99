# Two commands do all the set-up: `make demo` and `make test`. Both make .venv from constraints.txt first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
SIDE_BY_SIDE := -n 3 --dist worksteal  # tests; most of their time they wait for processes and deadlines
PROTOS := $(wildcard proto/kvrelay/v1/*.proto)

.PHONY: demo test check unit proto docs bench clean help

help:  ## what there is to make
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/'

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $(STAMP)

.venv: $(STAMP)  ## the virtual environment, exactly as constraints.txt says

demo: $(STAMP)  ## a small cluster on this computer's CPU: real requests, TTFT and TPOT, a clean stop
	$(BIN)/python -m kvrelay.demo

test: check  ## everything
	$(BIN)/python -c 'from placement.compiled.build import compiled_folder; compiled_folder()'  # no test waits for it
	$(BIN)/python -m pytest $(SIDE_BY_SIDE) -m 'not unit and not alone'
	$(BIN)/python -m pytest -m alone

check: $(STAMP)  ## format, lint, types, layers, unit tests
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m pytest -q $(SIDE_BY_SIDE) -m unit

proto: $(STAMP)  ## regenerate kvrelay/v1 from proto/
	$(BIN)/python -m grpc_tools.protoc -Iproto --python_out=. --pyi_out=. --grpc_python_out=. $(PROTOS)

docs: $(STAMP)  ## the tables of docs/, from what the code goes by and from bench/results, whose pictures are drawn
	$(BIN)/python docs/fill_serving.py
	$(BIN)/python docs/fill_reliability.py
	$(BIN)/python docs/fill_benchmarks.py
	$(BIN)/python -m bench.plots

bench: $(STAMP)  ## every benchmark, results in bench/results (an hour and a half)
	$(BIN)/python -m bench

clean:  ## remove what was made
	rm -rf $(VENV) .demo build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
