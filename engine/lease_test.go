// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"bytes"
	"context"
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/backends/mem"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/hostmem"
	"github.com/sluicehq/sluice/internal/testing/testkit"
)

func TestLease(t *testing.T) {
	owner, holder := open(t, "owner"), open(t, "holder")
	buffer, err := hostmem.Alloc(1<<20, hostmem.Options{Purpose: "test"})
	check(t, err)
	defer buffer.Close()
	pool, err := owner.RegisterPrivate("pool", buffer.Segment())
	check(t, err)
	src := register(t, holder, "src", 1<<20)
	fill(src.Bytes(), 5)
	p := connect(t, holder, owner)
	if names := p.Remotes(); len(names) != 0 {
		t.Errorf("a private region is described: %q", names)
	}

	l, err := pool.Lease(4096, 8192, LeaseOptions{})
	check(t, err)
	m, err := p.Import(l.Token())
	check(t, err)
	if m.Size() != 8192 || m.Name() != "pool" {
		t.Errorf("leased %d bytes of %q", m.Size(), m.Name())
	}
	tr := transfer(t, p, Write)
	require.ErrorIs(t, tr.Add(src, 0, m, 1, 8192), ErrBounds, "past the lease")
	check(t, tr.Add(src, 0, m, 0, 8192))
	check(t, tr.Post())
	check(t, tr.Wait(within(t)))
	if !bytes.Equal(pool.Bytes()[4096:4096+8192], src.Bytes()[:8192]) || pool.Bytes()[4095] != 0 ||
		pool.Bytes()[4096+8192] != 0 {
		t.Error("the leased range does not hold what was written")
	}
	require.ErrorIs(t, pool.Close(), ErrBusy, "closing a region with a lease")

	check(t, l.Revoke(within(t)))
	check(t, l.Revoke(within(t)))
	<-l.Revoked()
	clear(pool.Bytes())
	check(t, tr.Post())
	require.ErrorIs(t, tr.Wait(within(t)), ErrRevoked, "write after Revoke")
	if bytes.ContainsFunc(pool.Bytes(), func(r rune) bool { return r != 0 }) {
		testkit.ErrorBroken(t, "bytes landed after Revoke")
	}
	if _, err := p.Import(l.Token()); !errors.Is(err, ErrRevoked) &&
		!errors.Is(err, driver.ErrBadToken) {
		t.Errorf("import of an ended lease: %v", err)
	}
	check(t, tr.Reset())
	check(t, m.Close())
	check(t, pool.Close())
}

func TestLeaseExpires(t *testing.T) { testkit.InVirtualTime(t, leaseExpires) }

func leaseExpires(t *testing.T) {
	owner, holder := open(t, "owner"), open(t, "holder")
	pool := register(t, owner, "pool", 1<<16)
	p := connect(t, holder, owner)
	l, err := pool.Lease(0, 4096, LeaseOptions{TTL: 20 * time.Millisecond})
	check(t, err)
	select {
	case <-l.Revoked():
	case <-time.After(limit):
		t.Fatal("the lease did not end by its time")
	}
	require.Error(t, second(p.Import(l.Token())), "an expired lease was imported")
	require.Zero(t, owner.Stats().Leases, "leases are left")
}

func TestReadOnlyLease(t *testing.T) {
	owner, holder := open(t, "owner"), open(t, "holder")
	pool, local := register(t, owner, "pool", 1<<16), register(t, holder, "local", 1<<16)
	fill(pool.Bytes(), 1)
	p := connect(t, holder, owner)
	l, err := pool.Lease(0, 4096, LeaseOptions{ReadOnly: true})
	check(t, err)
	m, err := p.Import(l.Token())
	check(t, err)
	require.ErrorIs(t, transfer(t, p, Write).Add(local, 0, m, 0, 1), driver.ErrReadOnly, "write")
	tr := transfer(t, p, Read)
	check(t, tr.Add(local, 0, m, 0, 4096))
	check(t, tr.Post())
	check(t, tr.Wait(within(t)))
	require.True(t, bytes.Equal(local.Bytes()[:4096], pool.Bytes()[:4096]), "other bytes were read")
}

func TestForeignAndBrokenTokens(t *testing.T) {
	owner, other, holder := open(t, "owner"), open(t, "other"), open(t, "holder")
	pool := register(t, owner, "pool", 1<<16)
	register(t, other, "pool", 1<<16)
	l, err := pool.Lease(0, 4096, LeaseOptions{})
	check(t, err)
	token := l.Token()
	p := connect(t, holder, other)
	require.ErrorIs(t, second(p.Import(token)), driver.ErrBadToken, "the lease of another engine")
	q := connect(t, holder, owner)
	for n := range token {
		require.ErrorIs(t, second(q.Import(token[:n])), ErrCorrupt, "token cut to %d bytes", n)
	}
	for i := range token {
		bad := bytes.Clone(token)
		bad[i] ^= 0x10
		require.Error(t, second(q.Import(bad)), "token with byte %d altered was accepted", i)
	}
	for _, bad := range [][2]uint64{{0, 0}, {0, 1<<16 + 1}, {1 << 16, 1}, {^uint64(0), 2}} {
		require.ErrorIs(t, second(pool.Lease(bad[0], bad[1], LeaseOptions{})), ErrBounds,
			"lease of %v", bad)
	}
}

// TestRevokeWaitsNoLongerThanItsContext has a Revoke of a backend that takes its time, on behalf
// of somebody else.
func TestRevokeWaitsNoLongerThanItsContext(t *testing.T) {
	testkit.InVirtualTime(t, revokeWaitsNoLongerThanItsContext)
}

func revokeWaitsNoLongerThanItsContext(t *testing.T) {
	begun, goOn := make(chan struct{}, 9), make(chan struct{})
	f := &fake{onRevoke: func(context.Context) error {
		begun <- struct{}{}
		<-goOn
		return nil
	}}
	e := open(t, "e", func(c *Config) { c.Backends = []driver.Backend{f} })
	l, err := register(t, e, "r", 64).Lease(0, 64, LeaseOptions{})
	check(t, err)
	first := make(chan error)
	go func() { first <- l.Revoke(context.Background()) }()
	<-begun
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Millisecond)
	defer cancel()
	second := make(chan error, 1)
	go func() { second <- l.Revoke(ctx) }()
	select {
	case err := <-second:
		require.ErrorIs(t, err, context.DeadlineExceeded)
	case <-time.After(limit):
		t.Error("Revoke outlives its context")
	}
	close(goOn)
	check(t, <-first)
	check(t, l.Revoke(context.Background()))
}

// TestRemoteInUse: the key of a leased range that a transfer lists may not be
// given to other memory.
func TestRemoteInUse(t *testing.T) {
	p, src, _, dst := pair(t, 1<<16)
	l, err := dst.Lease(0, 4096, LeaseOptions{})
	check(t, err)
	m, err := p.Import(l.Token())
	check(t, err)
	tr := transfer(t, p, Write)
	check(t, tr.Add(src, 0, m, 0, 64))
	require.ErrorIs(t, m.Close(), ErrBusy, "close of a remote that a transfer lists")
	check(t, tr.Reset())
	check(t, m.Close())
	check(t, l.Revoke(within(t)))
}

// TestLeaseWithinAPage: a backend that puts fresh pages under a lease is told that the bytes beside
// it in the same page are not its own. shm's TestRangesThatShareAPageStay has what it does then.
func TestLeaseWithinAPage(t *testing.T) {
	var last driver.Segment
	e := open(t, "e", over(rigged(t, mem.Config{}, rig{onRegister: func(s driver.Segment) {
		last = s
	}})))
	m, err := Alloc(8<<20+100, AllocOptions{NoHuge: true})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, m.Close()) })
	r, err := e.Register("r", m.Segment())
	require.NoError(t, err)
	require.Nil(t, last.Only, "all of the memory")
	page := m.Segment().Shared.(interface{ PageBytes() uint64 }).PageBytes()
	for _, c := range []struct {
		off, n uint64
		within bool
	}{{0, page, false}, {page, 3 * page, false}, {8, page - 8, true}, {page, 64, true},
		{page, 2*page + 1, true}, {8 << 20 / 2, 8 << 20 / 2, false},
		{8 << 20 / 2, 8<<20/2 + 100, false}} {
		l, err := r.Lease(c.off, c.n, LeaseOptions{})
		require.NoError(t, err)
		want := driver.Ranges(nil)
		if c.within {
			want = driver.Ranges{{Len: c.n}}
		}
		require.Equal(t, want, last.Only, "[%d, +%d)", c.off, c.n)
		require.NoError(t, l.Revoke(within(t)))
	}
	require.NoError(t, r.Close())
	part, err := m.Segment().Slice(page/2, page, [16]byte{})
	require.NoError(t, err)
	r, err = e.Register("part", part)
	require.NoError(t, err)
	require.Equal(t, driver.Ranges{{Len: page}}, last.Only, "a region of a part of two pages")
	require.NoError(t, r.Close())
}

// poolOf returns two engines over mem, the source of the one and the pool of the other.
func poolOf(t *testing.T) (p *Peer, src, pool *Region) {
	t.Helper()
	owner, holder := open(t, "owner"), open(t, "holder")
	src, pool = register(t, holder, "src", 1<<16), register(t, owner, "pool", 1<<16)
	fill(src.Bytes(), 9)
	return connect(t, holder, owner), src, pool
}

// TestLeaseRanges leases blocks 1, 3, 4 and 9 of 4 KiB, of which two join.
func TestLeaseRanges(t *testing.T) {
	testkit.CheckLeaks(t, hostmem.InUse)
	p, src, pool := poolOf(t)
	l, err := pool.LeaseRanges([]Range{{Off: 9 * 4096, Len: 4096},
		{Off: 3 * 4096, Len: 4096}, {Off: 4096, Len: 4096}, {Off: 4 * 4096, Len: 4096}},
		LeaseOptions{})
	require.NoError(t, err)
	m, err := p.Import(l.Token())
	require.NoError(t, err)
	require.Equal(t, pool.Size(), m.Size())
	require.Len(t, m.only, 3)

	tr := transfer(t, p, Write)
	require.NoError(t, tr.Add(src, 4096, m, 4096, 4096))
	require.NoError(t, tr.Add(src, 3*4096, m, 3*4096, 2*4096))
	list := []uint32{9}
	require.NoError(t, tr.AddPages(src, m, Pages{Count: 1, EntryLen: 4096,
		LocalBase: 9 * 4096, LocalStride: 4096, RemoteStride: 4096, Remote: list}))
	list[0] = 8 // the program's own list may not lead it elsewhere
	require.NoError(t, tr.Post())
	require.NoError(t, tr.Wait(within(t)))
	want := make([]byte, pool.Size())
	for _, block := range []int{1, 3, 4, 9} {
		copy(want[block*4096:], src.Bytes()[block*4096:][:4096])
	}
	require.True(t, bytes.Equal(want, pool.Bytes()))

	for _, at := range []Range{{Off: 0, Len: 1}, {Off: 4095, Len: 2},
		{Off: 2 * 4096, Len: 4096}, {Off: 0, Len: 1 << 16}, {Off: 4096, Len: 4097}} {
		require.ErrorIs(t, tr.Add(src, 0, m, at.Off, at.Len), ErrBounds)
	}
	for _, beside := range []Pattern{
		{Count: 2, Run: 64, Remote: Side{Stride: 4096, List: []uint32{9, 8}}},
		{Count: 1, Run: 64, Loops: []Loop{{N: 2, Local: 64, Remote: 4096}},
			Remote: Side{Base: 4096}},
	} {
		beside.Local.Stride = 4096
		require.ErrorIs(t, tr.AddPattern(src, m, beside), ErrBounds)
	}
	nest := Pattern{Count: 1, Run: 64, Loops: []Loop{{N: 2, Local: 64, Remote: 2 * 4096}},
		Remote: Side{Base: 4096}}
	require.NoError(t, tr.AddPattern(src, m, nest))

	require.NoError(t, l.Revoke(within(t)))
	require.NoError(t, tr.Post())
	require.ErrorIs(t, tr.Wait(within(t)), ErrRevoked)
	if !bytes.Equal(want, pool.Bytes()) {
		testkit.FatalBroken(t, "bytes landed after Revoke")
	}
	require.NoError(t, tr.Reset())
	require.NoError(t, m.Close())
}

// TestLeaseRangesOfNone are leases that cannot be.
func TestLeaseRangesOfNone(t *testing.T) {
	testkit.CheckLeaks(t, hostmem.InUse)
	pool := register(t, open(t, "owner"), "pool", 1<<16)
	for name, ranges := range map[string][]Range{
		"none": nil, "empty": {{Off: 5}}, "past the end": {{Len: 1}, {Off: 1 << 16, Len: 1}},
		"past the numbers": {{Off: 1, Len: ^uint64(0)}},
	} {
		_, err := pool.LeaseRanges(ranges, LeaseOptions{})
		require.ErrorIs(t, err, ErrBounds, name)
	}
	many := make([]Range, 0, driver.RangesMax+1)
	for i := range cap(many) {
		many = append(many, Range{Off: uint64(i) * 2 % (1 << 16), Len: 1})
	}
	l, err := pool.LeaseRanges(many, LeaseOptions{}) // the same bytes again and again
	require.NoError(t, err)
	require.NoError(t, l.Revoke(within(t)))
	require.NoError(t, pool.Close())
}

// TestLeaseRangesOfALiar has an engine that does not look ask for what is beside the ranges: where
// the owner's side places the bytes, none lands there.
func TestLeaseRangesOfALiar(t *testing.T) {
	testkit.CheckLeaks(t, hostmem.InUse)
	p, src, pool := poolOf(t)
	l, err := pool.LeaseRanges([]Range{{Off: 4096, Len: 4096}}, LeaseOptions{})
	require.NoError(t, err)
	m, err := p.Import(l.Token())
	require.NoError(t, err)
	m.only = nil
	for _, op := range []Op{Write, Read} {
		before := bytes.Clone(src.Bytes())
		tr := transfer(t, p, op)
		require.NoError(t, tr.Add(src, 0, m, 8192, 4096))
		require.NoError(t, tr.Post())
		require.ErrorIs(t, tr.Wait(within(t)), ErrBounds)
		require.Equal(t, before, src.Bytes())
		require.NoError(t, tr.Close())
	}
	require.Equal(t, make([]byte, pool.Size()), pool.Bytes())

	require.NoError(t, m.Close())
	require.NoError(t, l.Revoke(within(t)))
}

// TestLeaseRangesStaged is that for memory of a kind which chains reach.
func TestLeaseRangesStaged(t *testing.T) {
	testkit.CheckLeaks(t, hostmem.InUse)
	a, b := newHost(t, "a"), newHost(t, "b")
	p := connect(t, a.e, b.e)
	fill(a.mem, 3)
	l, err := b.hbm.LeaseRanges([]Range{{Off: 100, Len: 5000}, {Off: hostBytes - 7, Len: 7}},
		LeaseOptions{})
	require.NoError(t, err)
	m, err := p.Import(l.Token())
	require.NoError(t, err)
	tr := transfer(t, p, Write)
	require.NoError(t, tr.Add(a.hbm, 100, m, 100, 5000))
	require.NoError(t, tr.Add(a.hbm, hostBytes-7, m, hostBytes-7, 7))
	require.NoError(t, tr.Post())
	require.NoError(t, tr.Wait(within(t)))
	want := make([]byte, hostBytes)
	copy(want[100:5100], a.mem[100:])
	copy(want[hostBytes-7:], a.mem[hostBytes-7:])
	require.True(t, bytes.Equal(want, b.mem))
	require.ErrorIs(t, tr.Add(a.hbm, 0, m, 99, 2), ErrBounds)
	require.NoError(t, tr.Reset())

	m.only = nil
	require.NoError(t, tr.Add(a.hbm, 99, m, 99, 2))
	require.NoError(t, tr.Post())
	require.ErrorIs(t, tr.Wait(within(t)), ErrBounds)
	require.True(t, bytes.Equal(want, b.mem))
	require.NoError(t, tr.Reset())
	require.NoError(t, m.Close())
	require.NoError(t, l.Revoke(within(t)))
}

// recorder is a backend that keeps the last segment that was registered.
type recorder struct {
	*fake
	last driver.Segment
}

func (r *recorder) Register(seg driver.Segment) (driver.Memory, error) {
	r.last = seg
	return r.fake.Register(seg)
}

// TestPartsOfPages: a lease of one range, or a region, that begins or ends within a page is
// registered as ranges that a backend must keep to, as it gives fresh pages to whole memories: what
// lies beside them in the page is the program's. The end of the memory has nothing beside it.
func TestPartsOfPages(t *testing.T) {
	const page, end = 4096, 5*4096 - 100
	r := &recorder{fake: &fake{}}
	e, err := Open(Config{Name: "a", Plaintext: true, Backends: []driver.Backend{r}})
	require.NoError(t, err)
	m, err := e.Alloc(end, AllocOptions{})
	require.NoError(t, err)
	region, err := e.RegisterPrivate("kv", m.Segment())
	require.NoError(t, err)
	require.Nil(t, r.last.Only, "all of the memory")
	for _, c := range []struct {
		off, len uint64
		part     bool
	}{
		{0, end, false}, {page, page, false}, {4 * page, page - 100, false},
		{0, page - 8, true}, {8, page - 8, true}, {page + 8, 8, true},
		{4*page + 8, page - 108, true},
	} {
		lease, err := region.Lease(c.off, c.len, LeaseOptions{})
		require.NoError(t, err)
		require.Equal(t, c.part, r.last.Only != nil, "%d bytes from %d", c.len, c.off)
		require.NoError(t, lease.Revoke(t.Context()))
	}
	require.NoError(t, region.Close())
	require.NoError(t, e.Close())
	require.NoError(t, m.Close())
}
