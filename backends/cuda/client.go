// SPDX-License-Identifier: Apache-2.0

package cuda

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/proc"
	"github.com/sluicehq/sluice/internal/sealed"
	"github.com/sluicehq/sluice/internal/session"
)

// client is another process that reaches our memory.
type client struct {
	b       *Backend
	wire    wire
	process proc.Remote
	users   []byte // theirs, which we only read
	states  []byte // ours, which they can only read
	saying  sync.Mutex
	due     atomic.Bool   // a hint waits for the packet that is being sent
	gone    chan struct{} // closed by dismiss
	going   sync.Once

	mu     sync.Mutex // guards what follows
	passes [slotsMax]*pass
	next   uint32   // slots that were never given are from here on
	free   []uint32 // that were given back
	left   bool     // nothing of it is under way, and the pages may be gone
}

// pass is what a client was given under a slot.
type pass struct {
	m    *memory
	lost bool // what it still does lands in memory that nothing uses
}

func (g *client) usersOf(slot uint32) *atomic.Uint64 { return sealed.Word(g.users, int(8*slot)) }
func (g *client) stateOf(slot uint32) *atomic.Uint64 { return sealed.Word(g.states, int(8*slot)) }

// attend answers until the connection ends, and stays until nothing of the client is under way.
// Copies of a process end neither with its socket nor with the process: a child that it forked
// keeps its context.
func (g *client) attend() {
	var watch sync.WaitGroup
	watch.Go(func() {
		if g.process.Wait() == nil {
			_ = g.wire.conn.Close() // a child of the process may hold the other end open
		}
	})
	polite := g.listen()
	_ = g.wire.conn.Close()
	if !polite {
		g.outlast()
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
			err = g.takeBack(h.Slot)
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

// outlast returns once nothing is under way of a client whose connection is lost, or the backend
// closes. As with Revoke, a batch that counts itself later sees the end of its pass. The process
// may live on and connect again: a lost connection keeps no place for it. One that died in a batch
// keeps its place until the memory is revoked: only Revoke may put other memory there.
func (g *client) outlast() {
	all := func(*pass) bool { return true }
	g.endPasses(all)
	for wait := time.Millisecond; g.isIn(all); wait = min(2*wait, outlastMax) {
		select {
		case <-g.gone:
			return
		case <-time.After(wait):
		}
	}
}

// outlastMax is the longest time between two looks at a process that has batches under way.
const outlastMax = 250 * time.Millisecond

// dismiss ends the connection; no memory is left that the client could reach.
func (g *client) dismiss() {
	g.going.Do(func() { close(g.gone) })
	_ = g.wire.conn.Close()
	g.process.Release()
}

// leave forgets the client.
func (g *client) leave() {
	s := &g.b.server
	s.mu.Lock()
	delete(s.clients, g)
	s.mu.Unlock()
	g.release()
}

func (g *client) release() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.left = true
	for _, page := range [][]byte{g.users, g.states} {
		if page != nil {
			_ = unix.Munmap(page) // ours, whole: cannot fail
		}
	}
	g.users, g.states = nil, nil
	g.process.Release()
}

// say sends a packet, within a limit.
func (g *client) say(h *head, tail []byte, limit time.Duration, fds ...int) error {
	g.saying.Lock()
	err := g.wire.send(h, tail, limit, fds...)
	g.saying.Unlock()
	if g.due.Swap(false) {
		g.hint()
	}
	return err
}

// hint says that a slot has ended. It does not wait: a frozen process needs no hint.
func (g *client) hint() {
	if !g.saying.TryLock() {
		g.due.Store(true)
		return
	}
	defer g.saying.Unlock()
	_ = g.wire.send(&head{Kind: sayEnded}, nil, hintMax)
}

// answer gives what a token opens, or says why not. Only an error of the connection is returned.
func (g *client) answer(id uint32, token []byte) error {
	h, fd, err := g.give(token)
	h.Kind, h.ID, h.Outcome = sayAnswer, id, outcomeOf(err)
	if err != nil {
		text := err.Error()
		return g.say(&h, []byte(text[:min(len(text), 1024)]), g.b.cfg.DialTimeout)
	}
	defer closeDescriptor(fd)
	return g.say(&h, nil, g.b.cfg.DialTimeout, fd)
}

// give opens a token, for a slot.
func (g *client) give(token []byte) (h head, fd int, err error) {
	t, err := session.DecodeToken(token, &g.b.owner)
	if err != nil {
		return h, -1, err
	}
	m := g.b.memories.At(t.Key)
	if err := m.opens(&t); err != nil {
		return h, -1, err
	}
	if err := m.reachable(); err != nil {
		return h, -1, err
	}
	slot, err := g.admit(&pass{m: m})
	if err != nil {
		return h, -1, err
	}
	h, fd, err = m.share()
	h.Slot = slot
	if err != nil {
		err = errors.Join(err, g.takeBack(slot))
	}
	return h, fd, err
}

// reachable says why no other process can reach a memory.
func (m *memory) reachable() error {
	switch {
	case m.dev == nil:
		return fmt.Errorf("host memory of another process is for another backend, such as shm: %w",
			driver.ErrNotSupported)
	case m.block == nil:
		return fmt.Errorf("device memory of another process is reached where AllocDevice of a "+
			"backend with Config.Peers made it: %w", driver.ErrNotSupported)
	case m.seg.Only != nil:
		return fmt.Errorf("some ranges of device memory are for this process alone: other memory "+
			"under them would be under what lies beside, too: %w", driver.ErrNotSupported)
	}
	return nil
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

// admit gives a slot. Revoke marks the end of the memory, or the beginning of a renew, and looks
// at the slots then; admit does it the other way round: one of the two sees the other.
func (g *client) admit(p *pass) (slot uint32, err error) {
	slot, err = g.put(p)
	if err != nil {
		return 0, err
	}
	switch {
	case p.m.theirs.ended.Load():
		err = driver.ErrRevoked
	case p.m.block.moving.Load():
		err = fmt.Errorf("a revoke against a frozen process replaces the memory now, try again: %w",
			driver.ErrFull)
	default:
		return slot, nil
	}
	return 0, errors.Join(err, g.takeBack(slot))
}

func (g *client) put(p *pass) (slot uint32, err error) {
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
	g.stateOf(slot).Store(passGood)
	g.passes[slot] = p
	return slot, nil
}

// takeBack makes a slot free. A process that gives back what it uses is not believed any more.
func (g *client) takeBack(slot uint32) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.left || slot >= slotsMax || g.passes[slot] == nil || g.usersOf(slot).Load() != 0 {
		return fmt.Errorf("slot %d given back: %w", slot, driver.ErrCorrupt)
	}
	g.passes[slot] = nil
	g.free = append(g.free, slot)
	return nil
}

// endPasses ends what the client was given, and tells it: it may drop what it has not begun.
func (g *client) endPasses(which func(*pass) bool) {
	ended := false
	g.eachPass(which, func(slot uint32, _ *pass) {
		ended = g.stateOf(slot).Swap(passOver) != passOver || ended
	})
	if ended {
		g.hint()
	}
}

// turn changes a state where it is as it was thought to be.
func (g *client) turn(which func(*pass) bool, from, to uint64) {
	g.eachPass(which, func(slot uint32, _ *pass) { g.stateOf(slot).CompareAndSwap(from, to) })
}

// eachPass calls f for what a condition says, under the lock.
func (g *client) eachPass(which func(*pass) bool, f func(slot uint32, p *pass)) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.left {
		return
	}
	for slot, p := range g.passes[:g.next] {
		if p != nil && which(p) {
			f(uint32(slot), p)
		}
	}
}

// hintMax is how long a hint may take where the socket is full.
const hintMax = time.Millisecond

// isIn reports whether the client has batches under way with what a condition says, dead or not.
func (g *client) isIn(which func(*pass) bool) bool {
	in := false
	g.eachPass(which, func(slot uint32, p *pass) {
		in = in || !p.lost && g.usersOf(slot).Load() != 0
	})
	return in
}

func (g *client) disown(which func(*pass) bool) {
	g.eachPass(which, func(_ uint32, p *pass) { p.lost = true })
}
