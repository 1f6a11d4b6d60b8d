# make book    build the site in both languages      make lab      open the chapters in JupyterLab
# make test    lint, unit tests, every chapter       make measure  record a benchmark: NAME=…
# make serve   train a small model, serve it on 127.0.0.1:8000, with a page to draw on: PORT=…
# make clean   remove what was built (not .venv)

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.stamp

.PHONY: book test lint unit notebooks lab measure serve clean

book: $(STAMP)
	$(BIN)/python book/site/build.py

# Tests run in two processes of one thread each.
SIDE_BY_SIDE := -n 2 --dist loadfile
unit notebooks: export OMP_NUM_THREADS ?= 1

test: lint unit notebooks

lint: $(STAMP)
	$(BIN)/ruff check .

unit: $(STAMP)
	$(BIN)/python -m pytest $(SIDE_BY_SIDE) tests

notebooks: $(STAMP)
	$(BIN)/python -m pytest $(SIDE_BY_SIDE) --nbval --nbval-sanitize-with tests/book/nbval.cfg notebooks

lab: $(STAMP)
	$(BIN)/jupyter lab --notebook-dir=notebooks

measure: $(STAMP)
	@test -n "$(NAME)" || { echo "which record? make measure NAME=matmul" >&2; exit 2; }
	$(BIN)/python benchmarks/measure.py $(NAME)

PORT ?= 8000
serve: $(STAMP)
	$(BIN)/python -m helpers.serving --train --port $(PORT)

clean:
	rm -rf _build .pytest_cache .ruff_cache .hypothesis

# The environment is made again when the pins or the package change.
$(STAMP): requirements.txt pyproject.toml
	$(PYTHON) -c 'import sys; v = sys.version_info; v < (3, 11) and sys.exit(f"Python 3.11 to 3.13 is needed, got {v.major}.{v.minor}; set PYTHON=python3.13"); v > (3, 14) and print(f"note: tested with Python 3.11 to 3.13, this is {v.major}.{v.minor}")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -r requirements.txt -e .
	touch $@
