# Everything runs in its own virtual environment. `make help` lists the commands.

PYTHON ?= python3
VENV ?= .venv
TORCH ?= 2.13.0

# make test: tests of one file run in one lane, and files start in order, the slow ones first
LANES ?= 2

# make train
NPROC ?= 2
MODEL ?= tiny
STRATEGY ?= zero3
STEPS ?= 700
DEVICE ?= cpu
TRAIN_ARGS ?=

# make gpu: NVFUSER=1 installs nvFuser, and with it torch 2.10, and fails where it cannot be used.
# GPU_ARGS has further options of tests/gpu/run.py, such as --only bench
NVFUSER ?=
GPU_ARGS ?=

# make nvfuser-check: needs Python 3.10 or 3.12, for which there are wheels of nvFuser
NVFUSER_VENV ?= .venv-nvfuser
NVFUSER_TORCH := 2.10.0
NVFUSER_WHEEL := $(shell grep -o 'nvfuser-cu[^"]*' pyproject.toml)

# make versions: of torch, VERSIONS_TESTS has files of tests
VERSIONS ?= 2.10 2.11 2.12 2.13 2.14 2.15
VERSIONS_VENV ?= .venv-versions
VERSIONS_TESTS ?=

# make sweep: MESH="1x2 tensor", "2x1 context" and so on; SWEEP_ARGS has further options of tests/models/sweep.py
MODELS_VENV ?= .venv-models
FAMILY ?=
PATTERN ?=
MESH ?=
SWEEP_ARGS ?=

# make fuzz
PROGRAMS ?= 500

# make mutants
MUTANTS ?= 5000

# make operators: OPERATORS_ARGS has further options of tests/operators/run.py, such as --missing
ONLY ?=
OPERATORS_ARGS ?=

# make bench: DEEPSPEED=1 builds DeepSpeed as one more contender, for an environment of its own: VENV=.venv-deepspeed
SETTING ?= loopback
BENCH_ARGS ?=
DEEPSPEED ?=

BIN := $(VENV)/bin

.DEFAULT_GOAL := help
.PHONY: help train moe test versions sweep operators fuzz mutants nvfuser-check bench gpu notebooks docs lint clean
.DELETE_ON_ERROR:

help:  ## list the commands
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 20
	@echo "Variables: PYTHON VENV TORCH; for test LANES; for train also NPROC MODEL STRATEGY STEPS DEVICE TRAIN_ARGS; for bench SETTING BENCH_ARGS DEEPSPEED; for gpu NVFUSER GPU_ARGS"

train: $(VENV)/.examples  ## train a small GPT-2 on 2 CPU ranks with ZeRO-3, in about a minute and a half
	@echo "training on $(NPROC) ranks: the first loss comes in about 20 seconds, $(STEPS) steps of the tiny model take a minute"
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/torchrun --standalone --nproc_per_node=$(NPROC) \
		examples/gpt2/train.py --model $(MODEL) --sharding-strategy $(STRATEGY) --steps $(STEPS) \
		--device $(DEVICE) $(TRAIN_ARGS)

moe: $(VENV)/.examples  ## train a small mixture of experts (Mixtral) on 2 CPU ranks with ZeRO-3
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/torchrun --standalone --nproc_per_node=$(NPROC) \
		examples/huggingface.py --config mixtral $(TRAIN_ARGS)

test: lint  ## check style and types, then run all tests
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/python -m pytest -q --numprocesses=$(LANES) \
		--dist=loadfile --no-loadscope-reorder

versions:  ## run the tests on each release of torch, in environments of 4 GB each: VERSIONS="2.10 2.15" PYTHON=python3.12
	$(PYTHON) tests/without_gpu/versions.py $(VERSIONS) --lanes $(LANES) --folder $(VERSIONS_VENV) $(if $(VERSIONS_TESTS),--tests $(VERSIONS_TESTS))

sweep: $(MODELS_VENV)/.ready  ## train third-party models one step on two ranks and compare with eager PyTorch: FAMILY=hf-causal PATTERN='llama*'
	$(MODELS_VENV)/bin/python tests/models/sweep.py $(if $(FAMILY),--family $(FAMILY)) $(if $(PATTERN),--pattern $(PATTERN)) $(if $(MESH),--mesh '$(MESH)') $(SWEEP_ARGS)

mutants: $(VENV)/.dev  ## make 5,000 wrong steps out of right ones; each must be found: MUTANTS=500
	$(BIN)/python tests/mutants/run.py --number $(MUTANTS)

operators: $(VENV)/.dev  ## hold torch's databases of operators and modules under fsdp against eager PyTorch, half an hour: ONLY='nn_functional_*'
	$(BIN)/python tests/operators/layouts.py
	$(BIN)/python tests/operators/run.py --jobs $(LANES) $(if $(ONLY),--only $(ONLY)) $(OPERATORS_ARGS)

fuzz: $(VENV)/.dev  ## train models and scripts that are put together at random beside eager PyTorch: PROGRAMS=500
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} PROGRAMS=$(PROGRAMS) $(BIN)/python -m pytest -q -s --timeout=0 tests/fuzz

nvfuser-check: $(NVFUSER_VENV)/.ready  ## without a GPU: build what Thunder fuses with nvFuser's wheel (1 GB), PYTHON=python3.12
	export LD_LIBRARY_PATH=$(abspath $(NVFUSER_VENV))/stubs OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1}; \
	$(NVFUSER_VENV)/bin/python tests/without_gpu/definitions.py \
	&& $(NVFUSER_VENV)/bin/python -m pytest -q tests/test_nvfuser.py tests/test_passes

bench: $(VENV)/.examples $(if $(DEEPSPEED),$(VENV)/.deepspeed)  ## compare with FSDP2, thunder.distributed and DDP: SETTING=loopback, slow-link or cuda
	$(BIN)/python examples/benchmarks/compare.py $(SETTING) $(BENCH_ARGS)

gpu: $(VENV)/.dev $(if $(NVFUSER),$(VENV)/.nvfuser)  ## run all that needs a GPU (tests, benchmarks) and print a table; without make: python3 tests/gpu/run.py
	@$(BIN)/python tests/gpu/run.py $(if $(NVFUSER),--nvfuser) $(GPU_ARGS)

docs: $(VENV)/.docs  ## build the site, with the API reference and a search: python -m http.server -d build/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --config-file docs/site/mkdocs.yml

notebooks: $(VENV)/.dev  ## execute the notebooks and store their outputs; NOTEBOOKS=name for some
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/python docs/execute_notebooks.py $(NOTEBOOKS)

lint: $(VENV)/.dev  ## run ruff and mypy
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/mypy examples/gpt2
	$(BIN)/mypy examples/mnist
	$(BIN)/mypy examples/trainers
	$(BIN)/mypy examples/huggingface.py examples/long_context.py examples/litgpt_finetune.py examples/lightning_pretrain.py \
		examples/museum.py
	MYPYPATH=examples/gpt2:notebooks $(BIN)/mypy examples/benchmarks

clean:  ## remove the environment and all build outputs
	rm -rf $(VENV) $(NVFUSER_VENV) $(MODELS_VENV) $(VERSIONS_VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# A stamp records what is installed. It is checked again only when pyproject.toml changes. pip compiles with one core,
# compileall with all; some packages have files that are not meant to be compiled.
$(VENV)/.examples $(VENV)/.dev $(VENV)/.docs $(VENV)/.nvfuser: $(VENV)/.%: pyproject.toml | $(VENV)/.torch
	$(BIN)/python -m pip install -q --no-compile -e ".[$*]"
	@$(BIN)/python -m compileall -q -j 0 $(VENV)/lib shardtrace passes tests >/dev/null 2>&1 || true
	@touch $@

# Its operators are not built, and its setup finds the torch that is installed.
$(VENV)/.deepspeed: | $(VENV)/.examples
	$(BIN)/python -m pip install -q wheel "setuptools>=77"
	DS_BUILD_OPS=0 $(BIN)/python -m pip install -q --no-build-isolation deepspeed==0.19.8
	@touch $@

# The CUDA build of torch brings gigabytes that are useless without a GPU. On such a machine the CPU build is tried
# first, from the indexes that pip is configured for, then from PyTorch's own.
$(VENV)/.torch:
	@$(PYTHON) -c 'import sys; (3, 10) <= sys.version_info < (3, 14) or sys.exit("needs Python 3.10 to 3.13, "\
	"but $(PYTHON) is " + sys.version.split()[0] + ": try make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	@set -- $(BIN)/python -m pip install -q --no-compile; \
	if ! command -v nvidia-smi >/dev/null 2>&1; then \
		echo "installing torch $(TORCH), the CPU build if one is offered"; \
		"$$@" "torch==$(TORCH)+cpu" 2>/dev/null \
		|| "$$@" --timeout 10 --retries 0 --extra-index-url https://download.pytorch.org/whl/cpu \
			"torch==$(TORCH)+cpu" 2>/dev/null \
		|| "$$@" "torch==$(TORCH)"; \
	else \
		echo "installing torch $(TORCH)"; \
		"$$@" "torch==$(TORCH)"; \
	fi
	@touch $@

# torch without the libraries of CUDA, in whose place are stubs, and what it and Thunder need otherwise.
$(NVFUSER_VENV)/.ready: tests/without_gpu/cuda_stubs.py
	@$(PYTHON) -c 'import sys; sys.version_info[:2] in ((3, 10), (3, 12)) or sys.exit("nvFuser has wheels for Python "\
	"3.10 and 3.12, but $(PYTHON) is " + sys.version.split()[0] + ": try make nvfuser-check PYTHON=python3.12")'
	$(PYTHON) -m venv $(NVFUSER_VENV)
	$(NVFUSER_VENV)/bin/pip install -q --no-deps torch==$(NVFUSER_TORCH) $(NVFUSER_WHEEL) nvidia-cuda-runtime-cu12==12.8.90 \
		lightning-thunder==0.2.6
	$(NVFUSER_VENV)/bin/pip install -q filelock "typing-extensions>=4.10" "sympy>=1.13.3" "networkx>=3.3" jinja2 fsspec numpy \
		"setuptools>=77,<82" looseversion==1.3.0 lightning-utilities optree opt-einsum "mpmath<1.4" dill safetensors pygments \
		pytest pytest-timeout expecttest hypothesis pandas
	$(NVFUSER_VENV)/bin/pip install -q --no-deps --no-build-isolation -e .
	$(NVFUSER_VENV)/bin/python $< $(NVFUSER_VENV)/stubs
	@touch $@

# A CPU build of torch, as above, and the libraries of the models, which shardtrace itself does not need.
$(MODELS_VENV)/.ready: tests/models/requirements.txt tests/models/requirements-alone.txt
	$(MAKE) VENV=$(MODELS_VENV) $(MODELS_VENV)/.torch
	@echo '*' > $(MODELS_VENV)/.gitignore
	$(MODELS_VENV)/bin/pip install -q -r tests/models/requirements.txt
	$(MODELS_VENV)/bin/pip install -q --no-deps -r tests/models/requirements-alone.txt -e .
	@touch $@
