// SPDX-License-Identifier: Apache-2.0

package rdma

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/csrc/verbs"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/clock"
)

// fakeNet is a fabric within this process, for tests of all that lies above C: queue pairs
// that know each other by number, keys that they look up, and a way to break both.
type fakeNet struct {
	cfg   verbs.Config
	clock clock.Clock
	rails []*fakeRail

	mu        sync.Mutex
	done      []verbs.Done
	taken     int // batches submitted and not polled
	notifs    []fakeNotif
	heard     []verbs.News
	armed     bool
	room      bool // has come: a submitter that was refused may go on
	memories  map[uint32]*fakeMemory
	links     map[uint64]*fakeLink
	pins      int
	revokes   int
	stuck     int      // how many times Revoke fails
	stuckMaps int      // how many times Unmap fails
	inUse     []uint32 // queue pairs: Revoke fails while one of them is there
	closed    bool
	free      []*fakeBatch
}

type fakeRail struct {
	device string
	gid    [16]byte
	cut    bool // nothing passes: queue pairs over it fail. fakeWire.mu
	gone   bool // no queue pair can be made. fakeWire.mu
	down   bool // queue pairs over it are given nothing. fakeWire.mu
}

type fakeNotif struct {
	from  *fakeLink
	notif verbs.Notif
}

type fakeMemory struct {
	key    uint32
	bytes  []byte
	grants map[int]uint32 // by rail
}

// fakeGrant is what a key of the NIC opens.
type fakeGrant struct {
	mu       sync.RWMutex // held for each piece
	over     bool
	bytes    []byte
	base     uint64
	readOnly bool
}

// fakeWire is what all fabrics of this process share.
var fakeWire = struct {
	sync.Mutex
	ids    uint64
	pairs  map[uint32]*fakePair
	grants map[uint32]*fakeGrant
	next   uint32
}{pairs: map[uint32]*fakePair{}, grants: map[uint32]*fakeGrant{}, next: 100}

// fakeDevices are two RoCE devices in one network.
func fakeDevices(func(string) bool) (list []Device) {
	for i := range 2 {
		address := netip.AddrFrom4([4]byte{192, 0, 2, byte(i + 1)})
		list = append(list, Device{Name: fmt.Sprintf("fake%d", i), Node: -1, Ports: []Port{{
			Number: 1, State: "ACTIVE", Physical: "LinkUp", LinkLayer: "Ethernet",
			RateText: "100 Gb/sec (4X EDR)", Rate: 12.5e9,
			GIDs: []GID{{Index: 1, Address: netip.AddrFrom16(address.As16()), Type: "RoCE v2",
				NetDev: "none", Subnet: netip.PrefixFrom(address, 24)}},
		}}})
	}
	return list
}

func openFake(c verbs.Config) (fabric, error) {
	return &fakeNet{cfg: c, clock: clock.Host(),
		memories: map[uint32]*fakeMemory{}, links: map[uint64]*fakeLink{}}, nil
}

// newFake opens a backend over it, with two rails.
func newFake(cfg Config) (*Backend, error) {
	cfg.devices = fakeDevices
	if cfg.Listen == "" {
		cfg.Listen = "127.0.0.1:0"
	}
	cfg.EnsureDefaults()
	return open(cfg, func(*Config) error { return nil }, func(c verbs.Config) (fabric, error) {
		f, err := openFake(c)
		f.(*fakeNet).clock = cfg.clock
		return f, err
	})
}

func (f *fakeNet) Close() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.closed = true
	if len(f.links) > 0 || len(f.memories) > 0 || f.pins > 0 {
		return fmt.Errorf("%d links, %d memories, %d pins are left", len(f.links), len(f.memories),
			f.pins)
	}
	return nil
}

func (f *fakeNet) OpenRail(c verbs.RailConfig) (int, error) {
	for _, d := range fakeDevices(nil) {
		if d.Name == c.Device {
			f.rails = append(f.rails, &fakeRail{device: d.Name,
				gid: d.Ports[0].GIDs[0].Address.As16()})
			return len(f.rails) - 1, nil
		}
	}
	return 0, unavailable("no device "+c.Device, "")
}

func (f *fakeNet) Rail(rail int) (verbs.Rail, error) {
	return verbs.Rail{GID: f.rails[rail].gid, SGEMax: 30}, nil
}

func (f *fakeNet) Counters(int) (verbs.Counters, error) {
	return verbs.Counters{Rate: 1e9}, nil
}

func (f *fakeNet) RailUp(rail int, up bool) {
	fakeWire.Lock()
	f.rails[rail].down = !up
	fakeWire.Unlock()
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, l := range f.links {
		l.more.Broadcast()
	}
}

func (f *fakeNet) Drive() {}

// port takes the port of a rail down, or up again.
func (f *fakeNet) port(rail int, up bool) {
	kind := verbs.PortDown
	if up {
		kind = verbs.PortUp
	}
	f.tell(verbs.News{Kind: kind, Rail: rail})
}

func (f *fakeNet) Poll(done []verbs.Done) int {
	f.mu.Lock()
	defer f.mu.Unlock()
	n := copy(done, f.done)
	f.done = append(f.done[:0], f.done[n:]...)
	f.taken -= n
	return n
}

func (f *fakeNet) Arm() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.armed = true
	ready := len(f.done) > 0 || len(f.notifs) > 0 || f.room
	f.room = false
	return ready
}

// wake signals who sleeps. Preconditions: f.mu is held.
func (f *fakeNet) wake() {
	if f.armed && !f.closed {
		f.armed = false
		_, _ = unix.Write(f.cfg.WakeFD, one)
	}
}

func (f *fakeNet) Receive() (verbs.Notif, bool) {
	f.mu.Lock()
	if len(f.notifs) == 0 {
		f.mu.Unlock()
		return verbs.Notif{}, false
	}
	n := f.notifs[0]
	f.notifs = f.notifs[1:]
	f.mu.Unlock()
	n.from.repay()
	return n.notif, true
}

func (f *fakeNet) News() (verbs.News, bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if len(f.heard) == 0 {
		return verbs.News{}, false
	}
	n := f.heard[0]
	f.heard = f.heard[1:]
	return n, true
}

func (f *fakeNet) tell(n verbs.News) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if !f.closed {
		f.heard = append(f.heard, n)
		_, _ = unix.Write(f.cfg.ControlFD, one)
	}
}

type fakePin struct{ net *fakeNet }

func (p fakePin) Close() error {
	p.net.mu.Lock()
	defer p.net.mu.Unlock()
	p.net.pins--
	return nil
}

func (f *fakeNet) pin(int, []byte, uint32) (pin, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.pins++
	return fakePin{f}, nil
}

func (f *fakeNet) pinDevice(int, verbs.Device, uint32) (pin, error) {
	return nil, driver.ErrNotSupported // the stand-in for libibverbs has device memory
}

func (f *fakeNet) showDevice(uint32, uint64, uint64, []pin, uint32) error {
	return driver.ErrNotSupported
}

func (f *fakeNet) show(key uint32, mem []byte, pins []pin, prefer uint32) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.memories[key] != nil || prefer == 0 || len(pins) != len(f.rails) {
		return fmt.Errorf("key %d, %d pins, prefer %b", key, len(pins), prefer)
	}
	f.memories[key] = &fakeMemory{key: key, bytes: mem, grants: map[int]uint32{}}
	return nil
}

func (f *fakeNet) memory(key uint32) *fakeMemory {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.memories[key]
}

func (f *fakeNet) Unmap(key uint32) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.stuckMaps > 0 {
		f.stuckMaps--
		return errStuck
	}
	delete(f.memories, key)
	return nil
}

func (f *fakeNet) Grant(key uint32, rail int, at uint64, flags uint32) (uint32, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	m := f.memories[key]
	if m == nil {
		return 0, driver.ErrBounds
	}
	if m.grants[rail] == 0 {
		fakeWire.Lock()
		fakeWire.next++
		m.grants[rail] = fakeWire.next
		fakeWire.grants[fakeWire.next] = &fakeGrant{bytes: m.bytes, base: at,
			readOnly: flags&verbs.ReadOnly != 0}
		fakeWire.Unlock()
	}
	return m.grants[rail], nil
}

var errStuck = errors.New("the key is in use")

func (f *fakeNet) Revoke(key uint32) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.revokes++
	if slices.ContainsFunc(f.inUse, fakePairIsThere) {
		return errStuck
	}
	if f.stuck > 0 {
		f.stuck--
		return errStuck
	}
	m := f.memories[key]
	for rail, k := range m.grants {
		fakeWire.Lock()
		g := fakeWire.grants[k]
		delete(fakeWire.grants, k)
		fakeWire.Unlock()
		g.mu.Lock()
		g.over = true
		g.mu.Unlock()
		delete(m.grants, rail)
	}
	return nil
}

func (f *fakeNet) connect(initiator bool, credit int) (link, error) {
	if credit == 0 {
		credit = f.cfg.NotifyMax
	}
	fakeWire.Lock()
	fakeWire.ids++
	l := &fakeLink{net: f, id: fakeWire.ids, initiator: initiator, credits: credit}
	fakeWire.Unlock()
	l.more.L = &l.mu
	f.mu.Lock()
	f.links[l.id] = l
	f.mu.Unlock()
	if initiator {
		l.running.Go(l.run)
	}
	return l, nil
}

// batch takes a batch off the free list.
func (f *fakeNet) batch() *fakeBatch {
	f.mu.Lock()
	defer f.mu.Unlock()
	if n := len(f.free); n > 0 {
		b := f.free[n-1]
		f.free = f.free[:n-1]
		return b
	}
	return &fakeBatch{}
}

func (f *fakeNet) complete(b *fakeBatch, status int32) {
	f.end(b, status)
	f.mu.Lock()
	f.wake()
	f.mu.Unlock()
}

func (f *fakeNet) end(b *fakeBatch, status int32) {
	f.mu.Lock()
	f.done = append(f.done, verbs.Done{Tag: b.tag, Status: status, Piece: -1})
	f.free = append(f.free, b)
	f.mu.Unlock()
}

// cut has nothing pass over a rail, or everything again.
func (f *fakeNet) cut(rail int, cut bool) {
	fakeWire.Lock()
	f.rails[rail].cut = cut
	fakeWire.Unlock()
}

// pairs are the queue pairs of all pairs.
func (f *fakeNet) pairs() (numbers []uint32) {
	fakeWire.Lock()
	defer fakeWire.Unlock()
	for number, p := range fakeWire.pairs {
		if p.link.net == f {
			numbers = append(numbers, number)
		}
	}
	return numbers
}

// fakePairIsThere reports whether something can still arrive at a queue pair.
func fakePairIsThere(number uint32) bool {
	fakeWire.Lock()
	defer fakeWire.Unlock()
	return fakeWire.pairs[number] != nil
}

// net is the fake of a backend.
func fakeOf(b *Backend) *fakeNet { return b.net.(*fakeNet) }

const patience = 30 * time.Second

// remove takes the device of a rail away.
func (f *fakeNet) remove(rail int) {
	fakeWire.Lock()
	f.rails[rail].cut, f.rails[rail].gone = true, true
	fakeWire.Unlock()
	f.tell(verbs.News{Kind: verbs.DeviceGone, Rail: rail})
}
