// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"fmt"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/backends/tcp"
)

// link is a way to a tcp backend on which bytes can be lost, held up or slowed down.
type link struct {
	deaf atomic.Bool  // what the owner sends is lost
	mute atomic.Bool  // what is sent to it is lost
	rate atomic.Int64 // bytes a second towards the owner, of each connection; 0: any
	held atomic.Pointer[holdUp]

	mu  sync.Mutex
	all []net.Conn
}

// holdUp stops a connection towards the owner once so many bytes have passed.
type holdUp struct {
	after int64
	came  chan struct{} // closed once it has stopped one
	once  sync.Once
	goOn  chan struct{} // closed: all passes
}

// hold holds the next bytes up behind the first so many, until goOn is called.
func (k *link) hold(t *testing.T, after int64) (came <-chan struct{}, goOn func()) {
	h := &holdUp{after: after, came: make(chan struct{}), goOn: make(chan struct{})}
	goOn = sync.OnceFunc(func() { close(h.goOn) })
	t.Cleanup(goOn)
	k.held.Store(h)
	return h.came, goOn
}

func (h *holdUp) pass(passed int64) {
	if passed >= h.after {
		h.once.Do(func() { close(h.came) })
		<-h.goOn
	}
}

func plainTCP(t testing.TB) *tcp.Backend {
	t.Helper()
	b, err := tcp.New(tcp.Config{Listen: "127.0.0.1:0", Plaintext: true})
	require.NoError(t, err)
	return b
}

// tcpBehind returns a backend that peers reach by a link alone.
func tcpBehind(t testing.TB) (*tcp.Backend, *link) {
	t.Helper()
	k := &link{}
	for range 20 { // another process may take the port
		l, err := net.Listen("tcp", "127.0.0.2:0")
		require.NoError(t, err)
		at := fmt.Sprintf("127.0.0.1:%d", l.Addr().(*net.TCPAddr).Port)
		b, err := tcp.New(tcp.Config{Listen: at, Plaintext: true, Advertise: []string{"127.0.0.2"}})
		if err != nil {
			_ = l.Close()
			continue
		}
		go k.serve(l, at)
		t.Cleanup(func() { _ = l.Close(); k.cut() })
		return b, k
	}
	t.Fatal("no port is free on both addresses")
	return nil, nil
}

func (k *link) serve(l net.Listener, to string) {
	for {
		near, err := l.Accept()
		if err != nil {
			return
		}
		far, err := net.Dial("tcp", to)
		if err != nil {
			_ = near.Close()
			continue
		}
		k.mu.Lock()
		k.all = append(k.all, near, far)
		k.mu.Unlock()
		go k.relay(far, near, &k.mute, true)
		go k.relay(near, far, &k.deaf, false)
	}
}

// relay does not close the other side: a cut link tells nothing.
func (k *link) relay(to, from net.Conn, lose *atomic.Bool, slow bool) {
	b := make([]byte, 16<<10)
	var by *holdUp
	passed := int64(0) // since by was there
	for {
		n, err := from.Read(b)
		if err != nil {
			return
		}
		if lose.Load() {
			continue
		}
		if _, err := to.Write(b[:n]); err != nil {
			return
		}
		if h := k.held.Load(); slow && h != nil {
			if h != by {
				by, passed = h, 0
			}
			passed += int64(n)
			h.pass(passed)
		}
		if rate := k.rate.Load(); slow && rate > 0 {
			time.Sleep(time.Duration(n) * time.Second / time.Duration(rate))
		}
	}
}

// cut resets all connections.
func (k *link) cut() {
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, c := range k.all {
		_ = c.(*net.TCPConn).SetLinger(0)
		_ = c.Close()
	}
}
