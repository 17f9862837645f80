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
	// handshakesMax bounds the connections that have not finished their handshake. Each takes a
	// socket and 5 KB, for Config.DialTimeout at most.
	handshakesMax = 16
	// outlastMax is the longest pause of client.serve between two checks of whether the batches of
	// a lost process have ended.
	outlastMax = 250 * time.Millisecond
	// hintMax is how long sending a hint may block on a full socket.
	hintMax = time.Millisecond
)

// server accepts the connections of other processes and keeps their clients.
type server struct {
	listener *net.UnixListener // nil without Config.Peers
	tasks    sync.WaitGroup
	lobby    *session.Lobby // handshakes under way

	mu      sync.Mutex // guards what follows
	closed  bool
	clients map[*client]struct{}
}

// client is the owner's side of a connection: another process that imports memory of this backend.
//
// Both sides share two pages with a word for each slot, that is for each import. The client counts
// its running batches in users; the owner writes the state of the import (importGood and so on) to
// states.
type client struct {
	b       *Backend
	wire    wire
	process proc.Remote
	users   []byte        // the client's page, mapped read-only here
	states  []byte        // the owner's page, read-only for the client
	sending sync.Mutex    // held to send
	hintDue atomic.Bool   // a hint must follow the packet that is being sent
	gone    chan struct{} // closed by dismiss

	dismissOnce sync.Once // closes gone

	mu       sync.Mutex // guards what follows
	exports  [slotsMax]*export
	next     uint32   // the lowest slot that was never used
	free     []uint32 // slots below next that are free again
	released bool     // by leave: the shared pages are unmapped
}

// export is memory that a client has imported, under one slot.
type export struct {
	m *memory
	// disowned: renew has replaced the memory, so batches of the client that still run write to
	// memory that nothing uses
	disowned bool
}

func (g *client) usersOf(slot uint32) *atomic.Uint64 {
	return hostmem.SharedWord(g.users, int(8*slot))
}
func (g *client) stateOf(slot uint32) *atomic.Uint64 {
	return hostmem.SharedWord(g.states, int(8*slot))
}

// serve opens the socket if Config.Peers is set, and starts to accept other processes.
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
				_ = conn.Close() // without a reason for the other process
				return
			}
			g.serve()
		})
		return true
	}
	s.tasks.Go(func() { _ = s.lobby.Serve(s.listener, welcome) })
	return nil
}

// greet does the owner's part of the handshake: it identifies the process, maps its users page and
// sends the states page.
func (b *Backend) greet(conn *net.UnixConn) (_ *client, err error) {
	g := &client{b: b, wire: wire{conn: conn}, gone: make(chan struct{})}
	defer func() {
		if err != nil {
			g.leave() // it has no slot yet, so no batch
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

	// Register the client before it can import anything, so that Revoke finds it.
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

// serve answers the client until the connection ends, and returns only when none of its batches
// runs. Neither the end of the socket nor the death of the process ends its copies: a child that it
// forked keeps the CUDA context alive.
func (g *client) serve() {
	var watch sync.WaitGroup
	watch.Go(func() {
		if g.process.Wait() == nil {
			_ = g.wire.conn.Close() // a child of the process may hold the other end open
		}
	})
	saidBye := g.listen()
	_ = g.wire.conn.Close()
	if !saidBye {
		// As in Revoke, end the imports first: a batch that is counted later sees that its import
		// has ended. A process that lives on ends its batches, gives up its place among the
		// clients, and may connect again. One that died during a batch is never seen to end it. It
		// keeps its place until the memory is revoked, since only Revoke may replace the memory.
		all := func(*export) bool { return true }
		g.endExports(all)
	wait:
		for pause := time.Millisecond; g.hasBatchesIn(all); pause = min(2*pause, outlastMax) {
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

// listen answers packets until the connection ends. It reports whether the client has said goodbye,
// that is, that none of its batches runs.
func (g *client) listen() (saidBye bool) {
	for reset := false; ; {
		h, tail, fd, err := g.wire.receive()
		if errors.Is(err, unix.ECONNRESET) && !reset {
			// The client closed its end before it had read all packets. The kernel reports that
			// once, and then delivers what the client had sent: perhaps a goodbye.
			reset = true
			continue
		}
		if err != nil {
			return false
		}
		closeDescriptor(fd) // after its hello, a client has no reason to send one
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

// leave removes the client from the server and unmaps the shared pages.
func (g *client) leave() {
	s := &g.b.server
	s.mu.Lock()
	delete(s.clients, g)
	s.mu.Unlock()
	g.mu.Lock()
	defer g.mu.Unlock()
	g.released = true
	unmapPages(g.users, g.states)
	g.users, g.states = nil, nil
	g.process.Release()
}

// dismiss stops the server and all clients. No memory is registered any more.
func (b *Backend) dismiss() {
	s := &b.server
	if s.listener == nil {
		return
	}
	s.mu.Lock()
	s.closed = true
	s.mu.Unlock()
	s.lobby.Close()
	_ = s.listener.Close() // ends lobby.Serve
	for _, g := range b.clients() {
		g.dismissOnce.Do(func() { close(g.gone) })
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

// hint tells the client to look at the states of its slots. It hardly blocks (hintMax): if the
// client does not read its socket, the hint is dropped.
func (g *client) hint() {
	g.hintDue.Store(true)
	g.sendHint()
}

// sendHint sends the hint that is due. If another goroutine is sending, that one sends the hint
// after its packet.
func (g *client) sendHint() {
	for g.hintDue.Load() && g.sending.TryLock() {
		if g.hintDue.Swap(false) {
			_ = g.wire.send(&head{Kind: sayEnded}, nil, hintMax)
		}
		g.sending.Unlock()
	}
}

// answer sends the client what the token opens, with a new slot, or the reason why it cannot. It
// returns only errors of the connection.
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

// open checks a token and takes a slot for its memory.
func (g *client) open(token []byte) (h head, fd int, err error) {
	t, err := session.DecodeToken(token, &g.b.owner)
	if err != nil {
		return h, -1, err
	}
	m := g.b.memories.At(t.Key)
	if err := m.checkToken(&t); err != nil {
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
	// Revoke sets remoteGrant.ended, and renew sets moving, before they look at the slots. Here the
	// slot is taken first and the flags are read afterwards. So either they see this slot, or this
	// sees their flag.
	switch {
	case m.remoteGrant.ended.Load():
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

// share describes a memory for the client, and returns a file descriptor that it can map.
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
	case g.released:
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

// freeSlot ends an export. Giving back a slot that still has batches is an error, which ends the
// connection.
func (g *client) freeSlot(slot uint32) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.released || slot >= slotsMax || g.exports[slot] == nil || g.usersOf(slot).Load() != 0 {
		return fmt.Errorf("slot %d given back: %w", slot, driver.ErrCorrupt)
	}
	g.exports[slot] = nil
	g.free = append(g.free, slot)
	return nil
}

// eachExport calls f, with g.mu held, for each export for which which returns true.
func (g *client) eachExport(which func(*export) bool, f func(slot uint32, e *export)) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.released {
		return
	}
	for slot, e := range g.exports[:g.next] {
		if e != nil && which(e) {
			f(uint32(slot), e)
		}
	}
}

// endExports marks exports as revoked and sends a hint, so that the client cancels the copies that
// it has not started.
func (g *client) endExports(which func(*export) bool) {
	ended := false
	g.eachExport(which, func(slot uint32, _ *export) {
		ended = g.stateOf(slot).Swap(importRevoked) != importRevoked || ended
	})
	if ended {
		g.hint()
	}
}

// hasBatchesIn reports whether batches of the client use one of these exports. The client may be
// dead: its copies may still run. Disowned exports do not count.
func (g *client) hasBatchesIn(which func(*export) bool) (in bool) {
	g.eachExport(which, func(slot uint32, e *export) {
		in = in || !e.disowned && g.usersOf(slot).Load() != 0
	})
	return in
}
