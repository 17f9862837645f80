// SPDX-License-Identifier: Apache-2.0

package tcp

import (
	"bytes"
	"context"
	"crypto/tls"
	"io"
	"math/rand/v2"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/session"
	"github.com/sluicehq/sluice/internal/testing/testkit"
)

func rawDial(t *testing.T, b *Backend) net.Conn {
	t.Helper()
	c, err := net.Dial("tcp", b.listener.Addr().String())
	require.NoError(t, err)
	t.Cleanup(func() { _ = c.Close() })
	return c
}

// hungUp fails the test unless the other side closes, having said at most most bytes.
func hungUp(t *testing.T, what string, c net.Conn, most int) {
	t.Helper()
	_ = c.SetReadDeadline(time.Now().Add(limit))
	said, err := io.ReadAll(c)
	if e, ok := err.(net.Error); ok && e.Timeout() {
		t.Errorf("%s: not hung up on", what)
	}
	if len(said) > most {
		t.Errorf("%s: was told %d bytes, want at most %d", what, len(said), most)
	}
}

func frame(h header, body []byte) []byte {
	h.length = uint32(len(body))
	return append(h.append(nil), body...)
}

func helloFrame(b *Backend, conns uint32) []byte {
	return frame(header{kind: kindHello, count: conns}, b.address.owner[:])
}

// works has a peer write and read.
func works(t *testing.T, b *Backend) {
	t.Helper()
	worksFrom(t, open(t, b.cfg), b)
}

func worksFrom(t *testing.T, near, b *Backend) {
	t.Helper()
	require.NoError(t, tryFrom(t, near, b), "a peer beside strangers")
}

// tryFrom says why a peer could not write.
func tryFrom(t *testing.T, near, b *Backend) error {
	t.Helper()
	m, mem := share(t, b, 4096)
	l, local := share(t, near, 4096)
	p, err := near.Connect(t.Context(), b.Addr())
	if err != nil {
		return err
	}
	token, err := m.AppendToken(nil)
	require.NoError(t, err)
	key, _, err := p.Import(token)
	if err != nil {
		return err
	}
	fill(local, 9)
	d := []driver.Desc{{Len: 4096, LocalKey: l.key, RemoteKey: key}}
	err = p.Submit(1, &driver.Batch{Op: driver.Write, Descs: d})
	if err == nil {
		err = await(t, near, 1)
	}
	if err == nil {
		require.Equal(t, local, mem)
	}
	return err
}

// Strangers send anything: they are hung up on without a word, and who behaves is served.
func TestStrangersAreHungUpOn(t *testing.T) {
	testkit.CheckLeaks(t)
	b := open(t, Config{})
	oversize := header{length: bodyMax + 1, kind: kindHello, count: 4}
	other := helloFrame(b, 4)
	other[headBytes] ^= 1 // another owner
	noise := make([]byte, 4096)
	for i := range noise {
		noise[i] = byte(rand.N(256))
	}
	old := helloFrame(b, 4)
	old[4] = wireVersion + 1
	for name, c := range map[string]struct {
		say  []byte
		most int
	}{
		"noise": {noise, 0},
		"HTTP": {[]byte("GET / HTTP/1.1\r\nHost: example.test\r\nAccept: " +
			"*/*\r\n\r\n"), 0},
		"a hello that is too long": {oversize.append(nil), 0},
		"another version":          {old, headBytes},
		"a write before any hello": {frame(header{kind: kindRead, count: 1},
			make([]byte, entryBytes)), 0},
		"a hello to another owner":  {other, headBytes},
		"a hello for no connection": {helloFrame(b, 0), headBytes},
		"a hello for too many":      {helloFrame(b, connsMax+2), headBytes},
		"a join of nobody": {frame(header{kind: kindJoin, id: 77, count: 1},
			make([]byte, 16)), headBytes},
		"a join without a secret": {frame(header{kind: kindJoin, id: 77, count: 1}, nil),
			headBytes},
	} {
		conn := rawDial(t, b)
		if _, err := conn.Write(c.say); err != nil {
			t.Fatal(err)
		}
		hungUp(t, name, conn, c.most)
	}
	works(t, b)
}

// Whoever says nothing, or a byte now and then, has until Handshake, and takes none of the
// places of others for longer.
func TestSlowStrangersAreHungUpOn(t *testing.T) {
	testkit.CheckLeaks(t)
	b := open(t, Config{Handshake: 2 * time.Second, Handshakes: 8})
	var slow []net.Conn
	for range 8 {
		c := rawDial(t, b)
		slow = append(slow, c)
		go func() {
			hello := helloFrame(b, 4)
			for _, one := range hello[:len(hello)-1] { // never whole, however late it is heard
				if _, err := c.Write([]byte{one}); err != nil {
					return
				}
				time.Sleep(50 * time.Millisecond)
			}
		}()
	}
	for _, c := range slow {
		hungUp(t, "a slow stranger", c, 0)
	}
	// A peer of a busy machine may take longer than Handshake itself, and comes again.
	near := open(t, Config{})
	for end := time.Now().Add(limit); ; {
		err := tryFrom(t, near, b)
		if err == nil {
			break
		}
		require.True(t, time.Now().Before(end), "a peer after slow strangers: %v", err)
	}
}

// Strangers who take all places and say nothing make room for who comes after them; many who come
// at once wait for each other.
func TestStrangersAreFew(t *testing.T) {
	testkit.CheckLeaks(t)
	b := openBy(t, running(t, 10*time.Millisecond), Config{Handshakes: 4, Handshake: 10 * limit})
	var silent []net.Conn
	for range 4 {
		silent = append(silent, rawDial(t, b))
	}
	works(t, b)
	hungUp(t, "a silent stranger", silent[0], 0)
	near := open(t, Config{Handshake: limit})
	var wg sync.WaitGroup
	for range 10 {
		wg.Go(func() {
			p, err := near.Connect(context.Background(), b.Addr())
			if err != nil {
				t.Errorf("one of many: %v", err)
				return
			}
			_ = p.Close()
		})
	}
	wg.Wait()
}

// welcomed says hello as a peer of ours would, and returns the connections.
func welcomed(t *testing.T, b *Backend) (id uint64, secret []byte, conns [2]net.Conn) {
	t.Helper()
	conns[control] = rawDial(t, b)
	if _, err := conns[control].Write(helloFrame(b, 2)); err != nil {
		t.Fatal(err)
	}
	h, secret, err := readFrame(conns[control], kindWelcome)
	if err != nil || h.status != uint8(session.StatusOK) {
		t.Fatalf("welcome: status %d, %v", h.status, err)
	}
	secret = secret[:16] // what the owner sees of us follows
	conns[express] = rawDial(t, b)
	if _, err := conns[express].Write(frame(header{kind: kindJoin, id: h.id, count: express},
		secret)); err != nil {
		t.Fatal(err)
	}
	if h, _, err := readFrame(conns[express], kindWelcome); err != nil ||
		h.status != uint8(session.StatusOK) {
		t.Fatalf("welcome of the second: status %d, %v", h.status, err)
	}
	return h.id, secret, conns
}

// A session that is over, or a place in it that is taken, opens nothing when it is shown again.
func TestReplayedJoinIsRefused(t *testing.T) {
	b := open(t, Config{})
	id, secret, conns := welcomed(t, b)
	again := frame(header{kind: kindJoin, id: id, count: express}, secret)
	wrong := frame(header{kind: kindJoin, id: id, count: express}, make([]byte, 16))
	c := rawDial(t, b)
	if _, err := c.Write(wrong); err != nil {
		t.Fatal(err)
	}
	h, _, err := readFrame(c, kindWelcome)
	if err != nil || h.status != uint8(session.StatusBadToken) {
		t.Errorf("a join with a wrong secret: status %d, %v, want %d", h.status, err,
			session.StatusBadToken)
	}
	_ = conns[control].Close()
	hungUp(t, "a connection whose control has ended", conns[express], headBytes)
	require.Eventually(t, func() bool { // until then a join is hung up on
		b.mu.Lock()
		defer b.mu.Unlock()
		return b.accepted[id] == nil
	}, limit, time.Millisecond)
	c = rawDial(t, b)
	if _, err := c.Write(again); err != nil {
		t.Fatal(err)
	}
	h, _, err = readFrame(c, kindWelcome)
	if err != nil || h.status != uint8(session.StatusBadToken) {
		t.Errorf("a join of a session that is over: status %d, %v, want %d", h.status, err,
			session.StatusBadToken)
	}
}

// A peer that was welcomed has no more rights than its tokens: what no peer of ours would say
// ends its connections, and touches nothing.
func TestPeersThatCheat(t *testing.T) {
	testkit.CheckLeaks(t)
	clock := testkit.NewClock() // nothing they say grows old: they would not answer
	b := openBy(t, clock, Config{})
	m, mem := share(t, b, 4096)
	seg := m.seg
	seg.ReadOnly = true
	fixed, err := b.Register(seg)
	require.NoError(t, err)
	constant := fixed.(*memory)
	table := func(off, n uint64, data int) []byte {
		return append(appendEntry(nil, off, n), make([]byte, data)...)
	}
	write := func(m *memory, ticket uint64, off, n uint64, data int) []byte {
		return frame(header{kind: kindWrite, count: 1, key: m.key, ticket: ticket,
			stamp: clock.Now()},
			table(off, n, data))
	}
	for name, say := range map[string][]byte{
		"past the end":          write(m, m.ticket.Load(), 4000, 97, 97),
		"of more than there is": write(m, m.ticket.Load(), 0, 5000, 5000),
		"by an overflow":        write(m, m.ticket.Load(), ^uint64(0)-5, 16, 16),
		"more than it says":     write(m, m.ticket.Load(), 0, 16, 17),
		"an empty range": frame(header{kind: kindWrite, count: 2, key: m.key,
			ticket: m.ticket.Load(), stamp: clock.Now()}, append(appendEntry(nil, 0, 0),
			table(0, 16, 16)...)),
		"to constant memory": write(constant, constant.ticket.Load(), 0, 16, 16),
		"a Read past the end": frame(header{kind: kindRead, count: 1, key: m.key,
			ticket: m.ticket.Load()}, table(4000, 97, 0)),
		"a Read of too much": frame(header{kind: kindRead, count: 1, key: m.key,
			ticket: m.ticket.Load()}, table(0, 1<<31, 0)),
		"an owner's frame":     frame(header{kind: kindAck}, nil),
		"an Import in between": frame(header{kind: kindImport}, make([]byte, 16)),
	} {
		_, _, conns := welcomed(t, b)
		if _, err := conns[express].Write(say); err != nil {
			t.Fatal(err)
		}
		hungUp(t, name, conns[express], 0)
	}
	_, _, hoarder := welcomed(t, b)
	go func() { // messages that wait for one that never comes
		for i := range uint64(b.cfg.NotifyMax + 1) {
			_, _ = hoarder[express].Write(frame(header{kind: kindNotif, message: i + 2,
				stamp: clock.Now()}, make([]byte, 100)))
		}
	}()
	hungUp(t, "a hoarder of messages", hoarder[express], (b.cfg.NotifyMax+1)*headBytes)
	_, _, conns := welcomed(t, b)
	if _, err := conns[express].Write(write(m, m.ticket.Load()^1<<40, 0, 16, 16)); err != nil {
		t.Fatal(err)
	}
	if h, _, err := readFrame(conns[express], kindAck); err != nil ||
		h.status != uint8(session.StatusRevoked) {
		t.Errorf("a write with a guessed ticket: status %d, %v, want %d", h.status, err,
			session.StatusRevoked)
	}
	if !bytes.Equal(mem, make([]byte, len(mem))) {
		t.Error("a cheat has changed memory")
	}
	works(t, b)
}

// With TLS nobody gets as far as a hello whose certificate is not of the authority.
func TestStrangersWithoutCertificate(t *testing.T) {
	testkit.CheckLeaks(t)
	ours := newAuthority()
	b := open(t, Config{TLS: ours.config(24 * time.Hour)})
	foreign := newAuthority().config(24 * time.Hour)
	foreign.RootCAs = ours.config(24 * time.Hour).RootCAs
	none := &tls.Config{InsecureSkipVerify: true}
	old := ours.config(24 * time.Hour)
	old.InsecureSkipVerify, old.MaxVersion = true, tls.VersionTLS12
	late := ours.config(30 * time.Minute)
	for name, cfg := range map[string]*tls.Config{"foreign": foreign, "none": none, "old": old,
		"expired": late} {
		cfg.InsecureSkipVerify = true
		c := tls.Client(rawDial(t, b), cfg)
		_ = c.SetDeadline(time.Now().Add(limit))
		if err := writeFrame(c, header{kind: kindHello, count: 2}, nil); err != nil {
			continue // refused in the handshake, as those before TLS 1.3 are
		}
		if _, _, err := readFrame(c, kindWelcome); err == nil {
			t.Errorf("a stranger with certificate %q was welcomed", name)
		}
	}
	c := rawDial(t, b)
	if _, err := c.Write(helloFrame(b, 2)); err != nil {
		t.Fatal(err)
	}
	_ = c.SetReadDeadline(time.Now().Add(limit))
	if _, _, err := readFrame(c, kindWelcome); err == nil {
		t.Error("a hello in plain text was welcomed")
	}
	works(t, b)
}

// An owner is known by its certificate as well.
func TestOwnersWithoutCertificate(t *testing.T) {
	ours := newAuthority()
	near := open(t, Config{TLS: ours.config(24 * time.Hour)})
	for name, cfg := range map[string]Config{
		"foreign": {TLS: newAuthority().config(24 * time.Hour)},
		"plain":   {},
		"expired": {TLS: ours.config(30 * time.Minute)},
	} {
		owner := open(t, cfg)
		if _, err := near.Connect(context.Background(), owner.Addr()); err == nil {
			t.Errorf("connected to an owner that is %s", name)
		}
	}
	named := ours.config(24 * time.Hour)
	named.ServerName = "owner.test"
	strict := open(t, Config{TLS: named})
	_ = dial(t, strict, near.Addr()).Close()
	named = ours.config(24 * time.Hour)
	named.ServerName = "other.test"
	if _, err := open(t, Config{TLS: named}).Connect(context.Background(),
		near.Addr()); err == nil {
		t.Error("connected to an owner of another name than Config.TLS.ServerName")
	}
}

// A peer has NotifyMax notifications on their way or not received, and announces each once: so
// that is all that it has us remember of its batches.
func TestPlacesOfNotificationsAreBounded(t *testing.T) {
	const most = 8
	g, _, write, notif := handFed(t, open(t, Config{NotifyMax: most}))
	require.NoError(t, write(most))
	require.Error(t, write(most+1))
	require.Error(t, notif(kindVoid, most+1))
	require.Error(t, notif(kindNotif, 0))
	require.NoError(t, notif(kindNotif, 1))
	require.Error(t, notif(kindNotif, 1), "announced twice")
	require.Error(t, notif(kindVoid, 1), "and taken back")
	require.NoError(t, write(1)) // it is delivered, and not received: its place is taken
	require.Error(t, notif(kindVoid, 1), "a number that was delivered")
	require.NoError(t, write(most))
	require.Error(t, write(most+1))
	g.received()
	require.NoError(t, write(most+1))
	require.NoError(t, notif(kindVoid, 2))
	require.NoError(t, write(2)) // a place that was taken back comes free at once
	require.NoError(t, write(most+2))
}

// handFed is an inbound of which the test is the reader. write takes a part of a batch, notif what
// follows it.
func handFed(t *testing.T, b *Backend) (g *inbound, c *conn, write func(number uint64) error,
	notif func(kind uint8, number uint64) error) {
	m, _ := share(t, b, 64)
	g = newInbound(b, 2)
	g.ages.begin(b.cfg.Grace, 0)
	c = &conn{b: b, side: g, index: express, tls: true}
	c.in.chunk = b.chunks.get()
	write = func(number uint64) error {
		c.in.from, c.in.to = 0, 8 // the payload
		return g.landWrite(c, &header{kind: kindWrite, count: 1, length: entryBytes + 8,
			key: m.key, ticket: m.ticket.Load(), message: number, stamp: b.clock.Now()},
			appendEntry(nil, 0, 8))
	}
	notif = func(kind uint8, number uint64) error {
		h := &header{kind: kind, message: number, stamp: b.clock.Now(), count: 1}
		if kind == kindVoid {
			return g.onVoid(c, h)
		}
		return g.onNotification(c, h, nil)
	}
	return g, c, write, notif
}
