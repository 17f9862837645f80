// SPDX-License-Identifier: Apache-2.0

package tcp

import (
	"encoding/binary"
	"net"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/session"
	"github.com/sluicehq/sluice/internal/testing/allocs"
	"github.com/sluicehq/sluice/internal/testing/leak"
	"github.com/sluicehq/sluice/internal/testing/manualclock"
	"github.com/sluicehq/sluice/internal/testing/promise"
)

// TestPollerReads has a goroutine poll while the reader of the connection stands aside for good: it
// reads the acknowledgement itself, and allocates nothing.
func TestPollerReads(t *testing.T) {
	leak.Check(t)
	x := newLed(t)
	x.untilAside()
	var done [1]driver.Completion
	for range 50 {
		tag := x.submit()
		require.NoError(t, await(t, x.b, tag))
	}
	if aside, _, _ := x.state(); !aside {
		t.Fatal("the reader came back")
	}
	each := allocs.PerRun(100, func() {
		if n, err := x.b.Poll(done[:]); n != 0 || err != nil {
			t.Fatal("a completion that was not asked for: ", n, err)
		}
	})
	require.Zero(t, each, "allocations of a poller that reads in vain")
}

// TestPollerIsItsOwnPeer spins for what it sends to itself: no call allocates, also where look has
// to leave what it meets to the reader.
func TestPollerIsItsOwnPeer(t *testing.T) {
	leak.Check(t)
	b := open(t, Config{})
	local, _ := share(t, b, 4096)
	m, _ := share(t, b, 4096)
	p := dial(t, b, b.Addr())
	token, err := m.AppendToken(nil)
	require.NoError(t, err)
	key, _, err := p.Import(token)
	require.NoError(t, err)
	var done [1]driver.Completion
	var msgs [1]driver.Message
	for _, op := range []driver.Op{driver.Write, driver.Read} {
		batch := driver.Batch{Op: op, Descs: []driver.Desc{{Len: 64, LocalKey: local.key,
			RemoteKey: key}}}
		each := allocs.PerRun(200, func() {
			require.NoError(t, p.Submit(1, &batch))
			for n := 0; n == 0; {
				_, err = b.Receive(msgs[:])
				require.NoError(t, err)
				n, err = b.Poll(done[:])
				require.NoError(t, err)
			}
		})
		require.Zero(t, each, "allocations of a %v", op)
	}
}

// TestPollersReadBesideReaders has both ends spin: each message comes once, in its order, whether
// the reader of its connection or the goroutine that polls read it.
func TestPollersReadBesideReaders(t *testing.T) {
	leak.Check(t)
	clock := manualclock.New()
	left, right := openBy(t, clock, Config{}), openBy(t, clock, Config{})
	there, back := dial(t, left, right.Addr()), dial(t, right, left.Addr())
	const rounds = 300
	tell := func(b *Backend, p *peer, i uint64) error {
		var done [1]driver.Completion
		batch := driver.Batch{Op: driver.Write, Tail: driver.NotifyTail,
			Notify: binary.LittleEndian.AppendUint64(nil, i)}
		end, err := time.Now().Add(limit), p.Submit(i, &batch)
		for err == driver.ErrFull && time.Now().Before(end) { // until there is room again
			runtime.Gosched()
			err = p.Submit(i, &batch)
		}
		clock.Advance(b.cfg.Grace + 1) // so that it is held where it has not been read
		for n := 0; err == nil && n == 0; {
			runtime.Gosched()
			if time.Now().After(end) {
				return driver.ErrTimeout
			}
			if n, err = b.Poll(done[:]); n > 0 {
				err = done[0].Err
			}
		}
		return err
	}
	hear := func(b *Backend, i uint64) {
		var msgs [2]driver.Message
		for end := time.Now().Add(limit); ; runtime.Gosched() {
			n, err := b.Receive(msgs[:])
			if err != nil || n > 1 || n == 1 && binary.LittleEndian.Uint64(msgs[0].Data) != i ||
				n == 0 && time.Now().After(end) {
				t.Errorf("message %d: %d came, first %x, %v", i, n, msgs[0].Data, err)
				return
			}
			if n == 1 {
				return
			}
		}
	}
	answered := make(chan struct{})
	go func() {
		defer close(answered)
		for i := uint64(1); i <= rounds && !t.Failed(); i++ {
			hear(right, i)
			if err := tell(right, back, i); err != nil {
				t.Error(err)
			}
		}
	}()
	for i := uint64(1); i <= rounds && !t.Failed(); i++ {
		if err := tell(left, there, i); err != nil {
			t.Error(err)
		}
		hear(left, i)
	}
	<-answered
}

// aloof has look read a pipe in place of a connection's socket, so that the runtime never tells the
// reader of what say puts there: it goes on only if look rouses it.
func aloof(t *testing.T, c *conn) (say func([]byte)) {
	t.Helper()
	var ends [2]int
	require.NoError(t, unix.Pipe2(ends[:], unix.O_NONBLOCK|unix.O_CLOEXEC))
	t.Cleanup(func() { _, _ = unix.Close(ends[0]), unix.Close(ends[1]) })
	c.rmu.Lock()
	c.lookNow = func(uintptr) { c.looked, _, c.saw = c.fetch(ends[0]) }
	c.rmu.Unlock()
	return func(b []byte) {
		t.Helper()
		n, err := unix.Write(ends[1], b)
		require.NoError(t, err)
		require.Len(t, b, n)
	}
}

// meets looks until it has read something, and fails the test where that stands still.
func meets(t *testing.T, c *conn) (ok bool) {
	t.Helper()
	met := make(chan bool, 1)
	go func() {
		for {
			if n, ok := c.look(); n > 0 {
				met <- ok
				return
			}
			runtime.Gosched() // the reader has not begun to wait
		}
	}()
	select {
	case ok = <-met:
	case <-time.After(limit):
		t.Error("a goroutine that polls stands still")
	}
	return ok
}

// asleep is a session with a backend whose reader of express waits for more, and that connection.
func asleep(t *testing.T, b *Backend, m *memory) (ends [2]net.Conn, c *conn) {
	t.Helper()
	before := acceptedBy(b)
	_, _, ends = welcomed(t, b)
	for g := range acceptedBy(b) {
		if !before[g] {
			c = g.conns[express]
		}
	}
	// A stamp that is still to come never grows old: nobody asks about this frame.
	_, err := ends[express].Write(small(m, b.clock.Now()+int64(time.Hour)))
	require.NoError(t, err)
	ack, _, err := readWord(ends[express])
	require.NoError(t, err)
	require.Equal(t, uint8(kindAck), ack.kind)
	time.Sleep(10 * time.Millisecond) // after its last words it looks once more
	return ends, c
}

// small is a frame that writes 16 bytes to memory.
func small(m *memory, stamp int64) []byte {
	data := make([]byte, 16)
	fill(data, 5)
	h := header{kind: kindWrite, count: 1, key: m.key, ticket: m.ticket.Load(), stamp: stamp}
	return frame(h, append(appendEntry(nil, 0, 16), data...))
}

// TestPollerMeetsStaleFrame has look find a frame that is to wait for a confirmation: the reader
// takes it from there. Without a rouse it sleeps on.
func TestPollerMeetsStaleFrame(t *testing.T) {
	leak.Check(t)
	clock := manualclock.New()
	b := openBy(t, clock, Config{})
	m, mem := share(t, b, 4096)
	for range 4 {
		ends, c := asleep(t, b, m)
		say := aloof(t, c)
		fill(mem, 0)
		say(small(m, clock.Now()-int64(time.Second)))
		require.False(t, meets(t, c), "a stale frame is the reader's")
		question := asked(t, ends[ctl], clock.Now())
		if mem[0] != 0 {
			promise.Broken(t, "stale bytes landed before the question was answered")
		}
		confirmed(t, ends, question)
		require.Equal(t, byte(5), mem[15])
	}
}

// TestPollerWaitsForNothing has look meet what must wait for a Fence or a Renew, or may take long:
// all that is left to the reader, which does it.
func TestPollerWaitsForNothing(t *testing.T) {
	leak.Check(t)
	b := open(t, Config{})
	plain, mem := share(t, b, 1<<20)
	x := &renewing{}
	seg := plain.seg
	seg.Shared = x
	again, err := b.Register(seg)
	require.NoError(t, err)
	renewed := again.(*memory)
	for _, wait := range []struct {
		in   *memory
		lock sync.Locker
	}{{plain, &plain.gate}, {renewed, &x.landing}} {
		ends, c := asleep(t, b, wait.in)
		say := aloof(t, c)
		fill(mem, 0)
		wait.lock.Lock()
		say(small(wait.in, b.clock.Now()+int64(time.Hour)))
		ok := meets(t, c)
		landed := mem[0]
		wait.lock.Unlock()
		require.False(t, ok)
		require.Zero(t, landed)
		ack, _, err := readWord(ends[express])
		require.NoError(t, err)
		require.Equal(t, uint8(session.StatusOK), ack.status)
		require.Equal(t, byte(5), mem[15])
	}

	ends, c := asleep(t, b, plain)
	say := aloof(t, c)
	h := header{kind: kindRead, count: 1, key: plain.key, ticket: plain.ticket.Load()}
	b.looks.drop(c) // as a poller does that met it
	say(frame(h, appendEntry(nil, 0, partBytes)))
	require.False(t, meets(t, c), "a Read is the reader's")
	data, body, err := readWord(ends[express])
	require.NoError(t, err)
	require.Equal(t, uint8(kindData), data.kind)
	require.Len(t, body, partBytes)
	require.Never(t, func() bool { return b.looks.conns[ofInbound].Load() == c },
		20*time.Millisecond, time.Millisecond, "look rouses the reader for each Read")

	large := frame(header{kind: kindWrite, count: 1, key: plain.key,
		ticket: plain.ticket.Load(), stamp: b.clock.Now()}, make([]byte, entryBytes+partBytes))
	copy(large[headBytes:], appendEntry(nil, 0, partBytes))
	say(large[:headBytes+entryBytes])
	require.False(t, meets(t, c), "a large Write is the reader's")
}

// TestPollerThatSleeps: a goroutine that arms between its calls, as one that sleeps does, reads no
// socket: that would cost an idle program system calls.
func TestPollerThatSleeps(t *testing.T) {
	leak.Check(t)
	b := open(t, Config{})
	m, mem := share(t, b, 4096)
	_, c := asleep(t, b, m)
	say := aloof(t, c)
	fill(mem, 0)
	say(small(m, b.clock.Now()+int64(time.Hour)))
	var msgs [1]driver.Message
	receive := func() {
		_, err := b.Receive(msgs[:])
		require.NoError(t, err)
	}
	for range 3 * looksAfter {
		_, err := b.Arm()
		require.NoError(t, err)
		for range looksAfter - 1 {
			receive()
		}
	}
	require.Zero(t, mem[15], "a goroutine that sleeps reads the socket")
	require.Eventually(t, func() bool { receive(); return mem[15] == 5 }, limit, time.Microsecond)
}

// TestPollerWritesNothingLarge has look read the acknowledgement after which the next part of a
// large batch goes: the goroutine that writes writes it.
func TestPollerWritesNothingLarge(t *testing.T) {
	leak.Check(t)
	addr, token := silentOwner(t, 2*time.Second)
	clock := manualclock.New()
	b := openBy(t, clock, Config{Conns: 1, Flight: partBytes})
	m, _ := share(t, b, 8<<20)
	p := dial(t, b, addr)
	key, size, err := p.Import(token)
	require.NoError(t, err)
	d := []driver.Desc{{Len: size, LocalKey: m.key, RemoteKey: key}}
	require.NoError(t, p.Submit(1, &driver.Batch{Op: driver.Write, Descs: d}))
	c := p.conns[express]
	require.Eventually(t, func() bool {
		p.mu.Lock()
		defer p.mu.Unlock()
		q := p.flight[express].at(1 << 32)
		return q != nil && q.out && c.kicks.Load() == 0
	}, limit, time.Millisecond)
	say := aloof(t, c)
	c.wmu.Lock() // who writes stands still
	say(frame(header{kind: kindAck, id: 1 << 32}, nil))
	ok := meets(t, c)
	c.wmu.Unlock()
	require.True(t, ok)
	defer clock.Run(100 * time.Millisecond)()
	require.NoError(t, p.Close())
	require.ErrorIs(t, await(t, b, 1), driver.ErrClosed)
}
