# What people need; each target sets up .venv first if it is not there.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

# Threads that wait should not keep the cores from data loading workers and other processes.
export OMP_WAIT_POLICY ?= passive

.PHONY: demo test lint timm-tests clean

demo: $(READY) ## train on handwritten digits, evaluate, predict: about two minutes on two cores
	$(BIN)/tokenformer-vit prepare-data --digits data/digits
	$(BIN)/tokenformer-vit train configs/digits_demo.py --resume
	$(BIN)/tokenformer-vit test work_dirs/digits_demo
	$(BIN)/tokenformer-vit predict data/digits/val/*/*07.png --topk 3 \
		--checkpoint work_dirs/digits_demo/model.safetensors

test: $(READY) ## the default tests: CPU, offline
	$(BIN)/python -m pytest -n 2 --dist worksteal

lint: $(READY) ## style, types, import contract, names in pages, and tables against their records
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports
	$(BIN)/python -m pytest -q tests/test_pages.py
	$(BIN)/python ablations/report.py --check

# timm's wheel leaves its tests out, its source distribution has them.
timm-tests: $(READY) ## timm's own model tests on all models: an hour on two cores
	$(BIN)/python -m pip download --quiet --no-deps --no-binary :all: --dest build/timm \
		"timm==$$($(BIN)/python -c 'import timm; print(timm.__version__)')"
	tar -xzf build/timm/timm-*.tar.gz -C build/timm --strip-components=1
	cd build/timm && PYTHONPATH=$(CURDIR)/tests/models TIMM_SUITE_MODELS="$$($(CURDIR)/$(BIN)/python -c \
		'import timm, tokenformer_vit; print(*timm.list_models("tokenformer*"), sep=",")')" \
		$(CURDIR)/$(BIN)/python -m pytest -q -p timm_suite_plugin tests/test_models.py

$(READY): setup.py
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@

clean: ## remove the environment and the demonstration; data of your own stay
	rm -rf .venv build data/digits work_dirs/digits_demo
