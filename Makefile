# Everything that people and CI run, one target each. `make help` lists them.
# CI's short form of a long target is the same target with a smaller number:
# `make fuzz FUZZTIME=5s`.

SHELL       := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := build

GO        ?= go
FUZZTIME  ?= 10s
BENCHFLAGS ?=
RACECOUNT ?= 3

# The binaries of this module, and the platforms that they are released for.
COMMANDS  := $(notdir $(wildcard cmd/*))
PLATFORMS ?= linux/amd64 linux/arm64 darwin/arm64 windows/amd64

VERSION ?= $(shell git describe --tags --always --dirty 2>/dev/null || echo dev)
LDFLAGS := -s -w -X github.com/hermes-reach/hermes-reach/internal/cli.version=$(VERSION)

# Tools come from a module of their own, so that their many dependencies never
# move a version in ours.
TOOL := $(GO) tool -modfile=tools/go.mod

.PHONY: help
help: ## print this list
	@awk -F':.*## ' '/^[a-z-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' Makefile

.PHONY: build
build: ## build every binary into bin/ (what `make` alone does)
	@mkdir -p bin
	for c in $(COMMANDS); do CGO_ENABLED=0 $(GO) build -trimpath -ldflags '$(LDFLAGS)' -o bin/ ./cmd/$$c; done

.PHONY: test
test: ## run all tests, with the race detector (needs a C compiler)
	$(GO) test -race ./...

.PHONY: race
race: ## run the tests RACECOUNT times more, shuffled, on one core and on four
	$(GO) test -race -shuffle=on -count=$(RACECOUNT) -cpu=1,4 ./...

.PHONY: fuzz
fuzz: ## fuzz every target for FUZZTIME
	@list=$$($(GO) test -list '^Fuzz' ./... | awk '/^Fuzz/ {t[n++]=$$1} /^ok/ {for (i=0; i<n; i++) print $$2, t[i]; n=0}'); \
	test -n "$$list" || { echo "no fuzz target found" >&2; exit 1; }; \
	while read -r package target; do \
		echo "== $$target in $$package for $(FUZZTIME)"; \
		$(GO) test -run '^$$' -fuzz "^$$target\$$" -fuzztime $(FUZZTIME) "$$package" </dev/null; \
	done <<< "$$list"

.PHONY: interop
interop: ## run the real Hermes Agent (from PyPI) behind broker and pin
	$(GO) test -race -count=1 -timeout=20m -tags=interop ./internal/lab/hermesagent/...

.PHONY: bench
bench: ## measure throughput, latency and allocations, as ratios to a bare splice
	$(GO) run ./bench/cmd/reachbench $(BENCHFLAGS)

.PHONY: lint
lint: ## formatting, modern Go, vet and the linters of .golangci.yml
	@bad=$$(gofmt -l .); \
	test -z "$$bad" || { echo "gofmt would change:" $$bad >&2; exit 1; }
	$(GO) fix -diff ./...
	$(TOOL) golangci-lint run ./...

.PHONY: vuln
vuln: ## look for known vulnerabilities; needs the Go vulnerability database
	$(TOOL) govulncheck ./...

.PHONY: vet-platforms
vet-platforms: ## vet the code for every released platform, tests included
	for p in $(PLATFORMS); do echo "== vet $$p"; CGO_ENABLED=0 GOOS=$${p%/*} GOARCH=$${p#*/} $(GO) vet ./...; done

.PHONY: dist
dist: ## build static release binaries for PLATFORMS into dist/, with SHA256SUMS
	@rm -rf dist && mkdir dist
	@for p in $(PLATFORMS); do for c in $(COMMANDS); do \
		os=$${p%/*}; arch=$${p#*/}; out=dist/$$c-$$os-$$arch; \
		case $$os in windows) out=$$out.exe ;; esac; \
		CGO_ENABLED=0 GOOS=$$os GOARCH=$$arch $(GO) build -trimpath -ldflags '$(LDFLAGS)' -o $$out ./cmd/$$c; \
		printf '%12d bytes  %s\n' "$$(wc -c < $$out)" $$out; \
	done; done
	@cd dist && { sha256sum * 2>/dev/null || shasum -a 256 *; } > ../SHA256SUMS.tmp && mv ../SHA256SUMS.tmp SHA256SUMS && cat SHA256SUMS

.PHONY: clean
clean: ## remove bin/ and dist/
	rm -rf bin dist
