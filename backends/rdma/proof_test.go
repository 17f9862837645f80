// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package rdma

import (
	"bytes"
	"errors"
	"fmt"
	"math"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/testing/standin"
	"github.com/sluicehq/sluice/internal/testing/testkit"
	"github.com/sluicehq/sluice/internal/testpoint"
)

// openThree connects two backends to a third, each over a device of its own of the stand-in.
func openThree(t *testing.T, cfg Config) (f *standin.VerbsFabric, p *pair, second *peer) {
	t.Helper()
	near, far := cfg, cfg
	near.Devices, far.Devices, cfg.Devices = "fake0", "fake1", "fake2"
	p = newPair(t, nil, near, far)
	c, err := openFakeBackend(t, cfg).Connect(t.Context(), p.far.Addr())
	require.NoError(t, err)
	return p.fabric, p, c.(*peer)
}

// TestKeyThatComesBack has a NIC that is slow send a request when its memory is revoked, and the
// key of the owner's NIC stands for other memory, which another peer holds. It reaches nothing.
func TestKeyThatComesBack(t *testing.T) {
	for _, op := range []driver.Op{driver.Write, driver.Read} {
		t.Run(fmt.Sprint(op), func(t *testing.T) {
			f, p, second := openThree(t, Config{Timeout: 20 * time.Second})
			l, r := register(t, p.near, 4096), register(t, p.far, 4096)
			old := p.imports(t, r)
			_, first, _ := r.grant() // of this epoch: it is only asked for
			for i := range l.bytes {
				l.bytes[i] = 0xee
			}
			f.Device(0).Set("frozen", 1)
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
			f.Device(0).Set("frozen", 0)
			require.ErrorIs(t, p.await(t, 77), driver.ErrRevoked)
			if !bytes.Equal(near, l.bytes) || !bytes.Equal(far, r.bytes) ||
				!bytes.Equal(beside, other.bytes) {
				testkit.ErrorBroken(t, "%v: bytes of memory that was revoked have moved", op)
			}
		})
	}
}

// TestAddressesWithoutAProof has no addresses left, and a NIC that keeps a queue pair, perhaps of a
// connection that has ended: then there is no grant until the NIC lets go of it.
func TestAddressesWithoutAProof(t *testing.T) {
	for _, ended := range []bool{false, true} {
		t.Run(fmt.Sprint(ended), func(t *testing.T) {
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
		})
	}
}

// keep has a device neither stop nor destroy queue pairs, or do so again.
func keep(d standin.VerbsDevice, kept bool) {
	times := uint32(0)
	if kept {
		times = math.MaxUint32
	}
	d.Set("modify_busy", times)
	d.Set("destroy_busy", times)
}

// TestKeptQueuePair closes a peer whose NIC keeps the queue pair of a read that is under way:
// Close is bounded and says that nothing is proved, the batch is not over, and the memory stays
// registered. Both end once the queue pair has.
func TestKeptQueuePair(t *testing.T) {
	f, c, p, l, r, remote := openOneRail(t)
	device := f.Device(0)
	for i := range r.bytes {
		r.bytes[i] = byte(i) | 1
	}
	device.Set("frozen", 1)
	d := driver.Desc{Len: l.size, LocalKey: l.key, RemoteKey: remote}
	require.NoError(t, p.peer.Submit(1, &driver.Batch{Op: driver.Read, Descs: []driver.Desc{d}}))
	keep(device, true)
	require.ErrorIs(t, c.during(t, p.peer.Close), driver.ErrUnproven)
	require.ErrorIs(t, c.during(t, p.peer.Close), driver.ErrUnproven)
	require.ErrorIs(t, l.Revoke(over(t)), driver.ErrBusy)
	var done [1]driver.Completion
	n, err := p.near.Poll(done[:])
	require.NoError(t, err)
	require.Zero(t, n, "a batch is over whose queue pair lives")
	keep(device, false)
	require.NoError(t, c.during(t, p.peer.Close))
	require.Error(t, p.await(t, 1))
	want := bytes.Clone(l.bytes)
	device.Set("frozen", 0)
	require.NoError(t, l.Revoke(t.Context()))
	require.True(t, bytes.Equal(want, l.bytes), "bytes land after the batch")
}

// TestKeptQueuePairOfOwner has the NIC of an owner keep a queue pair that the peer wants remade:
// the owner does not say that it is over, and what the peer had under way over it is not done
// again.
func TestKeptQueuePairOfOwner(t *testing.T) {
	f, c, p, l, _, remote := openOneRail(t)
	near, far := f.Device(0), f.Device(1)
	keep(far, true)
	near.FailNext(1, 12) // retries exceeded
	d := driver.Desc{Len: l.size, LocalKey: l.key, RemoteKey: remote}
	require.NoError(t, p.peer.Submit(1, &driver.Batch{Op: driver.Write, Descs: []driver.Desc{d}}))
	err := c.await(t, p, 1)
	require.ErrorIs(t, err, driver.ErrPeerLost)
	require.ErrorIs(t, err, driver.ErrUnproven, "the owner has answered for a queue pair")
	<-p.peer.Lost()
	require.False(t, p.peer.byeAnswered(), "the owner says that its queue pairs are gone")
	keep(far, false)
}

// TestStraggler has the network hold a write until its connection is closed, and an owner that does
// not answer: its queue pair takes the write then, and the outcome has said that this may be.
func TestStraggler(t *testing.T) {
	f, c, p, l, r, _ := openOneRail(t)
	owner := p.muffle(t)
	remote := p.imports(t, r)
	for i := range l.bytes {
		l.bytes[i] = 0xee
	}
	near, before := f.Device(0), bytes.Clone(r.bytes)
	owner.deaf.Store(true)
	near.ParkNext(1)
	tag := p.write(t, l, remote, nil)
	require.NoError(t, c.during(t, p.peer.Close))
	err := p.await(t, tag)
	near.LandParked(t, 1)
	require.False(t, bytes.Equal(before, r.bytes), "the write was lost")
	if !errors.Is(err, driver.ErrUnproven) {
		testkit.ErrorBroken(t, "a write landed after its end: %v", err)
	}
}

// TestRevokeAgainAfterARefusal revokes memory whose registration the device keeps at first:
// the second Revoke is nil only because that has ended.
func TestRevokeAgainAfterARefusal(t *testing.T) {
	f, _, p, _, _, _ := openOneRail(t)
	d := f.Device(0)
	before := d.Get("mrs")
	m := register(t, p.near, 1<<20)
	d.Set("deregister_busy", 1)
	require.ErrorIs(t, m.Revoke(over(t)), driver.ErrBusy)
	require.Greater(t, d.Get("mrs"), before)
	require.NoError(t, m.Revoke(t.Context()))
	require.Equal(t, before, d.Get("mrs"))
	require.NoError(t, m.Revoke(t.Context()))
}

// TestAddressesComeRound grants more often than there are addresses. Addresses are given out again
// only when the queue pairs are gone over which requests for them may be under way, and those of a
// grant that lasts never. What uses the queue pairs then goes on.
func TestAddressesComeRound(t *testing.T) {
	p := openPair(t, Config{addresses: 4 * areaUnit})
	l, lasting := register(t, p.near, 100), register(t, p.far, 100)
	remote, told, again := p.imports(t, lasting), map[uint64][]uint32{}, 0
	for range 12 {
		r := register(t, p.far, 100)
		key := p.imports(t, r)
		if r.at/areaUnit == lasting.at/areaUnit {
			testkit.ErrorBroken(t, "two grants have the addresses from %#x on", r.at)
		}
		if slices.ContainsFunc(told[r.at/areaUnit], pairIsThere) {
			testkit.ErrorBroken(t,
				"addresses from %#x on are given out again while a queue pair is "+
					"there whose peer was told of them", r.at)
		}
		again += len(told[r.at/areaUnit])
		told[r.at/areaUnit] = fakeOf(p.far).pairs()
		require.NoError(t, p.await(t, p.write(t, l, key, nil)))
		require.NoError(t, p.await(t, p.write(t, l, remote, nil)))
		require.NoError(t, r.Revoke(t.Context()))
	}
	require.NotZero(t, again, "no addresses were given out again")
}

// TestAddressesOfGrants has grants of several sizes within two rounds.
func TestAddressesOfGrants(t *testing.T) {
	memoryOf := func(base, size uint64) *memory {
		return &memory{span: span{base: base, size: size}}
	}
	a := addresses{end: 8 * areaUnit, granted: map[*memory]area{}}
	take := func(m *memory, want uint64) {
		t.Helper()
		at, ok := a.reserve(m)
		require.True(t, ok)
		require.Equal(t, want, at)
	}
	lasting, across := memoryOf(areaUnit+5, 10), memoryOf(areaUnit-1, 2)
	take(memoryOf(4096, areaUnit), 4096) // two units, since it begins within one
	take(lasting, 2*areaUnit+5)
	take(across, 4*areaUnit-1)
	take(memoryOf(0, 3*areaUnit), 5*areaUnit)
	_, ok := a.reserve(memoryOf(0, 1))
	require.False(t, ok)
	for m := range a.granted {
		if m != lasting {
			a.release(m)
		}
	}
	a.startRound(a.reserved())
	a.release(lasting) // all the same, this round leaves its addresses out
	take(memoryOf(0, 2*areaUnit), 0)
	take(memoryOf(0, areaUnit), 3*areaUnit)
	_, ok = a.reserve(memoryOf(0, 5*areaUnit))
	require.False(t, ok)
}

// parkAt has the first batch that comes to the one spot that there is call f there.
func parkAt(_ string, f func()) { testpoint.First("rdma: submit", f) }

// TestRevokeParked has a batch stand between its check and its post while the owner revokes, gives
// the memory another use, and another goroutine imports it anew and writes.
func TestRevokeParked(t *testing.T) {
	p := openPair(t, Config{})
	l, r := register(t, p.near, 4096), register(t, p.far, 4096)
	old := p.imports(t, r)
	for i := range l.bytes {
		l.bytes[i] = 0xee
	}
	batch := testpoint.Stand(t, "rdma: submit")[0]
	p.tag += 2
	stale, tag := p.tag-1, p.tag
	submitted := make(chan error, 1)
	go func() {
		submitted <- p.peer.Submit(stale,
			writeOf(driver.Desc{Len: 4096, LocalKey: l.key, RemoteKey: old}))
	}()
	<-batch.Came
	require.NoError(t, r.Revoke(t.Context()))
	clear(r.bytes)
	again, err := p.far.Register(driver.Segment{Kind: driver.DRAM, Mem: r.bytes, Len: 4096})
	require.NoError(t, err)
	next := again.(*memory)
	fresh := p.imports(t, next)
	d := driver.Desc{Len: 64, LocalKey: l.key, RemoteKey: fresh}
	require.NoError(t, p.peer.Submit(tag, writeOf(d)))
	require.NoError(t, p.await(t, tag))
	batch.GoOn()
	err = <-submitted
	if err == nil {
		err = p.await(t, stale)
	}
	require.ErrorIs(t, err, driver.ErrRevoked)
	require.NoError(t, next.Revoke(t.Context()))
	require.Equal(t, bytes.Repeat([]byte{0xee}, 64), r.bytes[:64])
	require.Equal(t, make([]byte, 4096-64), r.bytes[64:])
}
