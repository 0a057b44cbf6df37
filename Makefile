# Every target sets itself up first: a virtual environment in .venv from the hashed locks in
# requirements/. Needed on the machine: make, Python >= 3.11 and a package registry.

SHELL := /bin/sh
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?=
BIN := .venv/bin
STAMP := .venv/.set-up
LOCKS := requirements/uv.txt requirements/dev.txt

SEEDS ?= 200
SEED ?=
SOAK_SEEDS ?= 10000
CRASH_KILLS ?= 40
CRASH_CUTS ?= 150
CRASH_EVERY ?= 1
BASE ?=
PEERS ?=
TURNS ?= 3
SECONDS ?= 3
FINISHED ?= 100000
TRANSACTIONS ?= 100000
MINUTES ?= 10

# The sample of `make sim` and `make crash` that is a part of `make test`.
TEST_SEEDS ?= 20
TEST_KILLS ?= 5
TEST_CUTS ?= 15
TEST_EVERY ?= 10

# Compiled modules are kept, whatever the shell says: tests start hundreds of processes.
export PYTHONDONTWRITEBYTECODE :=

# A folder that was moved or copied has an environment that points elsewhere: make it anew.
ifneq ($(shell cat .venv/.made-in 2>/dev/null),$(CURDIR))
.PHONY: $(STAMP)
endif

.PHONY: help
help: ## list the targets
	@sed -n 's/^\([a-z0-9-]*\):.*## \(.*\)/  make \1	\2/p' Makefile | expand -t 22

.PHONY: setup
setup: $(STAMP) ## make .venv and install what the locks name

$(STAMP): $(LOCKS) pyproject.toml scripts/setup.sh
	@PYTHON="$(PYTHON)" sh scripts/setup.sh
	@touch $@

.PHONY: run
run: $(STAMP) ## the main job: an exactly-once pipeline through splits, merges and a kill
	$(BIN)/magnetar quickstart --page build/quickstart.html

.PHONY: demo
demo: $(STAMP) ## a server and its storage, killed and compared with what was receipted
	$(BIN)/magnetar demo

.PHONY: lint
lint: $(STAMP) ## formatting, lint, types and import contracts
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

.PHONY: check
check: lint ## lint and the fast tests: below a minute, before every commit
	$(BIN)/pytest -q -n 3 --dist loadgroup -m "not slow" --hypothesis-profile=quick \
		tests/unit tests/meta tests/kits

.PHONY: test
test: lint ## everything: check, slow tests, a short simulation, a crash sample
	$(BIN)/pytest -q -n 4 --dist loadgroup --durations 25 -m "not soak" tests
	$(MAKE) sim SEED= SEEDS=$(TEST_SEEDS)
	$(MAKE) crash CRASH_KILLS=$(TEST_KILLS) CRASH_CUTS=$(TEST_CUTS) CRASH_EVERY=$(TEST_EVERY)

.PHONY: sim
sim: $(STAMP) ## simulated faults on virtual time: SEEDS=200, or SEED=n to replay one
	$(BIN)/python -m harness.simulation $(if $(SEED),--seed $(SEED),--seeds $(SEEDS))

.PHONY: soak-sim
soak-sim: $(STAMP) ## the same for hours: SOAK_SEEDS=10000 of every simulation
	$(BIN)/python -m harness.simulation --seeds $(SOAK_SEEDS)

.PHONY: crash
crash: $(STAMP) ## kill -9 and power cuts: CRASH_KILLS=40 CRASH_CUTS=150 CRASH_EVERY=1
	$(BIN)/python -m harness.crash.storage.run --kills $(CRASH_KILLS) --cuts $(CRASH_CUTS)
	$(BIN)/python -m harness.crash.server.run --kills $(CRASH_KILLS)
	$(BIN)/python -m harness.crash.txn.run --kills $(CRASH_KILLS)
	$(BIN)/python -m harness.crash.txn.run --kills $(CRASH_KILLS) --legacy 0.7
	$(BIN)/python -m harness.crash.scalable.run --every $(CRASH_EVERY)

.PHONY: interop-java
interop-java: $(STAMP) ## the official Java clients against our server; needs Java 17 and Maven
	$(BIN)/python -m tests.interop_java.program
	$(BIN)/pytest -v tests/interop_java

.PHONY: interop-go
interop-go: $(STAMP) ## the official Go client against our server; needs Go 1.24
	$(BIN)/python -m tests.interop_go.program
	$(BIN)/pytest -v tests/interop_go

.PHONY: e2e
e2e: $(STAMP) ## the client's whole suite against our server, restarts included
	MAGNETAR_E2E_SERVER=magnetar $(BIN)/pytest -q tests/client_e2e

.PHONY: e2e-pulsar
e2e-pulsar: $(STAMP) ## the same against Apache Pulsar 5.0.0-M1; needs Java 17 and Maven
	$(BIN)/python -m tests.client_e2e.pulsar
	MAGNETAR_E2E_SERVER=pulsar $(BIN)/pytest -v tests/client_e2e

.PHONY: soak-fuzz
soak-fuzz: $(STAMP) ## a million broken and random inputs for the protocol parser
	$(BIN)/python -m harness.fuzz.wire --inputs 1000000

.PHONY: soak-txn
soak-txn: $(STAMP) ## what 10^5 transactions leave in the store: nothing; TRANSACTIONS=100000
	$(BIN)/python -m harness.crash.txn.soak --transactions $(TRANSACTIONS)

.PHONY: soak-models
soak-models: $(STAMP) ## the largest models and stores, whole: what `make test` sees a part of
	$(BIN)/pytest -v -m soak tests/unit tests/recovery tests/integration/client tests/meta

.PHONY: soak-spark
soak-spark: $(STAMP) ## the slow faults of Spark queries: kills, timeouts, a cluster of two hosts
	$(BIN)/pytest -v -m soak tests/integration/spark

.PHONY: bench
bench: $(STAMP) ## measure storage against bare loops; tables, and build/bench/*.json
	$(BIN)/python -m bench.storage

.PHONY: bench-broker
bench-broker: $(STAMP) ## measure the broker over sockets against a stub that stores nothing
	$(BIN)/python -m bench.broker

.PHONY: bench-restart
bench-restart: $(STAMP) ## from process start to the first producer, with a million messages stored
	$(BIN)/python -m bench.restart

.PHONY: bench-stalls
bench-stalls: $(STAMP) ## 70 % load for MINUTES=10: receipts, and the longest turn of the loop
	$(BIN)/python -m bench.stalls --minutes $(MINUTES)

.PHONY: bench-buckets
bench-buckets: $(STAMP) ## batches that hold one entry bucket each, beside batches of any keys
	$(BIN)/python -m bench.buckets

.PHONY: bench-delayed
bench-delayed: $(STAMP) ## a million messages that wait for their time: memory, start, processor, lateness
	$(BIN)/python -m bench.delayed

.PHONY: bench-compaction
bench-compaction: $(STAMP) ## a million messages of 10,000 keys are compacted beside a publisher: both rates
	$(BIN)/python -m bench.compaction

.PHONY: bench-split
bench-split: $(STAMP) ## a topic splits and merges under load: message set, order, stalls
	$(BIN)/python -m bench.split

.PHONY: bench-layouts
bench-layouts: $(STAMP) ## ten thousand segments: lookups, watches, memory, restarts
	$(BIN)/python -m bench.layouts

.PHONY: bench-policies
bench-policies: $(STAMP) ## ten thousand loaded topics: until a changed policy holds for all
	$(BIN)/python -m bench.policies

.PHONY: bench-txn
bench-txn: $(STAMP) ## transactions: cost of a publish, rate, commit times, wakes; FINISHED=100000
	$(BIN)/python -m bench.txn --finished $(FINISHED)

.PHONY: bench-txn-path
bench-txn-path: $(STAMP) ## what one transaction is made of: time, tasks, futures, records, calls
	$(BIN)/python -m bench.txn_path

.PHONY: bench-txn-large
bench-txn-large: $(STAMP) ## one transaction of up to 10^6 messages: memory, time of its end
	$(BIN)/python -m bench.txn_large

.PHONY: bench-txn-recovery
bench-txn-recovery: $(STAMP) ## from process start to a delivery, 10^6 finished and 10^4 open ones
	$(BIN)/python -m bench.txn_recovery

.PHONY: bench-client
bench-client: $(STAMP) ## our client beside the official one: single messages, batches, Arrow
	$(BIN)/python -m bench.client

.PHONY: bench-spark
bench-spark: $(STAMP) ## source and sink on Spark beside parquet and files; PEERS=1: beside Kafka
	$(BIN)/python -m bench.spark $(if $(PEERS),--peers)

.PHONY: bench-peers
bench-peers: $(STAMP) ## beside Apache Pulsar and Kafka, in turns; TURNS=3 SECONDS=3; Java, Maven
	$(BIN)/python -m bench.peers --turns $(TURNS) --seconds $(SECONDS)

.PHONY: bench-diff
bench-diff: $(STAMP) ## compare build/bench with an earlier commit: the newest, or BASE=rev
	$(BIN)/python -m bench.diff $(if $(BASE),--base "$(BASE)")

.PHONY: format
format: $(STAMP) ## format the code and mend what ruff can mend
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

.PHONY: docs
docs: $(STAMP) ## the API reference of the client as HTML: build/docs/index.html
	$(BIN)/python scripts/make_docs.py

.PHONY: blocking
blocking: $(STAMP) ## write the blocking classes of the client from the asyncio ones
	$(BIN)/python scripts/make_blocking.py

.PHONY: test-map
test-map: $(STAMP) ## write the page that says which tests belong to which module
	$(BIN)/python scripts/make_test_map.py

.PHONY: benchmarks-page
benchmarks-page: $(STAMP) ## write what the last bench-peers found into docs/benchmarks.md, README
	$(BIN)/python -m scripts.make_benchmarks

.PHONY: lock
lock: $(STAMP) ## resolve pyproject.toml anew into requirements/*.txt
	sh scripts/lock.sh

.PHONY: clean
clean: ## remove .venv, build and caches
	rm -rf .venv build dist .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find src tests bench -name __pycache__ -type d -prune -exec rm -rf {} +
