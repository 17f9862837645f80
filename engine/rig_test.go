// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/backends/mem"
	"github.com/sluicehq/sluice/driver"
)

// rig is mem with what a test changes. A function that is nil changes nothing.
type rig struct {
	*mem.Backend
	caps       func(c *driver.Caps)
	can        func(driver.Can) driver.Can // of its Peers
	onConnect  func(addr []byte) error
	onRegister func(driver.Segment)
	onRevoke   func(context.Context) error // before that of mem
	onAnswer   func(b []byte) error
	onArm      func()
}

// rigged makes mem into a rig.
func rigged(t testing.TB, cfg mem.Config, r rig) *rig {
	t.Helper()
	b, err := mem.New(cfg)
	check(t, err)
	r.Backend = b
	return &r
}

// over has an engine use backends.
func over(list ...driver.Backend) func(*Config) {
	return func(c *Config) { c.Backends = list }
}

func (r *rig) Caps() driver.Caps {
	c := r.Backend.Caps()
	if r.caps != nil {
		r.caps(&c)
	}
	return c
}

func (r *rig) Connect(ctx context.Context, addr []byte) (driver.Peer, error) {
	if r.onConnect != nil {
		if err := r.onConnect(addr); err != nil {
			return nil, err
		}
	}
	p, err := r.Backend.Connect(ctx, addr)
	if err == nil && r.can != nil {
		p = rigPeer{p, r.can(p.Can())}
	}
	return p, err
}

func (r *rig) Register(s driver.Segment) (driver.Memory, error) {
	if r.onRegister != nil {
		r.onRegister(s)
	}
	m, err := r.Backend.Register(s)
	if err == nil && r.onRevoke != nil {
		m = rigMemory{m, r.onRevoke}
	}
	return m, err
}

type rigMemory struct {
	driver.Memory
	onRevoke func(context.Context) error
}

func (m rigMemory) Revoke(ctx context.Context) error {
	if err := m.onRevoke(ctx); err != nil {
		return err
	}
	return m.Memory.Revoke(ctx)
}

func (r *rig) Answer(conn uint64, b []byte) error {
	if r.onAnswer != nil {
		if err := r.onAnswer(b); err != nil {
			return err
		}
	}
	return r.Backend.Answer(conn, b)
}

func (r *rig) Arm() (bool, error) {
	if r.onArm != nil {
		r.onArm()
	}
	return r.Backend.Arm()
}

func newMem(t testing.TB) *mem.Backend {
	t.Helper()
	b, err := mem.New(mem.Config{})
	require.NoError(t, err)
	return b
}

// rigPeer can what it says alone.
type rigPeer struct {
	driver.Peer
	can driver.Can
}

func (p rigPeer) Can() driver.Can { return p.can }

func (p rigPeer) Submit(tag uint64, b *driver.Batch) error {
	if err := b.Check(p.can); err != nil {
		return err
	}
	return p.Peer.Submit(tag, b)
}
