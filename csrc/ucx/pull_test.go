// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package ucx

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"runtime"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
)

const pulledWay = 1 // of ways

// offers are writes whose bytes the victim would have to take from the forger, and must
// not.
func offers(buffer uint64) map[string]forged {
	const huge = 1 << 63
	good := forged{kind: msgWrite, flags: flagPull, ticket: victimTicket, key: 7, size: 8,
		at: buffer}
	with := func(change func(f *forged)) forged {
		f := good
		change(&f)
		return f
	}
	return map[string]forged{
		"a wrong ticket":     with(func(f *forged) { f.ticket++ }),
		"a key of nothing":   with(func(f *forged) { f.key = 9 }),
		"read-only":          with(func(f *forged) { f.key = 8 }),
		"beyond the end":     with(func(f *forged) { f.off = victimTo - victimFrom - 7 }),
		"before the begin":   with(func(f *forged) { f.off = ^uint64(0) - 3 }),
		"too much":           with(func(f *forged) { f.size = victimTo - victimFrom + 1 }),
		"far too much":       with(func(f *forged) { f.size = huge }),
		"nowhere":            with(func(f *forged) { f.at = 0 }),
		"the kernel":         with(func(f *forged) { f.at = huge }),
		"the end of all":     with(func(f *forged) { f.at = ^uint64(0) - 3 }),
		"a table nowhere":    with(func(f *forged) { f.at, f.count = 8, 1 }),
		"too long a table":   with(func(f *forged) { f.count = 1024 }),
		"the longest table":  with(func(f *forged) { f.count = ^uint32(0) }),
		"a table of nothing": with(func(f *forged) { f.count = 1 }), // 0xee.. at 0xee..
	}
}

func TestForgedOffers(t *testing.T) {
	everyVictim(t, func(t *testing.T, v *victim) {
		before := bytes.Clone(v.mem)
		unchanged := func(name string) {
			t.Helper()
			v.alive(t)
			if !bytes.Equal(before, v.mem) {
				t.Fatalf("%s changed memory", name)
			}
		}
		for name, m := range offers(v.f.buffer) {
			m.conn = v.conn.ID()
			v.f.send(m, nil)
			unchanged(name)
		}
		const huge = 1 << 63
		there := v.f.buffer + 1<<19 // 0xee
		for name, rows := range map[string][]uint64{
			"a row beyond":          {victimTo - victimFrom - 7, 8, there},
			"a row before":          {^uint64(0) - 3, 8, there},
			"a long row":            {0, huge, there},
			"rows that wrap":        {0, huge, there, 0, huge + 8, there},
			"rows of less":          {0, 4, there},
			"rows of more":          {0, 8, there, 8, 1, there},
			"a good and a bad row":  {0, 4, there, victimTo - victimFrom, 4, there},
			"bytes that are nobody": {0, 8, 16},
		} {
			v.f.tell("place %x", table(rows...))
			v.f.send(forged{kind: msgWrite, flags: flagPull, conn: v.conn.ID(),
				ticket: victimTicket, key: 7, size: 8,
				count: uint32(len(rows) / 3), at: v.f.buffer}, nil)
			unchanged(name)
		}
	})
}

func TestTakesWhatIsOffered(t *testing.T) {
	v := openVictim(t, ways[pulledWay])
	require.NoError(t, v.conn.Pulls())
	before := bytes.Clone(v.mem)
	there := v.f.buffer + 1<<19
	offer := forged{kind: msgWrite, flags: flagPull | flagFirst | 2, conn: v.conn.ID(),
		ticket: victimTicket, key: 7, size: 9000,
		off: 1000, at: there}
	v.f.send(offer, nil)
	if a := v.f.await(msgAck); a.status_ != 0 {
		t.Fatalf("status %d", int32(a.status_))
	}
	copy(before[victimFrom+1000:], bytes.Repeat([]byte{0xee}, 9000))
	v.f.tell("place %x", table(12000, 100, there, 0, 10, there+7, 13000, 1, there))
	offer.count, offer.size, offer.at = 3, 111, v.f.buffer
	v.f.send(offer, nil)
	if a := v.f.await(msgAck); a.status_ != 0 {
		t.Fatalf("status %d", int32(a.status_))
	}
	for _, row := range [][2]int{{12000, 100}, {0, 10}, {13000, 1}} {
		copy(before[victimFrom+row[0]:], bytes.Repeat([]byte{0xee}, row[1]))
	}
	if !bytes.Equal(before, v.mem) {
		t.Fatal("other bytes changed than the rows name")
	}
	// Who has shut its gate offers nothing any more.
	v.f.tell("shut")
	offer.count, offer.size, offer.off, offer.at = 0, 100, 5000, there
	v.f.send(offer, nil)
	v.alive(t)
	if !bytes.Equal(before, v.mem) {
		t.Fatal("bytes landed from behind a gate that is shut")
	}
	if err := v.conn.Pulls(); !errors.Is(err, syscall.ESRCH) && !errors.Is(err, syscall.EFAULT) {
		t.Errorf("a connection to who has no gate: %v", err)
	}
}

// TestKnowsWhomItReads is told of a process whose gate has another mark, as one has
// that has the number of a peer by now.
func TestKnowsWhomItReads(t *testing.T) {
	v := openVictim(t, ways[pulledWay])
	v.f.gate.Mark[15]++
	_ = v.conn.Close(testGrace / 4)
	v.meet(t)
	if err := v.conn.Pulls(); !errors.Is(err, syscall.ESRCH) {
		t.Errorf("another process: %v", err)
	}
	before := bytes.Clone(v.mem)
	v.f.send(forged{kind: msgWrite, flags: flagPull, conn: v.conn.ID(), ticket: victimTicket,
		key: 7, size: 8, at: v.f.buffer}, nil)
	v.alive(t)
	if !bytes.Equal(before, v.mem) {
		t.Error("its bytes landed")
	}
}

// fetch submits a read of the forger's buffer, and returns the question that follows it.
func (v *victim) fetch(t *testing.T, tag, base uint64, d ...driver.Desc) forged {
	t.Helper()
	slot, err := v.conn.Import(Import{Key: 1, Size: 1 << 20, Ticket: 5,
		Export: Export{Base: base}})
	require.NoError(t, err)
	for i := range d {
		d[i].LocalKey, d[i].RemoteKey = 7, slot
	}
	require.NoError(t, submit(v.conn, driver.Read, tag, d, nil))
	q := v.f.await(msgRead)
	if q.size != 0 || q.count != 0 {
		t.Fatalf("asked for %d bytes in %d places", q.size, q.count)
	}
	return q
}

func TestFetchesAndThenAsks(t *testing.T) {
	v := openVictim(t, ways[pulledWay])
	answer := func(q forged, status int32) {
		v.f.send(forged{kind: msgData, conn: v.conn.ID(), seq: q.seq, status_: uint32(status)}, nil)
	}
	pieces := []driver.Desc{{Local: 10, Remote: 5, Len: 100}, {Local: 300, Remote: 200000,
		Len: 700}}
	answer(v.fetch(t, 1, v.f.buffer, pieces...), OK)
	require.NoError(t, v.outcome(t, 1))
	mem := v.mem[victimFrom:victimTo]
	if bytes.Count(mem[10:110], []byte{0xee}) != 100 ||
		bytes.Count(mem[300:1000], []byte{0xee}) != 700 {
		t.Fatal("other bytes")
	}
	answer(v.fetch(t, 2, v.f.buffer, pieces...), Revoked)
	if err := v.outcome(t, 2); !errors.Is(err, driver.ErrRevoked) {
		t.Fatalf("bytes that may be of another epoch: %v", err)
	}
	// Memory that is not there: its owner says whether it should be.
	answer(v.fetch(t, 3, v.f.buffer-200000+1<<20, pieces...), Revoked)
	if err := v.outcome(t, 3); !errors.Is(err, driver.ErrRevoked) {
		t.Fatalf("memory that went with its epoch: %v", err)
	}
	answer(v.fetch(t, 4, 4096, pieces...), OK)
	var piece *driver.PieceError
	if err := v.outcome(t, 4); !errors.Is(err, driver.ErrFault) || !errors.As(err, &piece) ||
		piece.Piece != 0 {
		t.Fatalf("memory that cannot be read: %v", err)
	}
	q := v.fetch(t, 5, v.f.buffer, pieces...)
	v.conn.Cancel(5)
	if err := v.outcome(t, 5); !errors.Is(err, driver.ErrAborted) {
		t.Fatal(err)
	}
	answer(q, OK)
	v.alive(t)
	v.f.tell("shut")
	slot, err := v.conn.Import(Import{Key: 1, Size: 1 << 20, Ticket: 5,
		Export: Export{Base: v.f.buffer}})
	require.NoError(t, err)
	clear(mem)
	require.NoError(t, submit(v.conn, driver.Read, 6,
		[]driver.Desc{{Len: 100, LocalKey: 7, RemoteKey: slot}}, nil))
	if err := v.outcome(t, 6); !errors.Is(err, driver.ErrPeerLost) || !errors.As(err, &piece) {
		t.Fatalf("a process that is another one by now: %v", err)
	}
	if bytes.Count(mem, []byte{0}) != len(mem) {
		t.Fatal("its bytes were read")
	}
}

// TestAsksForEachMemory reads from several memories in one batch: each is asked for, and one
// that is of another epoch by now fails the batch at its piece.
func TestAsksForEachMemory(t *testing.T) {
	v := openVictim(t, ways[pulledWay])
	var slots [2]uint32
	for i := range slots {
		var err error
		slots[i], err = v.conn.Import(Import{Key: uint32(1 + i), Size: 1 << 20, Ticket: 5,
			Export: Export{Base: v.f.buffer}})
		require.NoError(t, err)
	}
	var d []driver.Desc
	for i, slot := range []uint32{slots[0], slots[1], slots[0]} {
		d = append(d, driver.Desc{Local: uint64(i) * 500, Remote: uint64(i) * 500, Len: 100,
			LocalKey: 7, RemoteKey: slot})
	}
	require.NoError(t, submit(v.conn, driver.Read, 1, d, nil))
	for i, status := range []int32{OK, Revoked, OK} {
		q := v.f.await(msgRead)
		if want := d[i].RemoteKey - slots[0] + 1; q.key != want || q.size != 0 {
			t.Fatalf("question %d is for %d bytes of key %d, want none of %d", i, q.size, q.key,
				want)
		}
		v.f.send(forged{kind: msgData, conn: v.conn.ID(), seq: q.seq, status_: uint32(status)}, nil)
	}
	var piece *driver.PieceError
	if err := v.outcome(t, 1); !errors.Is(err, driver.ErrRevoked) || !errors.As(err, &piece) ||
		piece.Piece != 1 {
		t.Errorf("bytes of which some may be of another epoch: %v", err)
	}
}

// TestGateGoesWithItsConnection looks for the mark of one that owes its peer nothing.
func TestGateGoesWithItsConnection(t *testing.T) {
	v := openVictim(t, ways[pulledWay])
	self, err := os.Open("/proc/self/mem")
	require.NoError(t, err)
	defer self.Close()
	gate := v.conn.Gate()
	shows := func() bool {
		var mark [len(gate.Mark)]byte
		_, err := self.ReadAt(mark[:], int64(gate.At))
		return err == nil && mark == gate.Mark
	}
	if !shows() {
		t.Fatal("a connection without a gate")
	}
	v.conn.End(Closed, true)
	if shows() {
		t.Error("the gate of a connection that has ended is open")
	}
}

// isReserved reports whether nothing else can be mapped at an address, and nobody reads there.
func isReserved(t *testing.T, at uint64) bool {
	t.Helper()
	maps, err := os.ReadFile("/proc/self/maps")
	require.NoError(t, err)
	for line := range strings.Lines(string(maps)) {
		var from, to uint64
		var may string
		if _, err := fmt.Sscanf(line, "%x-%x %s", &from, &to, &may); err == nil && from <= at &&
			at < to {
			return may == "---p"
		}
	}
	return false
}

// TestGateShutsOnWhoIsLate has the forger take what was offered to it, as an owner does
// that was frozen after it had compared the ticket.
func TestGateShutsOnWhoIsLate(t *testing.T) {
	v := openVictim(t, ways[pulledWay])
	for name, d := range map[string][]driver.Desc{
		"plain":     {{Len: 5000}},
		"scattered": {{Len: 50}, {Local: 100, Remote: 200, Len: 60}},
	} {
		slot, err := v.conn.Import(Import{Key: 1, Size: 1 << 20, Ticket: 5})
		require.NoError(t, err)
		for i := range d {
			d[i].LocalKey, d[i].RemoteKey = 7, slot
		}
		require.NoError(t, submit(v.conn, driver.Write, 1, d, nil))
		o := v.f.await(msgWrite)
		if o.flags&flagPull == 0 || o.at == 0 {
			t.Fatalf("%s: %+v", name, o)
		}
		gate := v.conn.Gate()
		pull := func() int64 {
			v.f.tell("pull %d %d %d 24", os.Getpid(), gate.At, o.at)
			return v.f.pulled
		}
		if got := pull(); got != 16+24 {
			t.Fatalf("%s: the owner gets %d bytes", name, got)
		}
		v.conn.End(Closed, true)
		if got := pull(); got != -1 {
			t.Fatalf("%s: the owner gets %d bytes when it is over", name, got)
		}
		if err := v.outcome(t, 1); !errors.Is(err, driver.ErrClosed) {
			t.Fatal(err)
		}
		_ = v.conn.Close(testGrace / 4)
		if got := pull(); got != -1 {
			t.Fatalf("%s: the owner gets %d bytes when the connection is gone", name, got)
		}
		if !isReserved(t, gate.At) {
			t.Errorf("%s: something else may come to lie where a late owner looks for the gate",
				name)
		}
		v.meet(t)
	}
}

// TestGateThatIsNotShut stands open, as the kernel refuses to take the page away at first: the
// write does not end before, since an owner that stands still could take other bytes from its
// place.
func TestGateThatIsNotShut(t *testing.T) {
	v := openVictim(t, ways[pulledWay])
	slot, err := v.conn.Import(Import{Key: 1, Size: 1 << 20, Ticket: 5})
	require.NoError(t, err)
	d := []driver.Desc{{Len: 5000, LocalKey: 7, RemoteKey: slot}}
	require.NoError(t, submit(v.conn, driver.Write, 1, d, nil))
	o, gate := v.f.await(msgWrite), v.conn.Gate()
	ended := make(chan error)
	go func() {
		runtime.LockOSThread() // and never lets go: the thread ends with the goroutine
		err := refusePage(gate.At)
		v.conn.End(Closed, false)
		ended <- err
	}()
	require.NoError(t, <-ended)
	require.ErrorIs(t, v.outcome(t, 1), driver.ErrClosed)
	v.f.tell("pull %d %d %d 24", os.Getpid(), gate.At, o.at)
	require.EqualValues(t, -1, v.f.pulled, "bytes that the owner gets when it is over")
	require.True(t, isReserved(t, gate.At))
}
