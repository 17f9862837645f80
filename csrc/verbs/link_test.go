// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package verbs

import (
	"errors"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/hostmem"
	"github.com/sluicehq/sluice/internal/proc"
	"github.com/sluicehq/sluice/internal/testing/standin"
	"github.com/sluicehq/sluice/internal/testing/testkit"
)

// patience is what a test waits for anything.
const patience = time.Minute

// testShape says what a link is to be like; zero values are filled in.
type testShape struct {
	config Config
	pairs  int
	bytes  int
	// Of an acknowledgement; 16 and 2 are some 800 ms until a dead wire is noticed.
	timeout, retries int
	spin             bool   // the test polls without sleeping: Context.Drive
	prefer           uint32 // a bit for each rail that suits the memory
}

// testLink is a connection from near to far, with the memory at its ends. The test stands in for
// the control plane.
type testLink struct {
	near, far     *Context
	conn, back    *Conn
	local, remote []byte
	slot          uint32
	epoch         uint64 // of far's memory
	tag           uint64
	shape         testShape
	wake, news    *proc.Event // of near
	farWake       *proc.Event
	closed        bool
}

// hosts are the devices of the two ends: queue pair i goes from near[i] to far[i].
type hosts struct {
	near, far []string
	fake      *standin.VerbsFabric
}

// fakeDevices are of the stand-in.
func fakeDevices(t testing.TB, pairs int) hosts {
	t.Helper()
	f := standin.OpenVerbs(t, 2*pairs, Load)
	testkit.CheckLeaks(t, f.InUse)
	d := hosts{fake: f}
	for i := range pairs {
		d.near, d.far = append(d.near, f.Device(2*i).Name()), append(d.far, f.Device(2*i+1).Name())
	}
	return d
}

func newEvent(t testing.TB) *proc.Event {
	t.Helper()
	e, err := proc.NewEvent()
	require.NoError(t, err)
	t.Cleanup(func() { _ = e.Close() })
	return e
}

func openEnd(t testing.TB, s testShape, devices []string, wake, news *proc.Event) *Context {
	t.Helper()
	cfg := s.config
	cfg.WakeFD, cfg.ControlFD = wake.FD(), news.FD()
	c, err := Open(cfg)
	require.NoError(t, err)
	for _, name := range devices {
		if _, err := c.OpenRail(RailConfig{Device: name, Port: 1, GID: 1, Timeout: s.timeout,
			Retries: s.retries}); err != nil {
			t.Fatal(err)
		}
	}
	return c
}

// mapped registers memory on all rails.
func (s testShape) mapped(t testing.TB, c *Context) []byte {
	t.Helper()
	buf, err := hostmem.Alloc(uint64(s.bytes), hostmem.Options{Purpose: "test"})
	require.NoError(t, err)
	t.Cleanup(func() { _ = buf.Close() })
	mem := buf.Bytes()
	pins := make([]Pin, s.pairs)
	for i := range pins {
		pins[i], err = c.Pin(i, rangeOf(mem), 0)
		require.NoError(t, err)
	}
	require.NoError(t, mapRange(c, testKey, mem, pins, s.prefer))
	return mem
}

func fillShape(s testShape) testShape {
	or := func(v *int, d int) {
		if *v == 0 {
			*v = d
		}
	}
	or(&s.pairs, 1)
	or(&s.bytes, testBytes)
	or(&s.timeout, 14)
	or(&s.retries, 3)
	or(&s.config.BatchesMax, 64)
	or(&s.config.NotifyMax, 8)
	or(&s.config.ConnsMax, 4)
	or(&s.config.Depth, 32)
	if s.config.SliceMax == 0 {
		s.config.SliceMax = 256 << 10
	}
	if s.config.FlightMax == 0 {
		s.config.FlightMax = 2 << 20
	}
	if s.config.SpinNanos == 0 {
		s.config.SpinNanos = 20000
	}
	return s
}

// openLink connects both ends, with all queue pairs live.
func openLink(t testing.TB, d hosts, s testShape) *testLink {
	t.Helper()
	s = fillShape(s)
	l := &testLink{shape: s, wake: newEvent(t), news: newEvent(t), farWake: newEvent(t)}
	l.near = openEnd(t, s, d.near, l.wake, l.news)
	l.far = openEnd(t, s, d.far, l.farWake, newEvent(t))
	l.local, l.remote = s.mapped(t, l.near), s.mapped(t, l.far)
	t.Cleanup(func() { l.close(t) })
	var err error
	l.conn, err = l.near.Connect(true, s.config.NotifyMax)
	require.NoError(t, err)
	l.back, err = l.far.Connect(false, 0)
	require.NoError(t, err)
	for i := range s.pairs {
		l.make(t, i)
	}
	for range s.pairs {
		l.awaitNews(t, PairLive)
	}
	l.slot = l.imported(t)
	return l
}

func (l *testLink) close(t testing.TB) {
	t.Helper()
	if l.closed {
		return
	}
	l.closed = true
	for _, c := range []*Conn{l.conn, l.back} {
		if c == nil {
			continue
		}
		if err := c.Close(); err != nil {
			t.Errorf("close a connection: %v", err)
		}
	}
	for _, c := range []*Context{l.near, l.far} {
		if err := c.Close(); err != nil {
			t.Errorf("close: %v", err)
		}
	}
}

// make makes a queue pair, or makes it anew as the control plane does when it has failed.
func (l *testLink) make(t testing.TB, pair int) {
	t.Helper()
	l.makeHaving(t, pair, l.back.Seen)
}

// makeHaving has the owner say how many messages it has seen.
func (l *testLink) makeHaving(t testing.TB, pair int, seen func() uint64) {
	t.Helper()
	mine, err := l.conn.PairMake(pair, pair)
	require.NoError(t, err)
	require.NoError(t, l.back.PairEnd(pair))
	had := seen()
	theirs, err := l.back.PairMake(pair, pair)
	require.NoError(t, err)
	require.NoError(t, l.back.PairBegin(pair, mine))
	require.NoError(t, l.conn.PairSettle(pair, had))
	require.NoError(t, l.conn.PairBegin(pair, theirs))
}

// imported grants all of far's memory, at addresses of this epoch, and imports it.
func (l *testLink) imported(t testing.TB) uint32 {
	t.Helper()
	im := Import{Base: baseOf(l.remote) + l.epoch<<48, Size: uint64(len(l.remote))}
	for i := range l.shape.pairs {
		k, err := l.far.Grant(testKey, i, im.Base, 0)
		require.NoError(t, err)
		im.RemoteKeys = append(im.RemoteKeys, k)
	}
	slot, err := l.conn.Import(im)
	require.NoError(t, err)
	return slot
}

// awaitNews waits for news of near of one kind; any other fails the test.
func (l *testLink) awaitNews(t testing.TB, kind int) News {
	t.Helper()
	for end := time.Now().Add(patience); time.Now().Before(end); time.Sleep(time.Millisecond) {
		if n, ok := l.near.News(); ok {
			if n.Kind != kind {
				t.Fatalf("news %+v, want %d; %s", n, kind, Status(n.Status))
			}
			return n
		}
	}
	t.Fatalf("no news %d", kind)
	return News{}
}

// descs names the keys.
func (l *testLink) descs(descs ...driver.Desc) []driver.Desc {
	for i := range descs {
		descs[i].LocalKey, descs[i].RemoteKey = testKey, l.slot
	}
	return descs
}

// batchOf is a batch of descriptors with a notification, unless that is nil.
func batchOf(op driver.Op, descs []driver.Desc, msg []byte) *driver.Batch {
	b := &driver.Batch{Op: op, Descs: descs, Notify: msg}
	if msg != nil {
		b.Tail = driver.NotifyTail
	}
	return b
}

// pattern is one of count entries of one run, between l's memories.
func (l *testLink) pattern(count int, run, local, remote uint64) *driver.Pattern {
	return &driver.Pattern{
		Count: count, Run: run, LocalKey: testKey, RemoteKey: l.slot,
		Local: driver.Side{Stride: local}, Remote: driver.Side{Stride: remote},
	}
}

// submit starts a batch, when there is room, and returns its tag.
func (l *testLink) submit(t testing.TB, op driver.Op, msg []byte, descs ...driver.Desc) uint64 {
	t.Helper()
	l.tag++
	for end := time.Now().Add(patience); ; time.Sleep(20 * time.Microsecond) {
		err := l.conn.Submit(l.tag, batchOf(op, l.descs(descs...), msg))
		if err == nil {
			return l.tag
		}
		if !errors.Is(err, driver.ErrFull) || time.Now().After(end) {
			t.Fatal(err)
		}
	}
}

// take waits for one completion.
func (l *testLink) take(t testing.TB) Done {
	t.Helper()
	var done [1]Done
	end := time.Now().Add(patience)
	for i := 0; l.near.Poll(done[:]) == 0; i++ {
		if l.shape.spin {
			l.near.Drive()
			if i%1024 != 1023 {
				continue
			}
		} else {
			time.Sleep(20 * time.Microsecond)
		}
		if time.Now().After(end) {
			t.Fatal("nothing completes")
		}
	}
	return done[0]
}

// outcome waits for the completion of a tag, which must be the next.
func (l *testLink) outcome(t testing.TB, tag uint64) error {
	t.Helper()
	d := l.take(t)
	if d.Tag != tag {
		t.Fatalf("tag %d completed, want %d", d.Tag, tag)
	}
	return Error(d)
}

// move runs one batch.
func (l *testLink) move(t testing.TB, op driver.Op, descs ...driver.Desc) error {
	t.Helper()
	return l.outcome(t, l.submit(t, op, nil, descs...))
}

// notif waits for a message at far.
func (l *testLink) notif(t testing.TB) Notif {
	t.Helper()
	for end := time.Now().Add(patience); time.Now().Before(end); time.Sleep(20 * time.Microsecond) {
		if n, ok := l.far.Receive(); ok {
			return n
		}
	}
	t.Fatal("no message comes")
	return Notif{}
}

const (
	testBytes = 4 << 20
	testKey   = 7
)

// fill writes bytes that depend on a seed.
func fill(b []byte, seed uint64) {
	r := rand.New(rand.NewPCG(seed, 1))
	for i := range b {
		b[i] = byte(r.Uint32())
	}
}
