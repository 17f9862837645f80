// SPDX-License-Identifier: Apache-2.0

package ucx

import (
	"crypto/rand"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/csrc/ring"
	ucp "github.com/sluicehq/sluice/csrc/ucx"
	"github.com/sluicehq/sluice/driver"
)

// fakeNet is a fabric within this process, for tests of all that lies above C. As
// in UCX, messages of one connection keep their order, and each end has its own
// thread.
type fakeNet struct {
	cfg  ucp.Config
	name string

	refusal error // of the kernel, to copy between processes

	mu       sync.Mutex
	done     []ring.Done
	taken    int // batches submitted and not polled
	notifs   []fakeNotif
	control  []ucp.Control
	armed    bool
	news     bool // room, for who was told that there is none
	memories map[uint32]*fakeMemory
	links    map[uint64]*fakeLink
	ids      uint64
	free     []*fakeBatch

	fences atomic.Int64 // calls of Fence
	stuck  atomic.Bool  // Fence is never done, as with a frozen peer
	frozen bool         // control messages wait in held
	held   []ucp.Control
}

type fakeNotif struct {
	from  *fakeLink
	notif ucp.Notif
}

type fakeMemory struct {
	mu     sync.RWMutex // held for each piece
	bytes  []byte
	ticket uint64
	fresh  bool // Refresh was called
}

var fakeNets = struct {
	sync.Mutex
	byName map[string]*fakeNet
}{byName: map[string]*fakeNet{}}

func openFake(c ucp.Config) (fabric, error) {
	f := &fakeNet{cfg: c, name: rand.Text(), memories: map[uint32]*fakeMemory{},
		links: map[uint64]*fakeLink{}}
	fakeNets.Lock()
	fakeNets.byName[f.name] = f
	fakeNets.Unlock()
	return f, nil
}

// newFake opens a backend over it.
func newFake(cfg Config) (*Backend, error) {
	return open(cfg, func(*Config) error { return nil }, openFake)
}

func (f *fakeNet) Close() error {
	fakeNets.Lock()
	delete(fakeNets.byName, f.name)
	fakeNets.Unlock()
	f.mu.Lock()
	defer f.mu.Unlock()
	if len(f.links) > 0 {
		return fmt.Errorf("%d links are open", len(f.links))
	}
	return nil
}

func (f *fakeNet) Address(worker int) []byte { return fmt.Appendf(nil, "%s-%d", f.name, worker) }

func (f *fakeNet) Poll(done []ring.Done) int {
	f.mu.Lock()
	defer f.mu.Unlock()
	n := copy(done, f.done)
	f.done = append(f.done[:0], f.done[n:]...)
	f.taken -= n
	return n
}

func (f *fakeNet) Drive() {}

func (f *fakeNet) Arm() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.armed = true
	ready := len(f.done) > 0 || len(f.notifs) > 0 || f.news
	f.news = false
	return ready
}

// wake signals who sleeps. Preconditions: f.mu is held.
func (f *fakeNet) wake() {
	if f.armed {
		f.armed = false
		_, _ = unix.Write(f.cfg.WakeFD, one)
	}
}

func (f *fakeNet) Receive() (ucp.Notif, bool) {
	f.mu.Lock()
	if len(f.notifs) == 0 {
		f.mu.Unlock()
		return ucp.Notif{}, false
	}
	n := f.notifs[0]
	f.notifs = f.notifs[1:]
	f.mu.Unlock()
	sender := n.from.net
	sender.mu.Lock()
	n.from.credits++
	if n.from.starved {
		n.from.starved, sender.news = false, true
		sender.wake()
	}
	sender.mu.Unlock()
	return n.notif, true
}

func (f *fakeNet) Control() (ucp.Control, bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if len(f.control) == 0 {
		return ucp.Control{}, false
	}
	m := f.control[0]
	f.control = f.control[1:]
	return m, true
}

func (f *fakeNet) push(m ucp.Control) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.frozen {
		f.held = append(f.held, m)
		return
	}
	f.control = append(f.control, m)
	_, _ = unix.Write(f.cfg.ControlFD, one)
}

// freeze has what is sent to f wait until it is thawed.
func (f *fakeNet) freeze() {
	f.mu.Lock()
	f.frozen = true
	f.mu.Unlock()
}

func (f *fakeNet) thaw() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.control = append(f.control, f.held...) // before what comes from now on
	f.frozen, f.held = false, nil
	_, _ = unix.Write(f.cfg.ControlFD, one)
}

func (f *fakeNet) Map(key uint32, m ucp.Memory) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.memories[key] != nil || m.Ticket == 0 {
		return fmt.Errorf("key %d, ticket %d", key, m.Ticket)
	}
	f.memories[key] = &fakeMemory{bytes: m.Mem, ticket: m.Ticket}
	return nil
}

func (f *fakeNet) memory(key uint32) *fakeMemory {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.memories[key]
}

func (f *fakeNet) Unmap(key uint32) {
	m := f.memory(key)
	m.mu.Lock()
	m.ticket = 0
	m.mu.Unlock()
	f.mu.Lock()
	delete(f.memories, key)
	f.mu.Unlock()
}

func (f *fakeNet) Fence(key uint32, ticket uint64, grace time.Duration) error {
	f.fences.Add(1)
	m := f.memory(key)
	m.mu.Lock()
	if ticket != 0 {
		m.ticket = ticket
	}
	m.mu.Unlock()
	if f.stuck.Load() {
		time.Sleep(grace)
		return driver.ErrTimeout
	}
	return nil
}

func (f *fakeNet) standBeside(fabric) {}
func (f *fakeNet) Blocked() bool      { return false }
func (f *fakeNet) Condemn()           {}

func (f *fakeNet) Refresh(key uint32) error {
	m := f.memory(key)
	m.mu.Lock()
	m.fresh = true
	m.mu.Unlock()
	return nil
}

func (f *fakeNet) Export(uint32) (ucp.Export, bool) { return ucp.Export{}, false }
func (f *fakeNet) Words() ucp.Export                { return ucp.Export{} }

type fakeStorage struct {
	mem    []byte
	closed int
}

func (s *fakeStorage) Bytes() []byte { return s.mem }
func (s *fakeStorage) Close() error  { s.closed++; return syscall.Munmap(s.mem) }

func (f *fakeNet) allocate(n uint64) (storage, error) {
	mem, err := syscall.Mmap(-1, 0, int(n), syscall.PROT_READ|syscall.PROT_WRITE,
		syscall.MAP_PRIVATE|syscall.MAP_ANON)
	return &fakeStorage{mem: mem}, err
}

func (f *fakeNet) connect(worker int, address []byte) (link, error) {
	name, at := string(address[:26]), 0
	if _, err := fmt.Sscanf(string(address[26:]), "-%d", &at); err != nil {
		return nil, err
	}
	fakeNets.Lock()
	to := fakeNets.byName[name]
	fakeNets.Unlock()
	if to == nil {
		return nil, driver.ErrPeerLost
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.ids++
	l := &fakeLink{net: f, id: f.ids, worker: worker, to: to, at: at, credits: f.cfg.NotifyMax,
		stopped: make(chan struct{})}
	l.more.L = &l.mu
	f.links[l.id] = l
	go l.run()
	return l, nil
}

// batch takes a batch off the free list. Preconditions: f.mu is held.
func (f *fakeNet) batch() *fakeBatch {
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
	f.done = append(f.done, ring.Done{Tag: b.tag, Status: status, Piece: -1})
	f.free = append(f.free, b)
	f.mu.Unlock()
}

// lose has every link of f be given up, as UCX does when the other side is gone.
func (f *fakeNet) lose() {
	f.mu.Lock()
	ids := make([]uint64, 0, len(f.links))
	for id := range f.links {
		ids = append(ids, id)
	}
	f.mu.Unlock()
	slices.Sort(ids)
	for _, id := range ids {
		f.push(ucp.Control{Conn: id, Lost: true})
	}
}
