// SPDX-License-Identifier: Apache-2.0

// Package mem copies within one process. It is the reference for what every
// backend means, the template for a new one, and the fixture of other
// packages' tests: a backend (mem.go) has memories (memory.go) and peers (peer.go),
// which take batches (batch.go), copy them (copy.go), and carry notifications and
// answers (notify.go).
//
// Proof that nothing lands later: a copy holds the gate of the memory that the
// peer owns, for at most pieceMax bytes at a time, and looks under it whether the memory is
// revoked. Revoke says so and then takes the gate once. Nothing else copies.
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
	Workers    int // goroutines for batches over InlineMax; default 1
	InlineMax  int // bytes that Submit copies itself; default 64 KiB
	BatchesMax int // outstanding batches, and messages that wait in a receiver; default 1,024
	MessageMax int // bytes of a notification; default 64 KiB
}

const (
	descsMax = 4096
	runsMax  = 64 << 10
	pieceMax = 256 << 10 // bytes under one gate: how long a Revoke may have to wait
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
	free    []*job    // the rest of BatchesMax jobs, the last used on top; guarded by freeMu
	freeMu  sync.Mutex
	workers sync.WaitGroup

	done   chan driver.Completion // a place is taken before it is needed, so never full
	taken  atomic.Int64           // places of done that are taken
	armed  atomic.Bool            // the next signal is for wake
	closed atomic.Bool

	mu       sync.RWMutex // guards the tables
	memories session.KeyTable[memory]
	peers    map[uint64]*peer // ours to others, by our numbers
	senders  map[uint64]*peer // others' to us, by our numbers

	box session.Inbox
}

// registry finds the backends of this process by Addr: the wire of this one.
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

// Arm implements driver.Backend. It sets the flag before it looks for work, and a goroutine
// that brings work looks at the flag afterwards: one of the two sees the other.
func (b *Backend) Arm() (bool, error) {
	if b.closed.Load() {
		return false, driver.ErrClosed
	}
	b.armed.Store(true)
	return len(b.done) > 0 || b.box.Ready(), nil
}

func (b *Backend) signal() {
	if b.armed.CompareAndSwap(true, false) {
		_ = b.wake.Signal() // fails only when closed: then nothing waits for it
	}
}

// Poll implements driver.Backend.
func (b *Backend) Poll(done []driver.Completion) (int, error) {
	for n := range done {
		select {
		case done[n] = <-b.done:
			b.taken.Add(-1)
		default:
			if n == 0 && b.closed.Load() {
				return 0, driver.ErrClosed
			}
			return n, nil
		}
	}
	return len(done), nil
}

// complete ends a tag whose place in done was taken by take.
func (b *Backend) complete(tag uint64, err error) {
	b.done <- driver.Completion{Tag: tag, Err: err}
}

func (b *Backend) take() bool {
	if b.taken.Add(1) <= int64(cap(b.done)) {
		return true
	}
	b.taken.Add(-1)
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
	close(b.jobs) // no peer is left that could submit
	b.workers.Wait()
	return b.wake.Close()
}

var (
	_ driver.Backend = (*Backend)(nil)
	_ driver.Peer    = (*peer)(nil)
)
