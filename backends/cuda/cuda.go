// SPDX-License-Identifier: Apache-2.0

package cuda

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
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
	driver.BackendBase
	cfg      Config
	addr     string
	owner    session.Owner
	devices  []*device
	ends     *gpu.Ends
	wake     *proc.Event // wakes the program, which sleeps on FD
	heed     *proc.Event // wakes the goroutine attend
	attended chan struct{}
	memories session.KeyTable[memory]
	gates    gates
	closed   atomic.Bool
	ending   sync.Once
	ended    error // the result of Close

	closing atomic.Bool // no batch is left, so attend may return

	open     sync.RWMutex // held for reading by calls that use devices, except batches
	starting sync.RWMutex // held for reading while start puts a batch on a stream

	reaping sync.Mutex // held to take completions off the ring; guards what follows
	reaped  []ring.Done
	down    bool // the ring is freed; guarded by waking as well

	waking sync.Mutex // held to wake the program; the last in the lock order

	done    session.Completions
	scratch chan *scratch // free

	mu      sync.Mutex // guards what follows
	jobs    []*job
	free    []*job
	peers   map[*peer]struct{} // from this backend to others
	senders map[*peer]struct{} // from others of this process to this one

	server server // for other processes

	room atomic.Bool // a batch refused with ErrFull may be tried again; Arm reports it once
}

// registry finds the backends of this process by Addr.
var registry = struct {
	sync.RWMutex
	byAddr map[string]*Backend
	open   map[*Backend]struct{} // until no other backend or process reaches it
}{byAddr: map[string]*Backend{}, open: map[*Backend]struct{}{}}

// openBackends returns all open backends of this process.
func openBackends() []*Backend {
	registry.RLock()
	defer registry.RUnlock()
	return slices.Collect(maps.Keys(registry.open))
}

// New opens the devices. If the CUDA driver or a device is missing or too old, the error is a
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
		memories: session.KeyTable[memory]{Most: cfg.KeysMax}, reaped: make([]ring.Done, 64),
		scratch: make(chan *scratch, scratchMax),
		peers:   map[*peer]struct{}{}, senders: map[*peer]struct{}{},
	}
	b.done.Init(cfg.BatchesMax)
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

// stop takes the last completions off the ring and frees what start has made. No batch is running.
func (b *Backend) stop() (err error) {
	for _, d := range b.devices {
		d.close() // afterwards no thread is left that could complete a batch
	}
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
	for _, e := range []*proc.Event{b.wake, b.heed} {
		if e != nil {
			err = errors.Join(err, e.Close())
		}
	}
	return err
}

// Caps implements driver.Backend.
func (b *Backend) Caps() driver.Caps {
	return driver.Caps{
		Name: "cuda", Reach: b.cfg.reach(),
		Pairs: driver.Pairs{
			driver.DRAM: driver.KindsOf(driver.HBM),
			driver.HBM:  driver.KindsOf(driver.HBM, driver.DRAM),
		},
		DescsMax: descsMax, RunsMax: runsMax,
		Cost: driver.Cost{Setup: 8000, PerPiece: 800, Rate: 25e9},
	}
}

// Addr implements driver.Backend.
func (b *Backend) Addr() []byte { return []byte(b.addr) }

// FD implements driver.Backend.
func (b *Backend) FD() int { return b.wake.FD() }

// Arm implements driver.Backend. It sets the flag and then looks for completions; a thread that
// completes a batch queues it and then reads the flag. So either Arm sees the completion or the
// thread sees the flag.
func (b *Backend) Arm() (bool, error) {
	if b.closed.Load() {
		return false, driver.ErrClosed
	}
	b.reaping.Lock()
	defer b.reaping.Unlock()
	if b.down {
		return false, driver.ErrClosed
	}
	return b.ends.Arm() || b.done.Ready() > 0 || b.room.Swap(false), nil
}

// hasRoom wakes the program, which may sleep on FD, to try refused batches again.
func (b *Backend) hasRoom() {
	b.room.Store(true)
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
	n := b.done.Pop(done)
	if n == 0 && b.closed.Load() && b.done.Taken() == 0 {
		return 0, driver.ErrClosed
	}
	return n, nil
}

// Close implements driver.Backend. A second call waits for the first and returns the same error.
func (b *Backend) Close() error {
	b.ending.Do(func() { b.ended = b.end() })
	return b.ended
}

func (b *Backend) end() error {
	b.closed.Store(true)
	registry.Lock()
	delete(registry.byAddr, b.addr)
	registry.Unlock()
	b.open.Lock() // a Register has ended, or will see closed
	b.open.Unlock()
	b.mu.Lock()
	ours, theirs := slices.Collect(maps.Keys(b.peers)), slices.Collect(maps.Keys(b.senders))
	b.mu.Unlock()
	for _, p := range ours {
		_ = p.Close()
	}
	for _, p := range theirs {
		p.lose()
		p.waitForBatches() // its batches may use our memory
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
	b.open.Lock() // no call uses a device any more, and closed keeps new ones out
	defer b.open.Unlock()
	b.closing.Store(true)
	_ = b.heed.Signal()
	<-b.attended
	return errors.Join(append(errs, b.stop())...)
}

var (
	_ driver.Backend = (*Backend)(nil)
	_ driver.Peer    = (*peer)(nil)
)
