// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package ucx

import (
	"bytes"
	"errors"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/csrc/ring"
	"github.com/sluicehq/sluice/driver"
)

// outcomes collects completions until each tag of [from, to) has one, and sees that none has two.
func (l *lane) outcomes(t *testing.T, from, to uint64) map[uint64]error {
	t.Helper()
	got := make(map[uint64]error)
	var done [4]ring.Done
	end := time.Now().Add(testLimit)
	for len(got) < int(to-from) {
		if time.Now().After(end) {
			t.Fatalf("%d of %d batches complete", len(got), to-from)
		}
		for _, d := range done[:l.near.Poll(done[:])] {
			if _, twice := got[d.Tag]; twice || d.Tag < from || d.Tag >= to {
				t.Fatalf("tag %d completes twice, or was not submitted", d.Tag)
			}
			got[d.Tag] = Error(d)
		}
	}
	time.Sleep(time.Millisecond)
	if n := l.near.Poll(done[:]); n != 0 {
		t.Fatalf("tag %d completes twice", done[0].Tag)
	}
	return got
}

func (l *lane) desc(local, remote, n uint64) driver.Desc {
	return driver.Desc{Local: local, Remote: remote, Len: n, LocalKey: testKey, RemoteKey: l.slot}
}

// works sees that the connection is as good as new.
func (l *lane) works(t *testing.T) {
	t.Helper()
	fill(l.local[:1000], l.tag)
	require.NoError(t, l.move(t, driver.Write, driver.Desc{Local: 1, Remote: 2, Len: 999}))
	if !bytes.Equal(l.local[1:1000], l.remote[2:1001]) {
		t.Fatal("other bytes")
	}
}

func TestDoesNotKeepTheCallersArrays(t *testing.T) {
	l := openLane(t, overTCP)
	fill(l.remote[:4096], 3)
	for i := range 200 {
		clear(l.local[:4096])
		d := []driver.Desc{l.desc(100, 0, 300), l.desc(1000, 700, 300)}
		p := &driver.Pattern{Count: 2, Run: 100, Local: driver.Side{Base: 2000, Stride: 100},
			Remote: driver.Side{Stride: 100, List: []uint32{7, 3}}, LocalKey: testKey,
			RemoteKey: l.slot}
		tag := uint64(2 * i)
		require.NoError(t, errors.Join(submit(l.conn, driver.Read, tag, d, nil),
			submitPattern(l.conn, driver.Read, tag+1, p, nil)))
		d[0], d[1] = l.desc(3000, 2000, 300), l.desc(3500, 2500, 300)
		p.Remote.List[0], p.Remote.List[1] = 20, 21
		for tag, err := range l.outcomes(t, tag, tag+2) {
			if err != nil {
				t.Fatalf("tag %d: %v", tag, err)
			}
		}
		if !bytes.Equal(l.local[100:400], l.remote[:300]) ||
			!bytes.Equal(l.local[1000:1300], l.remote[700:1000]) ||
			!bytes.Equal(l.local[2000:2100], l.remote[700:800]) ||
			!bytes.Equal(l.local[2100:2200], l.remote[300:400]) {
			t.Fatal("the bytes are not where Submit said")
		}
	}
}

func TestRefusesUnknownKeys(t *testing.T) {
	l := openLane(t, overTCP)
	good := l.desc(0, 0, 10)
	for name, bad := range map[string]driver.Desc{
		"local key":      {Len: 10, LocalKey: 99, RemoteKey: l.slot},
		"far local key":  {Len: 10, LocalKey: KeysMax + 5, RemoteKey: l.slot},
		"slot":           {Len: 10, LocalKey: testKey, RemoteKey: l.slot + 1},
		"far slot":       {Len: 10, LocalKey: testKey, RemoteKey: 1 << 31},
		"nothing":        l.desc(0, 0, 0),
		"local end":      l.desc(testBytes-9, 0, 10),
		"remote end":     l.desc(0, testBytes-9, 10),
		"round the end":  l.desc(1<<63, 1<<63, 1<<63),
		"beyond the end": l.desc(^uint64(0)-4, 0, 10),
	} {
		err := submit(l.conn, driver.Write, 1, []driver.Desc{good, good, bad}, nil)
		var piece *driver.PieceError
		if !errors.Is(err, driver.ErrBounds) || !errors.As(err, &piece) || piece.Piece != 2 {
			t.Errorf("%s: %v", name, err)
		}
	}
	p := &driver.Pattern{Count: 2, Run: 1, Local: driver.Side{Stride: 1 << 40},
		Remote: driver.Side{Stride: 1}, LocalKey: testKey, RemoteKey: l.slot}
	if err := submitPattern(l.conn, driver.Read, 1, p, nil); !errors.Is(err,
		driver.ErrBounds) {
		t.Errorf("pages that overflow: %v", err)
	}
	l.works(t)
}

func TestMovesManyUnalignedPieces(t *testing.T) {
	l := openLane(t, overTCP)
	fill(l.local, 5)
	fill(l.remote, 6)
	r := rand.New(rand.NewPCG(7, 7))
	var descs []driver.Desc
	for i, at := range r.Perm(4096) {
		descs = append(descs, l.desc(uint64(i)*1001+3, uint64(at)*997+5, uint64(1+r.IntN(990))))
	}
	pages := &driver.Pattern{Count: 65536, Run: 17, Local: driver.Side{Base: 7, Stride: 33},
		Remote:   driver.Side{Base: 11, Stride: 29},
		LocalKey: testKey, RemoteKey: l.slot}
	for _, at := range r.Perm(65536) {
		pages.Remote.List = append(pages.Remote.List, uint32(at))
	}
	for _, op := range []driver.Op{driver.Write, driver.Read} {
		require.NoError(t, l.move(t, op, descs...))
		for _, d := range descs {
			if !bytes.Equal(l.local[d.Local:d.Local+d.Len], l.remote[d.Remote:d.Remote+d.Len]) {
				t.Fatalf("%v: other bytes at %+v", op, d)
			}
		}
		fill(l.local, 8)
		l.tag++
		require.NoError(t, errors.Join(submitPattern(l.conn, op, l.tag, pages, nil),
			l.outcome(t, l.tag)))
		for i := range pages.Count {
			if at, to := pages.Local.At(i), pages.Remote.At(i); !bytes.Equal(l.local[at:at+17],
				l.remote[to:to+17]) {
				t.Fatalf("%v: other bytes in page %d", op, i)
			}
		}
	}
	// One range of 65,536 neighbours: its pieces must not be put together for each message.
	pages = &driver.Pattern{Count: 65536, Run: 64, Local: driver.Side{Stride: 64},
		Remote: driver.Side{Stride: 64}, LocalKey: testKey, RemoteKey: l.slot}
	l.tag++
	require.NoError(t, errors.Join(submitPattern(l.conn, driver.Read, l.tag, pages, nil),
		l.outcome(t, l.tag)))
	if !bytes.Equal(l.local, l.remote) {
		t.Fatal("other bytes in neighbours")
	}
}

// insist submits a write with a message, as soon as the credit for it is back.
func (l *lane) insist(t *testing.T, tag uint64, d []driver.Desc, msg []byte) {
	t.Helper()
	err := driver.ErrFull
	for end := time.Now().Add(testLimit); errors.Is(err, driver.ErrFull) &&
		time.Now().Before(end); {
		err = submit(l.conn, driver.Write, tag, d, msg)
	}
	if err != nil {
		t.Fatalf("batch %d: %v", tag, err)
	}
}

func TestCreditComesBack(t *testing.T) {
	l := openLane(t, overTCP)
	msg := make([]byte, NotifMax)
	fill(msg, 1)
	for round := range 20 {
		for i := range uint64(4) {
			l.insist(t, i, nil, msg[:NotifMax*(i%2)])
		}
		l.outcomes(t, 0, 4)
		if err := submit(l.conn, driver.Write, 5, nil, msg); !errors.Is(err,
			driver.ErrFull) {
			t.Fatalf("one message too many: %v", err)
		}
		l.wake.Drain()
		_ = l.near.Arm()
		for i := range 4 {
			notif := l.notif(t)
			if !bytes.Equal(notif.Data, msg[:NotifMax*(i%2)]) || notif.Conn != l.back.ID() {
				t.Fatalf("round %d, message %d: %d bytes", round, i, len(notif.Data))
			}
		}
		_ = l.wake.SetDeadline(time.Now().Add(testLimit))
		require.NoError(t, l.wake.Wait(), "no wake-up when there is credit again")
	}
}

func TestRefusedBatchesKeepCredit(t *testing.T) {
	l := openLane(t, overTCP)
	require.NoError(t, l.far.Revoke(testKey, testLimit))
	msg := []byte("not delivered")
	for i := range uint64(20) {
		d := []driver.Desc{l.desc(0, 0, 100000)}
		l.insist(t, i, d, msg)
		if err := l.outcome(t, i); !errors.Is(err, driver.ErrRevoked) {
			t.Fatalf("batch %d: %v", i, err)
		}
	}
	if _, ok := l.far.Receive(); ok {
		t.Fatal("the message of a batch that failed arrived")
	}
}
