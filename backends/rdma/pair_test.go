// SPDX-License-Identifier: Apache-2.0

package rdma

import (
	"bytes"
	"context"
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/testing/leak"
	"github.com/sluicehq/sluice/internal/testing/promise"
)

// pair is two backends over the fake fabric, one connected to the other.
type pair struct {
	near, far *Backend
	peer      *peer
	tag       uint64
	outcomes  map[uint64]error
}

// brisk has queue pairs fail soon. The clock of the test says how long a second is.
func brisk() Config { return Config{Timeout: ackUnit << 8, Retries: 1} }

func openPair(t *testing.T, cfg Config) *pair {
	t.Helper()
	leak.Check(t)
	p := &pair{near: openFakeBackend(t, cfg), far: openFakeBackend(t, cfg),
		outcomes: map[uint64]error{}}
	p.peer = p.connect(t)
	return p
}

func openFakeBackend(t *testing.T, cfg Config) *Backend {
	t.Helper()
	b, err := newFake(cfg)
	require.NoError(t, err)
	t.Cleanup(func() {
		if err := b.Close(); err != nil {
			t.Errorf("close backend: %v", err)
		}
	})
	return b
}

func (p *pair) connect(t *testing.T) *peer {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	c, err := p.near.Connect(ctx, p.far.Addr())
	require.NoError(t, err)
	return c.(*peer)
}

func register(t *testing.T, b *Backend, n int) *memory {
	t.Helper()
	m, err := b.Register(driver.Segment{Kind: driver.DRAM, Len: uint64(n), Mem: make([]byte, n),
		Secret: [16]byte{1}})
	require.NoError(t, err)
	return m.(*memory)
}

func (p *pair) imports(t *testing.T, m *memory) uint32 {
	t.Helper()
	token, err := m.AppendToken(nil)
	require.NoError(t, err)
	key, size, err := p.peer.Import(token)
	if err != nil || size != m.size {
		t.Fatalf("import: %d bytes, %v", size, err)
	}
	return key
}

// write submits a whole memory, with a message unless that is nil.
func (p *pair) write(t *testing.T, l *memory, remote uint32, msg []byte) (tag uint64) {
	t.Helper()
	p.tag++
	b := writeOf(driver.Desc{Len: l.size, LocalKey: l.key, RemoteKey: remote})
	if msg != nil {
		b.Tail, b.Notify = driver.NotifyTail, msg
	}
	require.NoError(t, p.peer.Submit(p.tag, b), "submit")
	return p.tag
}

func writeOf(descs ...driver.Desc) *driver.Batch {
	return &driver.Batch{Op: driver.Write, Descs: descs}
}

// await polls for the outcome of a tag.
func (p *pair) await(t *testing.T, tag uint64) error {
	t.Helper()
	var done [8]driver.Completion
	for end := time.Now().Add(patience); ; time.Sleep(50 * time.Microsecond) {
		n, err := p.near.Poll(done[:])
		require.NoError(t, err, "poll")
		for _, c := range done[:n] {
			if _, twice := p.outcomes[c.Tag]; twice {
				promise.Breaks(t, "tag %d completed twice", c.Tag)
			}
			p.outcomes[c.Tag] = c.Err
		}
		if err, ok := p.outcomes[tag]; ok {
			return err
		}
		if time.Now().After(end) {
			t.Fatalf("tag %d does not complete; %s", tag, p.peer.Explain(0, 0))
		}
	}
}

// eventually waits for a condition.
func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(patience); !ok(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("%s: not in %v", what, patience)
		}
	}
}

// received takes what a backend has.
func received(t *testing.T, b *Backend) []driver.Message {
	t.Helper()
	msgs := make([]driver.Message, 16)
	n, err := b.Receive(msgs)
	require.NoError(t, err)
	return msgs[:n]
}

func (p *pair) live() int {
	n := 0
	for _, s := range p.peer.mender.look() {
		if s == pairLive {
			n++
		}
	}
	return n
}

// TestPairFails cuts one rail in mid-transfer: what it did not do the other does, and the
// queue pair comes back by itself.
func TestPairFails(t *testing.T) {
	p := openPair(t, brisk())
	l, r := register(t, p.near, 4<<20), register(t, p.far, 4<<20)
	remote := p.imports(t, r)
	eventually(t, "two live queue pairs", func() bool { return p.live() == 2 })
	for round := range 6 {
		for i := range l.bytes {
			l.bytes[i] = byte(i>>8 + i + round)
		}
		var tags []uint64
		for range 4 {
			tags = append(tags, p.write(t, l, remote, []byte{byte(round)}))
		}
		fakeOf(p.near).cut(round%2, true)
		for _, tag := range tags {
			if err := p.await(t, tag); err != nil {
				t.Fatalf("round %d: %v", round, err)
			}
		}
		if !bytes.Equal(l.bytes, r.bytes) {
			promise.Broken(t, "round %d: other bytes arrived", round)
		}
		fakeOf(p.near).cut(round%2, false)
		eventually(t, "a queue pair that comes back", func() bool { return p.live() == 2 })
	}
	got := 0
	eventually(t, "messages", func() bool {
		for _, m := range received(t, p.far) {
			if m.Err != nil || int(m.Data[0]) != got/4 {
				t.Errorf("message %d is %v (%v)", got, m.Data, m.Err)
			}
			got++
		}
		return got == 24
	})
}

// TestAnswerIsLost has pieces and messages arrive whose acknowledgement does not: all is
// there, and each message once.
func TestAnswerIsLost(t *testing.T) {
	p := openPair(t, brisk())
	l, r := register(t, p.near, 1000), register(t, p.far, 1000)
	remote := p.imports(t, r)
	link := p.peer.link.(*fakeLink)
	for i := range 20 {
		l.bytes[0] = byte(i)
		link.mu.Lock()
		link.echo = 1 + i%2 // the piece, or the message
		link.mu.Unlock()
		require.NoError(t, p.await(t, p.write(t, l, remote, []byte{byte(i)})))
		var msgs []driver.Message
		eventually(t, "a message", func() bool {
			msgs = append(msgs, received(t, p.far)...)
			return len(msgs) > 0
		})
		if len(msgs) != 1 || len(msgs[0].Data) != 1 || msgs[0].Data[0] != byte(i) ||
			r.bytes[0] != byte(i) {
			t.Fatalf("message %d: %v, byte %d", i, msgs, r.bytes[0])
		}
	}
}

// TestAllPairsFail has what is under way end with the peer's loss, in bounded time.
func TestAllPairsFail(t *testing.T) {
	c, p := openClocked(t, brisk())
	l, r := register(t, p.near, 1<<20), register(t, p.far, 1<<20)
	remote := p.imports(t, r)
	for rail := range 2 {
		fakeOf(p.near).cut(rail, true)
	}
	begin := c.Now()
	tag := p.write(t, l, remote, nil)
	if err := c.await(t, p, tag); !errors.Is(err, driver.ErrPeerLost) {
		t.Errorf("a write without a queue pair: %v", err)
	}
	require.Greater(t, c.since(begin), p.near.cfg.Failure)
	<-p.peer.Lost()
	if err := p.peer.Submit(99,
		writeOf(driver.Desc{Len: 1, LocalKey: l.key, RemoteKey: remote})); !errors.Is(err,
		driver.ErrPeerLost) {
		t.Errorf("submit to a lost peer: %v", err)
	}
	require.NoError(t, c.during(t, p.peer.Close))
	var msgs []driver.Message
	eventually(t, "the last word", func() bool {
		msgs = append(msgs, received(t, p.far)...)
		return len(msgs) > 0
	})
	if len(msgs) != 1 || !errors.Is(msgs[0].Err, driver.ErrPeerLost) {
		t.Errorf("messages of a peer that gave up: %+v", msgs)
	}
}

// TestOutage is shorter than Failure: the connection bears it.
func TestOutage(t *testing.T) {
	c, p := openClocked(t, brisk())
	l, r := register(t, p.near, 1<<20), register(t, p.far, 1<<20)
	remote := p.imports(t, r)
	for rail := range 2 {
		fakeOf(p.near).cut(rail, true)
	}
	tag := p.write(t, l, remote, nil)
	eventually(t, "no live queue pair", func() bool { return p.live() == 0 })
	c.runFor(t, p.near.cfg.Failure/2)
	for rail := range 2 {
		fakeOf(p.near).cut(rail, false)
	}
	if err := c.await(t, p, tag); err != nil {
		t.Errorf("a write over an outage: %v", err)
	}
}

// TestDeviceGone takes one device away for good, then the other.
func TestDeviceGone(t *testing.T) {
	p := openPair(t, brisk())
	l, r := register(t, p.near, 1<<20), register(t, p.far, 1<<20)
	remote := p.imports(t, r)
	fake := fakeOf(p.near)
	for rail := range 2 {
		fake.remove(rail)
		p.tag++
		err := p.peer.Submit(p.tag, writeOf(driver.Desc{Len: 1 << 20, LocalKey: l.key,
			RemoteKey: remote}))
		if err == nil {
			err = p.await(t, p.tag)
		}
		if rail == 0 && err != nil || rail == 1 && !errors.Is(err, driver.ErrPeerLost) {
			t.Errorf("without %d devices: %v", rail+1, err)
		}
		if up := p.near.Rails()[rail].Up; up {
			t.Errorf("rail %d is up without a device", rail)
		}
	}
}

// TestPortsDown has ports go down, which gives queue pairs nothing and fails nothing by itself:
// what waits goes over the other port.
func TestPortsDown(t *testing.T) {
	p := openPair(t, brisk())
	l, r := register(t, p.near, 1<<20), register(t, p.far, 1<<20)
	remote := p.imports(t, r)
	fake := fakeOf(p.near)
	eventually(t, "two live queue pairs", func() bool { return p.live() == 2 })
	for round := range 4 {
		tag := p.write(t, l, remote, nil)
		fake.port(round%2, false)
		require.NoError(t, p.await(t, tag), "with one port")
		eventually(t, "a failed queue pair", func() bool {
			return p.live() == 1 && !p.near.Rails()[round%2].Up
		})
		fake.port(round%2, true)
		eventually(t, "two live queue pairs", func() bool { return p.live() == 2 })
	}
}

// TestBothPortsDown ends what waits with the peer's loss.
func TestBothPortsDown(t *testing.T) {
	c, p := openClocked(t, brisk())
	l, r := register(t, p.near, 1<<20), register(t, p.far, 1<<20)
	remote, fake := p.imports(t, r), fakeOf(p.near)
	fake.port(0, false)
	fake.port(1, false)
	eventually(t, "both ports down", func() bool {
		return !p.near.Rails()[0].Up && !p.near.Rails()[1].Up
	})
	tag := p.write(t, l, remote, nil)
	if err := c.await(t, p, tag); !errors.Is(err, driver.ErrPeerLost) {
		t.Errorf("without a port: %v", err)
	}
}

// TestOwnerCloses closes the owner's backend in mid-transfer: what is under way ends, and at
// once, since the owner says that its queue pairs are gone.
func TestOwnerCloses(t *testing.T) {
	// so long is the quiet time that this must not wait for
	p := openPair(t, Config{Timeout: 20 * time.Second})
	l, r := register(t, p.near, 8<<20), register(t, p.far, 8<<20)
	remote := p.imports(t, r)
	var tags []uint64
	for range 8 {
		tags = append(tags, p.write(t, l, remote, nil))
	}
	begin := time.Now()
	require.NoError(t, p.far.Close())
	for _, tag := range tags {
		if err := p.await(t, tag); err != nil && !errors.Is(err, driver.ErrPeerLost) &&
			!errors.Is(err, driver.ErrRevoked) {
			t.Errorf("a write to a backend that closes: %v", err)
		}
	}
	<-p.peer.Lost()
	if took := time.Since(begin); took > patience {
		t.Errorf("the owner was gone after %v", took)
	}
	if _, _, err := p.peer.Import(nil); !errors.Is(err, driver.ErrPeerLost) {
		t.Errorf("import from a backend that is closed: %v", err)
	}
}

// TestConnectHangsUp ends a context while the owner is busy: the owner's program is told
// nothing of a connection that nobody had.
func TestConnectHangsUp(t *testing.T) {
	p := openPair(t, Config{})
	for range 20 {
		ctx, cancel := context.WithTimeout(t.Context(), 300*time.Microsecond)
		if c, err := p.near.Connect(ctx, p.far.Addr()); err == nil {
			_ = c.Close()
			eventually(t, "its last word", func() bool { return len(received(t, p.far)) == 1 })
		}
		cancel()
	}
	eventually(t, "one connection", func() bool {
		p.far.mu.Lock()
		defer p.far.mu.Unlock()
		return p.far.admitted.Sum() == 1
	})
	if msgs := received(t, p.far); len(msgs) > 0 {
		t.Errorf("the owner was told %+v", msgs)
	}
}
