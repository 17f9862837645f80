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
	p           *peer
	repair      *repair
	time        *clock.Stopwatch // all times of repair
	hadWaiters  bool             // something has waited for the peer since the last look
	host        hostWatch        // since something waits
	ends        []pairRequest    // of each queue pair, the last that the owner was asked
	movedBefore []uint64         // of each queue pair, what its rail had moved when it was live

	wake     chan struct{} // has one place
	over     chan struct{} // closed by stop
	done     chan struct{} // closed when run has returned
	stopping sync.Once

	mu     sync.Mutex
	events []event
	states []pairState // of repair, for Explain
}

// event is what a mender must know of.
type event struct {
	kind    eventKind
	pair    int
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
	eventPort                     // a port or a device has changed
)

// eventsMax bounds what an owner can have us remember.
const eventsMax = 4096

func newMender(p *peer) *mender {
	return &mender{
		p: p, repair: newRepair(len(p.pairs), &p.b.cfg), ends: make([]pairRequest, len(p.pairs)),
		time:        clock.NewStopwatch(p.b.cfg.clock, p.b.cfg.Failure),
		movedBefore: make([]uint64, len(p.pairs)),
		wake:        make(chan struct{}, 1), over: make(chan struct{}), done: make(chan struct{}),
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
	case m.wake <- struct{}{}:
	default:
	}
}

// stop ends run, and returns when it has ended. dialOnce starts run in any case.
func (m *mender) stop() {
	m.stopping.Do(func() { close(m.over) })
	<-m.done
}

// run is what the initiator does about its queue pairs, from the welcome to the end.
func (m *mender) run() {
	defer close(m.done)
	for m.await() {
		// What has happened.
		now := m.time.Look()
		for _, e := range m.takeEvents() {
			m.handle(e, now)
		}
		// The owner is asked for queue pairs that have failed, once their pause is over.
		for _, i := range m.repair.asks(now) {
			m.askOwner(i)
		}
		// A peer that something waits for is given up in its time.
		if why := m.lost(now); why != "" {
			m.p.lose(errors.New(why), false)
			return
		}
		m.publish()
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
	case <-m.wake:
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
	waited := m.hadWaiters
	m.hadWaiters = m.repair.isTiming() && m.p.hasWaiters()
	if !waited || !m.hadWaiters {
		m.host = hostWatch{ch: m.p.ch}
		m.repair.restartTimes(now)
		return ""
	}
	if silent := m.host.silentFor(now); silent > m.p.b.cfg.Failure {
		return fmt.Sprintf("its host has acknowledged nothing for %v: it is down, or out of reach",
			silent.Round(time.Millisecond))
	}
	return m.repair.lost(now)
}

func (m *mender) takeEvents() []event {
	m.mu.Lock()
	defer m.mu.Unlock()
	list := m.events
	m.events = nil
	return list
}

// publish notes the states for Explain.
func (m *mender) publish() {
	m.mu.Lock()
	defer m.mu.Unlock()
	for i := range m.states {
		m.states[i] = m.repair.pairs[i].state
	}
}

// pairStates returns them.
func (m *mender) pairStates() []pairState {
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
			m.beginPair(i, &a, now)
		}
		m.repair.begun(m.time.Look())
	case eventLive:
		m.repair.live(e.pair, now)
		m.movedBefore[e.pair] = m.moved(e.pair)
		select {
		case <-m.p.ready:
		default:
			close(m.p.ready)
		}
	case eventFailed:
		m.repair.failed(e.pair, m.moved(e.pair) > m.movedBefore[e.pair], now)
	case eventBroken:
		if m.repair.pairs[e.pair].mayWork() {
			m.endPair(e.pair, now)
		}
	case eventReply:
		m.handleReply(e.reply, now)
	case eventPort:
		// A queue pair is given nothing while its port is down, so that it may not fail by itself.
		for i, pair := range m.p.pairs {
			if !m.p.b.rails[pair.ours].usable() && m.repair.pairs[i].mayWork() {
				m.endPair(i, now)
			}
		}
		m.repair.endPauses(now)
	}
}

// endPair ends a queue pair of ours that does not fail by itself. One that the NIC keeps carries no
// more.
func (m *mender) endPair(i int, now time.Time) {
	_ = m.p.link.PairEnd(i) // PairMake tries again
	m.repair.failed(i, m.moved(i) > m.movedBefore[i], now)
}

// moved is how many bytes the rail of a queue pair has moved.
func (m *mender) moved(i int) uint64 {
	c, _ := m.p.b.net.Counters(m.p.pairs[i].ours) // of a rail that is there
	return c.BytesOut + c.BytesIn
}

// beginPair connects a queue pair to the owner's end of it.
func (m *mender) beginPair(i int, a *pairAnswer, now time.Time) {
	if a.there && m.p.link.PairBegin(i, a.end) == nil {
		return
	}
	_ = m.p.link.PairEnd(i) // nothing was posted over it
	m.repair.failed(i, false, now)
}

// askOwner makes a new queue pair, and asks the owner for its own, after it has ended the one
// before. Without a new one of ours, as while the port is down, it must end that all the
// same: what the queue pair held goes over others then.
func (m *mender) askOwner(i int) {
	q := pairRequest{pair: uint8(i), attempt: m.repair.pairs[i].attempt}
	if m.p.b.rails[m.p.pairs[i].ours].usable() {
		end, err := m.p.link.PairMake(i, m.p.pairs[i].ours)
		q.there, q.end = err == nil, end
	}
	m.ends[i] = q
	m.p.ch.send(&q)
}

// handleReply goes on after the owner has ended its queue pair: nothing of the first try lands
// any more, so what it did not do may be sent again.
func (m *mender) handleReply(r *pairReply, now time.Time) {
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
		m.beginPair(i, &r.pairAnswer, now)
	case m.p.b.rails[m.p.pairs[i].ours].gone.Load():
		m.repair.remove(i, now)
	default:
		_ = m.p.link.PairEnd(i) // ours, if it was made
	}
}

// repair is what becomes of the queue pairs of a connection that we began. It decides, and does
// nothing itself: mender carries it out.
//
//	probing -> live            a request without bytes came back
//	probing, live -> waiting   the queue pair failed: C has ended our end of it
//	waiting -> asked           the owner is told, and asked to end its own
//	asked -> probing           it did, and has a new one
//	asked -> waiting           it did, and could not make a new one
//	any -> out                 our device is gone
//
// The pause before the owner is asked is none at first, then grows from pauseMin to
// pauseMax until the queue pair is live again.
type repair struct {
	pairs      []pairRepair
	failure    time.Duration // how long no queue pair may be live
	soundAfter time.Duration // a queue pair that stays live for so long is sound
	noneLive   time.Time     // since when none is live; zero: one is
	asked      time.Time     // since when the owner owes an answer; zero: it does not
	unsound    time.Time     // since when none was sound; zero: one is, or has not failed
}

type pairRepair struct {
	state   pairState
	attempt uint32
	pause   time.Duration
	at      time.Time // waiting: when to ask; live: when it is sound
}

type pairState uint8

const (
	pairProbing pairState = iota
	pairLive
	pairWaiting
	pairAsked
	pairOut
)

var pairStates = [...]string{"probing", "live", "failed", "asked for", "out"}

func (s pairState) String() string { return pairStates[s] }

const (
	pauseMin   = 50 * time.Millisecond
	pauseMax   = time.Second
	unsoundMax = 10 // times failure
)

func newRepair(pairs int, cfg *Config) *repair {
	least, _ := cfg.FailureTime()
	return &repair{
		pairs:   make([]pairRepair, pairs),
		failure: cfg.Failure, soundAfter: 2 * least,
	}
}

// begun notes that the owner has made its ends: from now on a queue pair must come to life. What it
// takes until then is for the context of Connect to bound.
func (r *repair) begun(now time.Time) { r.noneLive = now }

// live notes that a probe came back.
func (r *repair) live(i int, now time.Time) {
	l := &r.pairs[i]
	if l.state != pairProbing {
		return
	}
	l.state, l.pause, l.at = pairLive, 0, now.Add(r.soundAfter)
	r.noneLive = time.Time{}
}

// failed notes the end of our queue pair. moved says that bytes have passed since it was
// live: then it was sound, however short that was.
func (r *repair) failed(i int, moved bool, now time.Time) {
	l := &r.pairs[i]
	if moved {
		r.unsound = time.Time{}
	}
	switch l.state {
	case pairLive:
		l.at = now
	case pairProbing:
		r.setPause(l, now)
	default:
		return
	}
	l.state = pairWaiting
	r.noteLive(now)
}

// setPause sets a pause, longer than the one before.
func (r *repair) setPause(l *pairRepair, now time.Time) {
	l.pause = min(max(pauseMin, 2*l.pause), pauseMax)
	l.at = now.Add(l.pause)
}

// remove takes a queue pair out for good. What it held must have been settled.
func (r *repair) remove(i int, now time.Time) {
	r.pairs[i].state = pairOut
	r.noteLive(now)
}

// noteLive notes how many queue pairs are live, and since when none is.
func (r *repair) noteLive(now time.Time) {
	if r.unsound.IsZero() {
		r.unsound = now
	}
	for i := range r.pairs {
		if r.pairs[i].state == pairLive {
			return
		}
	}
	if r.noneLive.IsZero() {
		r.noneLive = now
	}
}

// asks returns the queue pairs whose owner is to be asked now.
func (r *repair) asks(now time.Time) (list []int) {
	for i := range r.pairs {
		l := &r.pairs[i]
		if l.state == pairWaiting && !now.Before(l.at) {
			l.state = pairAsked
			l.attempt++
			list = append(list, i)
		}
	}
	r.discountAnswers(now)
	return list
}

// discountAnswers leaves out the time that the owner takes to answer, as far as it has passed: its
// process may be stopped, or kept off its processors. The caller knows whether its host is there.
func (r *repair) discountAnswers(now time.Time) {
	if !r.asked.IsZero() {
		for _, since := range []*time.Time{&r.noneLive, &r.unsound} {
			if !since.IsZero() {
				*since = since.Add(min(now.Sub(r.asked), now.Sub(*since)))
			}
		}
	}
	r.asked = time.Time{}
	for i := range r.pairs {
		if r.pairs[i].state == pairAsked {
			r.asked = now
		}
	}
}

// answered reports whether an answer is the one that is waited for. there says that the
// owner has a new queue pair, and that we have one.
func (r *repair) answered(i int, attempt uint32, there bool, now time.Time) bool {
	if i >= len(r.pairs) || r.pairs[i].state != pairAsked || r.pairs[i].attempt != attempt {
		return false
	}
	l := &r.pairs[i]
	if there {
		l.state = pairProbing
	} else {
		l.state = pairWaiting
		r.setPause(l, now)
	}
	r.discountAnswers(now)
	return true
}

// endPauses ends the pauses: a port is up again.
func (r *repair) endPauses(now time.Time) {
	for i := range r.pairs {
		if l := &r.pairs[i]; l.state == pairWaiting {
			l.pause, l.at = 0, now
		}
	}
}

// mayWork reports whether there is a queue pair that may work.
func (l *pairRepair) mayWork() bool { return l.state == pairLive || l.state == pairProbing }

// gone reports whether the devices of all queue pairs are gone: there will be none.
func (r *repair) gone() bool {
	for i := range r.pairs {
		if r.pairs[i].state != pairOut {
			return false
		}
	}
	return true
}

// lost says why the peer is to be given up, for which something waits; empty: it is not.
func (r *repair) lost(now time.Time) string {
	r.noteSound(now)
	r.discountAnswers(now)
	switch {
	case !r.noneLive.IsZero() && now.Sub(r.noneLive) > r.failure:
		return "no queue pair came to life in Config.Failure"
	case !r.unsound.IsZero() && now.Sub(r.unsound) > unsoundMax*r.failure:
		return "its queue pairs fail over and over"
	}
	return ""
}

// noteSound notes whether a queue pair has been live for long enough to be sound.
func (r *repair) noteSound(now time.Time) {
	for i := range r.pairs {
		if l := &r.pairs[i]; l.state == pairLive && !now.Before(l.at) {
			r.unsound = time.Time{}
		}
	}
}

// isTiming reports whether time runs that lost looks at.
func (r *repair) isTiming() bool {
	for i := range r.pairs {
		if r.pairs[i].state == pairAsked {
			return true
		}
	}
	return !r.noneLive.IsZero() || !r.unsound.IsZero()
}

// restartTimes gives a peer all of its time once more: nothing waits for it yet.
func (r *repair) restartTimes(now time.Time) {
	r.noteSound(now)
	r.discountAnswers(now)
	if !r.noneLive.IsZero() {
		r.noneLive = now
	}
	if !r.unsound.IsZero() {
		r.unsound = now
	}
}

// next is when to look again without news; zero: never.
func (r *repair) next() (at time.Time) {
	sooner := func(t time.Time) {
		if at.IsZero() || t.Before(at) {
			at = t
		}
	}
	for i := range r.pairs {
		l := &r.pairs[i]
		if l.state == pairWaiting || l.state == pairLive && !r.unsound.IsZero() {
			sooner(l.at)
		}
	}
	if !r.noneLive.IsZero() {
		sooner(r.noneLive.Add(r.failure))
	}
	if !r.asked.IsZero() {
		sooner(r.asked.Add(r.failure))
	}
	if at.IsZero() {
		return at
	}
	return at.Add(time.Millisecond) // past it, however clocks are cut
}
