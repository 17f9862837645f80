// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package verbs

import (
	"bytes"
	"encoding/binary"
	"errors"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/testing/allocs"
	"github.com/sluicehq/sluice/internal/testing/fakeverbs"
	"github.com/sluicehq/sluice/internal/testing/promise"
)

// TestSmallBatchesTakeTurns has two rails that are idle.
func TestSmallBatchesTakeTurns(t *testing.T) {
	l := openLink(t, fakeDevices(t, 2), testShape{pairs: 2})
	for i := range 20 {
		require.NoError(t, l.move(t, driver.Write, driver.Desc{Remote: uint64(i) * 100, Len: 100}))
	}
	for rail := range 2 {
		c, err := l.near.Counters(rail)
		require.NoError(t, err)
		require.EqualValues(t, 1000, c.BytesOut)
	}
}

// TestSoakVerbsShareRails checks that a large transfer is spread by how fast the rails are.
// TestTime does so by a clock of its own.
func TestSoakVerbsShareRails(t *testing.T) {
	d := fakeDevices(t, 2)
	l := openLink(t, d, testShape{pairs: 2, spin: true, config: Config{SliceMax: 64 << 10,
		FlightMax: 512 << 10}})
	bytesOf := func(rail int) uint64 {
		c, err := l.near.Counters(rail)
		require.NoError(t, err)
		return c.BytesOut
	}
	d.fake.Device(0).Set(fakeverbs.Rate, 300)
	d.fake.Device(2).Set(fakeverbs.Rate, 100)
	// The rates are learned, again and again: on a busy machine some are wrong for a while.
	var share float64
	for range 20 {
		a, b := bytesOf(0), bytesOf(1)
		for range 6 {
			require.NoError(t, l.move(t, driver.Write, driver.Desc{Len: testBytes}))
		}
		a, b = bytesOf(0)-a, bytesOf(1)-b
		if share = float64(a) / float64(a+b); share > 0.65 && share < 0.85 {
			return
		}
	}
	t.Errorf("a share of %.2f over rails of 300 and 100 MB/s, and never between 0.65 and 0.85",
		share)
}

// TestSoakSlowRailIsTriedAgain has a rail that was slow for a while: when it is not any more, large
// transfers go over it again.
func TestSoakSlowRailIsTriedAgain(t *testing.T) {
	d := fakeDevices(t, 2)
	l := openLink(t, d, testShape{pairs: 2, spin: true, config: Config{SliceMax: 64 << 10,
		FlightMax: 512 << 10}})
	counted := func(rail int) Counters {
		c, err := l.near.Counters(rail)
		require.NoError(t, err)
		return c
	}
	write := func() {
		require.NoError(t, l.move(t, driver.Write, driver.Desc{Len: testBytes}))
	}
	d.fake.Device(0).Set(fakeverbs.Rate, 300)
	d.fake.Device(2).Set(fakeverbs.Rate, 1)
	for i := 0; counted(1).Rate == 0 || counted(1).Rate > 10<<20; i++ {
		if i == 20 {
			t.Fatalf("a rail of 1 MB/s is measured as %d", counted(1).Rate)
		}
		write()
	}
	d.fake.Device(2).Set(fakeverbs.Rate, 300)
	before := counted(1).BytesOut
	for range 64 {
		if write(); counted(1).BytesOut > before {
			return
		}
	}
	t.Errorf("nothing went over a rail that was slow once: rates %d and %d", counted(0).Rate,
		counted(1).Rate)
}

// TestVerbsAllocatesNothing holds for the Go side of the hot path.
func TestVerbsAllocatesNothing(t *testing.T) {
	l := openLink(t, fakeDevices(t, 1), testShape{spin: true})
	d := l.descs(driver.Desc{Len: 5000})
	p := l.pattern(64, 656, 656, 656)
	p.Local.List = make([]uint32, 64)
	var done [1]Done
	n := allocs.PerRun(100, func() {
		_ = l.conn.Submit(1, batchOf(driver.Write, d, nil))
		for l.near.Poll(done[:]) == 0 {
			l.near.Drive()
		}
		_ = l.conn.Submit(2, &driver.Batch{Op: driver.Read, Pattern: p})
		for l.near.Poll(done[:]) == 0 {
			l.near.Drive()
		}
	})
	if n != 0 {
		t.Errorf("%v allocations", n)
	}
}

// hammer is many goroutines at one connection: each owns some tags and a part of the memory.
type hammer struct {
	l       *testLink
	ends    []chan Done // of each goroutine
	number  sync.Mutex  // held while a message is numbered and submitted
	sent    uint64
	stopped atomic.Bool
	ended   atomic.Uint64 // batches
}

const hammerPart = 512 << 10

func (h *hammer) work(t *testing.T, id, batches int) {
	r := rand.New(rand.NewPCG(uint64(id), 7))
	from := uint64(id) * hammerPart
	local, remote := h.l.local[from:from+hammerPart], h.l.remote[from:from+hammerPart]
	for i := 0; i < batches && !t.Failed(); i++ {
		n := 1 + r.Uint64N(hammerPart)
		fill(local[:n], r.Uint64())
		tag := uint64(id)<<32 | uint64(i)
		d := []driver.Desc{{Local: from, Remote: from, Len: n, LocalKey: testKey,
			RemoteKey: h.l.slot}}
		cancel := r.IntN(4) == 0
		if !h.submit(t, tag, d, r.IntN(3) == 0 && !cancel) {
			return
		}
		if cancel {
			h.l.conn.Cancel(tag)
		}
		var end Done
		select {
		case end = <-h.ends[id]:
		case <-time.After(patience):
			t.Errorf("batch of %d, tag %x: nothing completes", n, tag)
			return
		}
		switch err := Error(end); {
		case end.Tag != tag:
			t.Errorf("tag %x ends, want %x", end.Tag, tag)
		case cancel && errors.Is(err, driver.ErrAborted):
		case err != nil:
			t.Errorf("batch of %d: %v", n, err)
		case !bytes.Equal(local[:n], remote[:n]):
			promise.Breaks(t, "other bytes of %d", n)
		}
	}
}

func (h *hammer) submit(t *testing.T, tag uint64, d []driver.Desc, notif bool) bool {
	for limit := time.Now().Add(patience); ; {
		var msg []byte
		if notif {
			h.number.Lock()
			msg = numbered(int(h.sent))
		}
		err := h.l.conn.Submit(tag, batchOf(driver.Write, d, msg))
		if notif {
			if err == nil {
				h.sent++
			}
			h.number.Unlock()
		}
		if err == nil {
			return true
		}
		if !errors.Is(err, driver.ErrFull) || time.Now().After(limit) {
			t.Error(err)
			return false
		}
		time.Sleep(20 * time.Microsecond)
	}
}

// poll hands completions to their goroutines.
func (h *hammer) poll() {
	var done [16]Done
	for !h.stopped.Load() {
		n := h.l.near.Poll(done[:])
		for _, d := range done[:n] {
			h.ended.Add(1)
			h.ends[d.Tag>>32] <- d
		}
		if n == 0 {
			h.l.near.Drive()
		}
	}
}

// receive checks that messages come in order, until all have come that were sent.
func (h *hammer) receive(t *testing.T) uint64 {
	next := uint64(0)
	for until := time.Now().Add(2 * patience); !h.stopped.Load() || next < h.sent &&
		time.Now().Before(until); {
		n, ok := h.l.far.Receive()
		if !ok {
			time.Sleep(20 * time.Microsecond)
			continue
		}
		if got := binary.LittleEndian.Uint64(n.Data); got != next {
			promise.Breaks(t, "message %d, want %d", got, next)
		}
		next++
	}
	return next
}

// hammerLink has goroutines write, cancel and send messages while queue pairs end and are made
// anew, one after each batch that ends: all workers may wait for credit, which the owner tells
// before the initiator's end of a new queue pair listens, and a device sends it again after its
// timeout alone. So a queue pair that is to bring credit lives for as long as that takes.
func hammerLink(t *testing.T, d hosts) { hammerFor(t, d, 80) }

// hammerFor has each goroutine write so many batches.
func hammerFor(t *testing.T, d hosts, batches int) {
	h := &hammer{l: openLink(t, d, testShape{pairs: len(d.near), config: Config{SliceMax: 64 << 10,
		NotifyMax: 16, StallNanos: uint64(10 * time.Second)}})}
	var workers, others sync.WaitGroup
	over := make(chan struct{})
	for range 4 {
		h.ends = append(h.ends, make(chan Done, 1))
	}
	for id := range h.ends {
		workers.Go(func() { h.work(t, id, batches) })
	}
	others.Go(h.poll)
	var came uint64
	others.Go(func() { came = h.receive(t) })
	others.Go(func() {
		for i, seen := 0, uint64(0); !h.stopped.Load(); i++ {
			for h.ended.Load() == seen && !h.stopped.Load() {
				time.Sleep(20 * time.Millisecond)
			}
			seen = h.ended.Load()
			pair := i % len(d.near)
			_ = h.l.conn.PairEnd(pair)
			h.l.make(t, pair)
		}
		h.l.steward(t, over)
	})
	workers.Wait()
	h.stopped.Store(true)
	close(over)
	others.Wait()
	if came != h.sent {
		t.Errorf("%d messages came of %d", came, h.sent)
	}
	if n, ok := h.l.far.Receive(); ok {
		t.Errorf("message %x is one too many", n.Data)
	}
	t.Logf("%d messages", came)
}

// TestVerbsIdle checks that the threads sleep while there is nothing to do: for as long as nobody
// wakes them, and not in turns.
func TestVerbsIdle(t *testing.T) {
	l := openLink(t, fakeDevices(t, 2), testShape{pairs: 2})
	require.NoError(t, l.move(t, driver.Write, driver.Desc{Len: 1000}))
	best := ^uint64(0)
	for range 5 { // the last completion may still be in a queue
		before := switches(t)
		time.Sleep(100 * time.Millisecond)
		best = min(best, switches(t)-before)
	}
	if best != 0 {
		t.Errorf("idle threads wake %d times in 100 ms", best)
	}
}

// switches counts how often the threads of contexts went to sleep.
func switches(t *testing.T) uint64 {
	t.Helper()
	files, err := filepath.Glob("/proc/self/task/*/status")
	require.NoError(t, err)
	var sum uint64
	threads := 0
	for _, f := range files {
		text, err := os.ReadFile(f)
		if err != nil || !strings.HasPrefix(string(text), "Name:\tsluice-verbs\n") {
			continue
		}
		threads++
		_, rest, _ := strings.Cut(string(text), "\nvoluntary_ctxt_switches:\t")
		line, _, _ := strings.Cut(rest, "\n")
		n, err := strconv.ParseUint(line, 10, 64)
		require.NoError(t, err)
		sum += n
	}
	if threads != 2 {
		t.Fatalf("%d threads, want those of two contexts", threads)
	}
	return sum
}
