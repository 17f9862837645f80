// SPDX-License-Identifier: Apache-2.0

// Package drivertest is the conformance suite of every backend. It speaks the contract of package
// driver only, never the engine, and turns each "must" there into a check. A backend's test file is
// one page:
//
//	var harness = drivertest.Harness{
//		Name: "shm",
//		New:  func() (driver.Backend, error) { return shm.New(shm.Config{}) },
//	}
//
//	func TestMain(m *testing.M) { drivertest.Main(m, harness) }
//	func TestBackend(t *testing.T) { drivertest.Run(t, harness) }
//
// # Sides and wirings
//
// A check has a near side, whose peer submits, and a far side, whose memory it reaches. The checks
// run over up to three wirings: a backend connected to itself, two backends in one process, and,
// where Caps.Reach goes that far, two processes. The second process is the test binary once more.
// It is stopped, continued and killed where the contract speaks of frozen and dead peers.
//
// Each side has a host (host.go): the backend with its memory and peers. The host polls, and notes
// each breach of "each accepted tag completes exactly once" and "one last message of each
// connection". A check gives it requests (process.go), the same ones in this process and in the
// other; to the other they go as lines of JSON over its standard input.
//
// # What a check does
//
// checks.go has the table. Each check is one function that can be read from top to bottom:
//
//   - It makes memory on either side, with guards around it, and fills it (test.go, memory.go). A
//     model in this process knows every byte of it.
//   - It submits batches, waits for them, and applies those that succeeded to the models
//     (test.awaitSuccess, test.awaitAll).
//   - It compares all memory with the models, so that it also finds bytes that landed outside the
//     ranges that were named. Where nothing may land any more (after a cancel, a revoke, a close)
//     it reads the memory at that moment, also of a process that is stopped. The memory must keep
//     those bytes for a while, and then others that its owner writes (memory.readIntoModel,
//     memory.expectNoLanding).
//   - When it ends, both sides close. Descriptors, goroutines and registered bytes that are left
//     are a failure.
//
// submit.go has the checks of single batches, completion.go those of many and of their ends,
// message.go and wake.go notifications and sleepers, revoke.go tokens and revokes, lost.go
// connections. The check Random (random.go) calls everything in an order that a seed decides; the
// seed is printed, and -drivertest.seed gives it. Its storms have many writers in many leases, of
// which most are revoked at any moment.
//
// # Proof of the suite
//
// sabotage_test.go breaks each promise of a good backend in turn; the checks that it names for the
// promise must fail. It names each check at least once.
package drivertest

import (
	"cmp"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/testing/testkit"
)

// Harness says how to make the backend under test. New is all that most backends need.
type Harness struct {
	// Name tells the harnesses of one test binary apart. Empty: "backend".
	Name string

	// New opens a backend, in this process or in the second one.
	New func() (driver.Backend, error)

	// Local and Remote make memory of the kinds under test: Local what a transfer's initiator
	// has, Remote what it reaches. Nil is HostMemory.
	Local, Remote Allocator

	// SelfOnly says that the backend connects to its own Addr only, as those do that move bytes
	// between memory and files.
	SelfOnly bool

	// Guards says that the owner's side places the bytes itself, or checks where they go: a batch
	// that leaves the ranges of Segment.Only must end with ErrBounds.
	Guards bool

	// Start starts the second process, somewhere else than here: in a network namespace, say. Nil
	// is (*exec.Cmd).Start.
	Start func(*exec.Cmd) error

	// Grace is for how long the backend, as New opens it, waits for a peer that is silent. Zero is
	// a second.
	Grace time.Duration

	// Syncs makes a backend whose peers have CanDurable report its syncs. The suite calls it before
	// it uses b. b calls begun before a sync begins; ended after it has ended, before a batch
	// completes for it, and in the same order. Nil: the suite does not check what syncs cover.
	Syncs func(b driver.Backend, begun, ended func())

	// Park makes the first goroutine of this process that reaches a spot call f there; it goes on
	// when f returns. A nil f ends that. A spot is a named point of the backend's code between a
	// check and the act that relies on it (package testpoint). Spots are in the initiator: a write
	// of some KiB must pass all of them. OwnerSpots are in an owner that places the bytes itself.
	// Nil: the backend has no spots.
	Park              func(spot string, f func())
	Spots, OwnerSpots []string

	// Disturb breaks connections that peers have opened to b, or the network under them, while they
	// write. mend repairs it, so that peers reach b again. Nil: there is nothing to break.
	Disturb func(b driver.Backend, random *rand.Rand) (mend func())

	// Wirings are the wirings to run; zero is all. Only names the checks to run, Without those not
	// to run: for a harness that differs little from another of the same backend.
	Wirings       Wiring
	Only, Without []string

	limit     time.Duration // of every single wait
	awaitLate func()        // waits for the late writes of a sabotaged backend
}

// Wiring is a set of ways in which two sides are connected.
type Wiring uint8

// The wirings. Zero means all that the backend can do.
const (
	Self      Wiring = 1 << iota // one backend, connected to its own Addr
	Pair                         // two backends in one process
	Processes                    // two processes
)

const (
	anyWiring   = Self | Pair | Processes
	twoBackends = Pair | Processes // two backends
	oneProcess  = Self | Pair      // one process
)

var wiringNames = map[Wiring]string{Self: "self", Pair: "pair", Processes: "processes"}

// Moving and Streaming are checks for Harness.Only. Moving are those whose result may depend on the
// kind of memory, where it lies, and how batches are cut. Streaming are those whose result may
// depend on the connections: their addresses, their number and their encryption.
var (
	Moving = []string{"Lengths", "ManyDescriptors", "Patterns", "Load", "Cancel", "NoAllocation",
		"Durable", "Random"}
	Streaming = []string{"Lengths", "Load", "MessageBehindItsBytes", "MessageOrder",
		"MessageBackPressure", "LastMessage", "Answers", "PeerClose", "PingPong", "PeerKilled",
		"PeerFrozen", "PeerThawed", "RevokeUnderWrites", "RevokeFrozen", "RevokeParked", "Random"}
)

func (h Harness) withDefaults() Harness {
	h.Name = cmp.Or(h.Name, "backend")
	h.Grace, h.limit = cmp.Or(h.Grace, time.Second), cmp.Or(h.limit, time.Minute)
	if h.Local == nil {
		h.Local = HostMemory
	}
	if h.Remote == nil {
		h.Remote = HostMemory
	}
	if h.Start == nil {
		h.Start = (*exec.Cmd).Start
	}
	return h
}

// leaks returns a function that lists what was opened after this call and is still open.
func (h *Harness) leaks() func() []string { return testkit.Leaks(min(h.limit, 20*time.Second)) }

// wirings returns what the backend can do of what the harness asks for.
func (h *Harness) wirings(caps driver.Caps) (list []Wiring) {
	for _, w := range []Wiring{Self, Pair, Processes} {
		asked := h.Wirings == 0 || h.Wirings&w != 0
		can := w == Self || !h.SelfOnly && (w == Pair || caps.Reach != driver.InProcess)
		if asked && can {
			list = append(list, w)
		}
	}
	return list
}

// check tests one promise of the contract.
type check struct {
	name    string
	wirings Wiring
	needs   driver.Can // bits of the Peer
	run     func(*test)
}

// The flags of Random, which every test binary of a backend has.
var (
	randomSeed = flag.Uint64("drivertest.seed", 0,
		"seed of the check Random; 0 is a fixed one for a "+
			"short run, and else a random one")
	randomFor = flag.Duration("drivertest.stress", 0,
		"how long the check Random runs over each wiring; "+
			"0 is a short run")
)

// mainCalled guards against a test binary without Main: its second process would run all tests
// instead of obeying.
var mainCalled bool

// Main is for TestMain: it runs the tests, or serves as the second process of one of the harnesses.
// It does not return.
func Main(m *testing.M, harnesses ...Harness) {
	flag.Parse()
	mainCalled = true
	if name, ok := os.LookupEnv(childVariable); ok {
		if err := serve(name, harnesses); err != nil {
			fmt.Fprintln(os.Stderr, "second process:", err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// Run runs every check of the contract that the bits of the backend's peers call for, over every
// wiring. It also checks that peers refuse what they have no bit for. Under the race detector the
// wiring Self runs in the soak only, unless it is the only one.
func Run(t *testing.T, h Harness) {
	h = h.withDefaults()
	b, err := h.New()
	if err != nil {
		SkipIfUnavailable(t, err)
	}
	caps := b.Caps()
	if err := b.Close(); err != nil {
		t.Fatalf("close a fresh backend: %v", err)
	}
	for _, name := range slices.Concat(h.Only, h.Without) {
		if !slices.ContainsFunc(checks, func(c check) bool { return c.name == name }) {
			t.Errorf("Harness.Only or Without names %q, which is no check", name)
		}
	}
	wirings := h.wirings(caps)
	if testkit.RaceEnabled && len(wirings) > 1 && wirings[0] == Self && !strings.HasPrefix(t.Name(),
		"TestSoak") {
		wirings = wirings[1:]
	}
	for _, w := range wirings {
		t.Run(wiringNames[w], func(t *testing.T) {
			for _, c := range checks {
				if c.wirings&w != 0 && (len(h.Only) == 0 || slices.Contains(h.Only, c.name)) &&
					!slices.Contains(h.Without, c.name) {
					t.Run(c.name, func(t *testing.T) { c.repeat(t, h, w) })
				}
			}
		})
	}
}

// repeat performs a check, and Random until the time of the stress is over.
func (c check) repeat(t *testing.T, h Harness, w Wiring) {
	if *randomFor == 0 || c.name != "Random" {
		c.perform(t, h, w)
		return
	}
	end := time.Now().Add(*randomFor)
	for first := true; first || time.Now().Before(end) && !t.Failed(); first = false {
		t.Run(time.Now().Format("15:04:05"), func(t *testing.T) { c.perform(t, h, w) })
	}
}

func (c check) perform(tb testing.TB, h Harness, w Wiring) {
	tb.Helper()
	t := newTest(tb, h, w)
	if !t.can(c.needs) {
		tb.Logf("not run: the peer takes %b, and this is of %b", t.peer.Can(), c.needs)
		return
	}
	c.run(t)
}

// SkipIfUnavailable skips the test if err is a *driver.UnavailableError: the machine lacks what the
// backend needs. Any other error fails the test. It is the only place of the suite that skips.
func SkipIfUnavailable(tb testing.TB, err error) {
	tb.Helper()
	var missing *driver.UnavailableError
	if !errors.As(err, &missing) {
		tb.Fatalf("open backend: %v (only a *driver.UnavailableError may skip a test)", err)
	}
	if missing.Backend == "" || missing.Reason == "" {
		tb.Fatalf("open backend: %#v does not say which backend and why", missing)
	}
	tb.Skip(missing)
}
