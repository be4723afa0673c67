# rdblk: see README.md; "make help" lists what there is.

GO      ?= go
VERSION := $(shell git describe --tags --always --dirty 2>/dev/null || echo devel)
LDFLAGS := -X rdblk/internal/version.Version=$(VERSION)
FUZZTIME ?= 30s
ROUNDS  ?= 5

.PHONY: help build deps run test race lint fuzz e2e bench clean

help:   ## list the targets
	@awk -F':.*## ' '/^[a-z0-9]+:.*## /{printf "  %-7s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

build:  ## bin/rdtarget and bin/rdinit
	$(GO) build -ldflags '$(LDFLAGS)' -o bin/ ./cmd/rdtarget ./cmd/rdinit

deps:   ## install by apt what tests and the demonstration use (root), or say what is missing
	@test/deps

run: build deps ## a demonstration: serve, attach, copy a file system, kill the target under load
	@test/demo/run

test: deps lint ## everything that CI runs
	$(GO) test -race -short ./internal/... ./protocol/... ./rdma/... ./blockdev/... ./nbd/... ./target/... ./initiator/...
	$(GO) test ./...

race:   ## all tests under the race detector
	$(GO) test -race -timeout 30m ./...

lint:   ## gofmt, go vet, module files, builds for other machines
	@test/lint

fuzz:   ## every fuzz target for FUZZTIME (30s)
	@test/fuzz $(FUZZTIME)

e2e: build deps ## only the end-to-end tests, verbosely
	$(GO) test -count=1 -v ./test/e2e

bench: build deps ## rdblk beside nbdkit, ROUNDS (5) interleaved rounds; writes docs/performance.md
	@test/bench/run --rounds $(ROUNDS)

clean:  ## remove what build made
	rm -rf bin
