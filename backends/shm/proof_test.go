// SPDX-License-Identifier: Apache-2.0

package shm

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/driver/drivertest"
	"github.com/sluicehq/sluice/internal/hostmem"
	"github.com/sluicehq/sluice/internal/testing/testkit"
)

// silent puts the announcement of a peer that never leaves into a page.
func silent(p *peer, key uint32, op driver.Op) {
	p.announce(key, op, 7)
}

func TestRevokePutsFreshPagesUnderASilentWriterOnce(t *testing.T) {
	clock := testkit.NewClock()
	b := openBy(t, clock, Config{})
	m, mem := share(t, b, drivertest.HostMemory, 1<<20)
	other, _ := share(t, b, drivertest.HostMemory, 1<<20)
	p := dial(t, open(t, Config{}), b.Addr())
	fill(mem, 0x5A)
	silent(p, m.Key(), driver.Write)
	alike(t, m) // so that the arena stays
	generation := b.table.generation(m.arena.index)
	before := generation.Load()

	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Millisecond)
	defer cancel()
	require.ErrorIs(t, m.Revoke(ctx), context.DeadlineExceeded)
	require.Equal(t, before, generation.Load(), "a Revoke cut short moved pages")
	require.NoError(t, other.Revoke(t.Context())) // at once: the clock stands
	begin, stop := clock.Now(), clock.Run(time.Millisecond)
	require.NoError(t, m.Revoke(t.Context()))
	stop()
	require.GreaterOrEqual(t, clock.Now()-begin, int64(b.cfg.Grace))
	require.Greater(t, generation.Load(), before)
	require.Equal(t, len(mem), bytes.Count(mem, []byte{0x5A}))
	before = generation.Load()
	require.NoError(t, again(t, m).Revoke(t.Context())) // at once: the writer is known
	require.Equal(t, before, generation.Load(), "more fresh pages")
}

// What a reader still reads lands in its own memory: no page needs to move.
func TestRevokeMovesNoPagesForASilentReader(t *testing.T) {
	b := hasty(t)
	for _, alloc := range []drivertest.Allocator{drivertest.HostMemory, drivertest.ForeignMemory} {
		m, _ := share(t, b, alloc, 1<<20)
		p := dial(t, open(t, Config{}), b.Addr())
		silent(p, m.Key(), driver.Read)
		var before uint64
		if m.arena != nil {
			alike(t, m) // so that the arena stays
			before = b.table.generation(m.arena.index).Load()
		}
		require.NoError(t, m.Revoke(context.Background()))
		if m.arena != nil && b.table.generation(m.arena.index).Load() != before {
			t.Error("a silent reader made pages move")
		}
	}
}

func TestExplainNamesTheWay(t *testing.T) {
	owner, b := open(t, Config{}), open(t, Config{})
	near, _ := share(t, b, drivertest.HostMemory, 4096)
	p := dial(t, b, owner.Addr())
	seen := make(map[string]bool)
	for _, alloc := range []drivertest.Allocator{drivertest.HostMemory, drivertest.ForeignMemory} {
		m, _ := share(t, owner, alloc, 4096)
		token, _ := m.AppendToken(nil)
		key, _, err := p.Import(token)
		require.NoError(t, err)
		seen[p.Explain(near.Key(), key)] = true
	}
	if len(seen) != 2 || seen["shm: unknown key"] {
		t.Errorf("explanations: %v, want a mapped one and one by the kernel", seen)
	}
}

// TestFreshPagesAreAMatterOfTheContext has a Revoke of much memory end in between. The next one
// goes on from there.
func TestFreshPagesAreAMatterOfTheContext(t *testing.T) {
	const steps = 3
	b := hasty(t)
	m, mem := share(t, b, drivertest.HostMemory, steps*freshBytes)
	fill(mem, 0x3C)
	p := dial(t, open(t, Config{}), b.Addr())
	renewals, cancel := 0, func() {}
	t.Cleanup(m.arena.shared.OnRenew(func() func() bool {
		renewals++
		cancel()
		return nil
	}))
	silent(p, m.Key(), driver.Write)
	var ctx context.Context
	ctx, cancel = context.WithCancel(t.Context())
	require.ErrorIs(t, m.Revoke(ctx), context.Canceled)
	require.Equal(t, 1, renewals, "after its context had ended")
	cancel = func() {}
	require.NoError(t, m.Revoke(t.Context()))
	require.Equal(t, steps, renewals)
	m = again(t, m)
	require.NoError(t, m.Revoke(t.Context()))
	require.Equal(t, steps, renewals, "the writer is known")
	require.Equal(t, len(mem), bytes.Count(mem, []byte{0x3C}))
}

// mappings counts those of this process.
func mappings(t *testing.T) int {
	t.Helper()
	text, err := os.ReadFile("/proc/self/maps")
	require.NoError(t, err)
	return strings.Count(string(text), "\n")
}

// silentLease registers part of a memory, has a writer be silent in it, revokes it, and lets the
// writer leave.
func silentLease(t *testing.T, owner *Backend, p *peer, seg driver.Segment, n int) {
	t.Helper()
	binary.LittleEndian.PutUint32(seg.Secret[:], uint32(n+1))
	mem, err := owner.Register(seg)
	require.NoError(t, err)
	_, err = mem.AppendToken(nil)
	require.NoError(t, err)
	line := p.announce(mem.Key(), driver.Write, 7)
	require.NoError(t, mem.Revoke(t.Context()), "revoke %d", n)
	line.Store(0)
}

// TestSoakSilentWriterRevokes has 5,000 revokes meet a writer that is silent, and leaves
// afterwards, over each kind of memory; of ranges, 500. Each has its proof, and what the proofs
// take is given back: each block has its turn an even number of times.
func TestSoakSilentWriterRevokes(t *testing.T) {
	const blocks = 5000
	for name, c := range map[string]struct {
		revokes int
		lease   func(whole driver.Segment, i int) driver.Segment
	}{
		"a block": {5000, func(whole driver.Segment, i int) driver.Segment {
			seg, err := whole.Slice(uint64(2*i+1)%blocks*pageBytes, pageBytes, [16]byte{})
			require.NoError(t, err)
			return seg
		}},
		"ranges": {500, func(whole driver.Segment, i int) driver.Segment {
			for j := range uint64(100) {
				at := (uint64(i)%25*100 + j) * 2 * pageBytes
				whole.Only = append(whole.Only, driver.Range{Off: at, Len: pageBytes})
			}
			return whole
		}},
		"memory that is not shareable": {5000, func(whole driver.Segment, i int) driver.Segment {
			return driver.Segment{Kind: driver.DRAM, Len: whole.Len, Mem: whole.Mem}
		}},
	} {
		t.Run(name, func(t *testing.T) {
			owner, b := open(t, Config{}), open(t, Config{})
			owner.cfg.Grace = 10 * time.Microsecond
			buf, err := hostmem.Alloc(blocks*pageBytes, hostmem.Options{Purpose: "test",
				Huge: hostmem.HugeNone})
			require.NoError(t, err)
			t.Cleanup(func() { _ = owner.Close(); require.NoError(t, buf.Close()) })
			whole, err := owner.Register(buf.Segment())
			require.NoError(t, err)
			p := dial(t, b, owner.Addr())
			keys, before := len(owner.freeKeys), mappings(t)
			for i := range c.revokes {
				silentLease(t, owner, p, c.lease(buf.Segment(), i), i)
			}
			require.NoError(t, buf.Lend(func(extents []driver.Extent) error {
				require.Len(t, extents, 1, "pieces")
				return nil
			}))
			require.Len(t, owner.freeKeys, keys, "leases")
			require.Len(t, owner.arenas, 1)
			require.LessOrEqual(t, len(owner.gate.old), 1)
			require.InDelta(t, before, mappings(t), 30, "mappings; the runtime has some")
			require.NoError(t, whole.Revoke(t.Context()))
		})
	}
}

// A peer that stands in the middle of a copy as the owner's backend closes writes nothing into
// memory that outlives it.
func TestNothingLandsAfterBackendClose(t *testing.T) {
	owner, b := hasty(t), open(t, Config{})
	buf, far := shared(t, owner, 1<<20, 1)
	src, near := shared(t, b, 1<<20, 2)
	fill(src.Bytes(), late)
	p := dial(t, b, owner.Addr())
	release := parkedMover(t, b, p, "shm: mapped",
		driver.Desc{Len: 4096, Remote: 8192, LocalKey: near.Key(), RemoteKey: importOf(t, p, far)})
	require.NoError(t, owner.Close())
	require.NoError(t, far.Revoke(t.Context()))
	clear(buf.Bytes())
	_ = release()
	nothingLate(t, buf.Bytes(), "after Close")
}

// A second Revoke leaves alone the memory that has the key now.
func TestRevokeTwiceLeavesTheNextMemoryAlone(t *testing.T) {
	owner, b := open(t, Config{}), open(t, Config{})
	_, old := shared(t, owner, 1<<20, 1)
	_, near := shared(t, b, 1<<20, 2)
	p := dial(t, b, owner.Addr())
	require.NoError(t, old.Revoke(t.Context()))
	_, next := shared(t, owner, 1<<20, 3)
	require.Equal(t, old.Key(), next.Key())
	key := importOf(t, p, next)
	require.NoError(t, old.Revoke(t.Context()))
	require.NoError(t, p.Submit(1, &driver.Batch{Op: driver.Write,
		Descs: []driver.Desc{{Len: 8, LocalKey: near.Key(), RemoteKey: key}}}))
	require.NoError(t, await(t, b, 1))
}

// pauses calls standStill in the first rest of a Revoke, and f in its second.
type pauses struct {
	context.Context
	count         int
	standStill, f func()
}

func (p *pauses) Done() <-chan struct{} {
	switch p.count++; p.count {
	case 1:
		p.standStill()
	case 2:
		p.f()
	}
	return p.Context.Done()
}

// While the owner stands still it learns nothing of its peers: none is shut out for that time.
func TestGraceDoesNotCountWhileTheOwnerStandsStill(t *testing.T) {
	clock := testkit.NewClock()
	owner, b := openBy(t, clock, Config{}), open(t, Config{})
	_, far := shared(t, owner, 1<<20, 1)
	_, near := shared(t, b, 1<<20, 2)
	p := dial(t, b, owner.Addr())
	release := parkedMover(t, b, p, "shm: mapped",
		driver.Desc{Len: 4096, LocalKey: near.Key(), RemoteKey: importOf(t, p, far)})
	generation := owner.table.generation(far.arena.index)
	alike(t, far) // so that the arena stays
	before := generation.Load()
	ctx := &pauses{Context: t.Context(), f: func() { _ = release() },
		standStill: func() { clock.Advance(2 * owner.cfg.Grace) }}
	defer clock.Run(time.Millisecond)()
	require.NoError(t, far.Revoke(ctx))
	require.Equal(t, before, generation.Load(), "a peer that was never silent was shut out")
}

// What Backend.Close could not prove Memory.Revoke does not say either.
func TestRevokeAfterBackendClose(t *testing.T) {
	owner, err := New(Config{})
	require.NoError(t, err)
	b := open(t, Config{})
	far, _ := share(t, owner, drivertest.ForeignMemory, heldBytes)
	other, _ := share(t, owner, drivertest.ForeignMemory, 4096)
	token, err := far.AppendToken(nil)
	require.NoError(t, err)
	source, ended := heldUp(t, b, owner.Addr(), token)
	require.ErrorIs(t, owner.Close(), driver.ErrTimeout)
	require.ErrorIs(t, far.Revoke(t.Context()), driver.ErrTimeout)
	require.NoError(t, other.Revoke(t.Context()), "nobody writes there")
	source.Supply(t)
	_ = ended()
}

// Close ends all epochs before it looks for a proof, also where a Revoke of one memory has the lock
// to look, and a second Revoke of that memory waits no longer than its context.
func TestEpochsEndBeforeAnyProof(t *testing.T) {
	owner := open(t, Config{})
	_, first := shared(t, owner, 4096, 1)
	_, second := shared(t, owner, 4096, 2)
	require.NoError(t, first.revokeLock.Lock(t.Context()))
	require.ErrorIs(t, cutShort(t, first), driver.ErrTimeout)
	epoch := owner.table.epoch(second.key)
	before, closed := epoch.Load(), make(chan error, 1)
	go func() { closed <- owner.Close() }()
	soon(t, "the epoch ends", func() bool { return epoch.Load() != before })
	require.Empty(t, closed)
	first.revokeLock.Unlock()
	require.NoError(t, <-closed)
}

const heldBytes = 64 << 10

// heldUp has a write of heldBytes zeros stand in the kernel, behind the gate: the pages of its
// source do not come until they are supplied. ended waits for the write and returns its outcome.
func heldUp(t *testing.T, b *Backend, addr, token []byte) (
	source *testkit.WithheldMemory, ended func() error,
) {
	t.Helper()
	near, here := share(t, b, drivertest.ForeignMemory, heldBytes)
	source, err := testkit.WithholdPages(here)
	if err != nil {
		drivertest.SkipIfUnavailable(t, err)
	}
	t.Cleanup(func() { source.Supply(t) }) // before Close, which waits for the write
	p := dial(t, b, addr)
	key, _ := take(t, p, token)
	submitted := make(chan error, 1)
	go func() {
		submitted <- p.Submit(1, &driver.Batch{Op: driver.Write, Descs: []driver.Desc{{
			Len: heldBytes, LocalKey: near.Key(), RemoteKey: key}}})
	}()
	source.Await(t)
	return source, func() error {
		require.NoError(t, <-submitted)
		return await(t, b, 1)
	}
}

// TestRevokeAgainInTheKernel: a Revoke that found no proof leaves the writer in the middle of its
// copy, and so the next one needs the same proof.
func TestRevokeAgainInTheKernel(t *testing.T) {
	owner, b := hasty(t), open(t, Config{})
	far, there := share(t, owner, drivertest.ForeignMemory, heldBytes)
	fill(there, 0x11)
	token, err := far.AppendToken(nil)
	require.NoError(t, err)
	source, ended := heldUp(t, b, owner.Addr(), token)
	for n := 0; n < 10 || len(owner.gate.old) == 0; n++ {
		require.ErrorIs(t, cutShort(t, far), driver.ErrTimeout)
	}
	require.Len(t, owner.gate.old, 1, "one for the writer, however often it is looked at")
	source.Supply(t)
	require.NoError(t, far.Revoke(t.Context()))
	after := bytes.Clone(there)
	require.NoError(t, ended())
	if !bytes.Equal(after, there) {
		testkit.FatalBroken(t, "bytes landed after Revoke")
	}
}

// TestBackendCloseInTheKernel: a backend that closes under a writer in the middle of its copy says
// that bytes may land yet.
func TestBackendCloseInTheKernel(t *testing.T) {
	owner, err := New(Config{})
	require.NoError(t, err)
	b := open(t, Config{})
	far, _ := share(t, owner, drivertest.ForeignMemory, heldBytes)
	token, err := far.AppendToken(nil)
	require.NoError(t, err)
	source, ended := heldUp(t, b, owner.Addr(), token)
	for range 2 {
		require.ErrorIs(t, owner.Close(), driver.ErrTimeout)
	}
	source.Supply(t)
	require.NoError(t, ended())
}

// TestRevokeAgainMapped is the same with memory that peers map, of which the owner can keep no
// writer out: its range shares a page with others.
func TestRevokeAgainMapped(t *testing.T) {
	owner, b := hasty(t), open(t, Config{})
	buf, err := hostmem.Alloc(4096, hostmem.Options{Purpose: "test", Huge: hostmem.HugeNone})
	require.NoError(t, err)
	t.Cleanup(func() { _ = owner.Close(); _ = buf.Close() })
	seg := buf.Segment()
	seg.Only = driver.Ranges{{Off: 8, Len: 64}}
	m, err := owner.Register(seg)
	require.NoError(t, err)
	far := m.(*memory)
	near, src := share(t, b, drivertest.ForeignMemory, 4096)
	fill(src, late)
	p := dial(t, b, owner.Addr())
	release := parkedMover(t, b, p, "shm: mapped", driver.Desc{Len: 64, Remote: 8,
		LocalKey: near.Key(), RemoteKey: importOf(t, p, far)})
	for range 3 {
		require.ErrorIs(t, far.Revoke(t.Context()), driver.ErrBusy)
	}
	require.NoError(t, release())
	require.NoError(t, far.Revoke(t.Context()))
}

// TestAnnouncementThatComesAgain: a peer numbers its announcements, and the numbers come again. One
// that Revoke gave up says nothing about a later one.
func TestAnnouncementThatComesAgain(t *testing.T) {
	b := hasty(t)
	shared, _ := share(t, b, drivertest.HostMemory, 4096)
	foreign, _ := share(t, b, drivertest.ForeignMemory, 4096)
	p := dial(t, open(t, Config{}), b.Addr())
	gate := b.table.gate()
	renewals := 0
	t.Cleanup(shared.arena.shared.OnRenew(func() func() bool { renewals++; return nil }))
	for _, m := range []*memory{shared, foreign} {
		revoke := func() {
			t.Helper()
			require.NoError(t, m.Revoke(t.Context()))
			m = again(t, m)
		}
		line := p.announce(m.Key(), driver.Write, 7)
		value := line.Load()
		revoke()
		line.Store(0)
		revoke()
		shut := gate.Load()
		line.Store(value)
		revoke()
		line.Store(0)
		require.Equal(t, m.arena == nil, gate.Load() != shut)
	}
	require.Equal(t, 2, renewals)
}

// TestManyRangesLeaveOthersTheirProof: memory of too many ranges for fresh pages has no proof
// against a frozen writer, but other memory of the same allocation keeps its own.
func TestManyRangesLeaveOthersTheirProof(t *testing.T) {
	const page, count = 4096, 3000
	b := hasty(t)
	buf, err := hostmem.Alloc(2*count*page, hostmem.Options{Purpose: "test",
		Huge: hostmem.HugeNone})
	require.NoError(t, err)
	t.Cleanup(func() { _ = b.Close(); _ = buf.Close() })
	register := func(seg driver.Segment) *memory {
		m, err := b.Register(seg)
		require.NoError(t, err)
		return m.(*memory)
	}
	seg := buf.Segment()
	for i := range uint64(count) {
		seg.Only = append(seg.Only, driver.Range{Off: 2 * i * page, Len: page})
	}
	many := register(seg)
	one, err := buf.Segment().Slice((2*count-1)*page, page, [16]byte{1})
	require.NoError(t, err)
	other := register(one)

	p := dial(t, open(t, Config{}), b.Addr())
	silent(p, many.Key(), driver.Write)
	if err := many.Revoke(t.Context()); err != nil {
		require.ErrorIs(t, err, driver.ErrFull)
	}
	silent(p, other.Key(), driver.Write)
	require.NoError(t, other.Revoke(t.Context()), "a lease of one page")
}

// hugePages is memory that says that it has reserved huge pages.
type hugePages struct{ *hostmem.Buffer }

func (*hugePages) PageBytes() uint64 { return 2 << 20 }

// TestRangesThatShareAPageStay: what lies beside a range in the same page is the program's, which
// may write it now, so no fresh page goes there, and a frozen writer leaves no proof. Whole pages
// have one.
func TestRangesThatShareAPageStay(t *testing.T) {
	const page = 4096
	buf, err := hostmem.Alloc(5*page-100, hostmem.Options{Purpose: "test", Huge: hostmem.HugeNone})
	require.NoError(t, err)
	b := hasty(t)
	t.Cleanup(func() { _ = b.Close(); _ = buf.Close() })
	renewed := 0
	reserved := &hugePages{buf} // a whole page of 4 KiB is part of one of 2 MiB there
	defer buf.OnRenew(func() func() bool { renewed++; return nil })()
	for name, c := range map[string]struct {
		only driver.Ranges
		want error
		huge bool
	}{
		"begins within": {driver.Ranges{{Off: page + 8, Len: page - 8}}, driver.ErrBusy, false},
		"ends within":   {driver.Ranges{{Off: page, Len: page - 8}}, driver.ErrBusy, false},
		"the second one": {driver.Ranges{{Off: 0, Len: page}, {Off: 2 * page, Len: 8}},
			driver.ErrBusy, false},
		"of huge pages": {driver.Ranges{{Off: page, Len: page}}, driver.ErrBusy, true},
		"whole pages": {driver.Ranges{{Off: 0, Len: page}, {Off: 2 * page, Len: 2 * page}},
			nil, false},
		"to the end": {driver.Ranges{{Off: 4 * page, Len: page - 100}}, nil, false},
	} {
		seg := buf.Segment()
		if seg.Only = c.only; c.huge {
			seg.Shared = reserved
		}
		m, err := b.Register(seg)
		require.NoError(t, err, name)
		p := dial(t, open(t, Config{}), b.Addr())
		renewed = 0
		silent(p, m.Key(), driver.Write)
		err = m.Revoke(t.Context())
		require.True(t, errors.Is(err, c.want), "%s: %v", name, err)
		require.Equal(t, c.want == nil, renewed > 0, name)
	}
}
