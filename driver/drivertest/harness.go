// SPDX-License-Identifier: Apache-2.0

// Package drivertest is the conformance suite and the benchmark set of every
// backend. It speaks the contract of package driver only, never the engine,
// and turns each "must" there into a check.
//
// A backend's test file is one page:
//
//	var harness = drivertest.Harness{
//		New: func() (driver.Backend, error) { return shm.New(shm.Config{}) },
//	}
//
//	func TestMain(m *testing.M) { drivertest.Main(m, harness) }
//	func TestBackend(t *testing.T) { drivertest.Run(t, harness) }
//	func BenchmarkBackend(b *testing.B) { drivertest.Benchmark(b, harness) }
//
// The checks run over up to three wirings: a backend connected to itself, two
// backends in one process, and, where Caps.Reach goes that far, two processes.
// The second process is the test binary once more, started by Main's caller and
// led over its standard input and output; it is stopped, continued and killed
// where the contract speaks of frozen and dead peers.
//
// Each check keeps a model of every byte of both sides, guard bytes included,
// and compares digests, so that a byte outside the ranges named is found as
// surely as a wrong one inside.
package drivertest

import (
	"errors"
	"flag"
	"math/rand/v2"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/testing/leak"
)

// Harness says how to make the backend under test.
type Harness struct {
	// Name tells the harnesses of one test binary apart. Empty: "backend".
	Name string

	// New opens a backend with what its own Config calls the default, or with
	// small limits. It is called in this process and in the second one.
	New func() (driver.Backend, error)

	// Local and Remote make memory of the kinds under test: Local what a
	// transfer's initiator has, Remote what it reaches. Nil is HostMemory, and
	// PopulatedMemory in benchmarks.
	Local, Remote Allocator

	// SelfOnly says that the backend connects to its own Addr only, as those do
	// that move bytes between memory and files.
	SelfOnly bool

	// Guards says that the owner's side places the bytes, or looks where they go: what peers
	// send beside Segment.Only is ErrBounds.
	Guards bool

	// Start starts the second process, somewhere else than here: in a network namespace,
	// say. It may change what the command has, and not how it speaks with this process.
	// Nil is (*exec.Cmd).Start.
	Start func(*exec.Cmd) error

	// Syncs has a backend that is about to be used, and whose peers have CanDurable, tell of its
	// syncs: begun is called before one begins, ended when it has ended and no job was told
	// yet, in the same order. Nil: what syncs cover is not looked at.
	Syncs func(b driver.Backend, begun, ended func())

	// Park has the first mover of this process that comes to one of Spots call f there, and
	// stand until f returns; a nil f ends that. Spots lie between a check of a mover and the
	// act that relies on it, and every write of some KiB must pass all of them. FenceParked
	// revokes meanwhile. OwnerSpots are those of an owner that lands the bytes itself, HeldSpots
	// the ones of it at which a piece is in hand: no Revoke is proved before that has landed.
	// Nil: the backend has no such spots, and that check does nothing.
	Park                         func(spot string, f func())
	Spots, OwnerSpots, HeldSpots []string

	// Disturb breaks connections that peers have opened to b, or the network below them, as b's
	// peers write: FenceStress has it in some rounds. Afterwards mend makes peers come through
	// again. Nil: those rounds are as the others.
	Disturb func(b driver.Backend, random *rand.Rand) (mend func())

	// Halts are further spots, at which a mover stops the other movers of its process, too.
	Halts []string

	// Replaces says that a revoke against a process that stands still replaces all of an
	// allocation: what that process has under way over other parts of it may fail with
	// ErrRevoked, and what it begins later must not. False: nothing that was not revoked fails.
	Replaces bool

	// Kept counts what a library keeps, in this process, of backends that were closed: one that it
	// cannot give back, since another process was killed or stands still. A Close that adds to it
	// may say so, and its descriptors are not counted as left behind. Nil: nothing is kept.
	Kept func() int

	// Grace is for how long the backend waits, as New opens it, for a proof of a peer that is
	// silent. Zero is a second.
	Grace time.Duration

	// Limit bounds every single wait, a Revoke or a Close included; past it the
	// check fails with a dump of all goroutines. Zero is 20 s. It must exceed
	// the backend's grace for frozen peers.
	Limit time.Duration

	// Wirings leaves the others out, for a second harness of the same backend that
	// only varies the memory.
	Wirings Wiring

	// Only names the checks to run, on machinery so slow that the others are left to
	// another harness of the same backend. Empty: all.
	Only []string

	// Without names checks that another harness of the same backend passes, and this one
	// cannot.
	Without []string

	// Settle waits for what a backend that breaks the contract on purpose does late. A check
	// that watches memory looks once more behind it. Nil: there is no such thing.
	Settle func()

	populated bool          // in benchmarks
	patience  time.Duration // with what ends late; 0 is as in all tests
}

// Wiring is a set of ways in which two sides are connected.
type Wiring uint8

// The wirings. Zero means all that the backend can do.
const (
	Self      Wiring = 1 << iota // one backend, connected to its own Addr
	Pair                         // two backends in one process
	Processes                    // two processes
)

// String returns the name that sub-tests bear.
func (w Wiring) String() string {
	switch w {
	case Self:
		return "self"
	case Pair:
		return "pair"
	case Processes:
		return "processes"
	}
	return "wirings"
}

func (h Harness) withDefaults() Harness {
	if h.Name == "" {
		h.Name = "backend"
	}
	if h.Local == nil {
		h.Local = HostMemory
	}
	if h.Remote == nil {
		h.Remote = HostMemory
	}
	if h.Start == nil {
		h.Start = (*exec.Cmd).Start
	}
	if h.Grace == 0 {
		h.Grace = time.Second
	}
	if h.Limit == 0 {
		h.Limit = 20 * time.Second
	}
	return h
}

// forBenchmarks is withDefaults of a benchmark, in this process or the second.
func (h Harness) kept() int {
	if h.Kept == nil {
		return 0
	}
	return h.Kept()
}

// check finds what a test leaves behind.
func (h Harness) check(t testing.TB) {
	t.Helper()
	before := h.kept()
	leak.CheckBut(t, h.patience, func() bool { return h.kept() > before })
}

func (h Harness) forBenchmarks() Harness {
	h.populated = true
	if h.Local == nil {
		h.Local = PopulatedMemory
	}
	if h.Remote == nil {
		h.Remote = PopulatedMemory
	}
	return h.withDefaults()
}

// wirings returns what the backend can do of what the harness asks for.
func (h Harness) wirings(caps driver.Caps) []Wiring {
	var list []Wiring
	for _, w := range []Wiring{Self, Pair, Processes} {
		switch {
		case h.Wirings != 0 && h.Wirings&w == 0,
			w != Self && h.SelfOnly,
			w == Processes && caps.Reach == driver.InProcess:
		default:
			list = append(list, w)
		}
	}
	return list
}

// asksFor reports whether a check is to run.
func (h *Harness) asksFor(name string) bool {
	return (len(h.Only) == 0 || slices.Contains(h.Only, name)) && !slices.Contains(h.Without, name)
}

// mainCalled guards against a test binary without Main: its second process
// would run all tests instead of taking orders.
var mainCalled bool

// Main is what TestMain calls: it runs the tests, or serves as the second
// process of one of the harnesses. It does not return.
func Main(m *testing.M, harnesses ...Harness) {
	flag.Parse()
	mainCalled = true
	if name, ok := os.LookupEnv(childVariable); ok {
		os.Exit(serveChild(name, harnesses))
	}
	os.Exit(m.Run())
}

// Run runs every check of the contract that the bits of the backend's peers call for,
// over every wiring. Checks of bits that they lack are named in the log; that such a peer
// refuses what a bit stands for is checked, too.
//
// Under the race detector it runs those checks alone in which goroutines meet, between two
// backends where the harness has two, unless the name of the test begins with TestSoak.
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
	wirings, all := h.wirings(caps), !raceEnabled || strings.HasPrefix(t.Name(), "TestSoak")
	if !all && len(wirings) > 1 {
		wirings = slices.DeleteFunc(wirings, func(w Wiring) bool { return w == Self })
	}
	for _, w := range wirings {
		t.Run(w.String(), func(t *testing.T) {
			for _, c := range checks {
				if c.wirings&w != 0 && h.asksFor(c.name) && (all || c.meets) {
					t.Run(c.name, func(t *testing.T) {
						if c.repeats {
							c.repeat(t, h, w)
						} else {
							c.perform(t, h, w)
						}
					})
				}
			}
		})
	}
}

// SkipIfUnavailable skips the test if err is a *driver.UnavailableError: the
// machine lacks what the backend needs. Any other error fails the test. It is
// the only place of the suite that skips.
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
