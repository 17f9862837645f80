// SPDX-License-Identifier: Apache-2.0

// Package backend is a minimal backend, as a start for writing one. It copies within one process,
// in Submit, and leaves the optional methods to driver.BackendBase and driver.PeerBase. It is a
// separate Go module, as another project's backend would be, and passes the conformance suite
// (go test).
package backend

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/driver"
)

const batchesMax = 256 // completions that wait for Poll

// Backend copies within one process.
type Backend struct {
	driver.BackendBase // no notifications

	addr string
	fd   int

	mu       sync.Mutex // guards what follows
	closed   bool
	memories []*memory // by key
	peers    []*peer
	done     []driver.Completion
	taken    int // places in done that are reserved for running batches, or wait for Poll
}

// backends finds them by Addr.
var backends sync.Map

// New opens a backend.
func New() (*Backend, error) {
	fd, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	if err != nil {
		return nil, fmt.Errorf("open backend: %w", err)
	}
	b := &Backend{addr: rand.Text(), fd: fd, done: make([]driver.Completion, 0, batchesMax)}
	backends.Store(b.addr, b)
	return b, nil
}

// Caps implements driver.Backend.
func (b *Backend) Caps() driver.Caps {
	return driver.Caps{
		Name: "example", Reach: driver.InProcess, DescsMax: 1024, Cost: driver.Cost{Rate: 5e9},
		Pairs: driver.Pairs{driver.DRAM: driver.KindsOf(driver.DRAM)},
	}
}

// Addr implements driver.Backend.
func (b *Backend) Addr() []byte { return []byte(b.addr) }

// FD implements driver.Backend. Nothing completes outside Submit, so it is never signalled.
func (b *Backend) FD() int { return b.fd }

// Arm implements driver.Backend.
func (b *Backend) Arm() (ready bool, err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return len(b.done) > 0, nil
}

// Poll implements driver.Backend.
func (b *Backend) Poll(done []driver.Completion) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	n := copy(done, b.done)
	b.done = b.done[:copy(b.done, b.done[n:])]
	b.taken -= n
	if n == 0 && b.closed {
		return 0, driver.ErrClosed
	}
	return n, nil
}

// take reserves a place for the completion of a batch.
func (b *Backend) take() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.taken == batchesMax {
		return false
	}
	b.taken++
	return true
}

func (b *Backend) push(c driver.Completion) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.done = append(b.done, c)
}

// Close implements driver.Backend. It takes the gate of each memory and the lock of each peer once:
// afterwards no copy runs.
func (b *Backend) Close() error {
	b.mu.Lock()
	first := !b.closed
	b.closed = true
	memories, peers := b.memories, b.peers
	b.mu.Unlock()
	if !first {
		return nil
	}
	backends.Delete(b.addr)
	for _, p := range peers {
		_ = p.Close()
	}
	for _, m := range memories {
		_ = m.Revoke(context.Background()) // waits for copies, so never fails
	}
	return unix.Close(b.fd)
}

func (b *Backend) isClosed() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.closed
}

// memory is one registration. Each copy holds its gate for reading. Keys are never reused, so a
// token needs no epoch.
type memory struct {
	key     uint32
	seg     driver.Segment
	gate    sync.RWMutex
	revoked atomic.Bool // each copy checks it once it holds the gate
}

// Register implements driver.Backend.
func (b *Backend) Register(seg driver.Segment) (driver.Memory, error) {
	if seg.Kind != driver.DRAM {
		return nil, fmt.Errorf("register %v: %w", seg.Kind, driver.ErrNotSupported)
	}
	if err := seg.Check(); err != nil {
		return nil, err
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.closed {
		return nil, driver.ErrClosed
	}
	m := &memory{key: uint32(len(b.memories)), seg: seg}
	b.memories = append(b.memories, m)
	return m, nil
}

func (b *Backend) memory(key uint32) *memory {
	b.mu.Lock()
	defer b.mu.Unlock()
	if int64(key) >= int64(len(b.memories)) {
		return nil
	}
	return b.memories[key]
}

// Key implements driver.Memory.
func (m *memory) Key() uint32 { return m.key }

// AppendToken implements driver.Memory.
func (m *memory) AppendToken(dst []byte) ([]byte, error) {
	if m.revoked.Load() {
		return dst, driver.ErrClosed
	}
	dst = append(dst, m.seg.Secret[:]...)
	dst = binary.LittleEndian.AppendUint32(dst, m.key)
	return binary.LittleEndian.AppendUint64(dst, m.seg.Len), nil
}

// Revoke implements driver.Memory. It sets revoked first, whatever the state of ctx. Then it takes
// the gate once: it waits for the copies that hold the gate, and every later copy finds revoked
// set.
func (m *memory) Revoke(ctx context.Context) error {
	m.revoked.Store(true)
	for !m.gate.TryLock() {
		select {
		case <-ctx.Done():
			return fmt.Errorf("revoke memory: a copy is in hand: %w", driver.ContextError(ctx))
		case <-time.After(gatePause):
		}
	}
	m.gate.Unlock()
	return nil
}

// gatePause is the pause between two attempts to take the gate.
const gatePause = 20 * time.Microsecond
