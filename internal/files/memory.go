// SPDX-License-Identifier: Apache-2.0

package files

import (
	"context"
	"crypto/subtle"
	"errors"
	"fmt"
	"slices"
	"sync"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/session"
)

// Memory is registered memory of the host or of a device, or a registered range of a file. It is a
// driver.Memory.
type Memory struct {
	Kind   driver.Kind
	Size   uint64
	Device int
	At     uint64 // address, unless it is a range of a file
	File   *File  // the file of a range; nil: memory of the program
	Own    any    // for the Mover's use, of memory of the program

	mem      []byte        // host memory
	shared   driver.Shared // the owner of pages that Renew may replace; nil: none
	off      uint64        // in the file
	readOnly bool
	core     *Core
	key      uint32
	epoch    uint64 // the generation of the key
	secret   [16]byte

	dropping sync.Mutex // held while Revoke releases resources; locked before Core.Mu
	gone     bool       // all resources are released; guarded by dropping
	revoked  bool       // guarded by Core.Mu
}

// Register implements driver.Backend. It opens a file again, so the caller may close its descriptor
// when Register has returned. Further ranges of a file share the first one's descriptors.
func (b *Backend) Register(seg driver.Segment) (driver.Memory, error) {
	c := b.core
	if !c.Caps.Pairs.Local().Has(seg.Kind) {
		return nil, fmt.Errorf("register %v with %s: %w", seg.Kind, c.Caps.Name,
			driver.ErrNotSupported)
	}
	if err := seg.Check(); err != nil {
		return nil, fmt.Errorf("register memory: %w", err)
	}
	if c.closed.Load() || !c.gate.Enter() {
		return nil, fmt.Errorf("register memory: %w", driver.ErrClosed)
	}
	defer c.gate.Exit()
	m := &Memory{Kind: seg.Kind, Size: seg.Len, Device: seg.Device, At: seg.Addr, mem: seg.Mem,
		shared: seg.Shared, off: seg.FileOff, readOnly: seg.ReadOnly, core: c, secret: seg.Secret}
	var err error
	if m.key, m.epoch, err = c.table.Take(); err != nil {
		return nil, fmt.Errorf("register memory: %w", err)
	}
	switch seg.Kind {
	case driver.File:
		m.File, err = c.use(&seg)
	case driver.DRAM:
		m.At = addressOf(seg.Mem)
		err = c.Mover.AddMemory(m, &seg)
	default:
		err = c.Mover.AddMemory(m, &seg)
	}
	if err != nil {
		c.table.Free(m.key)
		return nil, fmt.Errorf("register %v with %s: %w", seg.Kind, c.Caps.Name, err)
	}
	c.table.Put(m.key, m)
	if c.closed.Load() { // Close may have listed the memories before
		return nil, errors.Join(fmt.Errorf("register memory: %w", driver.ErrClosed),
			m.revoke(context.Background()))
	}
	return m, nil
}

// Key implements driver.Memory.
func (m *Memory) Key() uint32 { return m.key }

// AppendToken implements driver.Memory. The token is valid only in this process.
func (m *Memory) AppendToken(dst []byte) ([]byte, error) {
	c := m.core
	c.Mu.Lock()
	t := session.Token{Secret: m.secret, Key: m.key, Epoch: m.epoch, Size: m.Size}
	revoked := m.revoked
	c.Mu.Unlock()
	if revoked {
		return dst, driver.ErrClosed
	}
	return t.Append(dst, &c.owner), nil
}

// Revoke implements driver.Memory. It cancels the batches that use the memory and waits for them.
func (m *Memory) Revoke(ctx context.Context) error {
	if !m.core.gate.Enter() {
		return nil // Backend.Close ends every memory
	}
	defer m.core.gate.Exit()
	return m.revoke(ctx)
}

// revoke is Revoke inside the gate. It ends all jobs that use the memory, makes the Mover release
// the memory, and frees the key. After an error the key stays in use, and the next Revoke, or
// Backend.Close, continues where this one stopped.
func (m *Memory) revoke(ctx context.Context) error {
	c := m.core
	c.Mu.Lock()
	m.revoked = true
	err := c.await(ctx, driver.ErrRevoked, func(j *job) bool {
		return slices.ContainsFunc(j.views, func(v view) bool {
			return v.local == m || v.remote == m
		})
	})
	c.Mu.Unlock()
	if err != nil {
		return fmt.Errorf("revoke key %d: %s has not answered: %w", m.key, c.Disk, err)
	}
	m.dropping.Lock()
	defer m.dropping.Unlock()
	if m.gone {
		return nil
	}
	if m.File != nil {
		err = c.unuse(m.File)
	} else {
		err = c.Mover.DropMemory(m)
	}
	if err != nil {
		return err
	}
	m.gone = true
	c.table.Free(m.key)
	return nil
}

// admit checks a token that names the memory's key.
//
// Preconditions: Core.Mu is held.
func (m *Memory) admit(t *session.Token) error {
	switch {
	case m.revoked || t.Epoch < m.epoch:
		return driver.ErrRevoked
	case t.Epoch > m.epoch, t.Size != m.Size, subtle.ConstantTimeCompare(t.Secret[:],
		m.secret[:]) != 1:
		return driver.ErrBadToken
	case m.Kind != driver.File:
		return m.core.foreign
	}
	return nil
}
