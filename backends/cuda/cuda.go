// SPDX-License-Identifier: Apache-2.0

// Package cuda moves bytes between HBM and DRAM, and between HBM and HBM: batches of copies by
// the copy engines, and patterns of small entries by the gather kernel of the package cuda at
// the root of this module. The other side is a backend of this process or, with Config.Peers, one
// of another process of the same host and user, whose HBM is mapped here.
//
// The package is experimental: one card has met it, an H100. Two cards of one process, and what
// commands the driver to fail, have met a software stand-in of the driver alone.
//
// A backend (cuda.go) has devices (device.go), memories (memory.go, pins.go, block.go), and peers
// (peer.go), which turn batches into copies (submit.go, pages.go) on streams of a device. A thread
// of C for each stream waits for their ends and puts them into a ring, from where the first of
// these takes them (finish.go): Poll, Revoke, or, where a message or another process waits for
// them (notify.go), a goroutine. Streams of the program can be ordered with transfers (order.go). A
// peer of another process is a farPeer (far.go) over a link (link.go); the owner knows it as a
// client (server.go, client.go). Both speak as message.go says.
//
// Proof that nothing lands later: the event behind the last copy of a batch. Revoke refuses
// batches with an older token, has batches drop what is not yet on a stream, and waits for those
// events. Another process announces each batch in a page of shared memory before anything of it is
// on a stream, looks then whether its import is still good, and takes the announcement back when
// the event has ended. A process that stays silent for longer than Config.RevokeGrace loses the
// memory: other memory comes under the range. So does one that was killed in a batch: its copies
// may go on in a context that a child of it keeps.
package cuda

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"

	gpu "github.com/sluicehq/sluice/csrc/cuda"
	"github.com/sluicehq/sluice/csrc/ring"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/proc"
	"github.com/sluicehq/sluice/internal/session"
)

// Backend moves bytes between memory of devices and of the host. All methods may be called by any
// goroutine; Poll and Receive as package backends says.
type Backend struct {
	cfg      Config
	addr     string
	owner    session.Owner
	devices  []*device
	ends     *gpu.Ends
	wake     *proc.Event // of the program
	heed     *proc.Event // of the attendant
	attended chan struct{}
	memories session.KeyTable[memory]
	gates    gates
	closed   atomic.Bool
	ending   sync.Once
	ended    error // of Close

	closing atomic.Bool // no batch is left to attend to

	open     sync.RWMutex // held for reading by what uses devices and is no batch
	starting sync.RWMutex // held for reading while a batch goes on a stream

	reaping sync.Mutex // held to take ends off the ring; guards what follows
	done    []ring.Done
	ready   queue
	down    bool // the ring is gone; waking, too

	waking sync.Mutex // held to wake the sleeper, last of all locks

	taken atomic.Int64 // tags that have not been polled

	mu      sync.Mutex // guards what follows
	jobs    []*job
	free    []*job
	scratch []*scratch
	peers   map[*peer]struct{} // ours to others
	senders map[*peer]struct{} // others' to us

	server server // for other processes

	box session.Inbox
}

// registry finds the backends of this process by Addr.
var registry = struct {
	sync.RWMutex
	byAddr map[string]*Backend
	open   map[*Backend]struct{} // until all that reach it are gone
}{byAddr: map[string]*Backend{}, open: map[*Backend]struct{}{}}

// servers are all backends of this process.
func servers() (list []*Backend) {
	registry.RLock()
	defer registry.RUnlock()
	for b := range registry.open {
		list = append(list, b)
	}
	return list
}

// New opens the devices. Where driver or device is missing, or too old, the error is a
// *driver.UnavailableError.
func New(cfg Config) (*Backend, error) {
	cfg, err := cfg.withDefaults()
	if err != nil {
		return nil, fmt.Errorf("open cuda backend: %w", err)
	}
	if err := gpu.Load(cfg.Library); err != nil {
		return nil, err
	}
	b := &Backend{
		cfg: cfg, addr: newAddress(&cfg), owner: session.NewOwner(), attended: make(chan struct{}),
		memories: session.KeyTable[memory]{Most: cfg.KeysMax}, done: make([]ring.Done, 64),
		ready: queue{places: make([]driver.Completion, cfg.BatchesMax)},
		peers: map[*peer]struct{}{}, senders: map[*peer]struct{}{},
	}
	b.box.Open(cfg.BatchesMax, b.signal)
	for i := range cfg.BatchesMax {
		b.jobs = append(b.jobs, &job{b: b, number: i})
	}
	b.free = append(b.free, b.jobs...)
	if err := b.start(); err != nil {
		b.stop()
		return nil, err
	}
	go b.attend()
	registry.Lock()
	registry.byAddr[b.addr] = b
	registry.open[b] = struct{}{}
	registry.Unlock()
	if err := b.serve(); err != nil {
		return nil, errors.Join(err, b.Close())
	}
	return b, nil
}

func (b *Backend) start() (err error) {
	if b.wake, err = proc.NewEvent(); err != nil {
		return fmt.Errorf("open cuda backend: %w", err)
	}
	if b.heed, err = proc.NewEvent(); err != nil {
		return fmt.Errorf("open cuda backend: %w", err)
	}
	if b.ends, err = gpu.NewEnds(b.cfg.BatchesMax, b.wake.FD(), b.heed.FD()); err != nil {
		return err
	}
	return b.openDevices()
}

// stop gives back what start and openDevices have made. No batch is under way.
func (b *Backend) stop() error {
	var errs []error
	for _, d := range b.devices {
		d.close()
	}
	b.goDown()
	for _, e := range []*proc.Event{b.wake, b.heed} {
		if e != nil {
			errs = append(errs, e.Close())
		}
	}
	return errors.Join(errs...)
}

// goDown gives the ring back, after what was in it. No thread is left that could end a batch.
func (b *Backend) goDown() {
	b.reaping.Lock()
	defer b.reaping.Unlock()
	if b.ends != nil {
		b.reap()
	}
	b.waking.Lock()
	defer b.waking.Unlock()
	b.down = true
	if b.ends != nil {
		b.ends.Close()
	}
}

// Caps implements driver.Backend.
func (b *Backend) Caps() driver.Caps {
	return driver.Caps{
		Name: "cuda", Reach: b.cfg.reach(),
		Pairs: driver.Pairs{
			driver.DRAM: driver.KindsOf(driver.HBM),
			driver.HBM:  driver.KindsOf(driver.HBM, driver.DRAM),
		},
		DescsMax: descsMax, RunsMax: runsMax, MessageMax: b.cfg.MessageMax,
		Cost: driver.Cost{Setup: 8000, PerPiece: 800, Rate: 25e9},
	}
}

// Addr implements driver.Backend.
func (b *Backend) Addr() []byte { return []byte(b.addr) }

// FD implements driver.Backend.
func (b *Backend) FD() int { return b.wake.FD() }

// Arm implements driver.Backend. The flag goes up before the look, and what brings
// something looks at the flag afterwards: one of the two sees the other.
func (b *Backend) Arm() (bool, error) {
	if b.closed.Load() {
		return false, driver.ErrClosed
	}
	b.reaping.Lock()
	defer b.reaping.Unlock()
	if b.down {
		return false, driver.ErrClosed
	}
	return b.ends.Arm() || b.ready.n > 0 || b.box.Ready(), nil
}

// signal wakes the program that sleeps on FD.
func (b *Backend) signal() {
	b.waking.Lock()
	defer b.waking.Unlock()
	if !b.down && b.ends.Disarm() {
		_ = b.wake.Signal() // fails only when closed: nothing sleeps any more
	}
}

// Poll implements driver.Backend.
func (b *Backend) Poll(done []driver.Completion) (int, error) {
	b.reaping.Lock()
	defer b.reaping.Unlock()
	b.reap()
	n := b.ready.take(done)
	b.taken.Add(int64(-n))
	if n == 0 && b.closed.Load() && b.taken.Load() == 0 {
		return 0, driver.ErrClosed
	}
	return n, nil
}

// Close implements driver.Backend. A second call waits for the first, and answers the same.
func (b *Backend) Close() error {
	b.ending.Do(func() { b.ended = b.end() })
	return b.ended
}

func (b *Backend) end() error {
	b.closed.Store(true)
	registry.Lock()
	delete(registry.byAddr, b.addr)
	registry.Unlock()
	b.open.Lock() // a Register is done, or sees closed
	b.open.Unlock()
	b.mu.Lock()
	ours, theirs := listOf(b.peers), listOf(b.senders)
	b.mu.Unlock()
	for _, p := range ours {
		_ = p.Close()
	}
	for _, p := range theirs {
		p.lose()
		p.settle() // its batches may use our memory
	}
	var errs []error
	for _, m := range b.memories.All() {
		if err := m.Revoke(context.Background()); err != nil {
			errs = append(errs, m.giveUp(err))
		}
	}
	b.dismiss()
	registry.Lock()
	delete(registry.open, b)
	registry.Unlock()
	b.open.Lock() // nothing uses a device any more, and closed keeps others out
	defer b.open.Unlock()
	b.closing.Store(true)
	_ = b.heed.Signal()
	<-b.attended
	return errors.Join(append(errs, b.stop())...)
}

func listOf(set map[*peer]struct{}) (list []*peer) {
	for p := range set {
		list = append(list, p)
	}
	return list
}

var (
	_ driver.Backend = (*Backend)(nil)
	_ driver.Peer    = (*peer)(nil)
	_ driver.Peer    = farPeer{}
)
