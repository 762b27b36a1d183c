# What people and CI run. Every target sets up all it needs and is fast when nothing changed.

PYTHON ?= python3
GB     ?= 1
ROUNDS ?= 3
LOOPS  ?= 1000
RANKS  ?= 8
SEED   ?= 0
MINUTES ?= 10
# How much of each rig, at full length; tools/torture.py has the same numbers. CUTS are for each file system, from Rust
# and from Python: 3,000 in all. FS=ext4 cuts that one alone.
KILLS  ?= 3000
EACH_CALL ?= all
CUTS   ?= 500
FS     ?=
# Bits to flip; mutations of each kind of input.
FLIPS  ?= 10000
FAULT_SEEDS ?= 5000
MUTATIONS ?= 1000
INTERLEAVINGS ?= 500
# Kills of a promotion to an object store.
PROMOTION_KILLS ?= 200
# Kills of programs of a manager.
MANAGER_KILLS ?= 1000
LEAK_ROUNDS   ?= 50000
SOAK_MINUTES  ?= 60
# "all": every pair of ranks before and after, and every optimizer.
RESTARTS ?= all
# Signals to one rank of a training.
STOPS  ?= 200
SEEDS  ?= 100000
# The directory that `make sweep` measures, and where it puts what it found.
DIR    ?=
# The training loop that `make step-time` measures: plain, lightning or transformers.
TRAINER ?= plain
OUT    ?= sweep-out
# "2.11" has everything done with that PyTorch, in an environment of its own; empty: the newest.
TORCH  ?=
TESTS  ?= python/tests
TRAINER_TESTS ?= python/trainer_tests
# "--no-run" only builds the Rust tests.
RUN    ?=
# Processes that run the Python tests, each of which has torch imported. They wait for programs and disks, too: one more than two cores.
WORKERS ?= 3
# Says which tests are slow; .ci/run repeats it at its end.
PYTEST_FLAGS := -q -n $(WORKERS) --dist worksteal --durations=15 --durations-min=5
# Python tests of `make check`: fast ones of every part but the integrations, the commands and the page of a run.
CORE := dcp/test_dcp_reader.py dcp/test_dcp_writer.py dcp/test_distributed_differences.py dcp/test_distributed_mismatch.py \
	handle/test_handle.py manager/test_manager.py test_config.py test_convert.py test_errors.py test_foreign.py test_load_into.py test_mismatch.py test_open.py test_monitoring.py test_promote.py \
	test_report.py test_retain.py test_round_trip.py test_stateful.py test_steps.py test_stream.py test_values.py

export PATH := $(HOME)/.cargo/bin:$(PATH)
# Images of containers set it: each of a thousand processes then compiles what it imports, transformers for 5 s.
export PYTHONDONTWRITEBYTECODE :=

VENV   := .venv$(if $(TORCH),-torch$(TORCH))
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
# Formatters and linters that need neither PyTorch nor a build.
LINTERS := $(VENV)/.linters
# Training frameworks for python/trainer_tests, as extras of python/pyproject.toml; PyTorch is in $(READY).
TRAINERS       := $(VENV)/.trainers
TRAINER_EXTRAS := accelerate,deepspeed,lightning,megatron,nvrx,peft,pytorch-lightning,quantized,ray,torchtitan,transformers
# burn needs a newer Rust than ringstow: empty where rustc is older.
BURN := $(shell printf '1.95\n%s\n' "$$(PATH=$(HOME)/.cargo/bin:$$PATH rustc --version 2>/dev/null | cut -d' ' -f2)" | sort -VC && echo yes)
# The S3 server of the tests, in a stamp of its version: it needs a newer Rust than ringstow.
S3S    := 0.14.1
STORES := target/stores/.s3s-fs-$(S3S)
# The Azure server of the tests, likewise. The last version for Node 18, which Debian 12 has.
AZURITE := 3.35.0
AZURE   := target/stores/.azurite-$(AZURITE)
INPUTS := Cargo.toml $(wildcard Cargo.lock) $(shell find src python -type f \
	\( -name '*.rs' -o -name '*.py' -o -name '*.pyi' -o -name '*.toml' \) \
	-not -path 'python/tests/*' -not -path 'python/trainer_tests/*' -not -path '*/target/*' 2>/dev/null)

.PHONY: help help-all check check-docs check-format check-types check-rust demo stores test test-rust test-portable test-mpi test-python test-trainers test-gpu fuzz \
	torture torture-address torture-background torture-calls torture-calls-python torture-cuts torture-faults torture-flips \
	torture-fuzz torture-hosts torture-image torture-kills torture-leaks torture-managers torture-miri torture-promotes torture-restarts torture-simulation torture-soak \
	torture-stops torture-threads \
	lint doc bench bench-check bench-baseline compare compare-dcp compare-export step-time figures sweep wheel site gpu-bundle gpu-report clean
.DEFAULT_GOAL := help

help:
	@echo "make demo     train a small transformer, kill it while it saves, resume it, compare peers"
	@echo "make check    before each commit, minutes: formatting, types, clippy, unit tests, the core of the Python tests"
	@echo "make test     every Rust and Python test (test-rust, test-python; TORCH=2.11 for that PyTorch)"
	@echo "make test-trainers  training frameworks that save by ringstow; installs it in .venv the first time"
	@echo "make lint     formatting, clippy, ruff, mypy, import-linter, documentation, type stubs"
	@echo "make torture  every rig at full length, for hours; MINUTES=5 a share of each (SEED=$(SEED), RIGS='cuts hosts')"
	@echo "make bench    criterion benches, in bytes a second"
	@echo "make compare  ringstow beside its peers and fio (GB=$(GB) ROUNDS=$(ROUNDS)); installs peers in .peers"
	@echo "make sweep DIR=/mnt/nvme  the fastest setting there, and what each knob is worth (MINUTES=$(MINUTES) GB=$(GB))"
	@echo "make wheel    a wheel in dist/, tried without Rust (PORTABLE=1: the one to publish, for glibc 2.28, by zig)"
	@echo "make help-all  what else there is: the single rigs, comparisons, GPUs, the site"

help-all: help
	@echo
	@echo "make test-portable  Rust tests without io_uring, as on other systems than Linux"
	@echo "make test-mpi ranks in Rust over MPI; needs libopenmpi-dev, openmpi-bin, libclang-dev"
	@echo "make test-gpu the tests that need a GPU; says so and goes on where there is none"
	@echo "make fuzz     all fuzz targets in turn, on a nightly toolchain (MINUTES=$(MINUTES) in all)"
	@echo "make torture-address  unit tests of memory, format and plan under AddressSanitizer, on a nightly toolchain; not in make torture"
	@echo "make torture-miri  the same without GPUs under Miri (many minutes)"
	@echo "make torture-threads  saves and loads by every engine under ThreadSanitizer, likewise"
	@echo "make torture-background  save training loops that change meanwhile (LOOPS=$(LOOPS) SEED=$(SEED))"
	@echo "make torture-calls  fail and kill every operation at each of its system calls (minutes; SEED=$(SEED))"
	@echo "make torture-calls-python  the same for Python programs and conversions (MINUTES=$(MINUTES) SEED=$(SEED))"
	@echo "make torture-cuts  cut the power of ext4, XFS and btrfs in every operation (CUTS=$(CUTS) FS=ext4 SEED=$(SEED))"
	@echo "make torture-faults  shorten, interrupt and reorder the transfers of every engine; no byte changes (FAULT_SEEDS=$(FAULT_SEEDS) SEED=$(SEED))"
	@echo "make torture-flips  flip bits of checkpoints; each is found (FLIPS=$(FLIPS) SEED=$(SEED))"
	@echo "make torture-fuzz  make fuzz, and mutated files for conversions and loads (MUTATIONS=$(MUTATIONS) SEED=$(SEED))"
	@echo "make torture-hosts  interleavings of two hosts on one network file system (INTERLEAVINGS=$(INTERLEAVINGS))"
	@echo "make torture-image  what a disk may hold after a loss of power at each call (MINUTES=$(MINUTES) SEED=$(SEED))"
	@echo "make torture-kills  kill a saving process at any moment (KILLS=$(KILLS))"
	@echo "make torture-leaks  saves, loads and failures: nothing grows (LEAK_ROUNDS=$(LEAK_ROUNDS))"
	@echo "make torture-managers  kill programs of a manager beside a user, readers and clocks that step; nothing is lost (MANAGER_KILLS=$(MANAGER_KILLS) SEED=$(SEED))"
	@echo "make torture-promotes  kill a copy to an object store at any request, call or moment (PROMOTION_KILLS=$(PROMOTION_KILLS) SEED=$(SEED))"
	@echo "make torture-restarts  kill trainings on ranks; each goes on, on any number of ranks, as if it had not been stopped"
	@echo "make torture-simulation  programs at the same time, one schedule a seed (SEEDS=$(SEEDS) SEED=$(SEED))"
	@echo "make torture-soak  the same for an hour (SOAK_MINUTES=$(SOAK_MINUTES))"
	@echo "make torture-stops  stop trainings on ranks by signals to one of them; all hold the same last step (STOPS=$(STOPS) SEED=$(SEED))"
	@echo "make bench-check  instructions of planner, manifest, checksum, pipeline against the baseline"
	@echo "make compare-dcp  PyTorch DCP with its own storage and with ringstow's"
	@echo "make compare-export  one Hugging Face model by all ranks, beside a sharded save (RANKS=$(RANKS) GB=$(GB))"
	@echo "make step-time  what a background save costs training, beside other ways (GB=$(GB) ROUNDS=$(ROUNDS) TRAINER=$(TRAINER))"
	@echo "make figures  draw the plots of docs/figures.md from the measurements in docs/figures; measures nothing"
	@echo "make gpu-bundle  all that tests and measures GPUs, in dist/gpu, for a machine without Rust or network"
	@echo "make gpu-report  the same, and runs it here: report.md, report.json"
	@echo "make site     the documentation as a site, in dist/site"
	@echo "make clean    remove all that was built, the virtual environment too"

demo: $(READY)
	$(BIN)/python tools/demo.py --gb $(GB)

# Before each commit.
check: check-format check-types check-rust
	cargo test -q --lib
	$(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal $(addprefix python/tests/,$(CORE))

# What needs neither PyTorch nor a build.
check-format: $(LINTERS)
	cargo fmt --all --check
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/python tools/promises.py --check
	cd python && PYTHONPATH=. ../$(BIN)/lint-imports --no-cache

check-types: $(READY)
	$(BIN)/mypy tools examples
	cd python && ../$(BIN)/mypy --strict ringstow
	$(BIN)/stubtest --ignore-disjoint-bases --allowlist python/stubtest-allowlist.txt ringstow._native

# Only Python's own library is linked: no package is needed.
check-rust: $(LINTERS)
	tools/preflight.sh $(PYTHON) lint
	PYO3_PYTHON=$(abspath $(BIN)/python) \
		cargo clippy --workspace --all-targets --all-features \
		$(if $(BURN),,--exclude ringstow-burn --exclude ringstow-burn-example) -- -D warnings
	cargo clippy -p ringstow -- -D warnings # as who depends on it builds it, without the program

# PyTorch first: pip needs the most room while it unpacks.
test: test-python test-rust

# One set of features, so that nothing is built twice.
test-rust:
	tools/preflight.sh $(PYTHON)
	cargo test $(RUN) --features ringstow/object-store,ringstow/candle,ringstow/tokio-uring -p ringstow -p durable-image -p fake-cuda -p interleavings \
		-p ringstow-cudarc-example -p ringstow-candle-example -p ringstow-ranks-example \
		$(if $(BURN),-p ringstow-burn -p ringstow-burn-example)
	$(if $(BURN),,@echo "burn: skipped, it needs Rust 1.95")

# What does not depend on the engine is tested with all features, by test-rust.
WITHOUT_IO_URING := cargo test --no-default-features --features cli
test-portable:
	$(WITHOUT_IO_URING) --lib --test suite --no-run
	$(WITHOUT_IO_URING) --lib
	$(WITHOUT_IO_URING) --test suite -- awaiting:: copies:: damage:: engine_contract:: faults:: promote:: retain:: \
		round_trip:: streams:: striping::

# Needs Open MPI and libclang.
test-mpi:
	examples/mpi/tests.sh

test-gpu: $(READY)
	@if $(BIN)/python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then \
		RINGSTOW_REAL_GPU=1 cargo test --test gpu && $(BIN)/python -m pytest -q python/tests/gpu; \
	else \
		echo "no GPU here: skipped (torch.cuda.is_available() is false)"; \
	fi

test-python: $(READY) stores
	$(BIN)/python -m pytest $(PYTEST_FLAGS) $(TESTS)

test-trainers: $(TRAINERS)
	$(BIN)/python -m pytest $(PYTEST_FLAGS) $(TRAINER_TESTS)

# Ends with 77 where there is no nightly toolchain, or with 1 if every rig is required.
fuzz:
	@$(PYTHON) tools/fuzz.py --minutes $(MINUTES); code=$$?; [ $$code -eq 77 ] || exit $$code

# Only a number of minutes that was asked for: MINUTES has a default for sweeps.
torture: $(READY)
	$(BIN)/python tools/torture.py --seed $(SEED) $(if $(RIGS),--rigs $(RIGS)) \
		$(if $(filter command line,$(origin MINUTES)),--minutes $(MINUTES))

torture-%: export RINGSTOW_SEED = $(SEED)

# $(call needs_nightly,COMPONENT) ends a rig, and says why, where the nightly toolchain has no such component.
needs_nightly = rustup component list --toolchain nightly --installed 2>/dev/null | grep -q '^$(1)' || \
	{ echo "skipped: rustup toolchain install nightly --component $(1)"; exit $${RINGSTOW_REQUIRE_RIGS:+1}; }
TRIPLE := $(shell uname -m)-unknown-linux-gnu

# A broken engine's buffers are leaked on purpose, so leaks are not looked for.
torture-address: export RUSTFLAGS = -Zsanitizer=address
torture-address: export ASAN_OPTIONS = detect_leaks=0
torture-address:
	@$(call needs_nightly,rustc); cargo +nightly test --lib --target $(TRIPLE) --target-dir target/asan -- \
		pool:: format:: plan:: state pipeline:: device::

# The standard library is built too: ThreadSanitizer must see its locks.
torture-threads: export RUSTFLAGS = -Zsanitizer=thread
torture-threads:
	@$(call needs_nightly,rust-src); cargo +nightly test -Zbuild-std --target $(TRIPLE) --target-dir target/tsan --lib && \
	cargo +nightly test -Zbuild-std --target $(TRIPLE) --target-dir target/tsan --test suite -- \
		round_trip:: awaiting:: engine_contract::

# Left out: tests of GPUs, which need a driver, and those with too much data for an interpreter.
torture-miri: export MIRIFLAGS = -Zmiri-disable-isolation -Zmiri-ignore-leaks
torture-miri: export PROPTEST_CASES = 3
torture-miri:
	@$(call needs_nightly,miri); cargo +nightly miri test -p ringstow --lib --target-dir target/miri -- \
		pool:: device::host device::target format:: plan:: \
		--skip format::cover --skip headers_stay_below --skip blocks_hold_every_byte

torture-background: $(READY)
	$(BIN)/python tools/torture_background.py --loops $(LOOPS) --seed $(SEED)

torture-calls:
	$(if $(EACH_CALL),RINGSTOW_EACH_CALL='$(EACH_CALL)') cargo test --test each_call -- --nocapture no_call
	$(if $(filter-out all,$(EACH_CALL)),,$(if $(EACH_CALL),RINGSTOW_EACH_CALL=all) cargo test --test suite each_call::)

torture-faults:
	RINGSTOW_FAULT_SEEDS=$(FAULT_SEEDS) cargo test --test suite reordered_transfers
	@echo "promise: short, interrupted and reordered transfers change no byte: $(FAULT_SEEDS) seeds of every engine, 0 broken"

torture-calls-python: export RINGSTOW_PASSES = 96
torture-calls-python: export RINGSTOW_MINUTES = $(MINUTES)
torture-calls-python: $(READY)
	$(BIN)/python -m pytest -q -s python/tests/test_each_call.py

torture-cuts: export RINGSTOW_CUTS = $(CUTS)
torture-cuts: export RINGSTOW_REQUIRE_RIGS = 1
torture-cuts: $(READY)
	cargo test --test power_cut $(FS) -- --nocapture --test-threads=1
	$(BIN)/python -m pytest -q -rP -n 3 python/tests/test_power_cut.py -k "$(FS)"

torture-flips:
	RINGSTOW_FLIPS=$(FLIPS) cargo test --test suite flips:: -- --ignored --nocapture

# All fuzz targets, and the mutated inputs of the Python tests.
torture-fuzz: fuzz $(READY)
	RINGSTOW_MUTATIONS=$(MUTATIONS) $(BIN)/python -m pytest -q python/tests/test_mutated.py
	@echo "promise: a mutated input is read or refused, naming it: $$((8 * $(MUTATIONS))) mutations, 0 broken"

torture-hosts: export RINGSTOW_REQUIRE_RIGS = 1
torture-hosts: $(READY)
	RINGSTOW_INTERLEAVINGS=$(INTERLEAVINGS) \
		cargo test --test hosts -- --ignored --nocapture hosts_lose_and_mix_nothing_500_times
	RINGSTOW_INTERLEAVINGS=$$(($(INTERLEAVINGS) / 5 + 1)) \
		$(BIN)/python -m pytest -q -rP python/tests/test_convert_two_hosts.py

torture-image:
	RINGSTOW_MINUTES=$(MINUTES) cargo test --test image -- --ignored --nocapture at_every_call

torture-kills:
	RINGSTOW_KILLS=$(KILLS) cargo test --test suite crash:: -- --ignored --nocapture

torture-leaks: $(READY)
	RINGSTOW_ROUNDS=$(LEAK_ROUNDS) cargo test --test leaks many_thousands -- --ignored --nocapture
	RINGSTOW_ROUNDS=$$(($(LEAK_ROUNDS) / 25)) $(BIN)/python -m pytest -q -s python/tests/test_leaks.py

torture-managers: $(READY)
	$(BIN)/python tools/torture_managers.py --kills $(MANAGER_KILLS) --seed $(SEED)

torture-promotes: export RINGSTOW_REQUIRE_RIGS = 1
torture-promotes: $(READY) stores
	RINGSTOW_KILLS=$(PROMOTION_KILLS) $(BIN)/python -m pytest -q -s python/tests/test_promote_killed.py

torture-restarts: $(READY)
	RINGSTOW_RESTARTS=$(RESTARTS) $(BIN)/python -m pytest -q python/tests/dcp/test_restart.py
	@echo "promise: a training that was killed goes on as if it had not been: $(if $(RESTARTS),16,5) pairs of ranks, 0 broken"

torture-stops: $(READY)
	RINGSTOW_TEST_STOPS=$(STOPS) $(BIN)/python -m pytest -q -s python/tests/dcp/test_stops.py

torture-simulation:
	RINGSTOW_SEEDS=$(SEEDS) cargo test --profile torture --test simulation -- --nocapture \
		programs_break_no_promise

torture-soak:
	RINGSTOW_MINUTES=$(SOAK_MINUTES) \
		cargo test --test leaks for_an_hour -- --ignored --nocapture

# Names, keywords, commands, targets, paths and commits in the documentation exist.
check-docs: $(READY)
	$(BIN)/python tools/check_docs.py

lint: check-format check-types check-docs check-rust doc site

doc:
	RUSTDOCFLAGS="-D warnings" cargo doc --no-deps --all-features -p ringstow $(if $(BURN),-p ringstow-burn)

bench:
	cargo bench

bench-check:
	$(PYTHON) tools/bench_check.py

bench-baseline:
	$(PYTHON) tools/bench_check.py --write

compare-export: $(READY)
	$(BIN)/python tools/compare_dcp.py --export --ranks $(RANKS) --gb $(GB) --rounds $(ROUNDS)
	$(BIN)/python tools/compare_dcp.py --export --columns --ranks $(RANKS) --gb $(GB) --rounds $(ROUNDS)

compare-dcp: $(READY)
	$(BIN)/python tools/compare_dcp.py --gb $(GB) --rounds $(ROUNDS)

compare: $(READY)
	$(BIN)/python tools/compare.py --gb $(GB) --rounds $(ROUNDS) $(if $(USED_MEMORY),--used-memory)

# Only PyTorch's own loop needs no training framework.
step-time: $(READY) $(if $(filter plain,$(TRAINER)),,$(TRAINERS))
	$(BIN)/python tools/step_time.py --gb $(GB) --rounds $(ROUNDS) --trainer $(TRAINER) \
		--dir $(or $(DIR),.) $(if $(JSON),--json "$(JSON)")

figures: $(READY)
	$(BIN)/python tools/figures.py

sweep: $(READY)
	@test -n "$(DIR)" || { echo "say on which disk: make sweep DIR=/mnt/nvme"; exit 2; }
	$(BIN)/python tools/sweep.py "$(DIR)" --gb $(GB) --minutes $(MINUTES) --out "$(OUT)"

wheel: $(READY)
	$(BIN)/python tools/make_wheel.py dist --tests $(if $(PORTABLE),--portable)

# A link that leads nowhere, a page that is in no menu or a public name without a page fails.
site: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build -q --strict

gpu-bundle: $(READY)
	$(BIN)/python tools/gpu_bundle.py dist/gpu --python $(BIN)/python

gpu-report: gpu-bundle
	$(BIN)/python dist/gpu/gpu_report.py --out dist

clean:
	cargo clean
	rm -rf .venv .venv-torch* .peers dist demo-out compare-out torture-out

# The stamp: the environment exists and holds this tree's wheel and all that tests and lints need.
# PyTorch comes with the first run and stays; a changed source costs a Rust build.
$(READY): $(INPUTS)
	@tools/preflight.sh $(PYTHON)
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	@echo "building the wheel, installing it with what tests need (the first time: PyTorch too)"
	@$(BIN)/python -m pip install -q --disable-pip-version-check --no-compile './python[test,lint,docs]' \
		$(if $(TORCH),'torch==$(TORCH).*')
	@touch $@

# Those of the extra "lint", without the package, which would have to be built.
$(LINTERS): python/pyproject.toml
	@tools/preflight.sh $(PYTHON) lint
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	@$(BIN)/python -c 'import tomllib; p = tomllib.load(open("python/pyproject.toml", "rb"))["project"]; \
		print(*p["optional-dependencies"]["lint"], sep="\n")' >$(VENV)/lint.txt
	@$(BIN)/python -m pip install -q --disable-pip-version-check --no-compile -r $(VENV)/lint.txt
	@touch $@

# A machine that cannot install it skips the tests that need it; RINGSTOW_REQUIRE_RIGS fails them.
stores: $(STORES) $(AZURE)

$(STORES):
	@echo "installing s3s-fs $(S3S), the S3 server of the tests: two minutes, once"
	@if cargo install -q s3s-fs --version $(S3S) --features binary --locked --root target/stores; then \
		touch $@; \
	else \
		echo "could not install s3s-fs: tests of object stores are skipped"; \
	fi

$(AZURE):
	@echo "installing azurite $(AZURITE), the Azure server of the tests: a minute, once"
	@if tools/azurite.sh $(AZURITE) target/stores/azurite; then \
		touch $@; \
	else \
		echo "could not install azurite: tests of Azure are skipped"; \
	fi

# pip installs an extra with its package only, so the wheel is installed again.
$(TRAINERS): python/pyproject.toml | $(READY)
	@echo "installing training frameworks: $(TRAINER_EXTRAS)"
	@$(BIN)/python -m pip install -q --disable-pip-version-check --no-compile './python[test,$(TRAINER_EXTRAS)]'
	@touch $@
