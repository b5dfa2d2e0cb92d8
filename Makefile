# The two commands that a newcomer needs are `make up` and `make test`. `make help` lists all.

CARGO ?= cargo

.DEFAULT_GOAL := help
.PHONY: help up test fmt lint deny docs bench build

help: ## List the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10

up: build ## Build, get what is missing, start everything on loopback with data under ./data
	@target/release/tidemark up $(ARGS)

build:
	@$(CARGO) build --release --locked --bins

test: ## Format check, lints, and all tests against a real nats-server and a real PostgreSQL
	$(CARGO) fmt --check
	$(CARGO) clippy --locked --all-targets -- --deny warnings
	$(CARGO) test --locked

fmt: ## Format the sources
	$(CARGO) fmt

lint: ## The lints alone
	$(CARGO) clippy --locked --all-targets -- --deny warnings

deny: ## Licenses, bans and sources of all dependencies (needs cargo-deny)
	$(CARGO) deny check licenses bans sources

docs: ## Bring the tables of operations in docs/ up to date
	$(CARGO) run --locked --bin tidemark -- docs docs

bench: build ## Measure the speed that we promise, both sides of a ratio in one run
	@target/release/tidemark bench --markdown docs/performance.md --svg docs/plots $(ARGS)
