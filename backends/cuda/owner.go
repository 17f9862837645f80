// SPDX-License-Identifier: Apache-2.0

package cuda

import (
	"errors"
	"fmt"
	"maps"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/clock"
	"github.com/sluicehq/sluice/internal/hostmem"
	"github.com/sluicehq/sluice/internal/proc"
	"github.com/sluicehq/sluice/internal/session"
)

const (
	// handshakesMax bounds what processes can make us hold before they have said hello: a socket
	// and 5 KB each, for Config.DialTimeout.
	handshakesMax = 16
	// outlastMax is the longest time between two looks at a process that has batches under way.
	outlastMax = 250 * time.Millisecond
	// hintMax is how long a hint may take where the socket is full.
	hintMax = time.Millisecond
)

// server is what other processes reach.
type server struct {
	listener *net.UnixListener // nil: none do
	tasks    sync.WaitGroup
	lobby    *session.Lobby // handshakes under way

	mu      sync.Mutex // guards what follows
	closed  bool
	clients map[*client]struct{}
}

// client is another process that reaches our memory.
type client struct {
	b       *Backend
	wire    wire
	process proc.Remote
	users   []byte        // theirs, which we only read
	states  []byte        // ours, which they can only read
	sending sync.Mutex    // held to send
	hintDue atomic.Bool   // a hint is to be sent, behind the packet that is being sent
	gone    chan struct{} // closed by dismiss
	going   sync.Once

	mu      sync.Mutex // guards what follows
	exports [slotsMax]*export
	next    uint32   // slots that were never used are from here on
	free    []uint32 // that were given back
	left    bool     // nothing of it is under way, and the pages may be gone
}

// export is the memory that a client was given under a slot.
type export struct {
	m    *memory
	lost bool // what the client still does lands in memory that nothing uses
}

func (g *client) usersOf(slot uint32) *atomic.Uint64 {
	return hostmem.SharedWord(g.users, int(8*slot))
}
func (g *client) stateOf(slot uint32) *atomic.Uint64 {
	return hostmem.SharedWord(g.states, int(8*slot))
}

// serve opens the socket where the Config asks for it, and serves other processes until it is
// closed.
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
	if s.listener, err = net.ListenUnix("unixpacket", at); err != nil {
		return fmt.Errorf("open cuda backend: %w", err)
	}
	welcome := func(conn net.Conn, v *session.Visit) bool {
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
			g.serve()
		})
		return true
	}
	s.tasks.Go(func() { _ = s.lobby.Serve(s.listener, welcome) })
	return nil
}

// greet takes the page of a process of our user, and answers with ours.
func (b *Backend) greet(conn *net.UnixConn) (_ *client, err error) {
	g := &client{b: b, wire: wire{conn: conn}, gone: make(chan struct{})}
	defer func() {
		if err != nil {
			g.leave() // it was given no slot
		}
	}()
	if err = conn.SetDeadline(time.Now().Add(b.cfg.DialTimeout)); err != nil {
		return nil, err
	}
	if g.process, err = proc.Identify(conn); err != nil {
		return nil, err
	}
	if !g.process.Known() {
		return nil, &driver.UnavailableError{Backend: "cuda", Reason: "the kernel has no pidfd, " +
			"so that the end of a process's copies cannot be known", Fix: "Linux 5.3 or later"}
	}
	h, _, theirs, err := g.wire.receive()
	if err != nil {
		return nil, err
	}
	defer closeDescriptor(theirs)
	if h.Kind != sayHello || theirs < 0 {
		return nil, fmt.Errorf("hello of kind %d: %w", h.Kind, driver.ErrCorrupt)
	}
	if g.users, err = hostmem.MapSealed(theirs, pageBytes, unix.PROT_READ); err != nil {
		return nil, err
	}
	page, states, err := hostmem.NewSealed("sluice-cuda-slots", pageBytes, true)
	if err != nil {
		return nil, err
	}
	defer closeDescriptor(page) // the mappings keep it
	g.states = states

	// Revoke sees the client from here on, before it can be given anything.
	s := &b.server
	s.mu.Lock()
	switch {
	case s.closed:
		err = driver.ErrClosed
	case len(s.clients) >= b.cfg.PeersMax:
		err = fmt.Errorf("%d processes, raise Config.PeersMax: %w", len(s.clients), driver.ErrFull)
	default:
		s.clients[g] = struct{}{}
	}
	s.mu.Unlock()
	answer := head{Kind: sayWelcome, Outcome: outcomeOf(err)}
	if err != nil {
		_ = g.wire.send(&answer, []byte(err.Error()), b.cfg.DialTimeout)
		return nil, err
	}
	if err = g.wire.send(&answer, nil, b.cfg.DialTimeout, page); err == nil {
		err = conn.SetDeadline(time.Time{})
	}
	return g, err
}

// serve answers until the connection ends, and stays until nothing of the client is under way.
// Copies of a process end neither with its socket nor with the process: a child that it forked
// keeps its context.
func (g *client) serve() {
	var watch sync.WaitGroup
	watch.Go(func() {
		if g.process.Wait() == nil {
			_ = g.wire.conn.Close() // a child of the process may hold the other end open
		}
	})
	polite := g.listen()
	_ = g.wire.conn.Close()
	if !polite {
		// As with Revoke, a batch that counts itself later sees the end of its import. The process
		// may live on and connect again: a lost connection keeps no place for it. One that died in
		// a batch keeps its place until the memory is revoked: only that may put other memory
		// there.
		all := func(*export) bool { return true }
		g.endExports(all)
	wait:
		for pause := time.Millisecond; g.isIn(all); pause = min(2*pause, outlastMax) {
			select {
			case <-g.gone:
				break wait
			case <-time.After(pause):
			}
		}
	}
	g.leave()
	watch.Wait()
}

// listen reports whether the client has said that nothing is under way.
func (g *client) listen() (polite bool) {
	for reset := false; ; {
		h, tail, fd, err := g.wire.receive()
		if errors.Is(err, unix.ECONNRESET) && !reset {
			// The other end has closed over a packet of ours that it had not read. The
			// kernel says so once, before it gives what had been sent: a goodbye, perhaps.
			reset = true
			continue
		}
		if err != nil {
			return false
		}
		closeDescriptor(fd) // a client has none to give after its hello
		switch h.Kind {
		case sayAsk:
			err = g.answer(h.ID, tail)
		case sayDrop:
			err = g.freeSlot(h.Slot)
		case sayBye:
			return true
		default:
			err = driver.ErrCorrupt
		}
		if err != nil {
			return false
		}
	}
}

// leave forgets the client.
func (g *client) leave() {
	s := &g.b.server
	s.mu.Lock()
	delete(s.clients, g)
	s.mu.Unlock()
	g.mu.Lock()
	defer g.mu.Unlock()
	g.left = true
	unmapPages(g.users, g.states)
	g.users, g.states = nil, nil
	g.process.Release()
}

// dismiss ends the server; no memory is registered any more that a client could reach.
func (b *Backend) dismiss() {
	s := &b.server
	if s.listener == nil {
		return
	}
	s.mu.Lock()
	s.closed = true
	s.mu.Unlock()
	s.lobby.Close()
	_ = s.listener.Close() // the lobby ends by it
	for _, g := range b.clients() {
		g.going.Do(func() { close(g.gone) })
		_ = g.wire.conn.Close()
		g.process.Release()
	}
	s.tasks.Wait()
}

func (b *Backend) clients() []*client {
	b.server.mu.Lock()
	defer b.server.mu.Unlock()
	return slices.Collect(maps.Keys(b.server.clients))
}

// say sends a packet, within Config.DialTimeout.
func (g *client) say(h *head, tail []byte, fds ...int) error {
	g.sending.Lock()
	err := g.wire.send(h, tail, g.b.cfg.DialTimeout, fds...)
	g.sending.Unlock()
	g.sendHint()
	return err
}

// hint says that a slot has ended. It does not wait: a frozen process needs no hint.
func (g *client) hint() {
	g.hintDue.Store(true)
	g.sendHint()
}

// sendHint sends the hint that is due, unless another goroutine sends something: that one comes
// here behind its packet.
func (g *client) sendHint() {
	for g.hintDue.Load() && g.sending.TryLock() {
		if g.hintDue.Swap(false) {
			_ = g.wire.send(&head{Kind: sayEnded}, nil, hintMax)
		}
		g.sending.Unlock()
	}
}

// answer gives what a token opens, for a slot, or says why not. Only an error of the connection is
// returned.
func (g *client) answer(id uint32, token []byte) error {
	h, fd, err := g.open(token)
	h.Kind, h.ID, h.Outcome = sayAnswer, id, outcomeOf(err)
	if err != nil {
		text := err.Error()
		return g.say(&h, []byte(text[:min(len(text), 1024)]))
	}
	defer closeDescriptor(fd)
	return g.say(&h, nil, fd)
}

func (g *client) open(token []byte) (h head, fd int, err error) {
	t, err := session.DecodeToken(token, &g.b.owner)
	if err != nil {
		return h, -1, err
	}
	m := g.b.memories.At(t.Key)
	if err := m.opens(&t); err != nil {
		return h, -1, err
	}
	switch {
	case m.dev == nil:
		err = fmt.Errorf("host memory of another process is for another backend, such as shm: %w",
			driver.ErrNotSupported)
	case m.block == nil:
		err = fmt.Errorf("device memory of another process is reached where AllocDevice of a "+
			"backend with Config.Peers made it: %w", driver.ErrNotSupported)
	case m.seg.Only != nil:
		err = fmt.Errorf("some ranges of device memory are for this process alone: other memory "+
			"under them would be under what lies beside, too: %w", driver.ErrNotSupported)
	}
	if err != nil {
		return h, -1, err
	}
	slot, err := g.takeSlot(m)
	if err != nil {
		return h, -1, err
	}
	// Revoke marks the end of the memory, and renew that it begins, before either looks at the
	// slots; this is the other way round: one of the two sees the other.
	switch {
	case m.theirs.ended.Load():
		err = driver.ErrRevoked
	case m.block.moving.Load():
		err = fmt.Errorf("a revoke against a frozen process replaces the memory now, try again: %w",
			driver.ErrFull)
	default:
		h, fd, err = m.share()
		h.Slot = slot
	}
	if err != nil {
		return h, -1, errors.Join(err, g.freeSlot(slot))
	}
	return h, fd, nil
}

// share describes a memory, with a descriptor of what is there now.
func (m *memory) share() (h head, fd int, err error) {
	o := m.block
	o.mu.Lock()
	defer o.mu.Unlock()
	fd, err = o.block.Share()
	if m.seg.ReadOnly {
		h.ReadOnly = 1
	}
	h.Block, h.Mapped, h.Off, h.Size, h.Device = o.id, o.block.Mapped(), m.base-o.block.At,
		m.seg.Len, m.dev.uuid
	return h, fd, err
}

func (g *client) takeSlot(m *memory) (slot uint32, err error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	switch n := len(g.free); {
	case g.left:
		return 0, driver.ErrClosed
	case n > 0:
		slot, g.free = g.free[n-1], g.free[:n-1]
	case g.next < slotsMax:
		slot, g.next = g.next, g.next+1
	default:
		return 0, fmt.Errorf("%d imports over one connection, drop some: %w", slotsMax,
			driver.ErrFull)
	}
	g.stateOf(slot).Store(importGood)
	g.exports[slot] = &export{m: m}
	return slot, nil
}

// freeSlot ends an export. A process that gives back what it uses is not believed any more.
func (g *client) freeSlot(slot uint32) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.left || slot >= slotsMax || g.exports[slot] == nil || g.usersOf(slot).Load() != 0 {
		return fmt.Errorf("slot %d given back: %w", slot, driver.ErrCorrupt)
	}
	g.exports[slot] = nil
	g.free = append(g.free, slot)
	return nil
}

// eachExport calls f for those that a condition names, under the lock.
func (g *client) eachExport(which func(*export) bool, f func(slot uint32, e *export)) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.left {
		return
	}
	for slot, e := range g.exports[:g.next] {
		if e != nil && which(e) {
			f(uint32(slot), e)
		}
	}
}

// endExports ends what the client was given, and tells it: it may drop what it has not begun.
func (g *client) endExports(which func(*export) bool) {
	ended := false
	g.eachExport(which, func(slot uint32, _ *export) {
		ended = g.stateOf(slot).Swap(importRevoked) != importRevoked || ended
	})
	if ended {
		g.hint()
	}
}

// isIn reports whether the client has batches under way with such memory, dead or not.
func (g *client) isIn(which func(*export) bool) (in bool) {
	g.eachExport(which, func(slot uint32, e *export) {
		in = in || !e.lost && g.usersOf(slot).Load() != 0
	})
	return in
}
