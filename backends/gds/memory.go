// SPDX-License-Identifier: Apache-2.0

package gds

import (
	"context"
	"crypto/subtle"
	"errors"
	"fmt"

	"github.com/sluicehq/sluice/backends"
	"github.com/sluicehq/sluice/csrc"
	"github.com/sluicehq/sluice/internal/keys"
)

// memory is one registration: memory of a device or of the host, or a range of a file.
type memory struct {
	b        *Backend
	key      uint32
	kind     backends.Kind
	size     uint64
	secret   [16]byte
	readOnly bool

	device int     // whose context cuFile is called in
	at     uint64  // address
	buffer *buffer // what cuFile knows of it; nil of a file

	file *file // a range of a file; nil: memory
	off  uint64

	// Guarded by Backend.mu.
	epoch  uint64
	closed bool
}

// Register implements backends.Backend. A file is opened once more, so the caller's descriptor may be closed when Register
// has returned; further ranges of it, and parts of registered memory, cost little. A file that cuFile does not take (its
// filesystem, without compat mode) is an error that wraps *csrc.CuFileError.
func (b *Backend) Register(seg backends.Segment) (backends.Memory, error) {
	if !b.caps.Pairs.Local().Has(seg.Kind) {
		return nil, fmt.Errorf("register %v with gds: %w", seg.Kind, backends.ErrNotSupported)
	}
	if err := seg.Check(); err != nil {
		return nil, fmt.Errorf("register memory: %w", err)
	}
	if b.closed.Load() || !b.gate.Enter() {
		return nil, fmt.Errorf("register memory: %w", backends.ErrClosed)
	}
	defer b.gate.Exit()
	m := &memory{b: b, kind: seg.Kind, size: seg.Len, secret: seg.Secret, readOnly: seg.ReadOnly, off: seg.FileOff}
	var err error
	if m.key, m.epoch, err = b.table.Take(); err != nil {
		return nil, fmt.Errorf("register memory: %w", err)
	}
	if err := m.find(&seg); err != nil {
		b.table.GiveBack(m.key, m.epoch)
		return nil, fmt.Errorf("register %v with gds: %w", seg.Kind, err)
	}
	b.table.Put(m.key, m)
	return m, nil
}

// find makes the segment known to cuFile.
func (m *memory) find(seg *backends.Segment) (err error) {
	switch seg.Kind {
	case backends.File:
		m.file, err = m.b.use(seg)
		return err
	case backends.HBM:
		m.device, m.at = seg.Device, seg.Addr
	default:
		m.at = addressOf(seg.Mem)
	}
	if m.device < 0 || m.device >= csrc.CuFileDevices {
		return fmt.Errorf("device %d is not within 0 to %d: %w", m.device, csrc.CuFileDevices-1, backends.ErrBounds)
	}
	if err := m.b.mover.Use(m.device); err != nil {
		return err
	}
	if seg.Kind == backends.HBM {
		if err := m.holds(); err != nil {
			return err
		}
	}
	m.buffer, err = buffers.use(m.b, seg, m.at)
	return err
}

// holds checks that the range is allocated, and all of it on the device.
func (m *memory) holds() error {
	whose, until, err := m.b.mover.Whose(m.device, m.at, m.size)
	switch {
	case err != nil && until > m.at:
		return fmt.Errorf("%d bytes of device memory at %#x: only %d of them are allocated: %w", m.size, m.at, until-m.at, backends.ErrBounds)
	case err != nil:
		return fmt.Errorf("%d bytes at %#x, which is not device memory, or was freed: %w (%w)", m.size, m.at, backends.ErrBounds, err)
	case whose != m.device:
		return fmt.Errorf("%d bytes at %#x, which are of device %d and not of %d: %w", m.size, m.at, whose, m.device, backends.ErrBounds)
	}
	return nil
}

// base is what cuFile is told of a place in the memory: an address as it was registered, and where behind it.
func (m *memory) base(off uint64) (base, offset uint64) {
	if m.buffer.registered() {
		return m.buffer.at, m.at - m.buffer.at + off
	}
	return m.at, off
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
		err = errors.Join(err, m.b.unuse(m.file))
	} else {
		err = errors.Join(err, buffers.unuse(m.b, m.buffer))
	}
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
	return b.wait(ctx, func() bool { return !b.anyJob(func(j *job) bool { return j.reaches(m, epoch) }) })
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
		return fmt.Errorf("fence key %d: cuFile has not answered: %w", key, err)
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
