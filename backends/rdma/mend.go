// SPDX-License-Identifier: Apache-2.0

package rdma

import (
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/sluicehq/sluice/internal/clock"
)

// mender carries out what repair decides, in a goroutine of its own. It alone makes,
// begins and settles pairs.
type mender struct {
	p      *peer
	repair *repair
	time   *clock.Stopwatch // all times of repair
	waits  bool             // something has waited for the peer since the last look
	quiet  quiet            // since something waits
	ends   []pairRequest    // of each queue pair, the last that the owner was asked
	before []uint64         // of each queue pair, what its rail had moved when it was live

	mu      sync.Mutex
	events  []event
	stopped bool
	stir    chan struct{} // has one place
	over    chan struct{} // closed by stop
	done    chan struct{} // closed when run has returned
	begun   bool

	states []pairState // of repair, for Explain; mu
}

// event is what a mender must know of.
type event struct {
	kind    eventKind
	pair    int
	status  int32
	reply   *pairReply
	welcome *welcome
}

type eventKind uint8

const (
	eventWelcome eventKind = iota // the owner has made its ends
	eventLive                     // a probe came back
	eventFailed                   // our queue pair has failed and is no more
	eventBroken                   // the owner's is no more
	eventReply                    // the owner has ended its own
	eventHurry                    // a port or a device has changed
)

// eventsMax bounds what an owner can have us remember.
const eventsMax = 4096

func newMender(p *peer) *mender {
	return &mender{
		p: p, repair: newRepair(len(p.pairs), &p.b.cfg), ends: make([]pairRequest, len(p.pairs)),
		time:   clock.NewStopwatch(p.b.cfg.clock, p.b.cfg.Failure),
		before: make([]uint64, len(p.pairs)),
		stir:   make(chan struct{}, 1), over: make(chan struct{}), done: make(chan struct{}),
		states: make([]pairState, len(p.pairs)),
	}
}

// post tells the mender of something. It does not wait.
func (m *mender) post(e event) {
	m.mu.Lock()
	if len(m.events) < eventsMax {
		m.events = append(m.events, e)
	}
	m.mu.Unlock()
	select {
	case m.stir <- struct{}{}:
	default:
	}
}

// stop ends run, and returns when it has ended.
func (m *mender) stop() {
	m.mu.Lock()
	if !m.stopped {
		m.stopped = true
		close(m.over)
	}
	begun := m.begun
	m.mu.Unlock()
	if begun {
		<-m.done
	}
}

// enter reports whether run may begin.
func (m *mender) enter() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.begun = !m.stopped
	return m.begun
}

func (m *mender) run() {
	if !m.enter() {
		return
	}
	defer close(m.done)
	m.ports(m.time.Look())
	for {
		now := m.time.Look()
		for _, e := range m.take() {
			m.handle(e, now)
		}
		for _, i := range m.repair.darkened(now) {
			m.cut(i, now)
		}
		for _, i := range m.repair.asks(now) {
			m.ask(i)
		}
		if why := m.lost(now); why != "" {
			m.p.lose(errors.New(why), false)
			return
		}
		m.show()
		if !m.await() {
			return
		}
	}
}

// await waits until there is something to do, and reports whether run is to go on.
func (m *mender) await() bool {
	var tick <-chan struct{}
	if at := m.repair.next(); at.IsZero() {
		m.time.Rest()
	} else {
		var timer clock.Timer
		tick, timer = m.time.Tick(at)
		defer timer.Stop()
	}
	select {
	case <-m.stir:
	case <-tick:
	case <-m.over:
		return false
	}
	return true
}

// lost says why the peer is lost; empty: it is not. The peer's time begins with the first look that
// finds something that waits for it.
func (m *mender) lost(now time.Time) string {
	if m.repair.gone() {
		return "the devices of all queue pairs are gone"
	}
	waited := m.waits
	m.waits = m.repair.troubled() && m.p.awaited()
	if !waited || !m.waits {
		m.quiet = quiet{ch: m.p.ch}
		m.repair.bear(now)
		return ""
	}
	if silent := m.quiet.lasts(now); silent > m.p.b.cfg.Failure {
		return fmt.Sprintf("its host has acknowledged nothing for %v: it is down, or out of reach",
			silent.Round(time.Millisecond))
	}
	return m.repair.lost(now)
}

func (m *mender) take() []event {
	m.mu.Lock()
	defer m.mu.Unlock()
	list := m.events
	m.events = nil
	return list
}

// show notes the states for Explain.
func (m *mender) show() {
	m.mu.Lock()
	defer m.mu.Unlock()
	for i := range m.states {
		m.states[i] = m.repair.pairs[i].state
	}
}

// look returns them.
func (m *mender) look() []pairState {
	m.mu.Lock()
	defer m.mu.Unlock()
	return append([]pairState(nil), m.states...)
}

func (m *mender) handle(e event, now time.Time) {
	if e.pair < 0 || e.pair >= len(m.repair.pairs) {
		return // of an owner that makes queue pairs up
	}
	switch e.kind {
	case eventWelcome:
		for i, a := range e.welcome.pairs {
			m.begin(i, &a, now)
		}
		m.repair.begun(m.time.Look())
	case eventLive:
		m.repair.live(e.pair, now)
		m.before[e.pair] = m.moved(e.pair)
		select {
		case <-m.p.ready:
		default:
			close(m.p.ready)
		}
	case eventFailed:
		m.repair.failed(e.pair, m.moved(e.pair) > m.before[e.pair], now)
	case eventBroken:
		if m.repair.pairs[e.pair].carries() {
			m.cut(e.pair, now)
		}
	case eventReply:
		m.replied(e.reply, now)
	case eventHurry:
		m.ports(now)
		m.repair.hurry(now)
	}
}

// cut ends a queue pair of ours that does not fail by itself. One that the NIC keeps carries no
// more.
func (m *mender) cut(i int, now time.Time) {
	_ = m.p.link.PairEnd(i) // PairMake tries again
	m.repair.failed(i, m.moved(i) > m.before[i], now)
}

// ports looks at which of our ports are up.
func (m *mender) ports(now time.Time) {
	for i, pair := range m.p.pairs {
		m.repair.port(i, m.p.b.rails[pair.ours].usable(), now)
	}
}

// moved is how many bytes the rail of a queue pair has moved.
func (m *mender) moved(i int) uint64 {
	c, _ := m.p.b.net.Counters(m.p.pairs[i].ours) // of a rail that is there
	return c.BytesOut + c.BytesIn
}

// begin connects a queue pair to the owner's end of it.
func (m *mender) begin(i int, a *pairAnswer, now time.Time) {
	if a.there && m.p.link.PairBegin(i, a.end) == nil {
		return
	}
	_ = m.p.link.PairEnd(i) // nothing was posted over it
	m.repair.failed(i, false, now)
}

// ask makes a new queue pair, and asks the owner for its own, after it has ended the one
// before. Without a new one of ours, as while the port is down, it must end that all the
// same: what the queue pair held goes over others then.
func (m *mender) ask(i int) {
	q := pairRequest{pair: uint8(i), attempt: m.repair.pairs[i].attempt}
	if m.p.b.rails[m.p.pairs[i].ours].usable() {
		end, err := m.p.link.PairMake(i, m.p.pairs[i].ours)
		q.there, q.end = err == nil, end
	}
	m.ends[i] = q
	m.p.ch.send(q.encode())
}

// replied goes on after the owner has ended its queue pair: nothing of the first try lands
// any more, so what it did not do may be sent again.
func (m *mender) replied(r *pairReply, now time.Time) {
	i := int(r.pair)
	both := r.there && m.ends[i].there
	if !m.repair.answered(i, r.attempt, both, now) {
		return
	}
	if err := m.p.link.PairSettle(i, r.seen); err != nil {
		m.p.ch.close(err) // an owner that saw what we did not send: it is given up
		return
	}
	switch {
	case both:
		m.begin(i, &r.pairAnswer, now)
	case m.p.b.rails[m.p.pairs[i].ours].gone.Load():
		m.repair.out(i, now)
	default:
		_ = m.p.link.PairEnd(i) // ours, if it was made
	}
}
