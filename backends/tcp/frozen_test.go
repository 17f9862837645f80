// SPDX-License-Identifier: Apache-2.0

package tcp

import (
	"io"
	"net"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/session"
	"github.com/sluicehq/sluice/internal/testing/testkit"
)

// What is older than Grace when it would land, as after a freeze of ours, is asked about: it
// lands once who sent it says that it is still wanted, and never if nothing is said.
func TestStaleBytesAreAskedAbout(t *testing.T) {
	testkit.CheckLeaks(t)
	clock := testkit.NewClock()
	b := openBy(t, clock, Config{})
	m, mem := share(t, b, 64<<10)
	for _, size := range []int{16, 64 << 10} { // through a chunk, and into place
		fill(mem, 0)
		_, _, conns := welcomed(t, b)
		h := header{kind: kindWrite, count: 1, key: m.key, ticket: m.ticket.Load(),
			stamp: clock.Now() - int64(time.Second)}
		data := make([]byte, size)
		fill(data, 5)
		say := frame(h, append(appendEntry(nil, 0, uint64(size)), data...))
		nothing := func(when string) {
			t.Helper()
			if mem[0] != 0 || mem[size-1] != 0 {
				testkit.FatalBroken(t, "stale bytes landed %s", when)
			}
		}
		_, err := conns[express].Write(say)
		require.NoError(t, err)
		question := asked(t, conns[control], clock.Now())
		time.Sleep(20 * time.Millisecond)
		nothing("before the question was answered")
		confirmed(t, conns, question)
		require.Equal(t, byte(5), mem[0])
		require.Equal(t, byte(5), mem[size-1])

		fill(mem, 0)
		clock.Advance(b.cfg.Grace + 1) // so that the confirmation is too old as well
		_, err = conns[express].Write(say)
		require.NoError(t, err)
		asked(t, conns[control], clock.Now())
		_ = conns[control].Close() // who has given up
		hungUp(t, "a session without control", conns[express], 0)
		nothing("that nobody wants any more")
	}
}

// asked reads the question of an owner about stale bytes.
func asked(t *testing.T, control net.Conn, when int64) (question header) {
	t.Helper()
	require.NoError(t, control.SetReadDeadline(time.Now().Add(limit)))
	question, _, err := readWord(control)
	require.NoError(t, err)
	require.Equal(t, uint8(kindChallenge), question.kind)
	require.Equal(t, uint64(when), question.id)
	return question
}

// confirmed answers a question, and reads that the bytes are in place.
func confirmed(t *testing.T, conns [2]net.Conn, question header) {
	t.Helper()
	_, err := conns[control].Write(frame(header{kind: kindConfirm, id: question.id}, nil))
	require.NoError(t, err)
	ack, _, err := readWord(conns[express])
	require.NoError(t, err)
	require.Equal(t, uint8(kindAck), ack.kind)
	require.Equal(t, uint8(session.StatusOK), ack.status)
}

// A stale notification, and a stale frame that says that none follows a batch, have no message
// delivered before the peer was asked about them.
func TestStaleNotifsAndVoidsAreAskedAbout(t *testing.T) {
	for _, kind := range []uint8{kindNotif, kindVoid} {
		clock := testkit.NewClock()
		b := openBy(t, clock, Config{})
		_, _, conns := welcomed(t, b)
		fresh := header{kind: kindNotif, message: 2, stamp: clock.Now()} // due behind the stale one
		stale := header{kind: kind, message: 1, stamp: clock.Now() - int64(time.Second)}
		_, err := conns[express].Write(frame(fresh, []byte("later")))
		require.NoError(t, err)
		ack, _, err := readWord(conns[express])
		require.NoError(t, err)
		require.Equal(t, uint8(kindAck), ack.kind)
		_, err = conns[express].Write(frame(stale, nil))
		require.NoError(t, err)
		nothing := func() {
			t.Helper()
			var msgs [3]driver.Message
			n, err := b.Receive(msgs[:])
			require.NoError(t, err)
			for _, m := range msgs[:n] {
				if m.Data != nil {
					testkit.FatalBroken(t, "a stale message arrived: %s", m.Data)
				}
			}
		}
		asked(t, conns[control], clock.Now())
		nothing()
		_ = conns[control].Close()
		hungUp(t, "a session without control", conns[express], 0)
		nothing()
	}
}

// Word that no message follows a batch says how old it is, and counts as something that a Close
// outlives. None is sent that a Close does not count any more.
func TestVoidsAreOutlived(t *testing.T) {
	owner, near := open(t, Config{}), open(t, Config{})
	p := dial(t, near, owner.Addr())
	c := p.conns[express]
	c.writeMu.Lock() // nothing is written
	defer c.writeMu.Unlock()
	p.mu.Lock()
	defer p.mu.Unlock()
	p.lastSent = 0
	p.withdrawNotif(&batch{tail: driver.NotifyTail, number: 1})
	var h header
	require.Equal(t, headBytes, c.queuedBytes())
	require.NoError(t, h.decode((*[headBytes]byte)(c.queued)))
	require.Equal(t, uint8(kindVoid), h.kind)
	require.NotZero(t, h.stamp)
	require.NotZero(t, p.lastSent)
	p.failed = true
	p.withdrawNotif(&batch{tail: driver.NotifyTail, number: 2})
	require.Equal(t, headBytes, c.queuedBytes())
	p.failed = false
}

// readWord reads a frame of the owner, of any kind.
func readWord(c net.Conn) (h header, body []byte, err error) {
	var head [headBytes]byte
	if _, err := io.ReadFull(c, head[:]); err != nil {
		return h, nil, err
	}
	if err := h.decode(&head); err != nil {
		return h, nil, err
	}
	body = make([]byte, h.length)
	_, err = io.ReadFull(c, body)
	return h, body, err
}

// silentOwner welcomes a peer, answers its Imports, and nothing else: a program that froze.
func silentOwner(t testing.TB, grace time.Duration) (addr []byte, token []byte) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	t.Cleanup(func() { _ = l.Close() })
	a := address{owner: session.NewOwner(), places: []string{l.Addr().String()}}
	addr, err = a.encode()
	require.NoError(t, err)
	memory := session.Token{Key: 1, Epoch: 1, Size: 8 << 20}
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			t.Cleanup(func() { _ = c.Close() })
			go welcomeOnly(c, grace, memory.Size)
		}
	}()
	return addr, memory.Append(nil, &a.owner)
}

func welcomeOnly(c net.Conn, grace time.Duration, size uint64) {
	if _, _, err := readWord(c); err != nil {
		return
	}
	w := header{kind: kindWelcome, count: 8, ticket: uint64(grace), stamp: int64(time.Hour)}
	if writeFrame(c, w, make([]byte, 16)) != nil {
		return
	}
	for {
		h, _, err := readWord(c)
		if err != nil || h.kind != kindReady && h.kind != kindImport {
			return // the rest stays in the socket
		}
		if h.kind == kindImport {
			_ = writeFrame(c, header{kind: kindImported, id: h.id, message: size}, nil)
		}
	}
}

// gone has the kernel of a backend say that the hosts of its peers acknowledge nothing more.
func gone(b *Backend, c *testkit.Clock) {
	since := c.Now()
	b.queryOutbound = func(*conn) session.Outbound {
		return session.Outbound{Unacked: true, Pending: true,
			SinceAck: time.Duration(c.Now() - since)}
	}
}

// An owner whose host is gone is lost after Failure, and what was sent to it ends when nothing of
// it can land any more.
func TestGoneOwnerIsLost(t *testing.T) {
	testkit.CheckLeaks(t)
	const failure, grace = 6 * time.Second, graceMax
	addr, token := silentOwner(t, grace)
	clock := testkit.NewClock()
	b := openBy(t, clock, Config{Failure: failure})
	m, _ := share(t, b, 8<<20)
	p := dial(t, b, addr)
	key, size, err := p.Import(token)
	require.NoError(t, err)
	gone(b, clock)
	d := []driver.Desc{{Len: size, LocalKey: m.key, RemoteKey: key}}
	require.NoError(t, p.Submit(1, &driver.Batch{Op: driver.Write, Descs: d}))
	for range pulses + 1 { // one until it is seen to wait
		require.False(t, lost(p), "no answer was due")
		clock.Advance(failure / pulses)
	}
	clock.Advance(failure / pulses)
	require.True(t, lost(p))
	defer clock.Run(100 * time.Millisecond)()
	require.ErrorIs(t, await(t, b, 1), driver.ErrPeerLost)
	p.mu.Lock()
	last := p.lastSent
	p.mu.Unlock()
	if past := clock.Now() - last; past < int64(grace) {
		testkit.ErrorBroken(t,
			"a write ended %v after its last bytes were sent, which may land for %v",
			time.Duration(past), grace)
	}
	require.ErrorIs(t, p.Submit(2, &driver.Batch{Op: driver.Write, Descs: d}), driver.ErrPeerLost)
}

// lost reports whether a peer was given up.
func lost(p *peer) bool {
	select {
	case <-p.Lost():
		return true
	default:
		return false
	}
}

// A process that says nothing is not lost, however long a transfer waits for it: its host
// acknowledges what it is sent, also where the process has read nothing for so long that its socket
// is full.
func TestSilenceIsNoLoss(t *testing.T) {
	testkit.CheckLeaks(t)
	const failure = 6 * time.Second
	addr, token := silentOwner(t, 0)
	clock := testkit.NewClock()
	b := openBy(t, clock, Config{Failure: failure})
	m, _ := share(t, b, 8<<20)
	p := dial(t, b, addr)
	key, size, err := p.Import(token)
	require.NoError(t, err)
	require.NoError(t, p.Submit(1, &driver.Batch{Op: driver.Write,
		Descs: []driver.Desc{{Len: size, LocalKey: m.key, RemoteKey: key}}}))
	for range 100 * pulses {
		clock.Advance(failure / pulses)
	}
	require.False(t, lost(p), "its host answers")
	p.conns[control].queuedMu.Lock()
	defer p.conns[control].queuedMu.Unlock()
	require.Less(t, len(p.conns[control].queued), 10*headBytes, "questions pile up")
}

// A host that is gone is given up after six times Failure where no transfer waits for it, by either
// side.
func TestGoneHostOfNoTransfer(t *testing.T) {
	testkit.CheckLeaks(t)
	const failure = 6 * time.Second
	clock := testkit.NewClock()
	cfg := Config{Failure: failure}
	owner, b := openBy(t, clock, cfg), openBy(t, clock, cfg)
	m, _ := share(t, b, 1<<20)
	far, _ := share(t, owner, 1<<20)
	p := dial(t, b, owner.Addr())
	write := &driver.Batch{Op: driver.Write,
		Descs: []driver.Desc{{Len: 1 << 20, LocalKey: m.key, RemoteKey: importKey(t, p, far)}}}
	require.NoError(t, p.Submit(1, write))
	require.NoError(t, await(t, b, 1))
	gone(b, clock)
	for range session.IdleFailures * pulses { // idle ones are looked at once in a Failure
		clock.Advance(failure / pulses)
	}
	require.False(t, lost(p), "nothing waits for this peer")
	// A transfer has Failure from its beginning, however long the host was silent before.
	require.NoError(t, p.Submit(2, write))
	for range 2 * pulses {
		clock.Advance(failure / pulses)
	}
	require.True(t, lost(p))

	other := openBy(t, clock, cfg)
	q := dial(t, openBy(t, clock, cfg), other.Addr())
	gone(other, clock)
	for range (session.IdleFailures + 2) * pulses {
		clock.Advance(failure / pulses)
	}
	require.Eventually(t, func() bool { return lost(q) && len(acceptedBy(other)) == 0 }, limit,
		time.Millisecond)
}

// A host that is gone is given up after Failure also where an Import alone waits for it.
func TestGoneHostOfAnImport(t *testing.T) {
	testkit.CheckLeaks(t)
	const failure = 6 * time.Second
	clock := testkit.NewClock()
	b := openBy(t, clock, Config{Failure: failure})
	p := dial(t, b, openBy(t, clock, Config{}).Addr())
	gone(b, clock)
	p.importMu.Lock()
	p.importAnswers[1<<40] = make(chan imported, 1) // as if its question had gone nowhere
	p.importMu.Unlock()
	for range 2 * pulses {
		clock.Advance(failure / pulses)
	}
	require.True(t, lost(p))
}

// Close waits for a silent owner no longer than CloseMax, and what it ends does not land.
func TestSilentOwnerDoesNotHoldUpClose(t *testing.T) {
	testkit.CheckLeaks(t)
	addr, token := silentOwner(t, 0)
	clock := running(t, 5*time.Millisecond)
	b := openBy(t, clock, Config{})
	m, _ := share(t, b, 8<<20)
	p := dial(t, b, addr)
	key, size, err := p.Import(token)
	require.NoError(t, err)
	for tag := range uint64(3) {
		d := []driver.Desc{{Len: size, LocalKey: m.key, RemoteKey: key}}
		require.NoError(t,
			p.Submit(tag, &driver.Batch{Op: []driver.Op{driver.Write, driver.Read}[tag%2],
				Descs: d}))
	}
	begin := clock.Now()
	require.NoError(t, p.Close())
	require.Less(t, clock.Now()-begin, int64(limit))
	var done [4]driver.Completion
	n, err := b.Poll(done[:])
	if n != 3 || err != nil {
		t.Fatalf("%d completions after Close (%v), want 3", n, err)
	}
	for _, c := range done[:n] {
		wantError(t, "what was in flight at Close", c.Err, driver.ErrClosed)
	}
}
