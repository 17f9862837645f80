// SPDX-License-Identifier: Apache-2.0

package cuda

import (
	"context"
	"crypto/subtle"
	"errors"
	"fmt"
	"sync/atomic"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/session"
)

// memory is one registration.
type memory struct {
	b           *Backend
	key         uint32
	epoch       uint64 // the generation of the key
	seg         driver.Segment
	base        uint64   // address, of the host or of the device
	dev         *device  // nil: host memory
	pin         *pin     // of host memory
	at          []uint64 // addresses of pinned host memory on each device of the backend
	localGrant  grant    // for batches of this backend that use it as local memory
	remoteGrant grant    // for batches of peers of this process, which use it by a token
	// block is the allocation of AllocDevice that other processes may map; nil: they may not.
	block *ownBlock

	revokeLock session.ContextLock // held by Revoke
	gone       bool                // Revoke has succeeded; guarded by revokeLock
	// the error of Revoke when Close of the backend could not prove that other processes have
	// stopped; afterwards nothing can
	unproven atomic.Pointer[error]
}

// Register implements driver.Backend. Device memory must be allocated, all of it on one device.
// Register pins host memory. Memory that cannot be pinned works too, but slower, since the driver
// copies it through its own staging memory: Explain says so.
func (b *Backend) Register(seg driver.Segment) (driver.Memory, error) {
	if seg.Kind != driver.DRAM && seg.Kind != driver.HBM {
		return nil, fmt.Errorf("register %v with cuda: %w", seg.Kind, driver.ErrNotSupported)
	}
	if err := seg.Check(); err != nil {
		return nil, err
	}
	b.open.RLock()
	defer b.open.RUnlock()
	if b.closed.Load() {
		return nil, driver.ErrClosed
	}
	m := &memory{b: b, seg: seg, revokeLock: session.NewContextLock()}
	if err := m.find(); err != nil {
		return nil, err
	}
	key, epoch, err := b.memories.Take()
	if err != nil {
		return nil, errors.Join(err, m.unpin())
	}
	m.key, m.epoch = key, epoch
	b.memories.Put(key, m)
	return m, nil
}

// find pins host memory, or finds the device and the block of device memory.
func (m *memory) find() (err error) {
	if m.seg.Kind == driver.DRAM {
		m.base = addressOf(m.seg.Mem)
		if m.pin, err = pins.use(m.b, m.seg); err != nil || !m.pin.pinned() || !m.b.cfg.kernels() {
			return err
		}
		return m.locate()
	}
	m.base, m.dev = m.seg.Addr, m.b.device(m.seg.Device)
	if m.dev == nil {
		return fmt.Errorf("register memory of device %d, which Config.Devices leaves out: %w",
			m.seg.Device, driver.ErrNotSupported)
	}
	if err := m.dev.holds(m.base, m.seg.Len); err != nil {
		return fmt.Errorf("register %w", err)
	}
	if o := blocks.find(m.base, m.seg.Len); o != nil && o.peers {
		m.block = o
	}
	return nil
}

// locate gets the address of pinned host memory on each device.
func (m *memory) locate() error {
	for _, d := range m.b.devices {
		at, err := m.hostAddress(d)
		if err != nil {
			return errors.Join(err, m.unpin())
		}
		m.at = append(m.at, at)
	}
	return nil
}

// holds checks that a range is allocated, and all of it on the device.
func (d *device) holds(at, n uint64) error {
	whose, until, err := d.mover.DeviceOf(at, n)
	switch {
	case err != nil && until > at:
		return fmt.Errorf("%d bytes of device memory at %#x: only %d of them are "+
			"allocated: %w", n, at, until-at, driver.ErrBounds)
	case err != nil:
		return fmt.Errorf("%d bytes at %#x, which is not device memory, or was "+
			"freed: %w (%w)", n, at, driver.ErrBounds, err)
	case whose != d.ordinal:
		return fmt.Errorf("%d bytes at %#x, which are of device %d and not of %d: %w", n,
			at, whose, d.ordinal, driver.ErrBounds)
	}
	return nil
}

func (m *memory) Key() uint32 { return m.key }

// AppendToken implements driver.Memory.
func (m *memory) AppendToken(dst []byte) ([]byte, error) {
	if m.remoteGrant.ended.Load() {
		return dst, driver.ErrClosed
	}
	t := session.Token{Secret: m.seg.Secret, Key: m.key, Epoch: m.epoch, Size: m.seg.Len}
	return t.Append(dst, &m.b.owner), nil
}

// checkToken returns nil if the token gives access to the memory, else the reason.
func (m *memory) checkToken(t *session.Token) error {
	switch {
	case m == nil, t.Epoch < m.epoch, m.remoteGrant.ended.Load():
		return driver.ErrRevoked
	case subtle.ConstantTimeCompare(m.seg.Secret[:], t.Secret[:]) == 0,
		m.seg.Len != t.Size, t.Epoch > m.epoch:
		return driver.ErrBadToken
	}
	return nil
}

// Revoke implements driver.Memory. Copies that are already on a stream run to their end, which
// takes at most as long as two chunks. Revoke also waits for batches of this backend that use the
// memory as local memory.
func (m *memory) Revoke(ctx context.Context) error {
	m.end()
	if err := m.revokeLock.Lock(ctx); err != nil {
		return fmt.Errorf("revoke key %d: another call looks for the proof: %w", m.key, err)
	}
	defer m.revokeLock.Unlock()
	if m.gone {
		return nil
	}
	if err := m.unproven.Load(); err != nil {
		return *err
	}
	over := func() error {
		if ctx.Err() != nil {
			return fmt.Errorf("revoke key %d: %w", m.key, driver.ContextError(ctx))
		}
		return nil
	}
	if err := m.untilQuiet(over); err != nil {
		return err // the key stays taken, and the memory pinned
	}
	if err := m.unpin(); err != nil {
		return err // as above
	}
	m.gone = true
	m.b.memories.Free(m.key)
	return nil
}

// end refuses new batches, cancels the queued copies of running ones, and marks the exports to
// other processes as revoked (step over of spec/cuda_processes.pml).
func (m *memory) end() {
	m.remoteGrant.end()
	m.localGrant.end()
	m.b.cancelSenders(func(j *job) bool { return j.names(m) }, &driver.ErrRevoked)
	for _, g := range m.b.clients() {
		g.endExports(m.isExportedAs)
	}
}

// giveUp makes Revoke return ErrUnproven from now on. For host memory that is not needed: the end
// of the device's context also unpins it.
func (m *memory) giveUp(why error) error {
	if m.pin != nil {
		pins.abandon(m.pin)
		_ = m.revokeLock.Lock(context.Background())
		m.gone = true
		m.revokeLock.Unlock()
		return why
	}
	why = fmt.Errorf("the backend has closed, and a process may write still: %w: %w",
		driver.ErrUnproven, why)
	m.unproven.Store(&why)
	return why
}

func (m *memory) unpin() error {
	if m.pin == nil {
		return nil
	}
	return pins.unuse(m.b, m.pin)
}
