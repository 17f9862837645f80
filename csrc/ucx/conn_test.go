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
	"github.com/sluicehq/sluice/internal/testing/testkit"
)

const (
	testBytes = 4 << 20
	testGrace = 2 * time.Second
	testLimit = 20 * time.Second // of what must happen but not when
	testKey   = 7
)

// overTCP is how both ends open their contexts.
var overTCP = Config{Transports: "tcp", Devices: "lo",
	Settings: []string{"TCP_TX_SEG_SIZE=64k", "TCP_RX_SEG_SIZE=128k", "RNDV_THRESH=inf"}}

// lane is a connection from near to far, and the memory at its ends.
type lane struct {
	near, far     *Context
	conn, back    *Conn
	local, remote []byte
	slot          uint32
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

func openContext(t testing.TB, c Config, wake *proc.Event) *Context {
	t.Helper()
	c.Workers, c.BatchesMax, c.NotifyMax, c.SpinNanos = 1, 8, 4, 20000
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

// openLane connects both ends, which the end of the test closes.
func openLane(t testing.TB, c Config) *lane {
	t.Helper()
	testkit.CheckLeaks(t, hostmem.InUse)
	wake, err := proc.NewEvent()
	require.NoError(t, err)
	t.Cleanup(func() { _ = wake.Close() })
	l := &lane{near: openContext(t, c, wake), far: openContext(t, c, wake)}
	for end, mem := range map[*Context]*[]byte{l.near: &l.local, l.far: &l.remote} {
		buf, err := hostmem.Alloc(testBytes, hostmem.Options{Purpose: "test"})
		require.NoError(t, err)
		t.Cleanup(func() { _ = buf.Close() })
		*mem = buf.Bytes()
		require.NoError(t, end.Map(testKey, Memory{Ticket: 1, Mem: *mem}))
	}
	t.Cleanup(func() { l.close(t) }) // before the memory goes
	l.conn, err = l.near.Connect(0, l.far.Address(0))
	require.NoError(t, err)
	l.back, err = l.far.Connect(0, l.near.Address(0))
	require.NoError(t, err)
	l.back.Bind(l.conn.ID(), uint64(testGrace))
	l.conn.Bind(l.back.ID(), uint64(testGrace))
	l.slot, err = l.conn.Import(Import{Key: testKey, Size: testBytes, Ticket: 1})
	require.NoError(t, err)
	return l
}

// close may be called twice.
func (l *lane) close(t testing.TB) {
	t.Helper()
	for _, c := range []*Conn{l.conn, l.back} {
		if c != nil { // it got so far
			_ = c.Close(testGrace)
		}
	}
	l.conn, l.back = nil, nil
	for _, c := range []*Context{l.near, l.far} {
		require.NoError(t, c.Close(), "close")
	}
}

func (l *lane) desc(local, remote, n uint64) driver.Desc {
	return driver.Desc{Local: local, Remote: remote, Len: n, LocalKey: testKey, RemoteKey: l.slot}
}

// outcome waits for the completion of a tag.
func (l *lane) outcome(t *testing.T, tag uint64) error {
	t.Helper()
	var done [1]ring.Done
	for end := time.Now().Add(testLimit); l.near.Poll(done[:]) == 0; {
		require.False(t, time.Now().After(end), "tag %d does not complete", tag)
	}
	require.EqualValues(t, tag, done[0].Tag, "tag completed")
	return Error(done[0])
}

// works sees that the connection is as good as new.
func (l *lane) works(t *testing.T) {
	t.Helper()
	l.tag++
	fill(l.local[:1000], l.tag)
	require.NoError(t, submit(l.conn, driver.Write, l.tag, []driver.Desc{l.desc(1, 2, 999)}, nil))
	require.NoError(t, l.outcome(t, l.tag))
	require.True(t, bytes.Equal(l.local[1:1000], l.remote[2:1001]), "other bytes")
}

func fill(b []byte, seed uint64) {
	var key [32]byte
	binary.LittleEndian.PutUint64(key[:], seed)
	_, _ = rand.NewChaCha8(key).Read(b)
}
