// SPDX-License-Identifier: Apache-2.0

package cuda

import (
	"fmt"
	"net"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/clock"
	"github.com/sluicehq/sluice/internal/proc"
	"github.com/sluicehq/sluice/internal/sealed"
	"github.com/sluicehq/sluice/internal/session"
)

// handshakesMax bounds what processes can make us hold before they have said hello: a socket and 5
// KB each, for Config.DialTimeout.
const handshakesMax = 16

// server is what other processes reach.
type server struct {
	listener *net.UnixListener // nil: none do
	tasks    sync.WaitGroup
	lobby    *session.Lobby // handshakes under way

	mu      sync.Mutex // guards what follows
	closed  bool
	clients map[*client]struct{}
}

// serve opens the socket where the Config asks for it.
func (b *Backend) serve() error {
	if !b.cfg.Peers {
		return nil
	}
	s := &b.server
	s.lobby, s.clients = session.NewLobby(handshakesMax, clock.Host()), map[*client]struct{}{}
	at, err := socketOf([]byte(b.addr))
	if err != nil {
		return err
	}
	l, err := net.ListenUnix("unixpacket", at)
	if err != nil {
		return fmt.Errorf("open cuda backend: %w", err)
	}
	s.listener = l
	s.tasks.Go(b.accept)
	return nil
}

// accept serves other processes until the listener is closed.
func (b *Backend) accept() {
	s := &b.server
	_ = s.lobby.Serve(s.listener, func(conn net.Conn, v *session.Visit) bool {
		s.tasks.Go(func() {
			if !v.Wait() {
				return
			}
			g, err := b.greet(conn.(*net.UnixConn))
			v.Leave()
			if err != nil {
				_ = conn.Close() // the other end learns no more than that
				return
			}
			g.attend()
		})
		return true
	})
}

// greet checks a new connection and answers it.
func (b *Backend) greet(conn *net.UnixConn) (*client, error) {
	if err := conn.SetDeadline(time.Now().Add(b.cfg.DialTimeout)); err != nil {
		return nil, err
	}
	g := &client{b: b, wire: wire{conn: conn}, gone: make(chan struct{})}
	fd, err := g.hello()
	if err != nil {
		g.release()
		return nil, err
	}
	defer closeDescriptor(fd) // the mappings keep it
	err = b.enlist(g)
	answer := head{Kind: sayWelcome, Outcome: outcomeOf(err)}
	if err != nil {
		_ = g.wire.send(&answer, []byte(err.Error()), b.cfg.DialTimeout)
		g.release()
		return nil, err
	}
	if err = g.wire.send(&answer, nil, b.cfg.DialTimeout, fd); err == nil {
		err = conn.SetDeadline(time.Time{})
	}
	if err != nil {
		g.leave() // it was given no slot
		return nil, err
	}
	return g, nil
}

// hello takes the page of a process of our user, and makes ours.
func (g *client) hello() (fd int, err error) {
	if g.process, err = proc.Identify(g.wire.conn); err != nil {
		return -1, err
	}
	if !g.process.Known() {
		return -1, &driver.UnavailableError{Backend: "cuda", Reason: "the kernel has no pidfd, " +
			"so that the end of a process's copies cannot be known", Fix: "Linux 5.3 or later"}
	}
	h, _, page, err := g.wire.receive()
	if err != nil {
		return -1, err
	}
	defer closeDescriptor(page)
	if h.Kind != sayHello || page < 0 {
		return -1, fmt.Errorf("hello of kind %d: %w", h.Kind, driver.ErrCorrupt)
	}
	if g.users, err = sealed.Map(page, pageBytes, unix.PROT_READ); err != nil {
		return -1, err
	}
	fd, g.states, err = sealed.New("sluice-cuda-slots", pageBytes, true)
	return fd, err
}

// enlist puts a client where Revoke sees it, before it can be given anything.
func (b *Backend) enlist(g *client) error {
	s := &b.server
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return driver.ErrClosed
	}
	if len(s.clients) >= b.cfg.PeersMax {
		return fmt.Errorf("%d processes, raise Config.PeersMax: %w", len(s.clients), driver.ErrFull)
	}
	s.clients[g] = struct{}{}
	return nil
}

// each calls f for every client.
func (s *server) each(f func(*client)) {
	s.mu.Lock()
	list := make([]*client, 0, len(s.clients))
	for g := range s.clients {
		list = append(list, g)
	}
	s.mu.Unlock()
	for _, g := range list {
		f(g)
	}
}

// dismiss ends the server; no memory is registered any more.
func (b *Backend) dismiss() {
	s := &b.server
	if s.listener == nil {
		return
	}
	s.mu.Lock()
	s.closed = true
	s.mu.Unlock()
	s.lobby.Close()
	_ = s.listener.Close() // accept ends by it
	s.each((*client).dismiss)
	s.tasks.Wait()
}

// endPasses ends what clients were given, as a condition says.
func (b *Backend) endPasses(which func(*pass) bool) {
	b.server.each(func(g *client) { g.endPasses(which) })
}

// turnPasses changes the state of what clients were given.
func (b *Backend) turnPasses(which func(*pass) bool, from, to uint64) {
	b.server.each(func(g *client) { g.turn(which, from, to) })
}

// clientsIn reports whether a batch of another process uses what it was given.
func (b *Backend) clientsIn(which func(*pass) bool) (in bool) {
	b.server.each(func(g *client) { in = in || g.isIn(which) })
	return in
}

// disown has batches of other processes count no more: nothing else uses the memory that they write
// to.
func (b *Backend) disown(which func(*pass) bool) {
	b.server.each(func(g *client) { g.disown(which) })
}
