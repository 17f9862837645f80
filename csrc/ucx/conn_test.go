// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package ucx

import (
	"bytes"
	"encoding/binary"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/csrc/ring"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/driver/drivertest"
	"github.com/sluicehq/sluice/internal/hostmem"
	"github.com/sluicehq/sluice/internal/proc"
	"github.com/sluicehq/sluice/internal/testing/leak"
)

const (
	testBytes = 4 << 20
	testGrace = 2 * time.Second
	testLimit = 20 * time.Second // of what must happen but not when
	testKey   = 7
)

// overTCP is how both ends open their contexts.
var overTCP = Config{Transports: "tcp", Devices: "lo", SegmentMax: 60 << 10,
	Settings: []string{"TCP_TX_SEG_SIZE=64k", "TCP_RX_SEG_SIZE=128k", "RNDV_THRESH=inf"}}

// lane is a connection from near to far, and the memory at its ends.
type lane struct {
	near, far     *Context
	conn, back    *Conn
	local, remote []byte
	slot          uint32
	wake          *proc.Event
	tag           uint64
}

// submit submits descriptors; a nil msg is none.
func submit(c *Conn, op driver.Op, tag uint64, descs []driver.Desc, msg []byte) error {
	b := driver.Batch{Op: op, Descs: descs, Notify: msg}
	if msg != nil {
		b.Tail = driver.NotifyTail
	}
	return c.Submit(tag, &b)
}

func submitPattern(c *Conn, op driver.Op, tag uint64, p *driver.Pattern, msg []byte) error {
	b := driver.Batch{Op: op, Pattern: p, Notify: msg}
	if msg != nil {
		b.Tail = driver.NotifyTail
	}
	return c.Submit(tag, &b)
}

func openContext(t testing.TB, c Config, wake *proc.Event) *Context {
	t.Helper()
	c.Workers = max(c.Workers, 1)
	c.BatchesMax, c.NotifyMax, c.SpinNanos = 8, 4, 20000
	if c.GraceNanos == 0 {
		c.GraceNanos = uint64(testGrace)
	}
	c.WakeFD, c.ControlFD = wake.FD(), wake.FD()
	err := Load("")
	var x *Context
	if err == nil {
		x, err = Open(c)
	}
	if err != nil {
		drivertest.SkipIfUnavailable(t, err)
		t.Fatal(err)
	}
	return x
}

func mapped(t testing.TB, c *Context) []byte {
	t.Helper()
	buf, err := hostmem.Alloc(testBytes, hostmem.Options{Purpose: "test"})
	require.NoError(t, err)
	t.Cleanup(func() { _ = buf.Close() })
	require.NoError(t, c.Map(testKey, Memory{Ticket: 1, Mem: buf.Bytes()}))
	return buf.Bytes()
}

// join makes both ends of a connection.
func join(t testing.TB, near, far *Context) (conn, back *Conn) {
	t.Helper()
	return joinWorkers(t, near, far, 0, 0)
}

func joinWorkers(t testing.TB, near, far *Context, at, to int) (conn, back *Conn) {
	t.Helper()
	conn, err := near.Connect(at, far.Address(to))
	require.NoError(t, err)
	back, err = far.Connect(to, near.Address(at))
	require.NoError(t, err)
	back.Bind(conn.ID(), uint64(testGrace))
	conn.Bind(back.ID(), uint64(testGrace))
	return conn, back
}

func openLane(t testing.TB, c Config) *lane {
	t.Helper()
	leak.Check(t, hostmem.InUse)
	wake, err := proc.NewEvent()
	require.NoError(t, err)
	t.Cleanup(func() { _ = wake.Close() })
	l := &lane{wake: wake, near: openContext(t, c, wake), far: openContext(t, c, wake)}
	l.local, l.remote = mapped(t, l.near), mapped(t, l.far)
	t.Cleanup(func() { l.close(t) }) // before the memory goes
	l.conn, l.back = join(t, l.near, l.far)
	l.imports(t)
	return l
}

func (l *lane) imports(t testing.TB) {
	t.Helper()
	slot, err := l.conn.Import(Import{Key: testKey, Size: testBytes, Ticket: 1})
	require.NoError(t, err)
	l.slot = slot
}

func (l *lane) close(t testing.TB) {
	t.Helper()
	for _, c := range []*Conn{l.conn, l.back} {
		if c != nil { // it got so far
			_ = c.Close(testGrace)
		}
	}
	if err := l.near.Close(); err != nil {
		t.Errorf("close: %v", err)
	}
	if err := l.far.Close(); err != nil {
		t.Errorf("close: %v", err)
	}
}

// outcome waits for the completion of a tag.
func (l *lane) outcome(t *testing.T, tag uint64) error {
	t.Helper()
	var done [1]ring.Done
	for end := time.Now().Add(testLimit); l.near.Poll(done[:]) == 0; {
		if time.Now().After(end) {
			t.Fatalf("tag %d does not complete", tag)
		}
	}
	if done[0].Tag != tag {
		t.Fatalf("tag %d completed, want %d", done[0].Tag, tag)
	}
	return Error(done[0])
}

// notif waits for the next message on the far side.
func (l *lane) notif(t *testing.T) Notif {
	t.Helper()
	for end := time.Now().Add(testLimit); time.Now().Before(end); {
		if notif, ok := l.far.Receive(); ok {
			return notif
		}
	}
	t.Fatal("a message does not arrive")
	return Notif{}
}

func (l *lane) move(t *testing.T, op driver.Op, descs ...driver.Desc) error {
	t.Helper()
	l.tag++
	for i := range descs {
		descs[i].LocalKey, descs[i].RemoteKey = testKey, l.slot
	}
	if err := submit(l.conn, op, l.tag, descs, nil); err != nil {
		return err
	}
	return l.outcome(t, l.tag)
}

func fill(b []byte, seed uint64) {
	var key [32]byte
	binary.LittleEndian.PutUint64(key[:], seed)
	_, _ = rand.NewChaCha8(key).Read(b)
}

func TestMovesBytes(t *testing.T) {
	l := openLane(t, overTCP)
	fill(l.local, 1)
	for _, n := range []uint64{1, 8, 656, 4095, 16000, 16001, 40000, 70000, 1 << 20,
		testBytes - 3} {
		if err := l.move(t, driver.Write, driver.Desc{Local: 1, Remote: 3, Len: n}); err != nil {
			t.Fatalf("write %d: %v", n, err)
		}
		if !bytes.Equal(l.remote[3:3+n], l.local[1:1+n]) {
			t.Fatalf("write %d: other bytes", n)
		}
		clear(l.local)
		if err := l.move(t, driver.Read, driver.Desc{Local: 2, Remote: 3, Len: n}); err != nil {
			t.Fatalf("read %d: %v", n, err)
		}
		if !bytes.Equal(l.remote[3:3+n], l.local[2:2+n]) {
			t.Fatalf("read %d: other bytes", n)
		}
		fill(l.local, n)
	}
}

func TestNotifs(t *testing.T) {
	l := openLane(t, overTCP)
	d := []driver.Desc{{Len: 100000, LocalKey: testKey, RemoteKey: l.slot}}
	for i := range 10 {
		fill(l.local[:100000], uint64(i))
		var around struct { // a message may lie beside pointers, which concern nobody
			next *int
			msg  [4000]byte
		}
		around.next = new(int)
		msg := around.msg[:i*400]
		fill(msg, uint64(i))
		require.NoError(t, submit(l.conn, driver.Write, uint64(i), d, msg))
		notif := l.notif(t)
		if !bytes.Equal(notif.Data, msg) || notif.Conn != l.back.ID() {
			t.Fatalf("message %d: %d bytes", i, len(notif.Data))
		}
		if !bytes.Equal(l.local[:100000], l.remote[:100000]) {
			t.Fatal("a message came before its data")
		}
		require.NoError(t, l.outcome(t, uint64(i)))
	}
}
