// SPDX-License-Identifier: Apache-2.0

package rdma

import (
	"errors"
	"fmt"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"github.com/sluicehq/sluice/csrc/verbs"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/clock"
	"github.com/sluicehq/sluice/internal/session"
)

// handshakesMax bounds the control connections that have not said hello, or are refused.
const handshakesMax = 64

// accept takes control connections until the listener is closed.
func (b *Backend) accept(l net.Listener) {
	_ = b.lobby.Serve(l, func(conn net.Conn, v *session.Visit) bool {
		return b.tasks.Start(func() { b.serve(conn, v) })
	})
}

// inbound is our end of a connection that a peer began: over it the peer reaches our memory and
// sends messages.
type inbound struct {
	b       *Backend
	ch      *channel
	visit   *session.Visit // until the hello is answered
	link    link
	rails   []int        // of ours, by queue pair
	counted bool         // one of Config.ConnsMax, until nothing of it is left
	hold    session.Gate // held by every use of link by other goroutines than that of serve
	hasKeys atomic.Bool  // the peer was told keys of NICs

	mu        sync.Mutex
	imports   []*importRequest // not answered yet
	importing bool             // a goroutine answers them
	asked     sync.WaitGroup   // that goroutine
	quitting  bool             // we close: the program is told nothing
	replies   replies
}

// serve is the owner's part in a connection, from the hello to the end. One goroutine runs it.
func (b *Backend) serve(conn net.Conn, v *session.Visit) {
	// A peer that has not said hello has one of few places.
	if !v.Wait() {
		return
	}
	defer v.Leave()
	c := &inbound{b: b, ch: newChannel(conn, &b.cfg), visit: v}
	defer func() {
		c.ch.wait()
		if c.counted {
			b.mu.Lock()
			b.admitted.Add(v.Host, -1)
			b.mu.Unlock()
		}
	}()

	// From here on Close ends the connection, unless it has begun.
	b.mu.Lock()
	open := b.accepted != nil
	if open {
		b.accepted[c] = struct{}{}
	}
	b.mu.Unlock()
	if !open {
		c.ch.close(driver.ErrClosed)
		return
	}
	defer func() {
		b.mu.Lock()
		delete(b.accepted, c)
		b.mu.Unlock()
	}()

	// The hello has the initiator's ends of the queue pairs; the welcome has ours, or says why not.
	h := c.receiveHello()
	if h == nil {
		c.ch.close(driver.ErrCorrupt)
		return
	}
	c.ch.start()
	if err := c.welcome(h); err != nil {
		c.ch.send(&welcome{status: session.StatusOf(err)})
		c.ch.closeWhenRead(b.cfg.Grace)
		return
	}

	// The peer's requests, until it says bye, dies or is given up, or we close.
	saidBye, abandoned := false, false
	for !saidBye {
		m, err := c.ch.receive()
		if err != nil {
			break
		}
		switch m := m.(type) {
		case *importRequest:
			c.queueImport(m)
		case *pairRequest:
			c.remake(m)
		case *answersTaken:
			if !c.addCredit(m.count) {
				c.ch.close(driver.ErrCorrupt)
			}
		case *bye:
			saidBye, abandoned = true, m.abandoned
		default:
			c.ch.close(driver.ErrCorrupt)
		}
	}

	// Our queue pairs end first: one that does not drain is destroyed. Then nothing of the peer
	// lands any more, and its messages are in their ring. Only then we say so: our answer to a bye
	// is the peer's proof.
	c.endReplies()
	c.hold.Shut()
	c.hold.Wait()
	ended := c.link.End(verbs.Lost, false) == nil
	c.mu.Lock()
	quitting := c.quitting
	c.mu.Unlock()
	switch {
	case !ended:
		c.ch.close(driver.ErrUnproven) // without a word that the peer could take for a proof
	case saidBye:
		c.ch.send(farewell{})
		c.ch.closeWhenRead(b.cfg.Grace)
	case quitting:
		c.ch.send(quit{})
		c.ch.closeWhenRead(b.cfg.Grace)
	default:
		c.ch.close(driver.ErrPeerLost)
	}

	// Nothing refers to the connection any more but the last word, which Receive passes on.
	c.asked.Wait()
	for _, m := range b.table.All() {
		m.removePeer(c)
	}
	if c.link.Close() != nil {
		b.keepLink(c.link)
	}
	if abandoned || quitting {
		b.remove(c.link.ID())
	} else {
		b.words.Add(c)
		b.wake()
	}
}

// receiveHello waits for the hello; nil: something else came, or nothing within Config.hello.
func (c *inbound) receiveHello() *hello {
	limit := clock.AfterRunning(c.b.cfg.clock, c.b.cfg.hello,
		func() { c.setReadDeadline(aLongTimeAgo) })
	m, err := c.ch.receive()
	if !limit.Stop() || err != nil {
		return nil
	}
	h, ok := m.(*hello)
	if !ok || len(h.pairs) == 0 {
		return nil
	}
	c.setReadDeadline(time.Time{})
	return h
}

// setReadDeadline sets until when the peer must say something, unless we close.
func (c *inbound) setReadDeadline(deadline time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.quitting {
		_ = c.ch.conn.SetReadDeadline(deadline) // fails only where it is closed
	}
}

// quit has serve end the connection because the backend closes. It can still say so.
func (c *inbound) quit() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.quitting = true
	_ = c.ch.conn.SetReadDeadline(aLongTimeAgo)
}

// welcome makes our end of the queue pairs and welcomes the peer; an error is why not.
func (c *inbound) welcome(h *hello) error {
	if _, err := decodeAddress(h.from); err != nil {
		return fmt.Errorf("a hello without an address: %w", driver.ErrCorrupt)
	}
	if h.to != c.b.address.owner || c.b.gate.IsShut() {
		return driver.ErrPeerLost // the backend that it means is gone, and we have its place
	}
	c.b.mu.Lock()
	err := c.b.admitted.Take(c.visit.Host, "peers", "ConnsMax")
	c.b.mu.Unlock()
	if err != nil {
		return err
	}
	c.counted = true
	if !c.visit.Leave() {
		return driver.ErrPeerLost // another connection has its place
	}
	link, err := c.b.net.connect(false, 0)
	if err != nil {
		return err
	}
	c.link = link
	c.b.add(link.ID(), c)
	w := welcome{}
	for i := range h.pairs {
		o := &h.pairs[i]
		if int(o.rail) >= len(c.b.rails) {
			o.rail = 0 // of a peer that makes rails up: its queue pair leads nowhere
		}
		c.rails = append(c.rails, int(o.rail))
		w.pairs = append(w.pairs, c.makePair(i, &o.end))
	}
	c.ch.send(&w)
	return nil
}

// makePair makes and begins our end of a queue pair.
func (c *inbound) makePair(pair int, theirs *verbs.End) pairAnswer {
	end, err := c.link.PairMake(pair, c.rails[pair])
	if err != nil {
		return pairAnswer{}
	}
	if c.link.PairBegin(pair, *theirs) != nil {
		_ = c.link.PairEnd(pair) // there is nothing to lose
		return pairAnswer{}
	}
	return pairAnswer{there: true, end: end}
}

// importsQueueMax bounds the imports that a peer has us remember.
const importsQueueMax = 4096

// queueImport has an import answered beside: NICs may take long to learn of large memory,
// and queue pairs must not wait for that.
func (c *inbound) queueImport(q *importRequest) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.imports) >= importsQueueMax {
		go c.ch.close(driver.ErrFull)
		return
	}
	c.imports = append(c.imports, q)
	if !c.importing {
		c.importing = true
		c.asked.Go(c.answerImports)
	}
}

// answerImports answers imports until there are none.
func (c *inbound) answerImports() {
	for {
		c.mu.Lock()
		if len(c.imports) == 0 {
			c.importing = false
			c.mu.Unlock()
			return
		}
		q := c.imports[0]
		c.imports = c.imports[1:]
		c.mu.Unlock()
		if m := c.b.table.At(q.key); m != nil {
			m.answer(c, q)
		} else {
			c.ch.send(&importAnswer{id: q.id, status: session.StatusRevoked})
		}
	}
}

// keysOf has the keys of the NICs in the order of the pairs.
func (c *inbound) keysOf(granted []uint32) []uint32 {
	list := make([]uint32, len(c.rails))
	for pair, rail := range c.rails {
		list[pair] = granted[rail]
	}
	return list
}

// remake ends our end of a queue pair that has failed at the peer's, and makes a new one. Only
// when ours is gone can nothing of the first try land any more; without that there is no
// answer, and the connection ends.
func (c *inbound) remake(q *pairRequest) {
	pair := int(q.pair)
	if pair >= len(c.rails) || c.link.PairEnd(pair) != nil {
		c.ch.close(driver.ErrCorrupt)
		return
	}
	a := pairReply{pair: q.pair, attempt: q.attempt, seen: c.link.Seen()}
	if q.there {
		a.pairAnswer = c.makePair(pair, &q.end)
	}
	c.ch.send(&a)
}

// onNews implements end: where ours has failed, the peer learns of it at once.
func (c *inbound) onNews(n verbs.News) {
	if n.Kind == verbs.PairFailed && n.Pair >= 0 && n.Pair < verbs.PairsMax {
		c.ch.send(&broken{pair: uint8(n.Pair)})
	}
}

// breakPairs ends all our queue pairs of the connection: the strong means of Revoke. The
// peer has them made anew. An error: one of them may be there.
func (c *inbound) breakPairs() error {
	if !c.hold.Enter() {
		return fmt.Errorf("a connection is ending: %w", driver.ErrBusy)
	}
	defer c.hold.Exit()
	var errs []error
	for pair := range c.rails {
		err := c.link.PairEnd(pair)
		if err == nil {
			c.ch.send(&broken{pair: uint8(pair)})
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// answersMax is how many answers of one connection may be on their way or not received.
const answersMax = 64

// replies counts what an owner has answered over one connection. Answers go over the
// control connection, which keeps their order; the initiator tells how many its program
// has taken, which makes room for more.
type replies struct {
	sent, taken uint64
	refused     bool // an Answer found no room
	over        bool // the connection has ended
}

// Answer implements driver.Backend.
func (b *Backend) Answer(conn uint64, msg []byte) error {
	if !b.gate.Enter() {
		return driver.ErrClosed
	}
	defer b.gate.Exit()
	if len(msg) > messageMax {
		return driver.ErrBounds
	}
	c, accepted := b.end(conn).(*inbound)
	if !accepted {
		return driver.ErrPeerLost
	}
	return c.reply(msg)
}

func (c *inbound) reply(msg []byte) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	r := &c.replies
	if !r.over && r.sent-r.taken >= answersMax {
		r.refused = true
		return driver.ErrFull
	}
	if r.over || !c.ch.send(&answer{data: msg}) {
		return driver.ErrPeerLost
	}
	r.sent++
	return nil
}

// addCredit notes how many answers the peer's program has taken, and reports whether that
// makes sense.
func (c *inbound) addCredit(taken uint64) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	r := &c.replies
	if taken < r.taken || taken > r.sent {
		return false
	}
	r.taken = taken
	if r.refused {
		r.refused = false
		c.b.roomForAnswers()
	}
	return true
}

// endReplies has Answer say that the connection has ended.
func (c *inbound) endReplies() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.replies.over = true
	if c.replies.refused {
		c.b.roomForAnswers() // it is to learn that there will be none
	}
}
