// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package rdma

import (
	"bytes"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/testing/fakeverbs"
	"github.com/sluicehq/sluice/internal/testing/leak"
	"github.com/sluicehq/sluice/internal/testing/promise"
)

// openThree connects two backends to a third, each over a device of its own of the stand-in.
func openThree(t *testing.T, cfg Config) (f *fakeverbs.Fabric, p *pair, second *peer) {
	t.Helper()
	f, open := standIn(t, 3)
	leak.Check(t, f.InUse)
	p = &pair{outcomes: map[uint64]error{}}
	var other *Backend
	for i, end := range []**Backend{&p.near, &p.far, &other} {
		cfg.Devices = f.Device(i).Name()
		b, err := open(cfg)
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, b.Close()) })
		*end = b
	}
	p.peer = p.connect(t)
	c, err := other.Connect(t.Context(), p.far.Addr())
	require.NoError(t, err)
	return f, p, c.(*peer)
}

// TestKeyThatComesBack has a NIC that is slow send a request when its memory is revoked, and the
// key of the owner's NIC stands for other memory, which another peer holds. It reaches nothing.
func TestKeyThatComesBack(t *testing.T) {
	for _, op := range []driver.Op{driver.Write, driver.Read} {
		f, p, second := openThree(t, Config{Timeout: 20 * time.Second})
		l, r := register(t, p.near, 4096), register(t, p.far, 4096)
		old := p.imports(t, r)
		_, first, _ := r.grant() // of this epoch: it is only asked for
		for i := range l.bytes {
			l.bytes[i] = 0xee
		}
		f.Device(0).Set(fakeverbs.Frozen, 1)
		b := writeOf(driver.Desc{Len: 4096, LocalKey: l.key, RemoteKey: old})
		b.Op = op
		require.NoError(t, p.peer.Submit(77, b))
		require.NoError(t, r.Revoke(t.Context()))

		other := register(t, p.far, 4096)
		token, err := other.AppendToken(nil)
		require.NoError(t, err)
		_, _, err = second.Import(token)
		require.NoError(t, err)
		_, next, _ := other.grant()
		require.Equal(t, first, next, "the stand-in gives no key out again")
		near, far := bytes.Clone(l.bytes), bytes.Clone(r.bytes)
		beside := bytes.Clone(other.bytes)
		f.Device(0).Set(fakeverbs.Frozen, 0)
		require.ErrorIs(t, p.await(t, 77), driver.ErrRevoked)
		if !bytes.Equal(near, l.bytes) || !bytes.Equal(far, r.bytes) ||
			!bytes.Equal(beside, other.bytes) {
			promise.Breaks(t, "%v: bytes of memory that was revoked have moved", op)
		}
	}
}

// TestAddressesWithoutAProof has no addresses left, and a NIC that keeps a queue pair, perhaps of a
// connection that has ended: then there is no grant until the NIC lets go of it.
func TestAddressesWithoutAProof(t *testing.T) {
	for _, ended := range []bool{false, true} {
		f, p, second := openThree(t, Config{addresses: areaUnit, Grace: graceMin})
		r := register(t, p.far, 1)
		p.imports(t, r)
		require.NoError(t, r.Revoke(t.Context()))
		token, err := register(t, p.far, 1).AppendToken(nil)
		require.NoError(t, err)
		keep(f.Device(1), true)
		if ended {
			require.NoError(t, p.peer.Close())
			eventually(t, "the end of a connection", func() bool {
				p.far.mu.Lock()
				defer p.far.mu.Unlock()
				return len(p.far.accepted) == 1
			})
		}
		_, _, err = second.Import(token)
		require.ErrorIs(t, err, driver.ErrFull)
		keep(f.Device(1), false)
		_, _, err = second.Import(token)
		require.NoError(t, err)
	}
}
