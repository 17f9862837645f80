// SPDX-License-Identifier: Apache-2.0

package rdma

import (
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/sluicehq/sluice/csrc/verbs"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/clock"
	"github.com/sluicehq/sluice/internal/proc"
	"github.com/sluicehq/sluice/internal/session"
)

// Poll implements driver.Backend. It reads a ring that C shares with Go. A caller that gets nothing
// from two calls in a row is waiting: Poll then takes completions from the NICs itself, which saves
// waking the progress thread.
func (b *Backend) Poll(done []driver.Completion) (int, error) {
	ended := b.ended.Load() // before collect: nothing is added to the ring after ended is set
	n := b.collect(done)
	if n == 0 && b.idle && !ended && b.gate.Enter() {
		b.net.Drive()
		b.gate.Exit()
		n = b.collect(done)
	}
	b.idle = n == 0
	if n == 0 && ended && len(done) > 0 {
		return 0, driver.ErrClosed
	}
	return n, nil
}

// collect takes completions from the ring, without a cgo call.
func (b *Backend) collect(done []driver.Completion) (n int) {
	for n < len(done) {
		got := b.net.Poll(b.scratch[:min(len(b.scratch), len(done)-n)])
		if got == 0 {
			break
		}
		for _, d := range b.scratch[:got] {
			done[n] = driver.Completion{Tag: d.Tag, Err: verbs.Error(d)}
			n++
		}
	}
	return n
}

// FD implements driver.Backend.
func (b *Backend) FD() int { return b.event }

// Arm implements driver.Backend.
func (b *Backend) Arm() (ready bool, err error) {
	if !b.gate.Enter() {
		return false, driver.ErrClosed
	}
	defer b.gate.Exit()
	ready = b.words.Arm() // before answers are checked: an answer after that signals the event
	ready = b.answers.ready() || ready
	return b.net.Arm() || ready, nil
}

// wake signals the event for answers, room for answers, and ended connections; C signals the rest.
func (b *Backend) wake() {
	if b.words.Disarm() {
		proc.SignalFD(uintptr(b.event))
	}
}

// Receive implements driver.Backend. It reports the end of a connection only after it has found the
// ring empty since the end: then the program has received all messages of the connection.
func (b *Backend) Receive(msgs []driver.Message) (int, error) {
	if !b.gate.Enter() {
		return 0, driver.ErrClosed
	}
	defer b.gate.Exit()
	n := b.gather(msgs)
	if n == 0 && b.quiet {
		b.net.Drive()
		n = b.gather(msgs)
	}
	b.quiet = n == 0
	return n, nil
}

// gather takes messages, then answers, then ends of connections.
func (b *Backend) gather(msgs []driver.Message) (n int) {
	b.leaving = b.words.Pending(b.leaving[:0])
	n = b.receiveNotifs(msgs)
	n += b.answers.receive(msgs[n:])
	ended := b.leaving[:min(len(b.leaving), len(msgs)-n)]
	for _, c := range ended {
		msgs[n] = driver.Message{Conn: c.link.ID(), Err: driver.ErrPeerLost}
		n++
		b.remove(c.link.ID())
	}
	if len(ended) > 0 {
		b.words.Drop(len(ended))
	}
	clear(b.leaving) // drop the references
	return n
}

// receiveNotifs fills msgs unless the ring is empty.
func (b *Backend) receiveNotifs(msgs []driver.Message) (n int) {
	for n < len(msgs) {
		notif, ok := b.net.Receive()
		if !ok {
			break
		}
		if _, known := b.end(notif.Conn).(*inbound); known {
			msgs[n] = driver.Message{Conn: notif.Conn, Data: notif.Data}
			n++
		}
	}
	return n
}

// attend handles the events of net (news) until Close stops it.
func (b *Backend) attend() {
	for b.control.Wait() == nil && !b.stopNews.Load() {
		for {
			n, ok := b.net.News()
			if !ok {
				break
			}
			b.handleNews(n)
		}
	}
}

// handleNews passes an event to the connection that it concerns, or to all peers if it is about a
// port or a device.
func (b *Backend) handleNews(n verbs.News) {
	if n.Conn != 0 {
		if e := b.end(n.Conn); e != nil {
			e.onNews(n)
		}
		return
	}
	if n.Rail < 0 || n.Rail >= len(b.rails) {
		return
	}
	r := b.rails[n.Rail]
	switch n.Kind {
	case verbs.PortUp:
		r.up.Store(true)
	case verbs.PortDown:
		r.up.Store(false)
	case verbs.DeviceGone:
		r.gone.Store(true)
	}
	b.checkPorts()
}

// checkPorts makes the menders of all peers check the ports of their queue pairs.
func (b *Backend) checkPorts() {
	b.mu.Lock()
	defer b.mu.Unlock()
	for p := range b.peers {
		p.mender.post(event{kind: eventPort})
	}
}

// hostWatch measures how long a peer's host has acknowledged nothing while a call or a batch waits
// for the peer. If only the process is stopped or gets no CPU, its kernel still acknowledges.
type hostWatch struct {
	ch       *channel
	host     session.SilenceWatch
	pingSent time.Time // zero: none was sent
}

// silentFor returns how long the host has acknowledged nothing. It sends a ping if there is nothing
// to acknowledge. now is the time of a Stopwatch.
func (q *hostWatch) silentFor(now time.Time) time.Duration {
	out := q.ch.outbound()
	if !out.Pending && now.Sub(q.pingSent) >= q.ch.cfg.Failure/2 {
		q.pingSent = now
		q.ch.send(ping)
	}
	return q.host.Look(out, now.UnixNano(), false)
}

// pulse closes connections to hosts that have acknowledged nothing for session.IdleFailures times
// Config.Failure, even if nothing waits for them. It returns when the backend closes.
func (b *Backend) pulse() {
	for last := b.cfg.clock.Now(); ; {
		over, timer := clock.After(b.cfg.clock, b.cfg.Failure)
		select {
		case <-over:
		case <-b.closing:
			timer.Stop()
			return
		}
		now := b.cfg.clock.Now()
		wasStopped := now-last > int64(b.cfg.Failure)*3/2
		last = now
		for _, c := range b.channels() {
			silent := c.idle.Look(c.outbound(), now, wasStopped)
			if silent >= session.IdleFailures*b.cfg.Failure {
				c.close(session.HostLost(silent))
			}
		}
	}
}

// channels returns all control connections, outbound and inbound.
func (b *Backend) channels() (list []*channel) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for p := range b.peers {
		list = append(list, p.ch)
	}
	for c := range b.accepted {
		list = append(list, c.ch)
	}
	return list
}

// roomForAnswers wakes the program after its Answer returned ErrFull.
func (b *Backend) roomForAnswers() {
	b.answers.room.Store(true)
	b.wake()
}

// answerQueue holds the answers of owners until Receive.
type answerQueue struct {
	room atomic.Bool // an Answer of this program that returned ErrFull may succeed now

	waiting atomic.Int64 // length of list, read without the lock
	mu      sync.Mutex
	list    []answered
}

type answered struct {
	p    *peer
	data []byte
}

// add queues an answer. It returns false if the owner exceeds answersMax.
func (a *answerQueue) add(p *peer, data []byte) bool {
	a.mu.Lock()
	p.answersIn++
	fits := p.answersIn-p.answersOut <= answersMax
	if fits {
		a.list = append(a.list, answered{p, data})
		a.waiting.Add(1)
	}
	a.mu.Unlock()
	if fits {
		p.b.wake()
	}
	return fits
}

// ready reports whether there is an answer, or, once, that there is room again.
func (a *answerQueue) ready() bool {
	return a.room.Load() && a.room.Swap(false) || a.waiting.Load() > 0
}

// receive moves answers to msgs, and tells the owners how many the program has taken.
func (a *answerQueue) receive(msgs []driver.Message) int {
	if a.waiting.Load() == 0 {
		return 0
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	n := min(len(msgs), len(a.list))
	for i, x := range a.list[:n] {
		msgs[i] = driver.Message{Conn: x.p.Conn(), Data: x.data}
		x.p.answersOut++
		if x.p.answersOut%(answersMax/4) == 0 {
			x.p.ch.send(&answersTaken{count: x.p.answersOut})
		}
	}
	a.list = slices.Delete(a.list, 0, n)
	a.waiting.Add(int64(-n))
	return n
}

// forget drops the answers of a connection that the program has closed.
func (a *answerQueue) forget(p *peer) {
	a.mu.Lock()
	defer a.mu.Unlock()
	n := len(a.list)
	a.list = slices.DeleteFunc(a.list, func(x answered) bool { return x.p == p })
	a.waiting.Add(int64(len(a.list) - n))
}
