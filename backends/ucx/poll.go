// SPDX-License-Identifier: Apache-2.0

package ucx

import (
	"encoding/binary"
	"maps"
	"net/netip"
	"time"

	"golang.org/x/sys/unix"

	ucp "github.com/sluicehq/sluice/csrc/ucx"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/clock"
	"github.com/sluicehq/sluice/internal/session"
)

// Poll implements driver.Backend. It looks at memory that the workers share with
// us. A caller that finds nothing and comes again at once waits: it moves the workers itself,
// which saves waking their threads.
func (b *Backend) Poll(done []driver.Completion) (int, error) {
	ended := b.ended.Load() // before the look: what is found missing then is missing for good
	n := b.collect(done)
	if n == 0 && b.idle && !ended {
		b.drive()
		n = b.collect(done)
	}
	b.idle = n == 0
	if n == 0 && ended && len(done) > 0 {
		return 0, driver.ErrClosed
	}
	return n, nil
}

// collect takes what is in the rings, without a crossing into C.
func (b *Backend) collect(done []driver.Completion) (n int) {
	for n < len(done) {
		got := b.net.Poll(b.scratch[:min(len(b.scratch), len(done)-n)])
		if got == 0 {
			break
		}
		for _, d := range b.scratch[:got] {
			done[n] = driver.Completion{Tag: d.Tag, Err: ucp.Error(d)}
			n++
		}
	}
	return n
}

func (b *Backend) drive() {
	if b.used.Load() > 0 {
		b.net.Drive()
	}
}

// FD implements driver.Backend.
func (b *Backend) FD() int { return b.event }

// Arm implements driver.Backend.
func (b *Backend) Arm() (ready bool, err error) {
	if b.gate.IsShut() {
		return false, driver.ErrClosed
	}
	said := b.words.Arm()
	return b.net.Arm() || said, nil
}

// wake signals the event for news that is not in a ring of C.
func (b *Backend) wake() {
	if b.words.Disarm() {
		_, _ = unix.Write(b.event, one) // full only when it is signalled already
	}
}

// one is what a signal adds, in the byte order of this machine.
var one = binary.NativeEndian.AppendUint64(nil, 1)

// Receive implements driver.Backend. A connection's last message waits until
// the rings were seen empty after its end was known: then all messages before it
// are out.
func (b *Backend) Receive(msgs []driver.Message) (int, error) {
	if b.gate.IsShut() {
		return 0, driver.ErrClosed
	}
	n := b.gather(msgs)
	if n == 0 && b.quiet {
		b.drive()
		n = b.gather(msgs)
	}
	b.quiet = n == 0
	return n, nil
}

// gather takes messages out of the rings, and then the last words of connections.
func (b *Backend) gather(msgs []driver.Message) (n int) {
	b.leaving = b.words.Pending(b.leaving[:0])
	for n < len(msgs) {
		notif, ok := b.net.Receive()
		if !ok {
			break
		}
		if e := b.end(notif.Conn); e != nil {
			msgs[n] = driver.Message{Conn: e.number(), Data: notif.Data}
			n++
		}
	}
	told := b.leaving[:min(len(b.leaving), len(msgs)-n)]
	for _, c := range told {
		msgs[n] = driver.Message{Conn: c.conn, Err: driver.ErrPeerLost}
		n++
		c.told()
	}
	if len(told) > 0 {
		b.words.Drop(len(told))
	}
	clear(b.leaving) // keep no connection alive
	return n
}

// told notes that the program knows of the end.
func (c *inbound) told() {
	c.mu.Lock()
	c.said = true
	c.mu.Unlock()
	c.forget()
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
	c := b.acceptedAs(conn)
	if c == nil {
		return driver.ErrPeerLost
	}
	return c.answer(msg)
}

// acceptedAs returns the connection of a peer to us with this number, or nil.
func (b *Backend) acceptedAs(conn uint64) *inbound {
	b.endsMu.RLock()
	defer b.endsMu.RUnlock()
	return b.accepted[conn]
}

// answer sends a notification to the end that began the connection.
func (c *inbound) answer(msg []byte) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.link == nil || c.left {
		return driver.ErrPeerLost
	}
	return c.link.Notify(msg)
}

func (c *inbound) number() uint64 { return c.conn }
func (p *peer) number() uint64    { return p.conn }

// end is our end of a connection. Its methods are called by the control goroutine,
// and must not block.
type end interface {
	number() uint64 // of the connection, as the program knows it
	heard(message any)
	lost(over bool) // the peer is given up; over: it has ended its end itself
	there() *address
	over(f func(link)) // calls f, unless the link is gone
}

func (b *Backend) add(id uint64, e end) {
	b.endsMu.Lock()
	b.ends[id] = e
	b.used.Store(int64(len(b.ends)))
	b.endsMu.Unlock()
}

func (b *Backend) remove(id uint64) {
	b.endsMu.Lock()
	delete(b.ends, id)
	b.used.Store(int64(len(b.ends)))
	b.endsMu.Unlock()
}

func (b *Backend) end(id uint64) end {
	b.endsMu.RLock()
	defer b.endsMu.RUnlock()
	return b.ends[id]
}

// allEnds lists the ends by what peers put into their messages.
func (b *Backend) allEnds() map[uint64]end {
	b.endsMu.RLock()
	defer b.endsMu.RUnlock()
	return maps.Clone(b.ends)
}

// inbound lists the connections of others to us.
func (b *Backend) inbound() (list []*inbound) {
	b.endsMu.RLock()
	defer b.endsMu.RUnlock()
	for _, c := range b.inbounds {
		list = append(list, c)
	}
	return list
}

// attend handles control messages until the event is closed.
func (b *Backend) attend() {
	for b.control.Wait() == nil {
		for {
			m, ok := b.net.Control()
			if !ok {
				break
			}
			b.handle(&m)
		}
	}
}

// handle passes a message on. What cannot be read is dropped: a peer of another
// version gets no answer, and its Connect ends with its context.
func (b *Backend) handle(m *ucp.Control) {
	var e end
	if m.Conn != 0 {
		if e = b.end(m.Conn); e == nil {
			return // for an end that is gone
		}
	}
	if m.Lost {
		if e != nil {
			e.lost(m.Over)
		}
		return
	}
	message, err := decodeControl(m.Data)
	switch {
	case err != nil:
	case e != nil:
		e.heard(message)
	default:
		b.unconnected(m.Worker, message)
	}
}

// unconnected handles a message that a peer sent to no end of ours: it begins a connection, or ends
// one whose beginning it has given up.
func (b *Backend) unconnected(worker int, message any) {
	switch m := message.(type) {
	case *hello:
		b.greet(worker, m)
	case *bye:
		if c := b.inboundOf(inboundID{m.from, m.conn}); c != nil {
			c.heard(m)
		}
	}
}

// pulses is how many there are in a Failure.
const pulses = 12

// pulse looks at peers that say nothing, until the backend closes.
func (b *Backend) pulse() {
	ticker, now := time.NewTicker(b.cfg.Failure/pulses), clock.Host().Now
	defer ticker.Stop()
	watches := map[uint64]*session.SilenceWatch{}
	for last := now(); ; {
		select {
		case <-ticker.C:
		case <-b.closing:
			return
		}
		at := now()
		watches = b.giveUpGone(watches, at, at-last > int64(b.cfg.Failure)/2)
		last = at
	}
}

// giveUpGone gives up peers whose host is gone: for Config.Failure it has acknowledged nothing
// of what our kernel sends it, by whatever connection. Where nothing waits for the peer that is six
// times as long, and so it is where there is no connection of TCP that could tell: UCX's other
// transports see for themselves that a host is gone. watches are those of the look before, by end;
// stood: this process stood still since.
func (b *Backend) giveUpGone(watches map[uint64]*session.SilenceWatch, now int64, stood bool) (
	kept map[uint64]*session.SilenceWatch) {
	failure := b.cfg.Failure
	kept = make(map[uint64]*session.SilenceWatch)
	var hosts map[netip.Addr]session.Outbound
	for id, e := range b.allEnds() {
		var heard, waited time.Duration
		e.over(func(l link) { heard, waited = l.Silence() })
		there := e.there()
		if heard < 2*failure/pulses || there.host == b.address.host {
			continue // it pings more often, or its kernel is ours
		}
		if hosts == nil {
			hosts = b.kernel()
		}
		out := session.NoOutbound
		for _, a := range there.hosts {
			if o, known := hosts[a]; known {
				out = out.Join(o)
			}
		}
		w := watches[id]
		if w == nil {
			w = &session.SilenceWatch{}
		}
		kept[id] = w
		silent := w.Look(out, now, stood)
		// After a standstill nothing that came has been read yet.
		if out == session.NoOutbound && !stood {
			silent, waited = min(heard, waited), 0
		}
		if silent >= session.IdleFailures*failure || min(silent, waited) > failure {
			e.over(link.GiveUp)
		}
	}
	return kept
}
