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

// handshakesMax bounds the control connections whose handshake has not completed.
const handshakesMax = 64

// accept serves control connections until the listener is closed.
func (b *Backend) accept(l net.Listener) {
	_ = b.lobby.Serve(l, func(conn net.Conn, v *session.Visit) bool {
		return b.tasks.Start(func() { b.serve(conn, v) })
	})
}

// inbound is the owner's end of a connection that a peer began. Over it the peer accesses our
// memory and sends messages.
type inbound struct {
	b        *Backend
	ch       *channel
	visit    *session.Visit // the connection's place in the lobby during the handshake
	link     link
	rails    []int        // our rail of each queue pair
	admitted bool         // counts against Config.ConnsMax until serve returns
	hold     session.Gate // entered by goroutines other than serve's while they use link
	hasKeys  atomic.Bool  // the peer has received remote keys of our NICs

	mu        sync.Mutex
	imports   []*importRequest // not answered yet
	importing bool             // the goroutine answerImports runs
	importer  sync.WaitGroup   // waits for that goroutine
	quitting  bool             // the backend closes; the program is not told that the peer left
	credit    answerCredit
}

// serve runs the owner's side of a connection, from the hello to the end, in its own goroutine.
func (b *Backend) serve(conn net.Conn, v *session.Visit) {
	// The number of connections in the handshake is bounded, so this one may have to wait.
	if !v.Wait() {
		return
	}
	defer v.Leave()
	c := &inbound{b: b, ch: newChannel(conn, &b.cfg), visit: v}
	defer func() {
		c.ch.wait()
		if c.admitted {
			b.mu.Lock()
			b.admitted.Add(v.Host, -1)
			b.mu.Unlock()
		}
	}()

	// From here on Backend.Close ends the connection. If Close has begun, serve ends it here.
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

	// The hello carries the initiator's ends of the queue pairs. The welcome carries our ends, or
	// the status that says why the peer is refused.
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

	// Handle requests until the peer says bye, the connection breaks, or the backend closes.
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

	// End our queue pairs first; the link destroys a queue pair that does not drain. After that no
	// write of the peer can land, and all its messages are in the inbox. Only then answer the bye:
	// the peer takes the answer as proof of that.
	c.refuseAnswers()
	c.hold.Shut()
	c.hold.Wait()
	ended := c.link.End(verbs.Lost, false) == nil
	c.mu.Lock()
	quitting := c.quitting
	c.mu.Unlock()
	switch {
	case !ended:
		c.ch.close(driver.ErrUnproven) // send nothing that the peer could take as proof
	case saidBye:
		c.ch.send(farewell)
		c.ch.closeWhenRead(b.cfg.Grace)
	case quitting:
		c.ch.send(quit)
		c.ch.closeWhenRead(b.cfg.Grace)
	default:
		c.ch.close(driver.ErrPeerLost)
	}

	// Remove all references to the connection, except the notice of its end that Receive delivers.
	c.importer.Wait()
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

// receiveHello waits for the hello. It returns nil if the peer sends something else first, or
// nothing within Config.hello.
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

// setReadDeadline sets the time by which the peer must send a message. It does nothing after quit,
// which has set a deadline in the past.
func (c *inbound) setReadDeadline(deadline time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.quitting {
		_ = c.ch.conn.SetReadDeadline(deadline) // fails only if the connection is closed
	}
}

// quit makes serve end the connection because the backend closes. serve can still send the peer a
// quit message, since only its reads end.
func (c *inbound) quit() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.quitting = true
	_ = c.ch.conn.SetReadDeadline(aLongTimeAgo)
}

// welcome makes our ends of the queue pairs and sends them to the peer. An error is the reason to
// refuse the peer; serve sends it.
func (c *inbound) welcome(h *hello) error {
	if _, err := decodeAddress(h.from); err != nil {
		return fmt.Errorf("a hello without an address: %w", driver.ErrCorrupt)
	}
	if h.to != c.b.address.owner || c.b.gate.IsShut() {
		return driver.ErrPeerLost // the backend that the peer wants is gone; we have its address
	}
	c.b.mu.Lock()
	err := c.b.admitted.Take(c.visit.Host, "peers", "ConnsMax")
	c.b.mu.Unlock()
	if err != nil {
		return err
	}
	c.admitted = true
	if !c.visit.Leave() {
		return driver.ErrPeerLost // the lobby has given its place to another connection
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
			o.rail = 0 // we have no such rail: the peer is wrong, and its queue pair cannot connect
		}
		c.rails = append(c.rails, int(o.rail))
		w.pairs = append(w.pairs, c.makePair(i, &o.end))
	}
	c.ch.send(&w)
	return nil
}

// makePair creates our end of a queue pair and connects it to the peer's end. If that fails, the
// answer tells the peer that there is none.
func (c *inbound) makePair(pair int, theirs *verbs.End) pairAnswer {
	end, err := c.link.PairMake(pair, c.rails[pair])
	if err != nil {
		return pairAnswer{}
	}
	if c.link.PairBegin(pair, *theirs) != nil {
		_ = c.link.PairEnd(pair) // nothing was sent over it, so an error does not matter
		return pairAnswer{}
	}
	return pairAnswer{there: true, end: end}
}

// importsQueueMax bounds the queued imports of one peer.
const importsQueueMax = 4096

// queueImport queues an import for a separate goroutine. To register large memory with the NICs
// may take long, and serve must not delay requests for queue pairs meanwhile.
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
		c.importer.Go(c.answerImports)
	}
}

// answerImports answers queued imports until the queue is empty.
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

// keysOf returns the remote key of each queue pair, given those of each rail.
func (c *inbound) keysOf(granted []uint32) []uint32 {
	list := make([]uint32, len(c.rails))
	for pair, rail := range c.rails {
		list[pair] = granted[rail]
	}
	return list
}

// remake replaces a queue pair that has failed at the peer's end. It ends ours first: after that
// no request of the old queue pair can land, and the peer may repeat them. If ours cannot be
// ended, remake sends no answer and closes the connection.
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

// onNews implements end. It tells the peer at once when our end of a queue pair has failed.
func (c *inbound) onNews(n verbs.News) {
	if n.Kind == verbs.PairFailed && n.Pair >= 0 && n.Pair < verbs.PairsMax {
		c.ch.send(&broken{pair: uint8(n.Pair)})
	}
}

// breakPairs ends all our queue pairs of the connection; the peer then asks for new ones. Revoke
// calls it when a NIC does not release a key, and a grant before it reuses addresses. After an
// error, some of the queue pairs may still exist.
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

// answersMax bounds the answers of one connection that the initiator's program has not received.
const answersMax = 64

// answerCredit is the flow control of the owner's answers on one connection. Answers go over the
// control connection, which preserves their order. The initiator reports how many its program has
// taken, and each of these frees the slot of one answer.
type answerCredit struct {
	sent, taken uint64
	refused     bool // Answer has returned ErrFull since the last free slot
	ended       bool // the connection has ended
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
	r := &c.credit
	if !r.ended && r.sent-r.taken >= answersMax {
		r.refused = true
		return driver.ErrFull
	}
	if r.ended || !c.ch.send(&answer{data: msg}) {
		return driver.ErrPeerLost
	}
	r.sent++
	return nil
}

// addCredit notes how many answers the peer's program has taken in all. It returns false if the
// number is impossible: lower than before, or more than were sent.
func (c *inbound) addCredit(taken uint64) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	r := &c.credit
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

// refuseAnswers makes Answer return ErrPeerLost from now on.
func (c *inbound) refuseAnswers() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.credit.ended = true
	if c.credit.refused {
		c.b.roomForAnswers() // wake the refused caller, so that its next Answer gets ErrPeerLost
	}
}
