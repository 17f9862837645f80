// SPDX-License-Identifier: Apache-2.0

package tcp

import (
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/clock"
	"github.com/sluicehq/sluice/internal/session"
)

// peer is our end of connections that we began: over them we reach the owner's memory.
type peer struct {
	driver.PeerBase
	b     *Backend
	to    address
	conn  uint64 // our number for it
	conns []*conn
	place string // of the owner's, where conns go

	stopped chan struct{} // one place: the owner says that nothing of ours lands any more

	entry   session.Gate  // every call of the program is in it
	closing chan struct{} // closed when Close begins
	dead    atomic.Bool   // nothing new begins
	lost    chan struct{}
	dying   sync.Once
	ending  sync.Once

	offset    atomic.Int64 // the owner's clock, less steady of ours
	learned   atomic.Int64 // when we learned it
	roundTrip atomic.Int64 // the shortest that was measured
	askedAt   int64        // when pulse has asked whether the peer is there; of pulse
	owesSince int64        // when it last saw that nothing is owed; of pulse

	mu       sync.Mutex // after wmu of a connection, before queueMu
	small    queue
	large    queue
	flight   []inFlight // by connection
	byTag    map[uint64]*batch
	failed   bool
	messages uint64 // numbers of messages given out
	notifMax int    // bytes of a notification that the owner takes
	credit   int    // messages that the owner has room for
	starved  bool   // a Submit found none
	kept     int    // answers that are delivered and not received
	returned int    // answers that were received, and of which the owner is not told
	grace    int64  // how long what we sent may land, in nanoseconds: the owner goes by it, too
	graceTop int64  // what it may grow to
	lastSent int64  // when we last said something that lets bytes land

	importMu sync.RWMutex
	imports  session.Imports[remote]
	asked    map[uint64]chan imported
	lastAsk  uint64
}

// imported is what the owner says to an Import.
type imported struct {
	r   *remote
	err error
}

// Conn implements driver.Peer.
func (p *peer) Conn() uint64 { return p.conn }

// Import implements driver.Peer.
func (p *peer) Import(token []byte) (uint32, uint64, error) {
	if !p.entry.Enter() {
		return 0, 0, driver.ErrClosed
	}
	defer p.entry.Exit()
	t, err := session.DecodeToken(token, &p.to.owner)
	if err != nil {
		return 0, 0, fmt.Errorf("import: %w", err)
	}
	answer := make(chan imported, 1)
	p.importMu.Lock()
	p.lastAsk++
	id := p.lastAsk
	p.asked[id] = answer
	p.importMu.Unlock()
	defer func() {
		p.importMu.Lock()
		delete(p.asked, id)
		p.importMu.Unlock()
	}()
	p.conns[control].post(&header{kind: kindImport, id: id, key: t.Key, ticket: t.Epoch},
		t.Secret[:])
	p.conns[control].kick(false)
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

// Drop implements driver.Peer. A batch in flight has what it needs of the import.
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
		how = "by TLS 1.3, which knows the peer " + p.to.security.String()
	}
	return fmt.Sprintf("%s to %s, %d connections for data",
		how, p.conns[control].tcp.RemoteAddr(), len(p.conns)-1)
}

// serve implements end: what an owner may say.
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
			if l, ok = p.target(c, h); ok {
				if err := c.land(l); err != nil {
					return err
				}
				p.landed(c, h.id, l.status)
			}
		case h.kind == kindAck:
			p.learn(h.stamp)
			ok = p.onAck(c, h)
		}
		if !ok {
			return fmt.Errorf("frame of kind %d out of place: %w", h.kind, driver.ErrCorrupt)
		}
	}
}

// onControl takes what comes over the control connection. It reports false for what no owner says.
func (p *peer) onControl(c *conn, h *header, body []byte) bool {
	switch h.kind {
	case kindImported:
		p.onImported(h)
	case kindPong:
		p.learn(h.stamp)
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
	if answer := p.asked[h.id]; answer != nil {
		delete(p.asked, h.id) // one answer, for which there is a place
		answer <- a
	}
}

func (p *peer) onCredit(n int) {
	p.mu.Lock()
	p.credit += min(n, 1<<16)
	starved := p.starved
	p.starved = false
	p.mu.Unlock()
	if starved {
		p.b.alarm()
	}
}

// onStopped takes word that nothing of ours lands any more, which we have asked for, or the owner
// has lost a connection.
func (p *peer) onStopped() {
	select {
	case p.stopped <- struct{}{}:
	default:
	}
	p.mu.Lock()
	asked := p.failed
	p.mu.Unlock()
	if !asked {
		p.lose()
	}
}

// broken implements end.
func (p *peer) broken(*conn, error) { p.lose() }

// lose ends the connections because the peer is gone. What is in flight completes once it is
// certain that nothing of it lands.
func (p *peer) lose() {
	if p.die() {
		p.b.tasks.Start(func() { p.shutDown(driver.ErrPeerLost) })
	}
}

// die has nothing new begin, and tells the program, before anything completes for that reason. It
// reports whether it was the first to do so.
func (p *peer) die() (first bool) {
	p.dying.Do(func() {
		first = true
		p.dead.Store(true)
		close(p.lost)
	})
	return first
}

// Close implements driver.Peer. It waits a while for what is on its way, at most for
// Config.CloseMax, and then asks the owner to land nothing any more: that is proved when the
// owner says so, or when all that we sent is too old to land. So it takes at most CloseMax
// and 9/8 of the age limit of the connection; where the network's round trip makes that limit
// longer than Grace, the first wait is shorter by as much.
func (p *peer) Close() error {
	if p.entry.Shut() {
		close(p.closing)
	}
	p.entry.Wait()
	p.shutDown(driver.ErrClosed)
	return nil
}

// shutDown ends the connections and completes all batches with why. It returns when that is done,
// by whichever goroutine.
func (p *peer) shutDown(why error) {
	p.ending.Do(func() {
		if p.dead.Load() {
			why = driver.ErrPeerLost // also where the program closes first
		} else {
			p.dropAll(why)
			p.awaitQuiet()
		}
		p.mu.Lock()
		p.failed = true
		busy := len(p.byTag) > 0
		last := p.lastSent
		if busy && last != 0 {
			last += p.grace + p.grace/8 // more than the clocks drift apart: see driftPart
		}
		p.mu.Unlock()
		for _, c := range p.conns[express:] {
			c.stop()
		}
		for _, c := range p.conns[express:] {
			c.close(busy)
		}
		if busy {
			p.conns[control].send(header{kind: kindStop})
			p.outlive(last)
		}
		p.conns[control].close(busy)
		p.completeAll(why)
		p.b.mu.Lock()
		delete(p.b.peers, p)
		p.b.mu.Unlock()
		p.die()
	})
}

// dropAll takes what waits out of the queues.
func (p *peer) dropAll(why error) {
	p.mu.Lock()
	for _, x := range p.byTag {
		if x.queue != nil { // else all of it is on its way, and a message may be
			p.drop(x, why)
			p.settle(x)
		}
	}
	p.mu.Unlock()
	p.b.wakeForDone()
	p.conns[express].kickAnswers()
}

// awaitQuiet waits for what is on its way.
func (p *peer) awaitQuiet() {
	p.mu.Lock()
	longer := p.grace - int64(p.b.cfg.Grace)
	p.mu.Unlock()
	end := p.b.clock.Now() + int64(p.b.cfg.CloseMax) - longer - longer/8
	for pause := 10 * time.Microsecond; !p.dead.Load(); pause = min(2*pause, time.Millisecond) {
		p.mu.Lock()
		n := len(p.byTag)
		p.mu.Unlock()
		if n == 0 && p.written() || p.b.clock.Now() > end {
			return
		}
		p.b.clock.Sleep(pause)
	}
}

// written reports whether nothing waits to be written.
func (p *peer) written() bool {
	for _, c := range p.conns {
		if c.kicks.Load() > 0 {
			return false
		}
	}
	return true
}

// completeAll ends what is left.
func (p *peer) completeAll(why error) {
	p.mu.Lock()
	for tag, x := range p.byTag {
		delete(p.byTag, tag)
		if x.err == nil {
			x.err = why
		}
		p.complete(x)
	}
	p.small, p.large, p.flight = queue{}, queue{}, make([]inFlight, len(p.conns))
	p.mu.Unlock()
	p.b.wakeForDone()
}
