# rdblk: see README.md; "make help" lists what there is.

GO      ?= go
VERSION := $(shell git describe --tags --always --dirty 2>/dev/null || echo devel)
LDFLAGS := -X rdblk/internal/version.Version=$(VERSION)
FUZZTIME ?= 30s
ROUNDS  ?= 5

.PHONY: help build deps run test race lint fuzz e2e vm bench benchvm clean

help:   ## list the targets
	@awk -F':.*## ' '/^[a-z0-9]+:.*## /{printf "  %-7s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

build:  ## bin/rdtarget and bin/rdinit
	$(GO) build -ldflags '$(LDFLAGS)' -o bin/ ./cmd/rdtarget ./cmd/rdinit

deps:   ## install by apt what tests and the demonstration use (root), or say what is missing
	@test/deps

run: deps build ## a demonstration: serve, attach, copy a file system, kill the target under load
	@test/demo/run

# All packages but the virtual machines, which take the whole machine for minutes each.
PKGS = $(shell $(GO) list ./... | grep -v '/test/vm$$')

# The suite: what make test boots, in its short forms; test/vm/doc.go says what each shows. make vm boots all, in the long forms.
VMTESTS ?= ^(TestInitrdIsOfItsCheckout|TestHarness|TestVerbs|TestVerbsEndToEnd|TestRping|TestBlockDevice|TestBlockDeviceFileSystems|TestBlockDeviceKill|TestBlockDeviceRounds|TestBlockDeviceReboot|TestKernelHost|TestKernelTarget)$$

test: deps lint ## everything that CI runs
	$(GO) test -count=1 -race -short -timeout 20m $(filter-out %/test %/test/e2e,$(PKGS))
	$(GO) test -count=1 -timeout 20m $(PKGS)
	$(GO) test -count=1 -timeout 60m -run '$(VMTESTS)' ./test/vm

race:   ## all tests under the race detector
	$(GO) test -race -timeout 60m $(PKGS)

lint:   ## gofmt, go vet, module files, builds for other machines
	@test/lint

fuzz:   ## every fuzz target for FUZZTIME (30s)
	@test/fuzz $(FUZZTIME)

e2e: deps build ## only the end-to-end tests, verbosely
	$(GO) test -count=1 -v ./test/e2e

vm:     ## all interoperation with the kernel, in virtual machines (root, qemu)
	RDBLK_VM_LONG=1 CONNECTS=500 $(GO) test -count=1 -timeout 150m -v ./test/vm/...

bench: deps build ## rdblk beside its peers, 15 minutes; WRITE=1 puts the result into docs/performance.md
	@test/bench/run --rounds $(ROUNDS) $(if $(WRITE),--write) $(BENCH)

benchvm: build ## rdinit and rdtarget beside the kernel over rxe and siw, in virtual machines (root, qemu); WRITE=1 as above
	@test/bench/vm $(if $(WRITE),--write)

clean:  ## remove what build made
	rm -rf bin
