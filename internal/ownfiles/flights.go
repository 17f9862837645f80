// SPDX-License-Identifier: Apache-2.0

// Package ownfiles has the in-flight table of a backend that moves bytes between memory and files
// of its own process: which memories and files it has, what its peers, which are the process
// itself, may reach by which token and epoch, which batches are under way, and how one waits until
// none of an epoch is left. How the bytes move is the backend's.
package ownfiles

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/session"
)

// Config is what the table is told of its backend.
type Config[E any] struct {
	Name              string // of the backend
	Memory            string // what it moves files from and to: "host memory"
	Mover             string // what moves the bytes, and may not answer: "the disk"
	KeysMax           int    // memories at a time
	JobsMax           int    // jobs, with their completions until Poll takes them
	Can               driver.Can
	DescsMax, RunsMax int // of a batch

	// Take notes what else the backend keeps of a batch, or says why it does not take it. It may
	// be nil. Flights.Mu is held.
	Take func(*Job[E], *driver.Batch) error
	// First begins what comes before the next requests of jobs. It may be nil. Flights.Mu is held.
	First func()
	// Room reports whether another request can be made. Flights.Mu is held.
	Room func() bool
	// Cut makes and begins the next request of a job, from its At, which it moves on. False: that
	// has to wait until others have ended. Flights.Mu is held.
	Cut func(*Job[E]) bool
	// Ends has a job of which nothing is under way, or to begin, give back what it has. False: it
	// has not ended yet, and Settle is called again. Flights.Mu is held.
	Ends func(*Job[E]) bool
	// Stop ends jobs whose Err is set, as early as can be. Flights.Mu is held.
	Stop func()
	// Leave gives Flights.Mu up, and then begins what there is to begin.
	Leave func()
	// Release gives back what a memory has, which is not used any more. After an error it is called
	// again, and goes on with what is left. Flights.Mu is not held.
	Release func(*Memory[E]) error
}

// Flights is the in-flight table of one backend. E is what it notes of where a memory lies.
type Flights[E any] struct {
	Mu   sync.Mutex   // guards what is called with it held, and what the backend has under way
	Gate session.Gate // held by users of what moves the bytes
	Done session.Completions
	News bool // completions of which no sleeper was told; guarded by Mu

	cfg     Config[E]
	owner   session.Owner
	addr    []byte
	table   session.KeyTable[Memory[E]]
	closed  atomic.Bool
	closing sync.Once
	err     error // of Close
	foreign error // of a local key that is a file, or a token that is not
	distant error // of another process

	// Guarded by Mu.
	peers  map[*Peer[E]]struct{}
	jobs   []*Job[E]
	free   []*Job[E]
	queue  turns[Job[E]] // jobs with pieces that no request was made of
	failed bool          // jobs in the queue may have failed
	// for each of these a goroutine begins what is in the queue when a Renew is over
	returning map[driver.Shared]struct{}
	ended     sync.Cond // a job has
	waiters   int       // for that
}

var errUnknownKey = fmt.Errorf("unknown key: %w", driver.ErrBounds)

// Open begins, before anything else is called.
func (b *Flights[E]) Open(cfg Config[E]) {
	b.cfg, b.owner = cfg, session.NewOwner()
	b.addr = append([]byte(cfg.Name+":"), b.owner[:]...)
	b.table.Most = cfg.KeysMax
	b.foreign = fmt.Errorf("%s moves between %s of the initiator and files: %w", cfg.Name,
		cfg.Memory, driver.ErrNotSupported)
	b.distant = fmt.Errorf("%s reaches files of its own process only: those of others are served "+
		"by their engines", cfg.Name)
	b.peers, b.returning = map[*Peer[E]]struct{}{}, map[driver.Shared]struct{}{}
	b.ended.L = &b.Mu
	b.Done.Init(cfg.JobsMax)
	b.queue = newTurns[Job[E]](cfg.JobsMax)
}

// Addr is for driver.Backend. It opens nothing in another process.
func (b *Flights[E]) Addr() []byte { return b.addr }

// Closed reports whether Close has begun.
func (b *Flights[E]) Closed() bool { return b.closed.Load() }

// At returns the memory of a key, nil for none.
func (b *Flights[E]) At(key uint32) *Memory[E] { return b.table.At(key) }

// All lists the memories.
func (b *Flights[E]) All() []*Memory[E] { return b.table.All() }

// Connect has a peer that was just made reach these memories, if addr is the backend's own.
func (b *Flights[E]) Connect(ctx context.Context, addr []byte, p *Peer[E]) error {
	if ctx.Err() != nil {
		return driver.ContextError(ctx)
	}
	if b.closed.Load() {
		return driver.ErrClosed
	}
	if !bytes.Equal(addr, b.addr) {
		return fmt.Errorf("connect: %w: %w", b.distant, driver.ErrNotSupported)
	}
	b.Mu.Lock()
	defer b.Mu.Unlock()
	if b.closed.Load() {
		return driver.ErrClosed
	}
	p.flights = b
	b.peers[p] = struct{}{}
	return nil
}

// Close ends all jobs and waits for them, closes peers and memories, and lets no caller through
// Gate any more. It is idempotent; release gives back what the backend has.
func (b *Flights[E]) Close(release func() error) error {
	b.closing.Do(func() { b.err = errors.Join(b.close(), release()) })
	return b.err
}

func (b *Flights[E]) close() error {
	b.Mu.Lock()
	b.closed.Store(true)
	for p := range b.peers {
		p.closed = true
	}
	_ = b.end(context.Background(), driver.ErrClosed, func(*Job[E]) bool { return true })
	clear(b.peers)
	b.Mu.Unlock()
	var errs []error
	for _, m := range b.table.All() {
		// nothing is under way that it would wait for
		errs = append(errs, m.revoke(context.Background()))
	}
	b.Gate.Shut()
	b.Gate.Wait()
	return errors.Join(errs...)
}
