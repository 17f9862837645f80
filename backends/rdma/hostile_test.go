// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package rdma

import (
	"context"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/session"
	"github.com/sluicehq/sluice/internal/testing/testkit"
)

// stranger speaks to a backend's control as it likes.
type stranger struct {
	t    *testing.T
	conn net.Conn
}

func newStranger(t *testing.T, b *Backend) *stranger {
	t.Helper()
	conn, err := net.DialTimeout("tcp", b.address.control[0].String(), patience)
	require.NoError(t, err)
	t.Cleanup(func() { _ = conn.Close() })
	_ = conn.SetDeadline(time.Now().Add(patience))
	return &stranger{t, conn}
}

func (s *stranger) say(msgs ...[]byte) {
	for _, m := range msgs {
		frame := binary.LittleEndian.AppendUint32(nil, uint32(len(m)))
		_, _ = s.conn.Write(append(frame, m...)) // who hung up already is seen by hear
	}
}

// hear returns the next message but a ping; nil: the other side hung up.
func (s *stranger) hear() any {
	s.t.Helper()
	for {
		var head [4]byte
		if _, err := io.ReadFull(s.conn, head[:]); err != nil {
			return nil
		}
		body := make([]byte, binary.LittleEndian.Uint32(head[:]))
		if _, err := io.ReadFull(s.conn, body); err != nil {
			return nil
		}
		m, err := decodeControl(body)
		require.NoError(s.t, err)
		if m != ping {
			return m
		}
	}
}

func helloTo(from, to *Backend, pairs int) *hello {
	h := &hello{to: to.address.owner, from: from.addr}
	for range pairs {
		h.pairs = append(h.pairs, pairOffer{0, someEnd(1)})
	}
	return h
}

// TestHostileInitiator hangs up on what makes no sense, and goes on with others.
func TestHostileInitiator(t *testing.T) {
	p := openPair(t, Config{})
	greeting := encoded(helloTo(p.near, p.far, 1))
	for name, msgs := range map[string][][]byte{
		"nothing that is read": {{}}, "nonsense": {[]byte("GET / HTTP/1.1\r\n")},
		"another version":                {{9, kindHello}},
		"no hello":                       {encoded(&bye{})},
		"no queue pairs":                 {encoded(helloTo(p.near, p.far, 0))},
		"an answer":                      {greeting, encoded(&importAnswer{})},
		"two hellos":                     {greeting, greeting},
		"a queue pair that is not there": {greeting, encoded(&pairRequest{pair: 1})},
		"a queue pair far out":           {greeting, encoded(&pairRequest{pair: 255})},
		"too long":                       {greeting, make([]byte, controlMax+1)},
	} {
		s := newStranger(t, p.far)
		s.say(msgs...)
		for m := s.hear(); m != nil; m = s.hear() {
			if w, ok := m.(*welcome); !ok || w.status != session.StatusOK {
				t.Errorf("%s: answered with %+v", name, m)
			}
		}
	}
	for name, h := range map[string]*hello{
		"whom it does not mean": {to: p.near.address.owner, from: p.near.addr,
			pairs: helloTo(p.near, p.far, 1).pairs},
		"without an address": {to: p.far.address.owner, from: []byte("me"),
			pairs: helloTo(p.near, p.far, 1).pairs},
	} {
		s := newStranger(t, p.far)
		s.say(encoded(h))
		if w, ok := s.hear().(*welcome); !ok || w.status == session.StatusOK {
			t.Errorf("%s: not refused", name)
		}
	}
	l, r := register(t, p.near, 100), register(t, p.far, 100)
	if err := p.await(t, p.write(t, l, p.imports(t, r), nil)); err != nil {
		t.Errorf("a write beside strangers: %v", err)
	}
}

// TestHostileRail offers a queue pair to a rail that is not there: it leads nowhere, and harms
// none.
func TestHostileRail(t *testing.T) {
	p := openPair(t, Config{})
	s := newStranger(t, p.far)
	h := helloTo(p.near, p.far, 2)
	h.pairs[1].rail = 200
	s.say(encoded(h), encoded(&importRequest{id: 1, key: 1 << 31}),
		encoded(&importRequest{id: 2}))
	if w, ok := s.hear().(*welcome); !ok || len(w.pairs) != 2 {
		t.Errorf("no welcome: %+v", w)
	}
	for id := range uint32(2) {
		if a, ok := s.hear().(*importAnswer); !ok || a.id != id+1 || a.status.Err() == nil ||
			len(a.keys) > 0 {
			t.Errorf("an import of nothing: %+v", a)
		}
	}
}

// TestRemake asks an owner for a queue pair anew. When it answers, the old one is gone, also where
// the peer has no new one; and what came over it until then counts as seen. Otherwise the peer
// would write again what the owner's program was told of, and may have used for something else.
func TestRemake(t *testing.T) {
	near, far := openFakeBackend(t, Config{}), openFakeBackend(t, Config{})
	s := newStranger(t, far)
	s.say(encoded(helloTo(near, far, 1)))
	w, ok := s.hear().(*welcome)
	if !ok || len(w.pairs) != 1 || !w.pairs[0].there {
		t.Fatalf("welcome: %+v", w)
	}
	pair, owner := w.pairs[0].end.QueuePair, fakeOf(far).only()
	owner.mu.Lock()
	owner.last = 1
	owner.mu.Unlock()
	for i, there := range []bool{true, false, true} {
		s.say(encoded(&pairRequest{attempt: uint32(i + 1),
			pairAnswer: pairAnswer{there, someEnd(1)}}))
		a, ok := s.hear().(*pairReply)
		if !ok || a.attempt != uint32(i+1) || a.there != there {
			t.Fatalf("request %d: answered with %+v", i, a)
		}
		require.False(t, pairIsThere(pair), "the owner has answered, and its queue pair is there")
		require.Equal(t, uint64(min(i+1, 2)), a.seen, "request %d: what came last, too", i)
		pair = a.end.QueuePair
	}
}

// TestConnsMax refuses one peer of a host too many, says so, and takes it when another has left.
func TestConnsMax(t *testing.T) {
	f, _ := standIn(t, 4)
	testkit.CheckLeaks(t, f.InUse)
	near, far := openFakeBackend(t, Config{}), openFakeBackend(t, Config{ConnsMax: 5})
	p := &pair{near: near, far: far}
	first, second := p.connect(t), p.connect(t)
	if _, err := near.Connect(t.Context(), far.Addr()); !errors.Is(err, driver.ErrFull) {
		t.Errorf("a third peer: %v", err)
	}
	_ = first.Close()
	eventually(t, "a place", func() bool {
		third, err := near.Connect(t.Context(), far.Addr())
		if err == nil {
			_ = third.Close()
		}
		return err == nil
	})
	_ = second.Close()
}

// TestHostileOwner answers a peer of ours with what makes no sense: the peer is lost.
func TestHostileOwner(t *testing.T) {
	f, _ := standIn(t, 4)
	testkit.CheckLeaks(t, f.InUse)
	b := openFakeBackend(t, Config{Grace: graceMin})
	m := register(t, b, 100)
	good := &welcome{pairs: []pairAnswer{{true, someEnd(1)}, {true, someEnd(1)}}}
	for name, answers := range map[string][][]byte{
		"nothing": {}, "a hang-up": {nil}, "nonsense": {[]byte("SSH-2.0")},
		"no welcome":                    {encoded(&bye{})},
		"too few queue pairs":           {encoded(&welcome{pairs: good.pairs[:1]})},
		"two welcomes":                  {encoded(good), encoded(good)},
		"queue pairs that lead nowhere": {encoded(good)},
		"a refusal":                     {encoded(&welcome{status: session.StatusFull})},
		"queue pairs it makes up": {encoded(good), encoded(&broken{99}),
			encoded(&pairReply{pair: 77}), encoded(&pairReply{pair: 0, seen: 1 << 60})},
		"answers to nothing": {encoded(good), encoded(&importAnswer{id: 9, size: 5}),
			encoded(&expired{key: 9, epoch: 9}), encoded(farewell), encoded(farewell)},
	} {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		require.NoError(t, err)
		a := b.address
		a.control = nil
		a.control = append(a.control, l.Addr().(*net.TCPAddr).AddrPort())
		addr, err := a.encode()
		require.NoError(t, err)
		go answerAll(t, l, answers)
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		if p, err := b.Connect(ctx, addr); err == nil {
			t.Errorf("%s: connected", name)
			_ = p.Close()
		}
		cancel()
		_ = l.Close()
	}
	if err := m.Revoke(context.Background()); err != nil {
		t.Error(err)
	}
}

// answerAll takes one connection and says what it is told to; nil hangs up.
func answerAll(t *testing.T, l net.Listener, answers [][]byte) {
	conn, err := l.Accept()
	if err != nil {
		return
	}
	defer conn.Close()
	s := &stranger{t, conn}
	for _, a := range answers {
		if a == nil {
			return
		}
		s.say(a)
	}
	_, _ = io.Copy(io.Discard, conn)
}

// TestTooManyAnswers is of an owner that does not keep to the bound: it is lost.
func TestTooManyAnswers(t *testing.T) {
	p := openPair(t, Config{})
	var owner *inbound
	p.far.mu.Lock()
	for c := range p.far.accepted {
		owner = c
	}
	p.far.mu.Unlock()
	for range answersMax + 1 {
		owner.ch.send(&answer{data: []byte("!")})
	}
	<-p.peer.Lost()
}

// silentAddress is one whose kernel answers no connection: the queue of its listener is full.
func silentAddress(t *testing.T) netip.AddrPort {
	t.Helper()
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, unix.Close(fd)) })
	require.NoError(t, unix.Bind(fd, &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}))
	require.NoError(t, unix.Listen(fd, 0))
	name, err := unix.Getsockname(fd)
	require.NoError(t, err)
	at := netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, 0, 1}),
		uint16(name.(*unix.SockaddrInet4).Port))
	first, err := net.Dial("tcp", at.String())
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, first.Close()) })
	return at
}

// TestAddressThatIsSilent has the first of two addresses of an owner not answer: the other is tried
// a little later, and an error says of both why they did not serve.
func TestAddressThatIsSilent(t *testing.T) {
	c, p := openClocked(t, Config{})
	silent, refused := silentAddress(t), netip.MustParseAddrPort("127.0.0.1:1")
	for _, other := range []netip.AddrPort{p.far.address.control[0], refused} {
		var conn net.Conn
		err := c.during(t, func() (err error) {
			both := &address{control: []netip.AddrPort{silent, other}}
			conn, err = p.near.reach(t.Context(), both)
			return err
		})
		if other != refused {
			require.NoError(t, err)
			require.NoError(t, conn.Close())
			continue
		}
		require.ErrorIs(t, err, driver.ErrTimeout)
		require.ErrorIs(t, err, unix.ECONNREFUSED)
	}
}
