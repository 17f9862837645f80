// SPDX-License-Identifier: Apache-2.0

package ucx

import (
	"context"
	"errors"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	ucp "github.com/sluicehq/sluice/csrc/ucx"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/keys"
)

// eventually waits for what must come to be.
func eventually(t *testing.T, what string, f func() bool) {
	t.Helper()
	for end := time.Now().Add(patience); !f(); time.Sleep(100 * time.Microsecond) {
		if time.Now().After(end) {
			t.Fatalf("%s: not within %v", what, patience)
		}
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
	n := 0
	for _, l := range b.sides {
		l.mu.RLock()
		n += len(l.ends) + len(l.inbounds)
		l.mu.RUnlock()
	}
	return n
}

// TestHelloGivenUp connects to a backend that stands still. When it goes on it
// forgets what was given up, without a word to its program.
func TestHelloGivenUp(t *testing.T) {
	p := openPair(t, Config{})
	fakeOf(p.far).freeze()
	for range 3 {
		ctx, cancel := context.WithTimeout(t.Context(), 2*time.Millisecond)
		c, err := p.near.Connect(ctx, p.far.Addr())
		cancel()
		if !errors.Is(err, driver.ErrTimeout) || !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("connect to a frozen backend: %v, %v", c, err)
		}
	}
	fakeOf(p.far).thaw()
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
	fakeOf(p.near).freeze()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	if _, err := p.near.Connect(ctx, p.far.Addr()); !errors.Is(err, driver.ErrTimeout) {
		t.Errorf("connect without an answer: %v", err)
	}
	fakeOf(p.near).thaw()
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
	a.owner = keys.NewOwner()
	registry.add(a.owner)
	defer registry.remove(a.owner)
	addr, err := a.encode()
	require.NoError(t, err)
	if _, err := p.near.Connect(t.Context(), addr); !errors.Is(err, driver.ErrPeerLost) {
		t.Errorf("connect to who is no more: %v", err)
	}
}

func TestNoRoute(t *testing.T) {
	far := openFakeBackend(t, Config{Transports: "tcp"})
	near := openFakeBackend(t, Config{Transports: "posix"})
	for _, c := range [][2]*Backend{{far, near}, {near, far}} {
		if _, err := c[0].Connect(t.Context(), c[1].Addr()); !errors.Is(err, driver.ErrNoRoute) {
			t.Errorf("connect without a transport in common: %v", err)
		}
	}
}

// TestNonsense sends control messages that no peer of ours would send.
func TestNonsense(t *testing.T) {
	p := openPair(t, Config{})
	p.share(t)
	a := p.near.address
	addr := p.near.Addr()
	a.host[0]++
	elsewhere, err := a.encode()
	require.NoError(t, err)
	for _, m := range append(someControl(),
		&hello{conn: 1, worker: 200, to: p.far.address.owner, from: addr},
		&hello{conn: 1, to: p.far.address.owner, from: elsewhere},
		&bye{conn: 99, from: p.near.address.owner},
		&importAnswer{id: 1003}, &welcome{conn: 12},
	) {
		for conn := range uint64(4) {
			fakeOf(p.far).push(ucp.Control{Conn: conn, Data: m.encode()[:len(m.encode())-1]})
			if _, isBye := m.(*bye); !isBye || conn == 0 {
				fakeOf(p.far).push(ucp.Control{Conn: conn, Data: m.encode()})
			}
			if _, isQuit := m.(quit); !isQuit {
				fakeOf(p.near).push(ucp.Control{Conn: conn, Data: m.encode()})
			}
		}
	}
	p.share(t)
	p.connect(t)
}

// TestLost has UCX give up connections of both sides.
func TestLost(t *testing.T) {
	for _, list := range []string{"posix", "tcp"} {
		p := openPair(t, Config{Transports: list})
		m, _ := p.share(t)
		fabricOf := func(b *Backend) *fakeNet { return b.sides[0].net.(*fakeNet) }
		fabricOf(p.far).lose()
		var msgs []driver.Message
		eventually(t, "the last word", func() bool {
			msgs = append(msgs, received(t, p.far)...)
			return len(msgs) > 0
		})
		if len(msgs) != 1 || !errors.Is(msgs[0].Err, driver.ErrPeerLost) || msgs[0].Conn == 0 {
			t.Errorf("%s: %+v", list, msgs)
		}
		if list == "posix" { // it may be in the middle of a store: the link must stay
			time.Sleep(5 * time.Millisecond)
			if ends(p.far) != 2 {
				t.Error("a near connection was given back without proof that the peer is out")
			}
		} else {
			eventually(t, "the end of the link", func() bool { return ends(p.far) == 0 })
		}
		fabricOf(p.near).lose()
		<-p.peer.Lost()
		token, _ := m.AppendToken(nil)
		if _, _, err := p.peer.Import(token); !errors.Is(err, driver.ErrPeerLost) {
			t.Errorf("%s: import over a lost connection: %v", list, err)
		}
		if err := p.peer.Submit(1, &driver.Batch{Op: driver.Write,
			Tail: driver.NotifyTail}); !errors.Is(err, driver.ErrPeerLost) {
			t.Errorf("%s: submit over a lost connection: %v", list, err)
		}
		if err := p.peer.Close(); err != nil {
			t.Errorf("%s: close a lost peer: %v", list, err)
		}
	}
}

// TestQuit closes the backend that others are connected to.
func TestQuit(t *testing.T) {
	p := openPair(t, Config{Grace: graceMax}) // which nobody waits for
	require.NoError(t, p.far.Close())
	select {
	case <-p.peer.Lost():
	case <-time.After(patience):
		t.Fatal("nobody was told that the backend closed")
	}
	begin := time.Now()
	if err := p.peer.Close(); err != nil || time.Since(begin) >= graceMax {
		t.Errorf("close after the owner has closed: %v, after %v", err, time.Since(begin))
	}
	if _, err := p.near.Connect(t.Context(), p.far.Addr()); !errors.Is(err, driver.ErrPeerLost) {
		t.Errorf("connect to a closed backend: %v", err)
	}
}

// TestImportUnanswered asks an owner that stands still.
func TestImportUnanswered(t *testing.T) {
	p := openPair(t, Config{})
	m, _ := p.share(t)
	token, _ := m.AppendToken(nil)
	fakeOf(p.far).freeze()
	p.near.cfg.importMax = 20 * time.Millisecond
	if _, _, err := p.peer.Import(token); !errors.Is(err, driver.ErrTimeout) {
		t.Errorf("import without an answer: %v", err)
	}
	p.near.cfg.importMax = patience
	fakeOf(p.far).thaw()
	p.imports(t, m)
	fakeOf(p.far).freeze()
	done := make(chan error, 1)
	go func() { _, _, err := p.peer.Import(token); done <- err }()
	time.Sleep(time.Millisecond)
	closed := make(chan error, 1)
	go func() { closed <- p.peer.Close() }()
	if err := <-done; !errors.Is(err, driver.ErrClosed) {
		t.Errorf("import when the peer was closed: %v", err)
	}
	fakeOf(p.far).thaw()
	_ = <-closed
}

func TestExplain(t *testing.T) {
	p := openPair(t, Config{})
	m, key := p.share(t)
	local, err := p.near.Register(driver.Segment{Kind: driver.DRAM, Len: 1, Mem: make([]byte, 1)})
	require.NoError(t, err)
	const before, after = "near (this host, the same namespaces and user), ",
		"; not direct, because the memory is not UCX's own: allocate it with the ucx backend's " +
			"Alloc; lanes tcp/lo, fake/memory (am am_bw)"
	ours := p.peer
	for _, way := range []struct {
		refusal error
		pulled  bool
		want    string
	}{
		{nil, true, "served by the owner's thread: what is written by one copy of the kernel, " +
			"what is read message by message through UCX's queue"},
		{nil, false, "served by the owner's thread message by message through UCX's queue, since " +
			"the owner may not copy from this process"},
		{driver.ErrNotSupported, false, "served by the owner's thread message by message through " +
			"UCX's queue, since Transports of one side leave out cma"},
		{syscall.EPERM, false, "served by the owner's thread message by message through " +
			"UCX's queue " +
			"(operation not permitted: sysctl kernel.yama.ptrace_scope=0, or allow it in the " +
			"container's seccomp profile)"},
	} {
		fakeOf(p.near).refusal = way.refusal
		ours.pulled.Store(way.pulled)
		if got := p.peer.Explain(local.Key(), key); got != before+way.want+after {
			t.Errorf("%q, want %q", got, before+way.want+after)
		}
	}
	if got := p.peer.Explain(m.Key()+1, key); got != "ucx: unknown key" {
		t.Errorf("unknown key: %q", got)
	}
}

// TestOneProcessTakesHalfOfThePlaces of near peers: the others are for other processes.
func TestOneProcessTakesHalfOfThePlaces(t *testing.T) {
	b := openFakeBackend(t, Config{ConnsMax: 4})
	l := b.near
	made := []*inbound{}
	for i, pid := range []uint32{99998, 99998, 99998, 99999} {
		c := &inbound{b: b, l: l, id: inboundID{conn: uint64(i)}, conn: b.conns.Add(1)}
		c.from.process.PID = pid
		require.True(t, l.admit(c))
		made = append(made, c)
	}
	require.NoError(t, made[1].refusal)
	require.ErrorIs(t, made[2].refusal, driver.ErrFull)
	require.NoError(t, made[3].refusal)
	for _, c := range made {
		c.withdraw()
	}
}

// TestOneHostTakesHalfOfThePlaces of far peers, whichever of its processes they are.
func TestOneHostTakesHalfOfThePlaces(t *testing.T) {
	l := newSide(&Backend{cfg: Config{ConnsMax: 4}, accepted: map[uint64]*inbound{}}, nil, false)
	for i, want := range []error{nil, nil, driver.ErrFull, nil} {
		c := &inbound{b: l.b, l: l, id: inboundID{conn: uint64(i)}, conn: uint64(i)}
		c.from.host, c.from.process.PID = [8]byte{1 + byte(i)/3}, uint32(i)
		require.True(t, l.admit(c))
		require.ErrorIs(t, c.refusal, want)
	}
}

// TestHelloThatIsDropped, since an owner has too many to tell them so, is said again.
func TestHelloThatIsDropped(t *testing.T) {
	near, far := openFakeBackend(t, Config{}), openFakeBackend(t, Config{ConnsMax: 1})
	var others []*inbound
	for i := range 1 + refusalsMax {
		c := &inbound{b: far, l: far.near, id: inboundID{conn: uint64(i)}, conn: far.conns.Add(1)}
		require.True(t, far.near.admit(c))
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
		c.withdraw()
	}
	require.NoError(t, <-connected)
}
