// SPDX-License-Identifier: Apache-2.0

package tcp

import (
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/clock"
	"github.com/sluicehq/sluice/internal/session"
)

// peer is the initiator's end of the connections to one owner. This file has imports and what the
// owner may say (serve), and the end of a peer (shutDown); initiator.go has the way of a batch.
type peer struct {
	driver.PeerBase
	b          *Backend
	owner      address
	connID     uint64 // what Conn returns
	conns      []*conn
	ownerPlace string // host:port of the owner, to which all conns go

	ownerStopped chan struct{} // one place: the owner has said that it lands nothing more from here

	entry        session.Gate  // the program's calls are in it
	closing      chan struct{} // closed when Close begins
	dead         atomic.Bool   // Submit begins nothing any more
	lost         chan struct{} // what Lost returns
	dieOnce      sync.Once
	shutDownOnce sync.Once

	ownerClock   atomic.Int64 // the owner's clock less slowest of this host's clock: see proof.go
	ownerClockAt atomic.Int64 // when the owner last told its clock, by this host's
	roundTrip    atomic.Int64 // the shortest that was measured, in nanoseconds
	pingedAt     int64        // when pulse last sent a ping; of pulse alone
	idleAt       int64        // when pulse last found that the owner owes no answer; of pulse alone

	mu                   sync.Mutex // after conn.writeMu, before conn.queuedMu
	small                queue      // batches of at most inlineMax bytes
	large                queue
	parts                []partTable       // by connection
	byTag                map[uint64]*batch // all that are not complete
	failed               bool              // shutDown completes all batches: nothing more is sent
	messages             uint64            // the number of the last notification
	notifMax             int               // bytes of a notification that the owner takes
	credit               int               // notifications that the owner has room for
	submitWaitsForCredit bool              // a Submit has returned ErrFull for lack of credit
	answersHeld          int               // answers delivered, and not received by the program
	creditOwed           int               // answers received, and the owner not told of it
	grace                int64             // nanoseconds: older frames of ours the owner asks about
	graceMost            int64             // up to which the owner may raise grace
	lastSent             int64             // when something was last sent that lets bytes land

	importMu      sync.RWMutex // guards what follows
	imports       session.Imports[remote]
	importAnswers map[uint64]chan imported // of Imports under way, by their ids
	lastImport    uint64                   // the last such id
}

// imported is the owner's answer to an Import.
type imported struct {
	r   *remote
	err error
}

// Conn implements driver.Peer.
func (p *peer) Conn() uint64 { return p.connID }

// Import implements driver.Peer.
func (p *peer) Import(token []byte) (uint32, uint64, error) {
	if !p.entry.Enter() {
		return 0, 0, driver.ErrClosed
	}
	defer p.entry.Exit()
	t, err := session.DecodeToken(token, &p.owner.owner)
	if err != nil {
		return 0, 0, fmt.Errorf("import: %w", err)
	}
	answer := make(chan imported, 1)
	p.importMu.Lock()
	p.lastImport++
	id := p.lastImport
	p.importAnswers[id] = answer
	p.importMu.Unlock()
	defer func() {
		p.importMu.Lock()
		delete(p.importAnswers, id)
		p.importMu.Unlock()
	}()
	p.conns[control].queueFrame(&header{kind: kindImport, id: id, key: t.Key, ticket: t.Epoch},
		t.Secret[:])
	p.conns[control].startWriting(false)
	limit, timer := clock.After(p.b.clock, session.ImportMax)
	defer timer.Stop()
	select {
	case a := <-answer:
		if a.err != nil {
			return 0, 0, fmt.Errorf("import: %w", a.err)
		}
		if a.r.size != t.Size {
			return 0, 0, fmt.Errorf("import: token of %d bytes, the memory has %d: %w",
				t.Size, a.r.size, driver.ErrBadToken)
		}
		a.r.key = t.Key
		p.importMu.Lock()
		defer p.importMu.Unlock()
		key, err := p.imports.Add(a.r)
		return key, t.Size, err
	case <-p.lost:
		return 0, 0, fmt.Errorf("import: %w", driver.ErrPeerLost)
	case <-p.closing:
		return 0, 0, driver.ErrClosed
	case <-limit:
		return 0, 0, fmt.Errorf("import: the peer does not answer for %v: %w",
			session.ImportMax, driver.ErrTimeout)
	}
}

// Drop implements driver.Peer. Batches under way have a copy of what they need of the import.
func (p *peer) Drop(key uint32) {
	p.importMu.Lock()
	defer p.importMu.Unlock()
	p.imports.Drop(key)
}

// Lost implements driver.Peer.
func (p *peer) Lost() <-chan struct{} { return p.lost }

// Explain implements driver.Peer.
func (p *peer) Explain(_, _ uint32) string {
	how := "in plain text"
	if p.conns[control].tls {
		how = "by TLS 1.3, which knows the peer " + p.owner.security.String()
	}
	return fmt.Sprintf("%s to %s, %d connections for data",
		how, p.conns[control].tcp.RemoteAddr(), len(p.conns)-1)
}

// serve implements side: it handles what the owner sends.
func (p *peer) serve(c *conn) error {
	for {
		h, body, err := c.nextFrame()
		if err != nil {
			return err
		}
		ok := false
		switch {
		case c.index == control:
			ok = p.onControl(c, h, body)
		case h.kind == kindData:
			var l *landing
			if l, ok = p.readTarget(c, h); ok {
				if err := c.land(l); err != nil {
					return err
				}
				p.onReadLanded(c, h.id, l.status)
			}
		case h.kind == kindAck:
			p.noteOwnerClock(h.stamp)
			ok = p.onAck(c, h)
		}
		if !ok {
			return fmt.Errorf("frame of kind %d out of place: %w", h.kind, driver.ErrCorrupt)
		}
	}
}

// onControl handles a frame of the control connection. It reports false for one that no owner
// sends.
func (p *peer) onControl(c *conn, h *header, body []byte) bool {
	switch h.kind {
	case kindImported:
		p.onImported(h)
	case kindPong:
		p.noteOwnerClock(h.stamp)
	case kindChallenge:
		p.confirm(c, h)
	case kindCredit:
		p.onCredit(int(h.count))
	case kindStopped:
		p.onStopped()
	case kindAnswer:
		return p.onAnswer(body)
	default:
		return false
	}
	return true
}

func (p *peer) onImported(h *header) {
	a := imported{err: session.Status(h.status).Err()}
	if a.err == nil {
		a.r = &remote{ticket: h.ticket, size: h.message, readOnly: h.flags&flagReadOnly != 0}
	}
	p.importMu.Lock()
	defer p.importMu.Unlock()
	if answer := p.importAnswers[h.id]; answer != nil {
		delete(p.importAnswers, h.id) // a second answer would find no place in the channel
		answer <- a
	}
}

func (p *peer) onCredit(n int) {
	p.mu.Lock()
	p.credit += min(n, creditMax)
	waits := p.submitWaitsForCredit
	p.submitWaitsForCredit = false
	p.mu.Unlock()
	if waits {
		p.b.wakeForRoom()
	}
}

// onStopped handles the owner's message that it lands no more bytes of this peer, either because
// shutDown has asked for that, or because it has lost a connection.
func (p *peer) onStopped() {
	select {
	case p.ownerStopped <- struct{}{}:
	default:
	}
	p.mu.Lock()
	asked := p.failed
	p.mu.Unlock()
	if !asked {
		p.lose()
	}
}

// broken implements side.
func (p *peer) broken(*conn, error) { p.lose() }

// lose starts to shut the peer down because its owner is gone.
func (p *peer) lose() {
	if p.die() {
		p.b.tasks.Start(func() { p.shutDown(driver.ErrPeerLost) })
	}
}

// die makes Submit refuse all batches, and closes Lost, as must happen before the first completion
// with ErrPeerLost. It reports whether this call was the first.
func (p *peer) die() (first bool) {
	p.dieOnce.Do(func() {
		first = true
		p.dead.Store(true)
		close(p.lost)
	})
	return first
}

// Close implements driver.Peer. It waits for batches under way to end by themselves, at most for
// Config.CloseMax, and then tells the owner to land nothing more. That is proved when the owner
// says that it has stopped, or when all that was sent is older than the age limit. So Close takes
// at most CloseMax and 9/8 of the age limit; where the network's round trip makes that limit longer
// than Grace, the first wait is shorter by as much.
func (p *peer) Close() error {
	if p.entry.Shut() {
		close(p.closing)
	}
	p.entry.Wait()
	p.shutDown(driver.ErrClosed)
	return nil
}

// shutDown ends the connections, and completes all batches with an error once it is proved that
// nothing of them lands later. Every call returns when that is done.
func (p *peer) shutDown(why error) {
	p.shutDownOnce.Do(func() {
		if p.dead.Load() {
			why = driver.ErrPeerLost // also if the program has called Close before lose came here
		} else {
			p.failQueued(why)
			p.awaitIdle()
		}

		// From here on nothing is sent. end is when all that was sent is too old to land.
		p.mu.Lock()
		p.failed = true
		busy := len(p.byTag) > 0
		end := p.lastSent
		if busy && end != 0 {
			end += p.grace + p.grace/8 // the clocks drift apart by less: see driftPart
		}
		p.mu.Unlock()

		// Bytes of Reads land here: not after stop.
		for _, c := range p.conns[express:] {
			c.stop()
		}
		for _, c := range p.conns[express:] {
			c.close(busy)
		}

		// Bytes of Writes land at the owner: not after it has said so, nor after end.
		if busy {
			p.conns[control].sendFrame(header{kind: kindStop})
			p.awaitTooOld(end)
		}
		p.conns[control].close(busy)

		p.mu.Lock()
		for tag, x := range p.byTag {
			delete(p.byTag, tag)
			if x.err == nil {
				x.err = why
			}
			p.complete(x)
		}
		p.small, p.large, p.parts = queue{}, queue{}, make([]partTable, len(p.conns))
		p.mu.Unlock()
		p.b.wakeForDone()
		p.b.mu.Lock()
		delete(p.b.peers, p)
		p.b.mu.Unlock()
		p.die()
	})
}

// failQueued fails the batches of which parts are to be cut yet. All of the others is sent, and
// perhaps their notifications. A message alone stays in its queue: its sender may not wait for it.
func (p *peer) failQueued(why error) {
	p.mu.Lock()
	for _, x := range p.byTag {
		if x.queue != nil && x.piece < x.count {
			p.failBatch(x, why)
			p.completeIfOver(x)
		}
	}
	p.mu.Unlock()
	p.b.wakeForDone()
	p.conns[express].writeQueued()
}

// awaitIdle waits until no batch is under way and all frames are written, as long as Close may.
func (p *peer) awaitIdle() {
	p.mu.Lock()
	longer := p.grace - int64(p.b.cfg.Grace)
	p.mu.Unlock()
	end := p.b.clock.Now() + int64(p.b.cfg.CloseMax) - longer - longer/8
	writing := func(c *conn) bool { return c.writeRequests.Load() > 0 }
	for pause := 10 * time.Microsecond; !p.dead.Load(); pause = min(2*pause, time.Millisecond) {
		p.mu.Lock()
		n := len(p.byTag)
		p.mu.Unlock()
		if n == 0 && !slices.ContainsFunc(p.conns, writing) || p.b.clock.Now() > end {
			return
		}
		p.b.clock.Sleep(pause)
	}
}
