// SPDX-License-Identifier: Apache-2.0

package tcp

import (
	"bytes"
	"io"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/testing/testkit"
)

// A proxy hangs up while the owner is well, and may still be reading: that ends nothing before
// Grace.
func TestProxyThatHangsUpProvesNothing(t *testing.T) {
	testkit.CheckLeaks(t)
	clock := testkit.NewClock()
	owner := openBy(t, clock, Config{Grace: 2 * time.Second})
	far, _ := share(t, owner, 8<<20)
	x := startProxy(t, owner)
	b := openBy(t, clock, Config{})
	m, _ := share(t, b, 8<<20)
	p := dial(t, b, x.addr)
	if p.direct {
		t.Fatal("a connection through a proxy is taken for a direct one")
	}
	d := []driver.Desc{{Len: 8 << 20, LocalKey: m.key, RemoteKey: take(t, p, far)}}
	far.gate.Lock() // nothing lands: most is on its way when the proxy hangs up
	defer far.gate.Unlock()
	for tag := range uint64(64) {
		require.NoError(t, p.Submit(tag, &driver.Batch{Op: driver.Write, Descs: d}))
	}
	x.hangUp()
	defer clock.Run(20 * time.Millisecond)()
	wantError(t, "a write through a proxy that hangs up", await(t, b, 63), driver.ErrPeerLost)
	p.mu.Lock()
	last := p.lastSent
	p.mu.Unlock()
	if past := clock.Now() - last; past < p.grace {
		testkit.ErrorBroken(t, "it ended %v after its last bytes were sent, which may land for %v",
			time.Duration(past), time.Duration(p.grace))
	}
}

// proxy passes on what comes, each way.
type proxy struct {
	addr  []byte
	mu    sync.Mutex
	conns []net.Conn
	all   sync.WaitGroup
}

func startProxy(t *testing.T, owner *Backend) *proxy {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	x := &proxy{}
	a := owner.address
	a.places = []string{l.Addr().String()}
	x.addr, err = a.encode()
	require.NoError(t, err)
	x.all.Go(func() {
		for {
			near, err := l.Accept()
			if err != nil {
				return
			}
			far, err := net.Dial("tcp", owner.listener.Addr().String())
			if err != nil {
				_ = near.Close()
				return
			}
			x.mu.Lock()
			x.conns = append(x.conns, near, far)
			x.mu.Unlock()
			x.all.Go(func() { pass(far, near) })
			x.all.Go(func() { pass(near, far) })
		}
	})
	t.Cleanup(func() { _ = l.Close(); x.hangUp(); x.all.Wait() })
	return x
}

// pass copies until somebody hangs up. It hides what the connections are: the runtime would keep
// pipes for them.
func pass(to io.Writer, from io.Reader) {
	_, _ = io.Copy(struct{ io.Writer }{to}, struct{ io.Reader }{from})
}

func (x *proxy) hangUp() {
	x.mu.Lock()
	defer x.mu.Unlock()
	for _, c := range x.conns {
		_ = c.Close()
	}
}

// Both sides of a connection see the same, whichever family of addresses their sockets are of.
func TestView(t *testing.T) {
	near := &net.TCPAddr{IP: net.IPv4(10, 0, 0, 1), Port: 5}
	far := &net.TCPAddr{IP: net.IPv4(10, 0, 0, 2).To4(), Port: 6}
	other := &net.TCPAddr{IP: net.IPv4(10, 0, 0, 1).To4(), Port: 7}
	same := &net.TCPAddr{IP: net.IPv4(10, 0, 0, 1).To4(), Port: 5}
	if !bytes.Equal(appendView(nil, near, far), appendView(nil, same, far)) {
		t.Error("an address is not the same in four bytes and in sixteen")
	}
	if bytes.Equal(appendView(nil, near, far), appendView(nil, other, far)) ||
		bytes.Equal(appendView(nil, near, far), appendView(nil, far, near)) {
		t.Error("two connections look like one")
	}
}
