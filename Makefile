# Works with Python 3.11+, make and a package registry; everything lands in .venv.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.mmkv-installed

.PHONY: demo test lint format clean

demo: $(READY)
	$(BIN)/mmkv chat --image assets/scene.png --budget 256 -p "what is at row 2, column 3?"

test: $(READY)
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# lmms-eval's own dependencies would bring CUDA and a torchvision that breaks beside a CPU torch;
# what the tests need of them is the extra eval-light, which dev includes.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("mmkv needs Python 3.11 or newer; set PYTHON=...") if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	$(BIN)/python -m pip install --quiet --no-deps lmms-eval==0.7.3
	touch $@

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
