// SPDX-License-Identifier: Apache-2.0

// Package mem is a backend that copies within one process. It is the reference implementation of
// driver.Backend, a template for new backends, and a fixture for the tests of other packages.
//
// A backend (mem.go) has memories (memory.go) and peers (peer.go). Peers accept batches (batch.go),
// copy them (copy.go), and carry notifications and answers (notify.go).
//
// # Proof that nothing lands after Revoke
//
// Each memory has a gate, a read-write lock. A copy locks the gate of the remote memory for reading
// and checks that the memory is not revoked; it unlocks the gate after at most pieceMax bytes.
// Revoke marks the memory revoked and then locks the gate once for writing. A copy that got the
// gate before has ended then, and every later one sees the mark.
package mem

import (
	"context"
	"crypto/rand"
	"fmt"
	"maps"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/proc"
	"github.com/sluicehq/sluice/internal/session"
)

// Config bounds the backend. The zero value is useful.
type Config struct {
	Workers    int // goroutines that copy batches larger than InlineMax; default 1
	InlineMax  int // bytes of the largest batch that Submit copies itself; default 64 KiB
	BatchesMax int // outstanding batches, and messages not received yet; default 1,024
	MessageMax int // bytes of a notification; default 64 KiB
}

const (
	descsMax = 4096
	runsMax  = 64 << 10
	pieceMax = 256 << 10 // bytes copied per lock of a gate: bounds the time that Revoke waits
)

func (c Config) withDefaults() Config {
	for _, f := range []struct {
		field *int
		value int
	}{{&c.Workers, 1}, {&c.InlineMax, 64 << 10}, {&c.BatchesMax, 1024}, {&c.MessageMax, 64 << 10}} {
		if *f.field <= 0 {
			*f.field = f.value
		}
	}
	return c
}

// Backend is the in-process backend.
type Backend struct {
	cfg     Config
	addr    string
	owner   session.Owner
	wake    *proc.Event
	jobs    chan *job // to the workers
	free    []*job    // unused jobs, a stack; guarded by freeMu
	freeMu  sync.Mutex
	workers sync.WaitGroup

	done     chan driver.Completion // Submit reserves a slot, so that a send never blocks
	reserved atomic.Int64           // slots of done that are reserved or hold a completion
	armed    atomic.Bool            // the program sleeps on wake: the next event must signal it
	closed   atomic.Bool

	mu       sync.RWMutex // guards the tables
	memories session.KeyTable[memory]
	peers    map[uint64]*peer // from this backend to others, by this backend's connection number
	senders  map[uint64]*peer // from others to this backend, by the same numbers

	box session.Inbox
}

// registry finds the backends of this process by Addr. A connection is a pointer to the other
// backend, found here.
var registry = struct {
	sync.RWMutex
	byAddr map[string]*Backend
}{byAddr: map[string]*Backend{}}

// New opens a backend.
func New(cfg Config) (*Backend, error) {
	wake, err := proc.NewEvent()
	if err != nil {
		return nil, fmt.Errorf("open mem backend: %w", err)
	}
	cfg = cfg.withDefaults()
	b := &Backend{
		cfg: cfg, addr: "mem:" + rand.Text(), owner: session.NewOwner(), wake: wake,
		jobs:  make(chan *job, cfg.BatchesMax),
		done:  make(chan driver.Completion, cfg.BatchesMax),
		peers: map[uint64]*peer{}, senders: map[uint64]*peer{},
	}
	b.memories.Most = session.KeyLimit
	b.box.Open(cfg.BatchesMax, b.signal)
	for range cfg.BatchesMax {
		b.free = append(b.free, &job{})
	}
	for range cfg.Workers {
		b.workers.Add(1)
		go b.worker()
	}
	registry.Lock()
	registry.byAddr[b.addr] = b
	registry.Unlock()
	return b, nil
}

// Caps implements driver.Backend.
func (b *Backend) Caps() driver.Caps {
	return driver.Caps{
		Name: "mem", Reach: driver.InProcess,
		Pairs:    driver.Pairs{driver.DRAM: driver.KindsOf(driver.DRAM)},
		DescsMax: descsMax, RunsMax: runsMax, MessageMax: b.cfg.MessageMax,
		Cost: driver.Cost{Setup: 200, PerPiece: 10, Rate: 9e9},
	}
}

// Addr implements driver.Backend.
func (b *Backend) Addr() []byte { return []byte(b.addr) }

// FD implements driver.Backend.
func (b *Backend) FD() int { return b.wake.FD() }

// Arm implements driver.Backend. It sets armed before it looks for events; a goroutine that adds
// an event checks armed afterwards. So either Arm sees the event, or that goroutine wakes the
// program.
func (b *Backend) Arm() (bool, error) {
	if b.closed.Load() {
		return false, driver.ErrClosed
	}
	b.armed.Store(true)
	return len(b.done) > 0 || b.box.Ready(), nil
}

func (b *Backend) signal() {
	if b.armed.CompareAndSwap(true, false) {
		_ = b.wake.Signal() // fails only when closed, and then no goroutine waits
	}
}

// Poll implements driver.Backend.
func (b *Backend) Poll(done []driver.Completion) (int, error) {
	for n := range done {
		select {
		case done[n] = <-b.done:
			b.reserved.Add(-1)
		default:
			if n == 0 && b.closed.Load() {
				return 0, driver.ErrClosed
			}
			return n, nil
		}
	}
	return len(done), nil
}

// complete adds the completion of a batch, for which reserve has reserved a slot.
func (b *Backend) complete(tag uint64, err error) {
	b.done <- driver.Completion{Tag: tag, Err: err}
}

// reserve reserves a slot of done for a batch. It returns false if there is none.
func (b *Backend) reserve() bool {
	if b.reserved.Add(1) <= int64(cap(b.done)) {
		return true
	}
	b.reserved.Add(-1)
	return false
}

// Close implements driver.Backend.
func (b *Backend) Close() error {
	if !b.closed.CompareAndSwap(false, true) {
		return nil
	}
	registry.Lock()
	delete(registry.byAddr, b.addr)
	registry.Unlock()
	b.mu.RLock()
	memories := b.memories.All()
	ours := slices.Collect(maps.Values(b.peers))
	theirs := slices.Collect(maps.Values(b.senders))
	b.mu.RUnlock()
	for _, p := range ours {
		_ = p.Close()
	}
	for _, p := range theirs {
		p.lose()
	}
	for _, m := range memories {
		_ = m.Revoke(context.Background()) // never fails
	}
	close(b.jobs) // every peer is closed, so no Submit sends on it any more
	b.workers.Wait()
	return b.wake.Close()
}

var (
	_ driver.Backend = (*Backend)(nil)
	_ driver.Peer    = (*peer)(nil)
)
