// SPDX-License-Identifier: Apache-2.0

package shm

import (
	"bytes"
	"context"
	"fmt"
	"net"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/csrc/copy"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/driver/drivertest"
	"github.com/sluicehq/sluice/internal/hostmem"
	"github.com/sluicehq/sluice/internal/proc"
	"github.com/sluicehq/sluice/internal/testing/testkit"
	"github.com/sluicehq/sluice/internal/testpoint"
)

const late = 0xEE // what a mover writes that comes late

// nothingLate fails the test where a late mover has written.
func nothingLate(t *testing.T, mem []byte, where string) {
	t.Helper()
	if at := bytes.IndexByte(mem, late); at >= 0 {
		testkit.FatalBroken(t, "a byte landed %s, at %d", where, at)
	}
}

// shared registers memory of its own arena.
func shared(t *testing.T, b *Backend, n uint64, secret byte) (*hostmem.Buffer, *memory) {
	t.Helper()
	buf, err := hostmem.Alloc(n, hostmem.Options{Purpose: "test"})
	require.NoError(t, err)
	t.Cleanup(func() { _ = b.Close(); _ = buf.Close() })
	seg := buf.Segment()
	seg.Secret[0] = secret
	m, err := b.Register(seg)
	require.NoError(t, err)
	return buf, m.(*memory)
}

func importOf(t *testing.T, p *peer, m *memory) uint32 {
	t.Helper()
	token, err := m.AppendToken(nil)
	require.NoError(t, err)
	key, _, err := p.Import(token)
	require.NoError(t, err)
	return key
}

// parkedMover submits a write of which the mover stands at a spot. release lets it go on
// and returns its outcome.
func parkedMover(
	t *testing.T, b *Backend, p *peer, where string, d driver.Desc,
) (release func() error) {
	t.Helper()
	mover := testpoint.Stand(t, where)[0]
	submitted := make(chan error, 1)
	go func() {
		submitted <- p.Submit(1, &driver.Batch{Op: driver.Write, Descs: []driver.Desc{d}})
	}()
	<-mover.Came
	return func() error {
		mover.GoOn()
		require.NoError(t, <-submitted)
		testpoint.Set(nil)
		return await(t, b, 1)
	}
}

// TestLateMoverOfMappedMemory has a mover stand between a check and the act that relies on
// it, through the whole of a revoke: the memory is revoked and cleared, its arena's
// number serves another arena, and another goroutine of the writer's process maps that.
// No byte lands there, nor in the memory that was revoked.
func TestLateMoverOfMappedMemory(t *testing.T) {
	spots := []string{"shm: announced", "shm: generation", "shm: epoch", "shm: mapped",
		"shm: copied", "shm: left"}
	for _, where := range spots {
		for _, size := range []uint64{4 << 10, 1 << 20, 2 << 20} {
			t.Run(fmt.Sprintf("spot %s/%d bytes", where, size), func(t *testing.T) {
				lateMapped(t, where, size)
			})
		}
	}
}

func lateMapped(t *testing.T, where string, size uint64) {
	owner, b := hasty(t), open(t, Config{})
	old, far := shared(t, owner, 1<<20, 1)
	src, near := shared(t, b, 1<<20, 2)
	fill(src.Bytes(), late)
	p := dial(t, b, owner.Addr())
	key := importOf(t, p, far)
	release := parkedMover(t, b, p, where,
		driver.Desc{Len: 4096, Remote: 8192, LocalKey: near.Key(), RemoteKey: key})

	require.NoError(t, far.Revoke(context.Background()))
	clear(old.Bytes())
	refetched := make(chan struct{})
	go func() { // the same arena, mapped anew
		defer close(refetched)
		same := again(t, far)
		_ = importOf(t, p, same)
		require.NoError(t, same.Revoke(context.Background()))
	}()
	<-refetched
	index := far.arena.index
	require.Eventually(t, func() bool { // the answer to the import holds it a moment longer
		owner.mu.Lock()
		defer owner.mu.Unlock()
		return len(owner.arenas) == 0
	}, 10*time.Second, 100*time.Microsecond)
	other, next := shared(t, owner, size, 3)
	require.Equal(t, index, next.arena.index, "the arena's number is not used again")
	_ = importOf(t, p, next)

	err := release()
	if where != "shm: left" {
		require.ErrorIs(t, err, driver.ErrRevoked)
	}
	nothingLate(t, old.Bytes(), "in memory that was revoked")
	nothingLate(t, other.Bytes(), "in another region")
}

// TestLateMoverKeepsItsPages: pages that it may write to come under no range while it stands.
func TestLateMoverKeepsItsPages(t *testing.T) {
	owner, b := hasty(t), open(t, Config{})
	buf, _ := shared(t, owner, 1<<20, 1)
	seg, err := buf.Segment().Slice(8192, 4096, [16]byte{2})
	require.NoError(t, err)
	far, err := owner.Register(seg)
	require.NoError(t, err)
	src, near := shared(t, b, 4096, 3)
	fill(src.Bytes(), late)
	p := dial(t, b, owner.Addr())
	release := parkedMover(t, b, p, "shm: mapped",
		driver.Desc{Len: 4096, LocalKey: near.Key(), RemoteKey: importOf(t, p, far.(*memory))})
	require.NoError(t, far.Revoke(t.Context()))
	require.NoError(t, buf.Renew(t.Context(), 8192, 4096))
	clear(buf.Bytes())
	_ = release()
	nothingLate(t, buf.Bytes(), "in pages of before")
}

// TestLateMoverWithinOneBackend: both ends are this backend, so there are no old pages, and
// Revoke waits for its own goroutine.
func TestLateMoverWithinOneBackend(t *testing.T) {
	for _, where := range []string{"shm: announced", "shm: epoch"} {
		b := hasty(t)
		mem, far := shared(t, b, 1<<20, 1)
		src, near := shared(t, b, 1<<20, 2)
		fill(src.Bytes(), late)
		p := dial(t, b, b.Addr())
		release := parkedMover(t, b, p, where,
			driver.Desc{Len: 4096, LocalKey: near.Key(), RemoteKey: importOf(t, p, far)})
		ctx, cancel := context.WithTimeout(context.Background(), 50*time.Millisecond)
		defer cancel()
		require.ErrorIs(t, far.Revoke(ctx), context.DeadlineExceeded)
		err := release()
		if where == "shm: announced" {
			require.ErrorIs(t, err, driver.ErrRevoked)
		}
		require.NoError(t, far.Revoke(context.Background()))
		require.Equal(t, err == nil, bytes.IndexByte(mem.Bytes(), late) >= 0)
	}
}

// TestLateMoverOfForeignMemory has a mover stand before its call while the owner revokes, or closes
// its backend. (TestRevokeWaitsForACopyInTheKernel has one in the call.)
func TestLateMoverOfForeignMemory(t *testing.T) {
	for _, where := range []string{"shm: announced", "shm: epoch", "shm: gate", "shm: passing"} {
		for _, closes := range []bool{false, true} {
			clock := testkit.NewClock()
			owner := openBy(t, clock, Config{Grace: 200 * time.Millisecond})
			b := open(t, Config{})
			stop := clock.Run(time.Millisecond)
			far, mem := share(t, owner, drivertest.ForeignMemory, 1<<20)
			near, src := share(t, b, drivertest.ForeignMemory, 1<<20)
			fill(src, late)
			p := dial(t, b, owner.Addr())
			release := parkedMover(t, b, p, where,
				driver.Desc{Len: 4096, LocalKey: near.Key(), RemoteKey: importOf(t, p, far)})
			if closes {
				require.NoError(t, owner.Close())
			}
			require.NoError(t, far.Revoke(context.Background()))
			clear(mem)
			stop()
			if err := release(); !closes {
				require.ErrorIs(t, err, driver.ErrRevoked, "spot %s", where)
			}
			nothingLate(t, mem, fmt.Sprintf("at spot %s (Close: %v)", where, closes))
		}
	}
}

// A peer that lives in a PID namespace which ours does not see has no number here: nothing
// is known of its threads, and that is no proof.
func TestRevokeOfAWriterWithoutANumber(t *testing.T) {
	identify = func(c *net.UnixConn) (proc.Remote, error) {
		id, err := proc.Identify(c)
		id.PID = 0
		return id, err
	}
	owner, b := hasty(t), open(t, Config{})
	t.Cleanup(func() { _ = owner.Close(); identify = proc.Identify })
	near, src := share(t, b, drivertest.ForeignMemory, 64<<10)
	fill(src, late)
	p := dial(t, b, owner.Addr())
	for patience := 50 * time.Millisecond; ; patience *= 2 {
		far, mem := share(t, owner, drivertest.ForeignMemory, 64<<10)
		release := parkedMover(t, b, p, "shm: passing",
			driver.Desc{Len: 4096, LocalKey: near.Key(), RemoteKey: importOf(t, p, far)})
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		err := far.Revoke(ctx)
		cancel()
		require.ErrorIs(t, err, context.DeadlineExceeded)
		err = release()
		if err == nil && patience < limit {
			continue // the Revoke had no time to shut the gate
		}
		require.ErrorIs(t, err, driver.ErrRevoked)
		require.NoError(t, far.Revoke(context.Background()))
		nothingLate(t, mem, "after a revoke")
		return
	}
}

// Between a look at the pages and their exchange no read lands in local memory.
func TestReadsLandBetweenEnterAndLeave(t *testing.T) {
	owner, b := open(t, Config{}), open(t, Config{})
	src, far := shared(t, owner, 1<<20, 1)
	fill(src.Bytes(), late)
	dst, near := shared(t, b, 1<<20, 2)
	p := dial(t, b, owner.Addr())
	key := importOf(t, p, far)
	mover := testpoint.Stand(t, "shm: mapped")[0]
	submitted, renewed := make(chan error, 1), make(chan error, 1)
	go func() {
		submitted <- p.Submit(1, &driver.Batch{Op: driver.Read,
			Descs: []driver.Desc{{Len: 4096, LocalKey: near.Key(), RemoteKey: key}}})
	}()
	<-mover.Came
	go func() { renewed <- dst.Renew(t.Context(), 0, 4096) }()
	select {
	case <-renewed:
		t.Error("pages moved under a read that is about to land")
	case <-time.After(50 * time.Millisecond):
	}
	mover.GoOn()
	require.NoError(t, <-submitted)
	require.NoError(t, <-renewed)
	require.NoError(t, await(t, b, 1))
	require.Equal(t, 4096, bytes.Count(dst.Bytes(), []byte{late}))
}

func fill(b []byte, v byte) {
	for i := range b {
		b[i] = v
	}
}

// TestFreshPagesOfAnotherBackend has one Shared registered with two backends. A writer of the
// first is frozen, and the Revoke of the first puts fresh pages under the range. What a writer of
// the second wrote lands all the same, whether its write began before or after that: each
// write that ended well is in the memory.
func TestFreshPagesOfAnotherBackend(t *testing.T) {
	for _, where := range []string{"shm: mapped", "shm: copied", "shm: left"} {
		t.Run(where, func(t *testing.T) {
			freshOfAnother(t, where)
		})
	}
}

func freshOfAnother(t *testing.T, where string) {
	const size = 1 << 20
	one, two := hasty(t), open(t, Config{SocketDir: t.TempDir()})
	buf, far := shared(t, one, size, 1)
	seg := buf.Segment()
	seg.Secret[0] = 2
	second, err := two.Register(seg)
	require.NoError(t, err)
	farTwo := second.(*memory)

	frozen, writer := open(t, Config{}), open(t, Config{})
	silent(dial(t, frozen, one.Addr()), far.Key(), driver.Write)
	src, near := shared(t, writer, size, 3)
	fill(src.Bytes(), 0x5A)
	p := dial(t, writer, two.Addr())
	key := importOf(t, p, farTwo)
	write := func(page uint64) driver.Desc {
		return driver.Desc{Len: 4096, Remote: page * 4096, LocalKey: near.Key(), RemoteKey: key}
	}
	release := parkedMover(t, writer, p, where, write(0))
	require.NoError(t, far.Revoke(context.Background()))
	require.NoError(t, release())
	require.NoError(t, p.Submit(2, &driver.Batch{Op: driver.Write, Descs: []driver.Desc{write(1)}}))
	require.NoError(t, await(t, writer, 2))
	require.Equal(t, 8192, bytes.Count(buf.Bytes(), []byte{0x5A}),
		"a write that ended well is not in the memory")
}

// TestHelpStopsAfterAPiece: the worker copies what Help has left of the batch.
func TestHelpStopsAfterAPiece(t *testing.T) {
	h := newHelped(t)
	stop := make(chan struct{})
	close(stop)
	require.True(t, h.p.Help(2, stop), "Help did nothing for a batch that waits")
	const places = 2 // the one that was given back, and one for the worker to join in
	if h.dst[0] != 0x5A || h.dst[helpedPiece] != 0 || h.b.queue.len() != places {
		t.Errorf("after one piece: bytes %#x and %#x, %d in the queue; want %#x, 0 and %d",
			h.dst[0], h.dst[helpedPiece], h.b.queue.len(), 0x5A, places)
	}
	h.worker.GoOn()
	for tag := uint64(1); tag <= 2; tag++ {
		require.NoError(t, await(t, h.b, tag), "batch %d", tag)
	}
	require.EqualValues(t, 0x5A, h.dst[helpedSize-1], "the rest of the batch is missing")
}

// TestHelpEndsABatch: it does not wait for the worker to find that nothing is left.
func TestHelpEndsABatch(t *testing.T) {
	h := newHelped(t)
	require.True(t, h.p.Help(2, nil), "Help did nothing for a batch that waits")
	require.NoError(t, await(t, h.b, 2))
	require.Zero(t, h.b.queue.len())
	require.EqualValues(t, 0x5A, h.dst[helpedSize-1])
	h.worker.GoOn()
	require.NoError(t, await(t, h.b, 1))
}

// TestHelpComesAgain: a goroutine that lends itself for a piece at a time copies all of a batch.
func TestHelpComesAgain(t *testing.T) {
	h := newHelped(t)
	stop := make(chan struct{})
	close(stop)
	pieces := 0
	for h.p.Help(2, stop) {
		pieces++
	}
	require.Equal(t, helpedSize/helpedPiece, pieces)
	require.NoError(t, await(t, h.b, 2))
	require.EqualValues(t, 0x5A, h.dst[helpedSize-1])
	h.worker.GoOn()
	require.NoError(t, await(t, h.b, 1))
}

// TestTheLastPieceEndsABatch, also where whoever has copied it is to stop: the batch does not wait
// for those that are before it in the queue then.
func TestTheLastPieceEndsABatch(t *testing.T) {
	h := newHelped(t)
	to, dst := share(t, h.b, drivertest.HostMemory, helpedPiece)
	from, src := share(t, h.b, drivertest.HostMemory, helpedPiece)
	fill(src, 0xA5)
	require.NoError(t, h.p.Submit(3, &driver.Batch{Op: driver.Write, Descs: []driver.Desc{
		{Len: helpedPiece, LocalKey: from.Key(), RemoteKey: importOf(t, h.p, to)}}}))
	stop := make(chan struct{})
	close(stop)
	require.True(t, h.p.Help(3, stop), "Help did nothing for a batch that waits")
	require.NoError(t, await(t, h.b, 3))
	require.EqualValues(t, 0xA5, dst[helpedPiece-1])
	h.worker.GoOn()
	for tag := uint64(1); tag <= 2; tag++ {
		require.NoError(t, await(t, h.b, tag), "batch %d", tag)
	}
}

// TestABatchIsCopiedAsItsTransfer: past the caches if that is long, however short the batch is.
func TestABatchIsCopiedAsItsTransfer(t *testing.T) {
	h := newHelped(t)
	j := h.b.queue.takeTag(h.p, 2)
	require.Equal(t, copy.For(1<<40), j.way)
	h.b.queue.push(j)
	h.worker.GoOn()
	for tag := uint64(1); tag <= 2; tag++ {
		require.NoError(t, await(t, h.b, tag), "batch %d", tag)
	}
}

const helpedPiece, helpedSize = 4096, 1 << 20

// helped is a backend whose only worker is held up in batch 1, so that Help alone copies what goes
// of batch 2, which fills dst.
type helped struct {
	b      *Backend
	p      *peer
	worker *testpoint.Standing
	dst    []byte
}

func newHelped(t *testing.T) *helped {
	b := open(t, Config{Workers: 1, InlineMax: -1, PieceMax: helpedPiece})
	held, _ := share(t, b, drivertest.HostMemory, helpedSize)
	from, src := share(t, b, drivertest.HostMemory, helpedSize)
	to, dst := share(t, b, drivertest.HostMemory, helpedSize)
	p := dial(t, b, b.Addr())
	fill(src, 0x5A)
	worker := testpoint.Stand(t, "shm: announced")[0] // the only one
	first := []driver.Desc{{Len: helpedPiece, LocalKey: held.Key(),
		RemoteKey: importOf(t, p, from)}}
	require.NoError(t, p.Submit(1, &driver.Batch{Op: driver.Read, Descs: first}))
	<-worker.Came
	second := []driver.Desc{{Len: helpedSize, LocalKey: from.Key(),
		RemoteKey: importOf(t, p, to)}}
	require.NoError(t, p.Submit(2, &driver.Batch{Op: driver.Write, Descs: second,
		Total: 1 << 40}))
	return &helped{b, p, worker, dst}
}
