// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package verbs

import (
	"bytes"
	"encoding/binary"
	"errors"
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/testing/testkit"
)

// Statuses of completions, as enum ibv_wc_status has them.
const (
	wcLocalLength  = 1
	wcLocalProtect = 4
	wcRemInvalid   = 9
	wcRemOperation = 11
	wcRetry        = 12
	wcNotReady     = 13
)

// testMender makes queue pairs anew when they fail, as the control plane does.
type testMender struct {
	l      *testLink
	quit   chan struct{}
	over   sync.WaitGroup
	failed map[int]bool // queue pairs
	fails  int
	gone   atomic.Int32 // devices
	status int32        // of the last queue pair that failed
	pause  time.Duration
}

// mend starts a mender that ends with the test.
func (l *testLink) mend(t testing.TB, pause time.Duration) *testMender {
	m := &testMender{l: l, quit: make(chan struct{}), failed: map[int]bool{}, pause: pause}
	m.over.Go(m.run)
	t.Cleanup(m.stop)
	return m
}

// stop may be called twice.
func (m *testMender) stop() {
	select {
	case <-m.quit:
	default:
		close(m.quit)
	}
	m.over.Wait()
}

func (m *testMender) run() {
	for {
		select {
		case <-m.quit:
			return
		case <-time.After(200 * time.Microsecond):
		}
		for {
			n, ok := m.l.near.News()
			if !ok {
				break
			}
			switch n.Kind {
			case PairFailed:
				m.fails++
				m.status = n.Status
				m.failed[n.Pair] = true
			case DeviceGone:
				m.gone.Add(1)
			}
		}
		for pair := range m.failed {
			time.Sleep(m.pause)
			if m.remake(pair) == nil {
				delete(m.failed, pair)
			}
		}
	}
}

func (m *testMender) remake(pair int) error {
	if err := m.l.back.PairEnd(pair); err != nil {
		return err
	}
	seen := m.l.back.Seen()
	if err := m.l.conn.PairSettle(pair, seen); err != nil {
		return err
	}
	mine, err := m.l.conn.PairMake(pair, pair)
	if err != nil {
		return err
	}
	theirs, err := m.l.back.PairMake(pair, pair)
	if err != nil {
		return err
	}
	if err := m.l.back.PairBegin(pair, mine); err != nil {
		return err
	}
	return m.l.conn.PairBegin(pair, theirs)
}

// A request that landed and whose acknowledgement was lost is done once more; a message is not.
func TestLostAcknowledgements(t *testing.T) {
	d := fakeDevices(t, 1)
	l := openLink(t, d, testShape{})
	m := l.mend(t, 0)
	near := d.fake.Device(0)
	for i := range 20 {
		fill(l.local, uint64(i))
		near.Set("after", uint32(i%3))
		near.LoseNext(1)
		n := uint64(300_000)
		tag := l.submit(t, driver.Write, numbered(i), driver.Desc{Local: 5, Remote: 9, Len: n})
		if err := l.outcome(t, tag); err != nil {
			t.Fatalf("write %d: %v", i, err)
		}
		if !bytes.Equal(l.remote[9:9+n], l.local[5:5+n]) {
			t.Fatalf("write %d: other bytes", i)
		}
		if got := l.notif(t); binary.LittleEndian.Uint64(got.Data) != uint64(i) {
			t.Fatalf("message %d after write %d", binary.LittleEndian.Uint64(got.Data), i)
		}
	}
	if n, ok := l.far.Receive(); ok {
		t.Errorf("message %x came twice", n.Data)
	}
	m.stop()
	if near.Set("lose", 0); m.fails < 10 {
		t.Errorf("%d failures of 20", m.fails)
	}
}

// The trap: a request that was given up lands long after its second try. Its queue pair must be
// over at the owner's end before anything is done again.
func TestNothingLandsLate(t *testing.T) {
	d := fakeDevices(t, 1)
	l := openLink(t, d, testShape{})
	l.mend(t, 0)
	near := d.fake.Device(0)
	for i := range 5 {
		fill(l.local, uint64(2*i))
		near.ParkNext(1)
		require.NoError(t, l.move(t, driver.Write, driver.Desc{Len: 4096}))
		fill(l.local, uint64(2*i+1))
		require.NoError(t, l.move(t, driver.Write, driver.Desc{Len: 4096}))
		near.LandParked(t, i+1)
		if !bytes.Equal(l.remote[:4096], l.local[:4096]) {
			testkit.FatalBroken(t, "what was given up has landed on what was written later")
		}
	}
}

// What was cancelled has landed before its completion, or never does: be it cancelled at once, or
// when its request has failed.
func TestNothingLandsAfterCancel(t *testing.T) {
	d := fakeDevices(t, 1)
	l := openLink(t, d, testShape{})
	l.mend(t, 2*time.Millisecond)
	near := d.fake.Device(0)
	for i := range 10 {
		near.ParkNext(1)
		faults := near.Get("faults")
		fill(l.local, uint64(i))
		tag := l.submit(t, driver.Write, nil, driver.Desc{Len: 4096})
		if i%2 == 1 {
			near.Await(t, "faults", faults+1)
		}
		l.conn.Cancel(tag)
		if err := l.outcome(t, tag); err != nil && !errors.Is(err, driver.ErrAborted) {
			t.Fatal(err)
		}
		fill(l.remote[:4096], uint64(1000+i))
		want := bytes.Clone(l.remote[:4096])
		near.LandParked(t, i+1)
		if !bytes.Equal(l.remote[:4096], want) {
			testkit.FatalBroken(t, "round %d: bytes landed after the completion", i)
		}
	}
}

// A request that must not be served fails its batch, and only that.
func TestFailuresByKind(t *testing.T) {
	for _, status := range []int32{wcLocalLength, wcLocalProtect, wcRemInvalid, wcRemOperation} {
		t.Run(Status(status), func(t *testing.T) {
			d := fakeDevices(t, 1)
			l := openLink(t, d, testShape{})
			l.mend(t, 0)
			fill(l.local, 7)
			d.fake.Device(0).Set("after", 2)
			d.fake.Device(0).FailNext(1, uint32(status))
			var wrong int
			outcomes := map[uint64]error{}
			for i := range 6 {
				l.submit(t, driver.Write, nil, driver.Desc{Local: uint64(i) * 8192,
					Remote: uint64(i) * 4096, Len: 4096})
			}
			for range 6 {
				done := l.take(t)
				outcomes[done.Tag] = Error(done)
			}
			for tag, err := range outcomes {
				at := (tag - 1) * 4096
				var piece *driver.PieceError
				switch {
				case err == nil && bytes.Equal(l.remote[at:at+4096], l.local[2*at:2*at+4096]):
				case err == nil:
					t.Errorf("batch %d: other bytes", tag)
				case !errors.As(err, &piece) || piece.Piece != 0:
					t.Errorf("batch %d: %v, want the piece that failed", tag, err)
				default:
					wrong++
				}
			}
			if wrong != 1 {
				t.Errorf("%d batches failed, want the one whose request did: %v", wrong, outcomes)
			}
			if err := l.move(t, driver.Read, driver.Desc{Len: 100}); err != nil {
				t.Errorf("afterwards: %v", err)
			}
		})
	}
}

// A key that the owner's NIC does not know was revoked: nothing more of that memory is tried.
func TestFailureByARevokedKey(t *testing.T) {
	d := fakeDevices(t, 1)
	l := openLink(t, d, testShape{})
	l.mend(t, 0)
	require.NoError(t, l.far.Revoke(testKey))
	fill(l.local, 9)
	if err := l.move(t, driver.Write, driver.Desc{Len: 100_000}); !errors.Is(err,
		driver.ErrRevoked) {
		t.Errorf("with a key that was revoked: %v", err)
	}
	if bytes.ContainsFunc(l.remote, func(r rune) bool { return r != 0 }) {
		t.Error("bytes landed")
	}
	err := l.conn.Submit(77, batchOf(driver.Write, l.descs(driver.Desc{Len: 10}), nil))
	if err == nil {
		err = l.outcome(t, 77)
	}
	if !errors.Is(err, driver.ErrRevoked) {
		t.Errorf("once more: %v", err)
	}
	l.slot = l.imported(t)
	if err := l.move(t, driver.Write, driver.Desc{Len: 100_000}); err != nil ||
		!bytes.Equal(l.remote[:100_000], l.local[:100_000]) {
		t.Errorf("in the next epoch: %v", err)
	}
}

// A process that is killed loses its memory before its queue pairs: a key that is over is believed
// once the peer has answered for the queue pair that said so. Where it is lost first, so are all.
func TestLossBehindARevokedKey(t *testing.T) {
	for _, pairs := range []int{1, 2} {
		d := fakeDevices(t, pairs)
		l := openLink(t, d, testShape{pairs: pairs})
		const n = 6
		for i := range pairs {
			d.fake.Device(2*i).Set("frozen", 1)
		}
		require.NoError(t, l.far.Revoke(testKey))
		write := batchOf(driver.Write, l.descs(driver.Desc{Len: 300_000}), nil)
		for tag := range uint64(n) {
			require.NoError(t, l.conn.Submit(tag, write))
		}
		for i := range pairs {
			d.fake.Device(2*i).Set("frozen", 0)
		}
		l.awaitNews(t, PairFailed)
		for i := range pairs {
			require.Eventually(t, func() bool {
				c, err := l.near.Counters(i)
				return err == nil && c.InFlight == 0
			}, patience, time.Millisecond, "all requests come back")
		}
		var done [1]Done
		require.Zero(t, l.near.Poll(done[:]), "an end that the peer has not answered for")
		require.NoError(t, l.conn.End(Lost, true))
		for tag, err := range l.outcomes(t, n) {
			require.ErrorIs(t, err, driver.ErrPeerLost, "%d pairs, batch %d", pairs, tag)
		}
		l.close(t)
	}
}

// Revoke waits for nobody, and when it returns nothing more lands: whatever is under way.
func TestNothingLandsAfterRevoke(t *testing.T) {
	for _, frozen := range []uint32{0, 1} { // the peer goes on, or its NIC does nothing any more
		d := fakeDevices(t, 1)
		l := openLink(t, d, testShape{})
		m := l.mend(t, 0)
		near := d.fake.Device(0)
		near.Set("rate", 50)
		fill(l.local, 11)
		tag := l.submit(t, driver.Write, nil, driver.Desc{Len: testBytes})
		near.Await(t, "kib_landed", 300)
		near.Set("frozen", frozen)
		require.NoError(t, l.far.Revoke(testKey))
		want := bytes.Clone(l.remote)
		near.Set("rate", 0)
		near.Set("frozen", 0)
		if err := l.outcome(t, tag); !errors.Is(err, driver.ErrRevoked) {
			t.Errorf("the write ended with %v", err)
		}
		if !bytes.Equal(l.remote, want) {
			testkit.ErrorBroken(t, "bytes landed after Revoke had returned")
		}
		if bytes.Equal(want, l.local) {
			t.Error("all had landed before: the test is of no use")
		}
		m.stop()
		l.close(t)
	}
}

// What is the way's fault and not the batch's is done again over a new queue pair.
func TestFailuresOfTheWay(t *testing.T) {
	d := fakeDevices(t, 1)
	l := openLink(t, d, testShape{})
	m := l.mend(t, 0)
	for _, status := range []uint32{wcRetry, wcNotReady, 7, 16, 19, 20, 21} {
		fill(l.local, uint64(status))
		d.fake.Device(0).FailNext(1, status)
		if err := l.move(t, driver.Write, driver.Desc{Len: 70_000}); err != nil {
			t.Errorf("%s: %v", Status(int32(status)), err)
		}
		if !bytes.Equal(l.remote[:70_000], l.local[:70_000]) {
			t.Errorf("%s: other bytes", Status(int32(status)))
		}
	}
	m.stop()
	if m.fails != 7 {
		t.Errorf("%d queue pairs failed, want 7", m.fails)
	}
}

const (
	stallTime     = 150 * time.Millisecond
	wcRespTimeout = 20
)

// TestStalledPairFails has a device take requests and never say anything of them again: the
// queue pair fails all the same, and what it held is done by the next.
func TestStalledPairFails(t *testing.T) {
	d := fakeDevices(t, 1)
	l := openLink(t, d, testShape{config: Config{StallNanos: uint64(stallTime)}})
	near := d.fake.Device(0)
	near.Set("frozen", 1)
	fill(l.local, 3)
	begin := time.Now()
	tag := l.submit(t, driver.Write, numbered(0), driver.Desc{Len: 4096})
	if n := l.awaitNews(t, PairFailed); n.Status != wcRespTimeout {
		t.Errorf("the queue pair failed with %s", Status(n.Status))
	}
	if took := time.Since(begin); took < stallTime {
		t.Errorf("it failed after %v, before its time of %v", took, stallTime)
	}
	near.Set("frozen", 0)
	l.make(t, 0)
	if err := l.outcome(t, tag); err != nil {
		t.Error(err)
	}
	if n := l.notif(t); !bytes.Equal(n.Data, numbered(0)) ||
		!bytes.Equal(l.local[:4096], l.remote[:4096]) {
		t.Errorf("message %x, same bytes %v", n.Data, bytes.Equal(l.local[:4096], l.remote[:4096]))
	}
}

// TestSlowPairsDoNotStall: neither one that is slow but moves, nor one that has had nothing to do.
func TestSlowPairsDoNotStall(t *testing.T) {
	d := fakeDevices(t, 1)
	l := openLink(t, d, testShape{config: Config{StallNanos: uint64(5 * stallTime), SliceMax: 4096,
		Depth: 8}})
	near := d.fake.Device(0)
	near.Set("delay_us", uint32((stallTime / 2).Microseconds()))
	for range 2 {
		if err := l.move(t, driver.Write, driver.Desc{Len: 16 * 4096}); err != nil {
			// 8 times the delay in all
			t.Error(err)
		}
		time.Sleep(6 * stallTime)
	}
	if c := l.counters(t); c.Failures != 0 {
		t.Errorf("%d failures", c.Failures)
	}
}

// TestUnmapOfWhatIsUsed unmaps the nine memories that a batch reads into, some in several runs, and
// one that it does not name: while the batch is under way, Unmap succeeds for that one alone.
func TestUnmapOfWhatIsUsed(t *testing.T) {
	d := fakeDevices(t, 1)
	l := openLink(t, d, testShape{})
	fill(l.remote, 2)
	mem := pages(t, 10*4096)
	whole := mustPin(t, l.near, 0, mem, 0)
	var descs []driver.Desc
	for i := range 10 {
		key := uint32(100 + i)
		require.NoError(t, mapRange(l.near, key, mem[i*4096:(i+1)*4096], []Pin{whole}, 0))
		for range 2 {
			descs = append(descs, driver.Desc{LocalKey: key, RemoteKey: l.slot,
				Remote: uint64(i) * 8192, Len: 4096})
		}
	}
	descs = slices.Repeat(descs[:18], 2) // without the tenth, and each a second time
	near := d.fake.Device(0)
	near.Set("frozen", 1)
	bad := append(descs[:len(descs):len(descs)], driver.Desc{LocalKey: 99, RemoteKey: l.slot,
		Len: 1})
	l.tag++
	require.Error(t, l.conn.Submit(l.tag, batchOf(driver.Read, bad, nil)), "an unknown memory")
	require.NoError(t, l.conn.Submit(l.tag, batchOf(driver.Read, descs, nil)))
	require.NoError(t, l.near.Unmap(109))
	for key := uint32(100); key < 109; key++ {
		require.ErrorIs(t, l.near.Unmap(key), driver.ErrBusy, "memory %d", key)
	}
	near.Set("frozen", 0)
	require.NoError(t, l.outcome(t, l.tag))
	for key := uint32(100); key < 109; key++ {
		require.NoError(t, l.near.Unmap(key), "memory %d", key)
	}
	require.Equal(t, l.remote[8*8192:8*8192+4096], mem[8*4096:9*4096])
}

// TestTroubleIsNoProof revokes memory of a device that says that a queue has failed, stops nothing,
// and answers EIO. It is there, and peers can write: only one that was taken away proves an end.
func TestTroubleIsNoProof(t *testing.T) {
	d := fakeDevices(t, 1)
	l := openLink(t, d, testShape{})
	far := d.fake.Device(1)
	regions := far.Get("mrs")
	far.Set("modify_busy", math.MaxUint32)
	far.Set("deregister_eio", 1)
	for range 20 {
		require.Error(t, l.far.Revoke(testKey))
		time.Sleep(time.Millisecond) // the event is looked at meanwhile
	}
	far.Set("modify_busy", 0)
	far.Set("deregister_eio", 0)
	require.NoError(t, l.far.Revoke(testKey))
	require.Less(t, far.Get("mrs"), regions)
}
