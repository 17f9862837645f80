// SPDX-License-Identifier: Apache-2.0

package tcp

import (
	"context"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/session"
	"github.com/sluicehq/sluice/internal/testing/testkit"
)

// A Revoke that finds a piece in hand ends the epoch at once, has no proof until the piece has
// landed, and looks for it again when it is called again.
func TestRevokeWaitsForThePieceInHand(t *testing.T) {
	owner, near := open(t, Config{}), open(t, Config{})
	m, mem := share(t, owner, 4096)
	l, local := share(t, near, 4096)
	p := dial(t, near, owner.Addr())
	token, err := m.AppendToken(nil)
	require.NoError(t, err)
	key := importKey(t, p, m)
	over, cancel := context.WithCancel(context.Background())
	cancel()

	require.True(t, m.enterGate(m.ticket.Load())) // a piece is in hand
	require.ErrorIs(t, m.Revoke(over), context.Canceled)
	_, _, err = p.Import(token)
	require.ErrorIs(t, err, driver.ErrRevoked)
	other, _ := share(t, owner, 4096)
	require.NotEqual(t, m.key, other.key, "the key of memory without a proof")
	require.ErrorIs(t, m.Revoke(over), context.Canceled)
	fill(local, 9)
	d := []driver.Desc{{Len: 4096, LocalKey: l.key, RemoteKey: key}}
	require.NoError(t, p.Submit(1, &driver.Batch{Op: driver.Write, Descs: d}))
	require.ErrorIs(t, await(t, near, 1), driver.ErrRevoked)
	proved := make(chan error)
	go func() { proved <- m.Revoke(context.Background()) }()
	select {
	case err := <-proved:
		require.Fail(t, "a Revoke returned with a piece in hand", "%v", err)
	default:
	}
	m.leaveGate()
	require.NoError(t, <-proved)
	require.NoError(t, m.Revoke(over), "the proof is there at once")
	require.Zero(t, mem[0])
}

// A part of a Read whose memory is revoked before its bytes are read has zeros in their place, and
// says so, whether they would go through a chunk or from where they lie.
func TestRevokedPayloadIsNotRead(t *testing.T) {
	b := open(t, Config{})
	for _, n := range []uint64{16, gatherMin} {
		m, mem := share(t, b, n)
		fill(mem, 9)
		c := &conn{b: b}
		o := &c.out
		o.chunk = b.chunks.get()
		o.chunk.n = 0
		o.payload = payload{mem: mem, owned: m, ticket: m.ticket.Load(),
			ranges: ranges{left: n, table: appendEntry(nil, 0, n)}}
		if n >= gatherMin {
			require.True(t, c.addPayload()) // as a direct run
		}
		require.NoError(t, m.Revoke(t.Context()))
		written, err := c.writeOnce(-1)
		require.NoError(t, err)
		require.Zero(t, written)
		for o.payload.left > 0 && c.addPayload() {
			continue
		}
		require.Equal(t, session.StatusRevoked, o.payload.status, "%d bytes", n)
		require.Equal(t, make([]byte, n), o.chunk.mem[:o.chunk.n])
		o.release(b)
	}
}

// renewing is memory of which the pages can be exchanged.
type renewing struct {
	driver.Shared
	landing sync.RWMutex
	entered atomic.Int64
}

func (r *renewing) TryEnter() bool { r.entered.Add(1); return r.landing.TryRLock() }

func (r *renewing) Enter() { r.entered.Add(1); r.landing.RLock() }
func (r *renewing) Leave() { r.landing.RUnlock() }

// Nothing lands while pages are exchanged, neither what a peer writes nor what a Read brings,
// through a chunk or in place, and it lands afterwards.
func TestNothingLandsDuringRenew(t *testing.T) {
	const n = 64 << 10
	owner, near := open(t, Config{}), open(t, Config{})
	p := dial(t, near, owner.Addr())
	shared := func(b *Backend) (*memory, []byte, *renewing) {
		plain, mem := share(t, b, n)
		x := &renewing{}
		seg := plain.seg
		seg.Shared = x
		m, err := b.Register(seg)
		require.NoError(t, err)
		return m.(*memory), mem, x
	}
	far, away, farRenew := shared(owner)
	m, local, nearRenew := shared(near)
	key := importKey(t, p, far)
	for _, op := range []driver.Op{driver.Write, driver.Read} {
		from, to, x := local, away, farRenew
		if op == driver.Read {
			from, to, x = away, local, nearRenew
		}
		for _, size := range []uint64{16, n} {
			fill(from, byte(size)|1)
			clear(to)
			before := x.entered.Load()
			x.landing.Lock()
			d := []driver.Desc{{Len: size, LocalKey: m.key, RemoteKey: key}}
			require.NoError(t, p.Submit(1, &driver.Batch{Op: op, Descs: d}))
			for x.entered.Load() == before { // until it is about to land
				runtime.Gosched()
			}
			require.Zero(t, to[0])
			x.landing.Unlock()
			require.NoError(t, await(t, near, 1))
			require.Equal(t, from[:size], to[:size])
		}
	}
}

// A piece that waited for a revoke, or for a renewal of pages, is as old then as it is: what its
// sender has given up meanwhile does not land.
func TestPieceThatWaitedIsLookedAtAgain(t *testing.T) {
	clock := testkit.NewClock()
	owner, near := openBy(t, clock, Config{}), openBy(t, clock, Config{})
	far, away := share(t, owner, 4096)
	m, local := share(t, near, 4096)
	x := &renewing{}
	seg := far.seg
	seg.Shared = x
	again, err := owner.Register(seg)
	require.NoError(t, err)
	shared := again.(*memory)
	for _, wait := range []struct {
		in   *memory
		lock sync.Locker
	}{{far, &far.gate}, {shared, &x.landing}} {
		fill(local, 0xEE)
		p := dial(t, near, owner.Addr())
		key := importKey(t, p, wait.in)
		wait.lock.Lock()
		d := []driver.Desc{{Len: 4096, LocalKey: m.key, RemoteKey: key}}
		require.NoError(t, p.Submit(1, &driver.Batch{Op: driver.Write, Descs: d}))
		var reader *inbound
		for reader = range acceptedBy(owner) {
		}
		for express := reader.conns[express]; express.landMu.TryLock(); runtime.Gosched() {
			express.landMu.Unlock() // until it has the bytes, and waits
		}
		stop := clock.Run(10 * time.Millisecond)
		require.NoError(t, p.Close())
		stop()
		require.ErrorIs(t, await(t, near, 1), driver.ErrClosed)
		wait.lock.Unlock()
		for len(acceptedBy(owner)) > 0 { // all that it had to read is dealt with
			time.Sleep(time.Millisecond)
		}
		if away[0] != 0 {
			testkit.FatalBroken(t, "bytes landed after their end")
		}
	}
}

// TestTokenOfTheNextEpoch: a holder of a token of revoked memory cannot make that of the next one
// under the key.
func TestTokenOfTheNextEpoch(t *testing.T) {
	owner, near := open(t, Config{}), open(t, Config{})
	m, _ := share(t, owner, 4096)
	p := dial(t, near, owner.Addr())
	old, err := m.AppendToken(nil)
	require.NoError(t, err)
	require.NoError(t, m.Revoke(t.Context()))
	next, err := owner.Register(driver.Segment{Kind: driver.DRAM, Len: 4096, Mem: m.seg.Mem})
	require.NoError(t, err)
	require.Equal(t, m.key, next.Key())
	token, err := session.DecodeToken(old, &owner.address.owner)
	require.NoError(t, err)
	for step, want := range []error{driver.ErrRevoked, driver.ErrBadToken, driver.ErrBadToken} {
		forged := token
		forged.Epoch += uint64(step)
		_, _, err = p.Import(forged.Append(nil, &owner.address.owner))
		require.ErrorIs(t, err, want)
	}
	importKey(t, p, next.(*memory))
}

// TestRevokesOfAStuckPiece wait by one goroutine, however often the engine looks for the proof: a
// page of the memory may not come for long.
func TestRevokesOfAStuckPiece(t *testing.T) {
	b := open(t, Config{})
	mem, err := b.Register(driver.Segment{Kind: driver.DRAM, Len: 64, Mem: make([]byte, 64)})
	require.NoError(t, err)
	m := mem.(*memory)
	over, cancel := context.WithCancel(t.Context())
	cancel()
	require.True(t, m.enterGate(m.ticket.Load()))
	leave := sync.OnceFunc(m.leaveGate)
	defer leave()
	before := runtime.NumGoroutine()
	for range 100 {
		require.Error(t, m.Revoke(over))
	}
	require.Less(t, runtime.NumGoroutine(), before+50)
	revoked := make(chan error, 2)
	for range 2 {
		go func() { revoked <- m.Revoke(t.Context()) }()
	}
	runtime.Gosched()
	require.Empty(t, revoked, "a Revoke returned with a piece in hand")
	leave()
	require.NoError(t, <-revoked)
	require.NoError(t, <-revoked)
	require.NoError(t, m.Revoke(over))
	require.NoError(t, m.Revoke(context.Background()))
}
