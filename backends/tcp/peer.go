// SPDX-License-Identifier: Apache-2.0

package tcp

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"

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

	direct bool          // no proxy is between us and the owner's kernel
	quit   chan struct{} // closed when the owner says that nothing of ours lands any more
	quits  sync.Once     // closes quit

	entry   session.Gate  // every call of the program is in it
	closing chan struct{} // closed when Close begins
	dead    atomic.Bool   // nothing new begins
	why     error         // of dead; written before it
	lost    chan struct{}
	losing  sync.Once
	ending  sync.Once

	offset    atomic.Int64 // the owner's clock, less steady of ours
	learned   atomic.Int64 // when we learned it
	roundTrip atomic.Int64 // the shortest that was measured
	askedAt   int64        // when pulse has asked whether the peer is there; of pulse
	owesSince int64        // when it last saw that nothing is owed; of pulse

	mu       sync.Mutex // after wmu of a connection, before ctlMu
	small    queue
	large    queue
	flight   []inFlight // by connection
	byTag    map[uint64]*batch
	failed   bool
	lastID   uint64
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
	imports  []*remote // by key; nil: free
	freeKeys []uint32
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
	answer, id := p.ask(&t)
	defer p.forget(id)
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
		return p.keep(a.r), t.Size, nil
	case <-p.lost:
		return 0, 0, fmt.Errorf("import: %w", driver.ErrPeerLost)
	case <-p.closing:
		return 0, 0, driver.ErrClosed
	case <-limit:
		return 0, 0, fmt.Errorf("import: the peer does not answer for %v: %w",
			session.ImportMax, driver.ErrTimeout)
	}
}

func (p *peer) ask(t *session.Token) (chan imported, uint64) {
	answer := make(chan imported, 1)
	p.importMu.Lock()
	p.lastAsk++
	id := p.lastAsk
	p.asked[id] = answer
	p.importMu.Unlock()
	h := header{kind: kindImport, id: id, key: t.Key, ticket: t.Epoch}
	p.conns[ctl].post(&h, t.Secret[:])
	p.conns[ctl].kick(false)
	return answer, id
}

func (p *peer) forget(id uint64) {
	p.importMu.Lock()
	delete(p.asked, id)
	p.importMu.Unlock()
}

// keep gives an import a key of its own.
func (p *peer) keep(r *remote) uint32 {
	p.importMu.Lock()
	defer p.importMu.Unlock()
	if n := len(p.freeKeys); n > 0 {
		key := p.freeKeys[n-1]
		p.freeKeys = p.freeKeys[:n-1]
		p.imports[key] = r
		return key
	}
	p.imports = append(p.imports, r)
	return uint32(len(p.imports) - 1)
}

func (p *peer) imported(key uint32) *remote {
	p.importMu.RLock()
	defer p.importMu.RUnlock()
	if uint64(key) >= uint64(len(p.imports)) {
		return nil
	}
	return p.imports[key]
}

// Drop implements driver.Peer. A batch in flight has what it needs of the import.
func (p *peer) Drop(key uint32) {
	p.importMu.Lock()
	defer p.importMu.Unlock()
	if uint64(key) < uint64(len(p.imports)) && p.imports[key] != nil {
		p.imports[key] = nil
		p.freeKeys = append(p.freeKeys, key)
	}
}

// Lost implements driver.Peer.
func (p *peer) Lost() <-chan struct{} { return p.lost }

// Explain implements driver.Peer.
func (p *peer) Explain(_, _ uint32) string {
	how := "in plain text"
	if p.conns[ctl].tls {
		how = "by TLS 1.3, which knows the peer " + p.to.security.String()
	}
	return fmt.Sprintf("%s to %s, %d connections for data",
		how, p.conns[ctl].tcp.RemoteAddr(), len(p.conns)-1)
}

// accept implements end: what an owner may say.
func (p *peer) accept(c *conn) verdict {
	h := &c.in.h
	ok := false
	if c.index == ctl {
		ok = p.told(c, h)
	} else {
		switch h.kind {
		case kindData:
			ok = p.aim(c, h)
		case kindAck:
			p.learn(h.stamp)
			ok = p.acked(c, h)
		}
	}
	if !ok {
		c.in.err = fmt.Errorf("frame of kind %d out of place: %w", h.kind, driver.ErrCorrupt)
		return finished
	}
	return more
}

// eased implements end: nothing of ours waits for that.
func (p *peer) eased() {}

// told takes what comes over the control connection.
func (p *peer) told(c *conn, h *header) bool {
	switch h.kind {
	case kindImported:
		p.answered(h)
	case kindPong:
		p.learn(h.stamp)
	case kindChallenge:
		p.confirm(c, h)
	case kindCredit:
		p.credited(int(h.count))
	case kindStopped:
		p.stopped()
	case kindAnswer:
		return p.took(c.in.body)
	default:
		return false
	}
	return true
}

func (p *peer) answered(h *header) {
	a := imported{err: session.Status(h.status).Err()}
	if a.err == nil {
		a.r = &remote{ticket: h.ticket, size: h.batch, readOnly: h.flags&flagReadOnly != 0}
	}
	p.importMu.Lock()
	defer p.importMu.Unlock()
	if answer := p.asked[h.id]; answer != nil {
		delete(p.asked, h.id) // one answer, for which there is a place
		answer <- a
	}
}

func (p *peer) credited(n int) {
	p.mu.Lock()
	p.credit += min(n, 1<<16)
	starved := p.starved
	p.starved = false
	p.mu.Unlock()
	if starved {
		p.b.alarm()
	}
}

// aim says where the bytes of a Read go.
func (p *peer) aim(c *conn, h *header) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	q := p.flight[c.index].at(h.id)
	if q == nil || q.notif || q.batch.op != driver.Read || q.n != uint64(h.length) {
		return false
	}
	x := q.batch
	seg := &x.views[q.v].local.seg
	c.in.land = landing{mem: seg.Mem, shared: seg.Shared, cancel: &x.dropped, ranges: x.locals(q)}
	return true
}

// finish implements end: a Read is over when its acknowledgement comes. It fails if an index
// list of the program has changed.
func (p *peer) finish(c *conn) {
	if c.in.land.status == session.StatusOK {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if q := p.flight[c.index].at(c.in.h.id); q != nil {
		p.drop(q.batch, c.in.land.status.Err())
	}
}

// stopped takes word that nothing of ours lands any more, which we have asked for, or the owner
// has lost a connection.
func (p *peer) stopped() {
	p.quits.Do(func() { close(p.quit) })
	p.mu.Lock()
	asked := p.failed
	p.mu.Unlock()
	if asked {
		return
	}
	p.lose(fmt.Errorf("the owner has lost a connection: %w", driver.ErrPeerLost))
}

// broken implements end.
func (p *peer) broken(c *conn, err error) {
	if c.index == ctl && p.direct && errors.Is(err, errEnded) {
		p.quits.Do(func() { close(p.quit) })
	}
	p.lose(err)
}

// lose ends the connections because the peer is gone. What is in flight completes once it is
// certain that nothing of it lands.
func (p *peer) lose(err error) {
	p.losing.Do(func() {
		if !errors.Is(err, driver.ErrPeerLost) {
			err = errors.Join(err, driver.ErrPeerLost)
		}
		p.why = err
		p.dead.Store(true)
		close(p.lost) // before anything completes for that reason
		p.b.tasks.Start(func() { p.part(driver.ErrPeerLost) })
	})
}
