// SPDX-License-Identifier: Apache-2.0

package posix

import (
	"context"
	"crypto/subtle"
	"fmt"

	"github.com/sluicehq/sluice/backends"
	"github.com/sluicehq/sluice/internal/keys"
)

// memory is one registration: host memory or a range of a file.
type memory struct {
	b        *Backend
	key      uint32
	size     uint64
	secret   [16]byte
	readOnly bool

	mem []byte // host memory
	pin pin    // where io_uring knows it

	file *file // a range of a file; nil: host memory
	off  uint64

	// Guarded by Backend.mu.
	epoch  uint64
	closed bool
}

// Register implements backends.Backend. A file is opened once more, so the caller's
// descriptor may be closed when Register has returned; further ranges of it cost little.
func (b *Backend) Register(seg backends.Segment) (backends.Memory, error) {
	if seg.Kind != backends.DRAM && seg.Kind != backends.File {
		return nil, fmt.Errorf("register %v with posix: %w", seg.Kind, backends.ErrNotSupported)
	}
	if err := seg.Check(); err != nil {
		return nil, fmt.Errorf("register memory: %w", err)
	}
	if b.closed.Load() || !b.gate.Enter() {
		return nil, fmt.Errorf("register memory: %w", backends.ErrClosed)
	}
	defer b.gate.Exit()
	m := &memory{b: b, size: seg.Len, secret: seg.Secret, readOnly: seg.ReadOnly, mem: seg.Mem, off: seg.FileOff}
	var err error
	if m.key, m.epoch, err = b.table.Take(); err != nil {
		return nil, fmt.Errorf("register memory: %w", err)
	}
	if seg.Kind == backends.File {
		m.mem = nil
		m.file, err = b.use(&seg)
	} else {
		m.pin = b.pinMemory(&seg)
	}
	if err != nil {
		b.table.GiveBack(m.key, m.epoch)
		return nil, fmt.Errorf("register file: %w", err)
	}
	b.table.Put(m.key, m)
	return m, nil
}

// use finds the file of a segment, or opens it.
func (b *Backend) use(seg *backends.Segment) (*file, error) {
	id, size, err := examine(seg.FD)
	if err != nil {
		return nil, err
	}
	if err := admit(seg, id, size); err != nil {
		return nil, err
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	f := b.files[id]
	if f == nil {
		if f, err = openFile(seg.FD, id, b.cfg.Buffered); err != nil {
			return nil, err
		}
		b.mover.addFile(f)
		b.files[id] = f
	}
	f.refs++
	return f, nil
}

// unuse closes a file that no memory lies in any more.
func (b *Backend) unuse(f *file) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if f.refs--; f.refs > 0 {
		return nil
	}
	delete(b.files, f.id)
	b.mover.dropFile(f)
	if err := f.close(); err != nil {
		return fmt.Errorf("close file: %w", err)
	}
	return nil
}

// Key implements backends.Memory.
func (m *memory) Key() uint32 { return m.key }

// AppendToken implements backends.Memory. It is of use in this process alone.
func (m *memory) AppendToken(dst []byte) ([]byte, error) {
	m.b.mu.Lock()
	t := keys.Token{Secret: m.secret, Key: m.key, Epoch: m.epoch, Size: m.size}
	closed := m.closed
	m.b.mu.Unlock()
	if closed {
		return dst, backends.ErrClosed
	}
	return t.Append(dst, &m.b.owner), nil
}

// Close implements backends.Memory. It ends what is in flight and waits for it.
func (m *memory) Close() error {
	if !m.b.gate.Enter() {
		return nil // the backend's Close closes every memory
	}
	defer m.b.gate.Exit()
	m.b.mu.Lock()
	if m.closed {
		m.b.mu.Unlock()
		return nil
	}
	m.closed = true
	err := m.end(context.Background())
	m.b.mu.Unlock()
	m.b.table.Remove(m.key)
	if m.file != nil {
		err = m.b.unuse(m.file)
	}
	m.b.unpin(m.pin)
	m.b.table.GiveBack(m.key, m.epoch+1)
	return err
}

// end moves the epoch on, and returns when no job of one before is left.
//
// Preconditions: Backend.mu is held; it is given up meanwhile.
func (m *memory) end(ctx context.Context) error {
	m.epoch++
	b, epoch := m.b, m.epoch
	b.endJobs(backends.ErrRevoked, func(j *job) bool { return j.reaches(m, epoch) })
	return b.wait(ctx, func() bool {
		for i := range b.jobs {
			if j := &b.jobs[i]; j.live && j.reaches(m, epoch) {
				return false
			}
		}
		return true
	})
}

// Fence implements backends.Fencer.
func (b *Backend) Fence(ctx context.Context, key uint32) error {
	if err := ctx.Err(); err != nil {
		return backends.ContextError(ctx)
	}
	if !b.gate.Enter() {
		return backends.ErrClosed
	}
	defer b.gate.Exit()
	m := b.table.At(key)
	if m == nil {
		return fmt.Errorf("fence key %d: %w", key, errUnknownKey)
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if m.closed {
		return nil
	}
	if err := m.end(ctx); err != nil {
		return fmt.Errorf("fence key %d: the disk has not answered: %w", key, err)
	}
	return nil
}

// open compares what a token says with the memory.
//
// Preconditions: Backend.mu is held.
func (m *memory) open(t *keys.Token) error {
	switch {
	case m.closed || t.Epoch < m.epoch:
		return backends.ErrRevoked
	case t.Epoch > m.epoch, t.Size != m.size, subtle.ConstantTimeCompare(t.Secret[:], m.secret[:]) != 1:
		return backends.ErrBadToken
	case m.file == nil:
		return errNotLocal
	}
	return nil
}
