# Each target runs in a virtual environment that tools/setup_env.py makes the first time and updates when needed.
#   PYTHON  the Python that makes the environment; a suitable torch in it is used
#   VENV    the folder of the environment
#   ARGS    more arguments for the program: make demo ARGS="--help", make test ARGS="-k fp4"
PYTHON ?= python3
VENV ?= .venv
ARGS ?=

dev = $(PYTHON) tools/setup_env.py --venv $(VENV)
# A worker that dies ends the run: pytest-xdist can wait for its successor for ever.
workers = -n logical --maxprocesses 32 --dist loadgroup --max-worker-restart 0

.PHONY: help demo demo-minilm demo-minilm-nvfp4 demo-moe demo-fp8-moe demo-save demo-serve demo-tensor-parallel demo-experts test test-vllm lint format typecheck docs bench release venv clean
.DEFAULT_GOAL := help

help:          ## List the targets
	@sed -n 's/^\([a-z0-9-]*\): *## /\1\t/p' $(firstword $(MAKEFILE_LIST)) | expand -t 20

demo:          ## Quantise hidden states and check the result: examples/quickstart.py
	@$(dev) -- examples/quickstart.py $(ARGS)

demo-minilm:   ## The same with the weights of a real model
	@$(dev) --extras dev,examples -- examples/quickstart.py --model minilm $(ARGS)

demo-minilm-nvfp4:  ## Compare that model's embeddings in NVFP4 with fp32: examples/minilm_nvfp4.py
	@$(dev) --extras dev,examples -- examples/minilm_nvfp4.py $(ARGS)

demo-moe:      ## Compare an expert layer in FP4 with bf16: examples/moe_layer.py
	@$(dev) -- examples/moe_layer.py $(ARGS)

demo-fp8-moe:  ## Compare an expert layer in FP8 with bf16: examples/fp8_moe_layer.py
	@$(dev) -- examples/fp8_moe_layer.py $(ARGS)

demo-save:     ## Quantise a model, save it for other libraries, load it again: examples/quantize_and_save.py
	@$(dev) -- examples/quantize_and_save.py $(ARGS)

demo-serve:    ## Serve a quantised Llama to requests that come and go: examples/serve.py
	@$(dev) -- examples/serve.py $(ARGS)

demo-tensor-parallel:  ## Run a decoder and experts on two ranks: examples/tensor_parallel.py
	@$(dev) -- -m torch.distributed.run --nproc-per-node 2 examples/tensor_parallel.py $(ARGS)

demo-experts:  ## Run a model in the shape of DeepSeek-V3 or gpt-oss: examples/expert_models.py
	@$(dev) -- examples/expert_models.py $(ARGS)

test:          ## Run the tests on every processor; with a GPU also the kernels
	@$(dev) -- -m pytest $(workers) $(ARGS)

test-vllm:     ## Serve tiny models with vLLM on a CPU, in a separate environment
	@$(PYTHON) tools/setup_vllm.py --venv $(VENV)-vllm -- -m pytest tests/engines $(ARGS)

lint:          ## Check style and formatting
	@$(dev) -- -m ruff check
	@$(dev) -- -m ruff format --check

format:        ## Repair style and formatting
	@$(dev) -- -m ruff check --fix
	@$(dev) -- -m ruff format

typecheck:     ## Check types
	@$(dev) -- -m mypy

docs:          ## Render the documents and the API reference into build/docs
	@$(dev) -- -m sphinx -q -W --keep-going -c docs . build/docs $(ARGS)

bench:         ## Measure on a GPU: make bench ARGS=rmsnorm_fp4quant
	@$(dev) --extras dev,bench -- -m benchmarks $(ARGS)

release:       ## Build sdist, wheel and a wheel of kernels into dist/, and check them
	@$(dev) --extras dev,release -- tools/release.py $(ARGS)

venv:          ## Create the environment only
	@$(dev)

clean:         ## Remove the environment, build outputs and caches
	rm -rf .venv .venv-vllm build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
