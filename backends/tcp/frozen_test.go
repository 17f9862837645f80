// SPDX-License-Identifier: Apache-2.0

package tcp

import (
	"context"
	"io"
	"net"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/control"
	"github.com/sluicehq/sluice/internal/keys"
	"github.com/sluicehq/sluice/internal/testing/leak"
)

// What is older than Grace when it would land, as after a freeze of ours, is asked about: it
// lands once who sent it says that it is still wanted, and never if nothing is said.
func TestStaleBytesAreAskedAbout(t *testing.T) {
	leak.Check(t)
	b := open(t, Config{Grace: 50 * time.Millisecond})
	m, mem := share(t, b, 64<<10)
	for _, size := range []int{16, 64 << 10} { // through a chunk, and into place
		fill(mem, 0)
		_, _, conns := welcomed(t, b)
		h := header{kind: kindWrite, count: 1, key: m.key, ticket: m.ticket.Load(), stamp: clock() -
			int64(time.Second)}
		data := make([]byte, size)
		fill(data, 5)
		say := frame(h, append(appendEntry(nil, 0, uint64(size)), data...))
		if _, err := conns[express].Write(say); err != nil {
			t.Fatal(err)
		}
		question, _, err := readWord(conns[ctl])
		if err != nil || question.kind != kindChallenge {
			t.Fatalf("stale bytes: was asked %d, %v, want %d", question.kind, err, kindChallenge)
		}
		time.Sleep(20 * time.Millisecond)
		if mem[0] != 0 || mem[size-1] != 0 {
			t.Fatal("stale bytes landed before the question was answered")
		}
		ack := vouch(t, conns, question)
		if ack.kind != kindAck || ack.status != uint8(control.OK) {
			t.Fatalf("stale bytes that are wanted: kind %d, status %d", ack.kind, ack.status)
		}
		if mem[0] != 5 || mem[size-1] != 5 {
			t.Error("stale bytes that are wanted did not land")
		}
		fill(mem, 0)
		time.Sleep(60 * time.Millisecond)
		begin := clock()
		if _, err := conns[express].Write(say); err != nil {
			t.Fatal(err)
		}
		for question = (header{}); int64(question.id) < begin; { // some may be of before
			question, _, err = readWord(conns[ctl])
			require.NoError(t, err)
		}
		_ = conns[ctl].Close() // who has given up
		hungUp(t, "a session without control", conns[express], 0)
		if mem[0] != 0 || mem[size-1] != 0 {
			t.Error("stale bytes landed that nobody wants any more")
		}
	}
}

// vouch answers questions until stale bytes are acknowledged: each answer says that they were
// wanted when the question was asked, which may be too long ago by the time it comes.
func vouch(t *testing.T, conns [2]net.Conn, question header) (ack header) {
	t.Helper()
	for end := time.Now().Add(limit); time.Now().Before(end); {
		if question.kind == kindChallenge {
			_, err := conns[ctl].Write(frame(header{kind: kindConfirm, id: question.id}, nil))
			require.NoError(t, err)
		}
		var err error
		if ack, err = wordOf(conns[express]); err == nil {
			return ack
		}
		if question, err = wordOf(conns[ctl]); err != nil {
			question = header{} // nobody asks
		}
	}
	require.Fail(t, "stale bytes that are wanted are not acknowledged")
	return ack
}

// wordOf is readWord, but for what does not come soon. Frames come whole within this machine.
func wordOf(c net.Conn) (header, error) {
	_ = c.SetReadDeadline(time.Now().Add(20 * time.Millisecond))
	defer c.SetReadDeadline(time.Time{})
	h, _, err := readWord(c)
	return h, err
}

// A stale message is not delivered, nor counted, before it was asked about.
func TestStaleNotifsAreAskedAbout(t *testing.T) {
	b := open(t, Config{Grace: 50 * time.Millisecond})
	_, _, conns := welcomed(t, b)
	notif := header{kind: kindNotif, flags: flagCounts, batch: 1, key: 3, stamp: clock() -
		int64(time.Second)}
	if _, err := conns[express].Write(frame(notif, nil)); err != nil {
		t.Fatal(err)
	}
	if q, _, err := readWord(conns[ctl]); err != nil || q.kind != kindChallenge {
		t.Fatalf("a stale notification: was asked %d, %v, want %d", q.kind, err, kindChallenge)
	}
	_ = conns[ctl].Close()
	hungUp(t, "a session without control", conns[express], 0)
	if n := b.Count(3); n != 0 {
		t.Errorf("a stale notification counted %d", n)
	}
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
	a := address{owner: keys.NewOwner(), places: []string{l.Addr().String()}}
	addr, err = a.encode()
	require.NoError(t, err)
	memory := keys.Token{Key: 1, Epoch: 1, Size: 8 << 20}
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
	w := header{kind: kindWelcome, count: 8, ticket: uint64(grace), stamp: clock()}
	if writeFrame(c, w, make([]byte, 16)) != nil {
		return
	}
	for {
		h, _, err := readWord(c)
		if err != nil || h.kind != kindReady && h.kind != kindImport {
			return // the rest stays in the socket
		}
		if h.kind == kindImport {
			_ = writeFrame(c, header{kind: kindImported, id: h.id, batch: size}, nil)
		}
	}
}

// An owner that says nothing is lost after Failure, and what was sent to it ends when nothing of
// it can land any more.
func TestSilentOwnerIsLost(t *testing.T) {
	leak.Check(t)
	const grace = 500 * time.Millisecond
	addr, token := silentOwner(t, grace)
	b := open(t, Config{Failure: 400 * time.Millisecond})
	m, _ := share(t, b, 8<<20)
	p := dial(t, b, addr)
	key, size, err := p.Import(token)
	require.NoError(t, err)
	d := []driver.Desc{{Len: size, LocalKey: m.key, RemoteKey: key}}
	require.NoError(t, p.Submit(1, &driver.Batch{Op: driver.Write, Descs: d}))
	wantError(t, "a write to a silent owner", await(t, b, 1), driver.ErrPeerLost)
	p.mu.Lock()
	last := p.lastSent
	p.mu.Unlock()
	if past := clock() - last; past < int64(grace) {
		t.Errorf("a write ended %v after its last bytes were sent, which may land for %v",
			time.Duration(past), grace)
	}
	wantError(t, "submit afterwards", p.Submit(2, &driver.Batch{Op: driver.Write, Descs: d}),
		driver.ErrPeerLost)
	select {
	case <-p.Lost():
	default:
		t.Error("Lost is not closed")
	}
}

// Close waits for a silent owner no longer than CloseMax, and what it ends does not land.
func TestSilentOwnerDoesNotHoldUpClose(t *testing.T) {
	leak.Check(t)
	addr, token := silentOwner(t, 100*time.Millisecond)
	b := open(t, Config{CloseMax: 200 * time.Millisecond})
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
	begin := time.Now()
	if err := p.Close(); err != nil {
		t.Errorf("close: %v", err)
	}
	if took := time.Since(begin); took > limit {
		t.Errorf("close took %v", took)
	}
	var done [4]driver.Completion
	n, err := b.Poll(done[:])
	if n != 3 || err != nil {
		t.Fatalf("%d completions after Close (%v), want 3", n, err)
	}
	for _, c := range done[:n] {
		wantError(t, "what was in flight at Close", c.Err, driver.ErrClosed)
	}
}

// Connect to a host that takes connections and says nothing is over with its context.
func TestConnectToSilence(t *testing.T) {
	leak.Check(t)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer l.Close()
	a := address{owner: keys.NewOwner(), places: []string{l.Addr().String()}}
	addr, err := a.encode()
	require.NoError(t, err)
	b := open(t, Config{Handshake: 100 * time.Millisecond})
	_, err = b.Connect(context.Background(), addr)
	wantError(t, "connect to silence", err, driver.ErrTimeout)
}
