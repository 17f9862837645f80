// SPDX-License-Identifier: Apache-2.0

package hostmem

import (
	"bytes"
	"context"
	"errors"
	"math/rand/v2"
	"os"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/driver"
)

func fill(mem []byte, seed uint64) {
	rng := rand.New(rand.NewPCG(seed, 1))
	for i := range mem {
		mem[i] = byte(rng.Uint32())
	}
}

func openDescriptors(t testing.TB) int {
	t.Helper()
	entries, err := os.ReadDir("/proc/self/fd")
	require.NoError(t, err)
	return len(entries)
}

func TestRenewBounds(t *testing.T) {
	b := mustAlloc(t, 10000, Options{})
	renewals := renewalsOf(t, b)
	for _, r := range [][2]uint64{{0, 0}, {10000, 1}, {0, 10001}, {1, ^uint64(0)}, {^uint64(0), 2},
		{9999, 2}} {
		require.ErrorIs(t, b.Renew(t.Context(), r[0], r[1]), driver.ErrBounds, "Renew(%d, %d)",
			r[0], r[1])
	}
	require.Zero(t, renewals.Load(), "refused calls moved pages")
	require.NoError(t, b.Renew(t.Context(), 9999, 1))
}

// TestRenewAgainstModel keeps, beside the buffer, every mapping a peer ever made
// and which bytes each may still change.
func TestRenewAgainstModel(t *testing.T) {
	for seed := range uint64(8) {
		b := mustAlloc(t, modelPages*basePage-100, Options{Huge: HugeNone})
		renewAgainstModel(t, b, seed)
	}
}

// TestRenewOfReservedHugePages empties the pool of reserved pages if that is
// small; what is renewed then must come in other pages, and no old mapping may
// die of SIGBUS.
func TestRenewOfReservedHugePages(t *testing.T) {
	b := mustAlloc(t, modelPages*HugeSize-100, Options{Purpose: "reserved"})
	if b.page != HugeSize {
		t.Log("this machine has no reserved huge pages")
		return
	}
	renewAgainstModel(t, b, 1)
	for _, e := range extentsOf(b) {
		if e.Off%HugeSize != 0 || e.Len%HugeSize != 0 {
			t.Errorf("extent %+v is not made of whole huge pages", e)
		}
	}
}

const modelPages = 12

func renewAgainstModel(t *testing.T, b *Buffer, seed uint64) {
	const pages = modelPages
	page := b.page
	rng := rand.New(rand.NewPCG(seed, 7))
	mem := b.Bytes()
	fill(mem, seed)
	want := bytes.Clone(mem)
	type view struct {
		mem  []byte
		made [pages]int // renewals of the page when the view was made
	}
	var renewals [pages]int
	views := []view{{mem: peerView(t, b)}}
	for step := range 60 {
		off := rng.Uint64N(b.len)
		n := 1 + rng.Uint64N(min(b.len-off, 4*page))
		require.NoError(t, b.Renew(t.Context(), off, n), "seed %d step %d", seed, step)
		for p := off / page; p <= (off+n-1)/page; p++ {
			renewals[p]++
		}
		if step%4 == 0 {
			views = append(views, view{peerView(t, b), renewals})
		}
		for _, v := range views {
			at := rng.Uint64N(b.len)
			v.mem[at]++
			if v.made[at/page] == renewals[at/page] {
				want[at] = v.mem[at]
			}
		}
		require.True(t, bytes.Equal(mem, want),
			"seed %d step %d: a byte changed that must not have, or the reverse", seed, step)
	}
	if len(b.layers) > layersMax || len(b.pieces) > pages {
		t.Errorf("%d layers, %d pieces for %d pages", len(b.layers), len(b.pieces), pages)
	}
}

// TestRenewOfDistinctRangesSharesDescriptors: a dead peer's thousand leases must
// not cost a thousand descriptors.
func TestRenewOfDistinctRangesSharesDescriptors(t *testing.T) {
	const pages = 1000
	b := mustAlloc(t, pages*basePage, Options{Huge: HugeNone})
	before := openDescriptors(t)
	for _, p := range rand.New(rand.NewPCG(3, 3)).Perm(pages) {
		require.NoError(t, b.Renew(t.Context(), uint64(p)*basePage, 1))
		if grown := openDescriptors(t) - before; grown > 1 {
			t.Fatalf("%d more descriptors", grown)
		}
	}
	require.Len(t, extentsOf(b), 1, "extents after all was renewed")
}

func TestRenewIsBounded(t *testing.T) {
	pages := uint64(layersMax + 1)
	b := mustAlloc(t, pages*basePage, Options{Huge: HugeNone})
	fill(b.Bytes(), 9)
	want := bytes.Clone(b.Bytes())
	var err error
	for n := pages - 1; n > 0 && err == nil; n-- {
		// each call leaves one page of the layer before in use
		err = b.Renew(t.Context(), 0, n*basePage)
	}
	require.ErrorIs(t, err, driver.ErrFull, "%d layers", len(b.layers))
	require.Len(t, b.layers, layersMax, "full at layers")
	require.NoError(t, b.Renew(t.Context(), 0, b.len), "the remedy that the error names")
	if len(b.layers) != 1 || len(b.pieces) != 1 || !bytes.Equal(b.Bytes(), want) {
		t.Errorf("%d layers, %d pieces, content kept: %v", len(b.layers), len(b.pieces),
			bytes.Equal(b.Bytes(), want))
	}
}

func TestPiecesAreBounded(t *testing.T) {
	b := mustAlloc(t, (piecesMax+8)*basePage, Options{Huge: HugeNone})
	left := false
	t.Cleanup(b.OnRenew(func() func() bool { return func() bool { return left } }))
	var err error
	for off := basePage; err == nil && off < b.len; off += 2 * basePage {
		err = b.Renew(t.Context(), off, 1)
	}
	if got := len(extentsOf(b)); !errors.Is(err, driver.ErrFull) || got > piecesMax {
		t.Fatalf("%d extents: %v", got, err)
	}
	before := len(extentsOf(b))
	left = true
	require.NoError(t, b.Renew(t.Context(), basePage, 1), "a renewal that joins pieces")
	require.Len(t, extentsOf(b), before-2)
	if err := b.Renew(t.Context(), 0, b.len); err != nil || len(extentsOf(b)) != 1 {
		t.Fatalf("renewing all of it: %v, %d extents", err, len(extentsOf(b)))
	}
}

// TestRenewTakesPagesAgain has each other page renewed, with writers in the old ones that leave, or
// do not: where they left, the next renewal goes back to where the neighbours lie, and pieces join.
func TestRenewTakesPagesAgain(t *testing.T) {
	const pages = 64
	b := mustAlloc(t, pages*basePage, Options{Huge: HugeNone})
	fill(b.Bytes(), 3)
	want := bytes.Clone(b.Bytes())
	left := false
	t.Cleanup(b.OnRenew(func() func() bool { return func() bool { return left } }))
	old := peerView(t, b)
	round := func() {
		for p := uint64(1); p < pages; p += 2 {
			require.NoError(t, b.Renew(t.Context(), p*basePage, 1))
		}
	}
	round()
	require.Len(t, extentsOf(b), pages)
	first := b.pieces[1].layer
	round()
	require.Len(t, extentsOf(b), pages)
	require.NotSame(t, first, b.pieces[1].layer)
	for i := range old {
		old[i]++ // the late writers
	}
	for i := range want {
		if uint64(i)/basePage%2 == 0 {
			want[i]++
		}
	}
	require.True(t, bytes.Equal(b.Bytes(), want))
	left = true
	round()
	require.Len(t, extentsOf(b), 1)
	require.Len(t, b.layers, 1)
	require.True(t, bytes.Equal(b.Bytes(), want))
}

func TestRenewOfManySteps(t *testing.T) {
	b := mustAlloc(t, 2*renewStep+12345, Options{Populate: true})
	mem := b.Bytes()
	for i := 0; i < len(mem); i += 4093 {
		mem[i] = byte(i / 4093)
	}
	old := peerView(t, b)
	require.NoError(t, b.Renew(t.Context(), renewStep/2+1, renewStep+renewStep/2))
	for i := 0; i < len(mem); i += 4093 {
		require.EqualValues(t, byte(i/4093), mem[i], "byte %d is lost", i)
	}
	old[renewStep] = 0xEE
	if mem[renewStep] == 0xEE {
		t.Error("a write through the old mapping is seen")
	}
}

func TestRenewGivesOldPagesBack(t *testing.T) {
	b := mustAlloc(t, 4<<20, Options{Huge: HugeNone, Populate: true})
	for range 20 {
		require.NoError(t, b.Renew(t.Context(), 0, 4<<20-1))
	}
	require.NoError(t, b.Renew(t.Context(), 0, 1<<20))
	var blocks int64
	for _, l := range b.layers {
		var st unix.Stat_t
		require.NoError(t, unix.Fstat(l.fd, &st))
		blocks += st.Blocks * 512
	}
	require.EqualValues(t, 4<<20, blocks, "bytes are held by %d layers of a buffer of",
		len(b.layers))
}

func TestRenewConcurrently(t *testing.T) {
	before := openDescriptors(t)
	b := mustAlloc(t, 64*basePage, Options{Huge: HugeNone})
	renewals := renewalsOf(t, b)
	var wg sync.WaitGroup
	for w := range uint64(4) {
		wg.Go(func() {
			mem := b.Bytes()[w*16*basePage:][:16*basePage]
			for i := range uint64(50) {
				mem[i*7] = byte(i + w)
				if err := b.Renew(t.Context(), w*16*basePage+i*100, 5*basePage); err != nil {
					t.Error(err)
				}
				if mem[i*7] != byte(i+w) {
					t.Errorf("worker %d lost its byte in round %d", w, i)
				}
				err := b.Lend(func(extents []driver.Extent) error {
					_, err := unix.FcntlInt(uintptr(extents[0].FD), unix.F_GET_SEALS, 0)
					return err
				})
				if err != nil {
					t.Errorf("a lent descriptor is closed: %v", err)
				}
			}
		})
	}
	wg.Wait()
	require.EqualValues(t, 200, renewals.Load(), "renewals")
	require.NoError(t, b.Close())
	require.Zero(t, openDescriptors(t)-before, "descriptors are left")
}

// TestHold keeps the pages where they are until the last holder lets go.
func TestHold(t *testing.T) {
	b := mustAlloc(t, 4*basePage, Options{Huge: HugeNone})
	var releases []func()
	for range 2 {
		release, err := b.Hold()
		require.NoError(t, err)
		releases = append(releases, release)
	}
	renewals, old := renewalsOf(t, b), peerView(t, b)
	for i, release := range releases {
		err := b.Renew(t.Context(), 0, basePage)
		if !errors.Is(err, driver.ErrBusy) || renewals.Load() != 0 {
			t.Fatalf("renew with %d holders: %v, %d renewals", len(releases)-i, err,
				renewals.Load())
		}
		if old[0]++; b.Bytes()[0] != old[0] {
			t.Fatal("held pages have changed")
		}
		release()
		release()
	}
	require.NoError(t, b.Renew(t.Context(), 0, basePage), "renew when all let go")
	require.NoError(t, b.Close())
	if _, err := b.Hold(); !errors.Is(err, driver.ErrClosed) {
		t.Errorf("hold memory that is gone: %v", err)
	}
}

// What lands between Enter and Leave is never lost, although the pages move all the time.
func TestRenewLosesNothingThatLands(t *testing.T) {
	b := mustAlloc(t, 1<<20, Options{Huge: HugeNone})
	mem := b.Bytes()
	var stop atomic.Bool
	var all sync.WaitGroup
	for part := range 3 {
		mine := mem[4096+512*part:][:512] // of one page
		all.Go(func() {
			for n := 0; !stop.Load(); n++ {
				b.Enter()
				for i := range mine {
					mine[i] = byte(n)
				}
				b.Leave()
				for i := range mine {
					if mine[i] != byte(n) {
						t.Errorf("byte %d of landing %d is lost", i, n)
						return
					}
				}
			}
		})
	}
	for range 300 {
		require.NoError(t, b.Renew(t.Context(), 4096, 100))
	}
	stop.Store(true)
	all.Wait()
}

// A Renew waits for what has entered, and what comes then waits for the Renew.
func TestRenewWaitsForLandings(t *testing.T) {
	defer func(d time.Duration) { enteredMax = d }(enteredMax)
	enteredMax = time.Minute
	b := mustAlloc(t, 1<<20, Options{Huge: HugeNone})
	renewals := renewalsOf(t, b)
	b.Enter()
	renewed := make(chan error, 1)
	go func() { renewed <- b.Renew(t.Context(), 0, 4096) }()
	for b.phase.Load() != renewWaits {
		time.Sleep(100 * time.Microsecond)
	}
	b.Enter() // after patience it goes first: the one inside may depend on it
	require.Empty(t, renewed)
	require.Zero(t, renewals.Load())
	b.Leave()
	b.Leave()
	require.NoError(t, <-renewed)
	require.EqualValues(t, 1, renewals.Load())
}

// A landing that comes while pages move waits for their end.
func TestLandingWaitsWhilePagesMove(t *testing.T) {
	b := mustAlloc(t, 1<<20, Options{Huge: HugeNone})
	require.NoError(t, b.stop(t.Context()))
	entered := make(chan struct{})
	go func() { b.Enter(); close(entered) }()
	select {
	case <-entered:
		t.Fatal("a landing began while pages moved")
	case <-time.After(3 * patience):
	}
	b.resume()
	<-entered
	b.Leave()
}

func TestRenewGivesUpOnALandingThatStays(t *testing.T) {
	defer func(d time.Duration) { enteredMax = d }(enteredMax)
	enteredMax = 20 * time.Millisecond
	b := mustAlloc(t, 1<<20, Options{Huge: HugeNone})
	renewals := renewalsOf(t, b)
	b.Enter()
	require.ErrorIs(t, b.Renew(t.Context(), 0, 4096), driver.ErrBusy)
	require.Zero(t, renewals.Load())
	b.Leave()
	require.NoError(t, b.Renew(t.Context(), 0, 4096))
}

// TestRenewEndsWithItsContext: neither a landing that stays nor another Renew that waits for it
// holds up one whose caller gives up, and the memory can be mapped meanwhile.
func TestRenewEndsWithItsContext(t *testing.T) {
	defer func(d time.Duration) { enteredMax = d }(enteredMax)
	enteredMax = time.Hour
	b := mustAlloc(t, 1<<20, Options{Huge: HugeNone})
	renewals := renewalsOf(t, b)
	b.Enter()
	ctx, cancel := context.WithCancel(t.Context())
	first := make(chan error, 1)
	go func() { first <- b.Renew(ctx, 0, 4096) }()
	for b.phase.Load() != renewWaits {
		time.Sleep(100 * time.Microsecond)
	}
	short, done := context.WithTimeout(t.Context(), time.Millisecond)
	defer done()
	require.ErrorIs(t, b.Renew(short, 4096, 4096), driver.ErrTimeout)
	require.Len(t, extentsOf(b), 1)
	cancel()
	require.ErrorIs(t, <-first, context.Canceled)
	require.Zero(t, renewals.Load())
	b.Leave()
	require.NoError(t, b.Renew(t.Context(), 0, 4096))
}

func BenchmarkEnterLeave(b *testing.B) {
	buf, err := Alloc(1<<20, Options{})
	require.NoError(b, err)
	defer buf.Close()
	for b.Loop() {
		buf.Enter()
		buf.Leave()
	}
}
