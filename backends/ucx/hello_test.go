// SPDX-License-Identifier: Apache-2.0

package ucx

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	ucp "github.com/sluicehq/sluice/csrc/ucx"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/session"
)

// patience bounds what must happen but not when.
const patience = 30 * time.Second

// eventually waits for what must come to be.
func eventually(t *testing.T, what string, f func() bool) {
	t.Helper()
	for end := time.Now().Add(patience); !f(); time.Sleep(100 * time.Microsecond) {
		require.False(t, time.Now().After(end), "%s: not within %v", what, patience)
	}
}

// received takes messages until there are none.
func received(t *testing.T, b *Backend) (list []driver.Message) {
	t.Helper()
	var msgs [3]driver.Message
	for {
		n, err := b.Receive(msgs[:])
		require.NoError(t, err)
		if n == 0 {
			return list
		}
		list = append(list, msgs[:n]...)
	}
}

func ends(b *Backend) int {
	b.endsMu.RLock()
	defer b.endsMu.RUnlock()
	return len(b.ends) + len(b.inbounds)
}

// TestHelloGivenUp connects to a backend that stands still. When it goes on it
// forgets what was given up, without a word to its program.
func TestHelloGivenUp(t *testing.T) {
	p := openPair(t, Config{})
	contextOf(p.far).freeze(true)
	for range 3 {
		ctx, cancel := context.WithTimeout(t.Context(), 2*time.Millisecond)
		c, err := p.near.Connect(ctx, p.far.Addr())
		cancel()
		if !errors.Is(err, driver.ErrTimeout) || !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("connect to a frozen backend: %v, %v", c, err)
		}
	}
	contextOf(p.far).freeze(false)
	eventually(t, "the given up are forgotten", func() bool {
		return ends(p.near) == 1 && ends(p.far) == 2
	})
	if m := received(t, p.far); len(m) > 0 {
		t.Errorf("messages of connections that never were: %+v", m)
	}
	p.share(t)
	p.connect(t)
}

// TestHelloGivenUpLate has the welcome and the goodbye cross.
func TestHelloGivenUpLate(t *testing.T) {
	p := openPair(t, Config{})
	contextOf(p.near).freeze(true)
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	if _, err := p.near.Connect(ctx, p.far.Addr()); !errors.Is(err, driver.ErrTimeout) {
		t.Errorf("connect without an answer: %v", err)
	}
	contextOf(p.near).freeze(false)
	eventually(t, "both sides forget", func() bool { return ends(p.near) == 1 && ends(p.far) == 2 })
	if m := received(t, p.far); len(m) > 0 {
		t.Errorf("messages of a connection that never was: %+v", m)
	}
}

func TestConnsMax(t *testing.T) {
	p := openPair(t, Config{ConnsMax: 2})
	second := p.connect(t)
	for range 3 {
		if _, err := p.near.Connect(t.Context(), p.far.Addr()); !errors.Is(err, driver.ErrFull) {
			t.Fatalf("one connection too many: %v", err)
		}
	}
	require.NoError(t, second.Close())
	eventually(t, "the last word", func() bool { return len(received(t, p.far)) == 1 })
	eventually(t, "room again", func() bool { return ends(p.far) == 2 })
	p.connect(t)
}

// TestHelloToAnother reaches a backend that has the place of another.
func TestHelloToAnother(t *testing.T) {
	p := openPair(t, Config{})
	a := p.far.address
	a.owner = session.NewOwner()
	addr, err := a.encode()
	require.NoError(t, err)
	if _, err := p.near.Connect(t.Context(), addr); !errors.Is(err, driver.ErrPeerLost) {
		t.Errorf("connect to who is no more: %v", err)
	}
}

// TestNonsense sends control messages that no peer of ours would send.
func TestNonsense(t *testing.T) {
	p := openPair(t, Config{})
	p.share(t)
	addr := p.near.Addr()
	for _, m := range append(someControl(),
		&hello{conn: 1, worker: 200, to: p.far.address.owner, from: addr},
		&bye{conn: 99, from: p.near.address.owner},
		&importAnswer{id: 1003}, &welcome{conn: 12},
	) {
		for conn := range uint64(4) {
			b := encodeControl(m)
			contextOf(p.far).push(ucp.Control{Conn: conn, Data: b[:len(b)-1]})
			if _, isBye := m.(*bye); !isBye || conn == 0 {
				contextOf(p.far).push(ucp.Control{Conn: conn, Data: encodeControl(m)})
			}
			contextOf(p.near).push(ucp.Control{Conn: conn, Data: encodeControl(m)})
		}
	}
	p.share(t)
	p.connect(t)
}

// TestImportUnanswered asks an owner that stands still.
func TestImportUnanswered(t *testing.T) {
	p := openPair(t, Config{})
	m, _ := p.share(t)
	token, _ := m.AppendToken(nil)
	contextOf(p.far).freeze(true)
	p.near.cfg.importMax = 20 * time.Millisecond
	if _, _, err := p.peer.Import(token); !errors.Is(err, driver.ErrTimeout) {
		t.Errorf("import without an answer: %v", err)
	}
	p.near.cfg.importMax = patience
	contextOf(p.far).freeze(false)
	p.imports(t, m)
	contextOf(p.far).freeze(true)
	done := make(chan error, 1)
	go func() { _, _, err := p.peer.Import(token); done <- err }()
	eventually(t, "the import asks", func() bool {
		p.peer.mu.Lock()
		defer p.peer.mu.Unlock()
		return len(p.peer.asks) == 1
	})
	closed := make(chan error, 1)
	go func() { closed <- p.peer.Close() }()
	require.ErrorIs(t, <-done, driver.ErrClosed, "import when the peer was closed")
	contextOf(p.far).freeze(false)
	_ = <-closed
}

// TestExplain names the cure where a peer of this host is reached by the network.
func TestExplain(t *testing.T) {
	p := openPair(t, Config{})
	m, key := p.share(t)
	local, err := p.near.Register(driver.Segment{Kind: driver.DRAM, Len: 1, Mem: make([]byte, 1)})
	require.NoError(t, err)
	const served = "; served by the owner's thread, message by message; lanes tcp/lo (am"
	require.Contains(t, p.peer.Explain(local.Key(), key), "this host, which ucx reaches over the "+
		"network like any other: the shm backend is for peers of one host, add it on both sides"+
		served)
	p.peer.owner.host[0]++
	require.Contains(t, p.peer.Explain(local.Key(), key), "another host, or apart by namespaces "+
		"or user"+served)
	require.Equal(t, "ucx: unknown key", p.peer.Explain(m.Key()+1, key))
}

// TestOneHostTakesHalfOfThePlaces, whichever of its processes they are. Our own process may take
// all.
func TestOneHostTakesHalfOfThePlaces(t *testing.T) {
	b := &Backend{cfg: Config{ConnsMax: 6}, inbounds: map[inboundID]*inbound{},
		accepted: map[uint64]*inbound{}}
	b.address.host, b.address.pid = [8]byte{3}, 100
	for i, want := range []error{nil, nil, nil, driver.ErrFull, nil, nil} {
		c := &inbound{b: b, id: inboundID{conn: uint64(i)}, conn: uint64(i)}
		c.from.host, c.from.pid = [8]byte{1 + byte(i)/4}, uint32(i)
		if i == 5 {
			c.from.host, c.from.pid = b.address.host, b.address.pid
		}
		require.True(t, b.admit(c))
		require.ErrorIs(t, c.refusal, want)
	}
}

// TestHelloThatIsDropped, since an owner has too many to tell them so, is said again.
func TestHelloThatIsDropped(t *testing.T) {
	near, far := openMeddled(t, Config{}), openMeddled(t, Config{ConnsMax: 1})
	var others []*inbound
	for i := range 1 + refusalsMax {
		c := &inbound{b: far, id: inboundID{conn: uint64(i)}, conn: far.conns.Add(1)}
		require.True(t, far.admit(c))
		others = append(others, c)
	}
	before := far.conns.Load()
	connected := make(chan error, 1)
	go func() {
		p, err := near.Connect(t.Context(), far.Addr())
		if err == nil {
			err = p.Close()
		}
		connected <- err
	}()
	eventually(t, "a hello that is dropped", func() bool { return far.conns.Load() > before })
	for _, c := range others {
		c.remove()
	}
	require.NoError(t, <-connected)
}
