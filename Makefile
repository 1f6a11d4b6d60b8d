# make book    build the site in both languages      make lab      open the chapters in JupyterLab
# make test    lint, unit tests, every chapter       make measure  record a benchmark: NAME=…
# make clean   remove what was built (not .venv)

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.stamp

.PHONY: book test lab measure clean

book: $(STAMP)
	$(BIN)/python book/site/build.py

test: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/python -m pytest tests
	$(BIN)/python -m pytest --nbval --nbval-sanitize-with tests/book/nbval.cfg notebooks

lab: $(STAMP)
	$(BIN)/jupyter lab --notebook-dir=notebooks

measure: $(STAMP)
	@test -n "$(NAME)" || { echo "which record? make measure NAME=matmul" >&2; exit 2; }
	$(BIN)/python benchmarks/measure.py $(NAME)

clean:
	rm -rf _build .pytest_cache .ruff_cache .hypothesis

# The environment is made again when the pins or the package change.
$(STAMP): requirements.txt pyproject.toml
	$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(None if v >= (3, 11) else f"Python 3.11 or newer is needed, got {v.major}.{v.minor}; set PYTHON=…")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -r requirements.txt -e .
	touch $@
