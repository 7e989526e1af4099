# Every target sets up what it needs: .ci/python prints the interpreter, after an installation
# where one is needed. Without an SM90 GPU, kernels are compiled and read but not run.

export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))
python = $$(.ci/python)
workers ?= 2
# nvdisasm, where it comes with CUDA instead of pip:
export PATH := $(PATH):/usr/local/cuda/bin

.PHONY: test demo bench bench-variants bench-call bench-gemm tune sanitize notebooks lint format

test: lint
	@python="$(python)" && "$$python" -m pytest -n $(workers) --dist worksteal $(pytest_args)

demo:
	@python="$(python)" && "$$python" -m cutedsl_fa3 demo

bench:
	@python="$(python)" && "$$python" -m cutedsl_fa3 bench $(bench_args)

bench-variants:
	@python="$(python)" && "$$python" -m cutedsl_fa3 bench-variants $(bench_args)

bench-call:
	@python="$(python)" && "$$python" -m cutedsl_fa3 bench-call $(bench_args)

bench-gemm:
	@python="$(python)" && "$$python" -m cutedsl_fa3 bench-gemm $(bench_args)

tune:
	@python="$(python)" && "$$python" -m cutedsl_fa3 tune $(tune_args)

sanitize:
	@python="$(python)" && "$$python" tests/kernels/sanitize.py $(sanitize_args)

notebooks:
	@python="$$(.ci/python notebooks)" && "$$python" tests/run_notebooks.py $(notebooks_args)

lint:
	@python="$(python)" && if "$$python" -m ruff --version >/dev/null 2>&1; then \
	    "$$python" -m ruff check . && "$$python" -m ruff format --check .; \
	else echo "lint: $$python has no ruff, nothing was linted"; fi

format:
	@python="$(python)" && "$$python" -m ruff check --fix . && "$$python" -m ruff format .
