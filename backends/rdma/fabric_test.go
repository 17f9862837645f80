// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package rdma

import (
	"errors"
	"net/netip"
	"slices"
	"sync"
	"testing"

	"github.com/sluicehq/sluice/csrc/verbs"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/driver/drivertest"
	"github.com/sluicehq/sluice/internal/clock"
	"github.com/sluicehq/sluice/internal/testing/standin"
	"github.com/sluicehq/sluice/internal/testing/testkit"
)

// standIn is how to open backends over the stand-in for libibverbs: all of the host code, C
// included, and no device.
func standIn(t testing.TB, devices int) (*standin.VerbsFabric, func(Config) (*Backend, error)) {
	t.Helper()
	f := standin.OpenVerbs(t, devices, verbs.Load)
	kernel := standInSysfs(t, devices)
	return f, func(cfg Config) (*Backend, error) {
		cfg.Library = standin.VerbsPath()
		if cfg.sysfs == nil {
			cfg.sysfs = kernel
		}
		if cfg.Listen == "" {
			cfg.Listen = "127.0.0.1:0"
		}
		return open(cfg, loadVerbs, openMeddled)
	}
}

// standInSysfs is what the kernel tells of the stand-in's devices.
func standInSysfs(t testing.TB, devices int) *sysfs {
	t.Helper()
	return &sysfs{root: standin.VerbsSysfs(t, devices), state: stateOf,
		prefixes: func(string) (list []netip.Prefix) {
			for i := range devices {
				list = append(list,
					netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 99, 0, byte(i + 1)}), 24))
			}
			return list
		}}
}

// TestStandIn runs the suite over the stand-in.
func TestStandIn(t *testing.T) {
	f, openStandIn := standIn(t, 2)
	testkit.CheckLeaks(t, f.InUse)
	drivertest.Run(t, drivertest.Harness{
		Name:    "rdma-stand-in",
		New:     func() (driver.Backend, error) { return openStandIn(Config{}) },
		Wirings: drivertest.Self | drivertest.Pair,
		Without: []string{"Faults"}, // NICs hold the pages
	})
}

// newFake opens a backend over the first two devices of the stand-in, or those that cfg names.
func newFake(t testing.TB, cfg Config) (*Backend, error) {
	t.Helper()
	_, open := standIn(t, 4)
	if cfg.Devices == "" {
		cfg.Devices = "fake0,fake1"
	}
	return open(cfg)
}

// meddled is the context of a backend. It says what this package asked of it, and refuses some of
// that when a test wants it to.
type meddled struct {
	fabric
	mu       sync.Mutex
	links    []*meddledLink
	revokes  int
	held     *heldNews
	stuckKey *uint32  // Unmap fails for it
	inUse    []uint32 // queue pairs: Revoke fails while one of them is there
}

var errStuck = errors.New("the key is in use")

func openMeddled(c verbs.Config) (fabric, error) {
	f, err := openVerbs(c)
	if err != nil {
		return nil, err
	}
	return &meddled{fabric: f}, nil
}

// fakeOf is the context of a backend.
func fakeOf(b *Backend) *meddled { return b.net.(*meddled) }

func (f *meddled) Revoke(key uint32) error {
	f.mu.Lock()
	f.revokes++
	stuck := slices.ContainsFunc(f.inUse, pairIsThere)
	f.mu.Unlock()
	if stuck {
		return errStuck
	}
	return f.fabric.Revoke(key)
}

// heldNews is the news that a queue pair failed, which stands between C and who is told of it.
type heldNews struct {
	taken chan struct{} // closed when it is out of C
	over  chan struct{}
	pass  func() // closes it
}

// holdFailure holds the next news of a failed queue pair back.
func (f *meddled) holdFailure(t *testing.T) *heldNews {
	h := &heldNews{taken: make(chan struct{}), over: make(chan struct{})}
	h.pass = sync.OnceFunc(func() { close(h.over) })
	t.Cleanup(h.pass)
	f.mu.Lock()
	f.held = h
	f.mu.Unlock()
	return h
}

func (f *meddled) News() (verbs.News, bool) {
	n, ok := f.fabric.News()
	if !ok || n.Kind != verbs.PairFailed || n.Conn == 0 {
		return n, ok
	}
	f.mu.Lock()
	h := f.held
	f.held = nil
	f.mu.Unlock()
	if h != nil {
		close(h.taken)
		<-h.over
	}
	return n, ok
}

func (f *meddled) Unmap(key uint32) error {
	if f.stuckKey != nil && key == *f.stuckKey {
		return errStuck
	}
	return f.fabric.Unmap(key)
}

func (f *meddled) connect(initiator bool, credit int) (link, error) {
	l, err := f.fabric.connect(initiator, credit)
	if err != nil {
		return nil, err
	}
	n := &meddledLink{link: l, net: f, numbers: map[int]uint32{}}
	f.mu.Lock()
	f.links = append(f.links, n)
	f.mu.Unlock()
	return n, nil
}

// only is the connection that there is.
func (f *meddled) only() *meddledLink {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.links[0]
}

// meddledLink is a connection. It notes its queue pairs, and when they ended.
type meddledLink struct {
	link
	net     *meddled
	clock   clock.Clock // nil: the times are not noted
	mu      sync.Mutex
	numbers map[int]uint32 // of queue pairs, by their index
	// when PairEnd was called last, and End first
	pairOver, over int64
	last           uint64 // so many messages come over each queue pair just before it ends
	came           uint64
}

// allPairs are the queue pairs of all backends.
var allPairs = struct {
	sync.Mutex
	of map[uint32]*meddled
}{of: map[uint32]*meddled{}}

// pairIsThere reports whether something can still arrive at a queue pair.
func pairIsThere(number uint32) bool {
	allPairs.Lock()
	defer allPairs.Unlock()
	return allPairs.of[number] != nil
}

// pairs are the queue pairs of all connections of a backend.
func (f *meddled) pairs() (numbers []uint32) {
	allPairs.Lock()
	defer allPairs.Unlock()
	for number, net := range allPairs.of {
		if net == f {
			numbers = append(numbers, number)
		}
	}
	return numbers
}

func (l *meddledLink) PairMake(pair, rail int) (verbs.End, error) {
	e, err := l.link.PairMake(pair, rail)
	if err != nil {
		return e, err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	allPairs.Lock()
	defer allPairs.Unlock()
	delete(allPairs.of, l.numbers[pair])
	l.numbers[pair] = e.QueuePair
	allPairs.of[e.QueuePair] = l.net
	return e, nil
}

func (l *meddledLink) PairEnd(pair int) error {
	err := l.link.PairEnd(pair)
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.clock != nil {
		l.pairOver = l.clock.Now()
	}
	if err == nil {
		l.gone(pair)
	}
	return err
}

// gone notes the end of a queue pair. Preconditions: l.mu is held.
func (l *meddledLink) gone(pair int) {
	allPairs.Lock()
	defer allPairs.Unlock()
	if number, there := l.numbers[pair]; there {
		delete(allPairs.of, number)
		delete(l.numbers, pair)
		l.came += l.last
	}
}

// noteTimes notes the times of ends from now on.
func (l *meddledLink) noteTimes(c clock.Clock) {
	l.mu.Lock()
	l.clock = c
	l.mu.Unlock()
}

func (l *meddledLink) Seen() uint64 {
	n := l.link.Seen()
	l.mu.Lock()
	defer l.mu.Unlock()
	return n + l.came
}

func (l *meddledLink) End(status int32, proved bool) error {
	l.mu.Lock()
	if l.clock != nil && l.over == 0 {
		l.over = l.clock.Now()
	}
	l.mu.Unlock()
	return l.ended(l.link.End(status, proved))
}

func (l *meddledLink) Close() error { return l.ended(l.link.Close()) }

func (l *meddledLink) ended(err error) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	for pair := range l.numbers {
		if err == nil {
			l.gone(pair)
		}
	}
	return err
}
