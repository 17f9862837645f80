// SPDX-License-Identifier: Apache-2.0

package rdma

import (
	"encoding/binary"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/csrc/verbs"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/clock"
	"github.com/sluicehq/sluice/internal/session"
)

// Poll implements driver.Backend. It looks at memory that C shares with us. A caller that finds
// nothing and comes again at once waits: it takes completions off the NICs itself, which
// saves waking the thread.
func (b *Backend) Poll(done []driver.Completion) (int, error) {
	ended := b.ended.Load() // before the look: what is found missing then is missing for good
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

// collect takes what is in the ring, without a crossing into C.
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
	ready = b.words.Arm() // before it looks at answers: what comes later wakes
	ready = b.answers.ready() || ready
	return b.net.Arm() || ready, nil
}

// wake signals the event for news that is not in a ring of C.
func (b *Backend) wake() {
	if b.words.Disarm() {
		_, _ = unix.Write(b.event, one) // full only when it is signalled already
	}
}

// one is what a signal adds, in the byte order of this machine.
var one = binary.NativeEndian.AppendUint64(nil, 1)

// Receive implements driver.Backend. A connection's last message waits until the ring
// was seen empty after its end was known: then all messages before it are out.
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

// gather takes messages, then answers, then last words.
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
	clear(b.leaving) // keep no connection alive
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

// attend takes the news of C until Close needs none any more.
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

// handleNews passes news on to the connections that they concern.
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

// checkPorts has all peers look at the ports of their queue pairs.
func (b *Backend) checkPorts() {
	b.mu.Lock()
	defer b.mu.Unlock()
	for p := range b.peers {
		p.mender.post(event{kind: eventPort})
	}
}

// hostWatch says for how long a peer's host has acknowledged nothing while something waits for the
// peer. The host of a process that is stopped, or kept off its processors, acknowledges for it.
type hostWatch struct {
	ch    *channel
	host  session.SilenceWatch
	asked time.Time // for a sign of life
}

// silentFor sees to it that there is something to acknowledge, and returns for how long nothing
// was. now is by a Stopwatch.
func (q *hostWatch) silentFor(now time.Time) time.Duration {
	out := q.ch.outbound()
	if !out.Pending && now.Sub(q.asked) >= q.ch.cfg.Failure/2 {
		q.asked = now
		q.ch.send(ping{})
	}
	return q.host.Look(out, now.UnixNano(), false)
}

// pulse ends connections to hosts that acknowledge nothing of what they were sent, whether
// something waits for them or not, until the backend closes.
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
		stood := now-last > int64(b.cfg.Failure)*3/2
		last = now
		for _, c := range b.channels() {
			silent := c.idle.Look(c.outbound(), now, stood)
			if silent >= session.IdleFailures*b.cfg.Failure {
				c.close(session.HostLost(silent))
			}
		}
	}
}

// channels lists the control connections of peers, and of those that have connected to us.
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

// roomForAnswers wakes a program whose Answer found no room.
func (b *Backend) roomForAnswers() {
	b.answers.room.Store(true)
	b.wake()
}

// answers holds what owners have answered over connections of ours, until Receive.
type answers struct {
	room atomic.Bool // an Answer of ours that found no room may find some now

	waiting atomic.Int64 // of list: looked at before the lock
	mu      sync.Mutex
	list    []answered
}

type answered struct {
	p    *peer
	data []byte
}

// add puts an answer into the list, and reports whether the owner kept to its bound.
func (a *answers) add(p *peer, data []byte) bool {
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
func (a *answers) ready() bool {
	return a.room.Load() && a.room.Swap(false) || a.waiting.Load() > 0
}

// receive fills msgs with answers, and tells their owners.
func (a *answers) receive(msgs []driver.Message) int {
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

// forget drops what came over a connection that the program has closed.
func (a *answers) forget(p *peer) {
	a.mu.Lock()
	defer a.mu.Unlock()
	n := len(a.list)
	a.list = slices.DeleteFunc(a.list, func(x answered) bool { return x.p == p })
	a.waiting.Add(int64(len(a.list) - n))
}
