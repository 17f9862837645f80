// SPDX-License-Identifier: Apache-2.0

package rdma

import (
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/sluicehq/sluice/internal/clock"
)

// mender replaces failed queue pairs of a peer, in a goroutine of its own. repair decides what to
// do, and mender does it. After dialOnce has made the queue pairs, only the mender's goroutine
// makes, begins and settles them.
type mender struct {
	p           *peer
	repair      *repair
	time        *clock.Stopwatch // the clock of repair
	hadWaiters  bool             // a call or a batch was waiting for the peer at the last check
	host        hostWatch        // restarted when a call or a batch begins to wait
	ends        []pairRequest    // by queue pair: the last request to the owner
	movedBefore []uint64         // by queue pair: bytes its rail had moved when it became live

	wake     chan struct{} // capacity 1
	over     chan struct{} // closed by stop
	done     chan struct{} // closed when run has returned
	stopping sync.Once

	mu     sync.Mutex
	events []event
	states []pairState // copies of repair's, for Explain
}

// event is an event for a mender.
type event struct {
	kind    eventKind
	pair    int
	reply   *pairReply
	welcome *welcome
}

type eventKind uint8

const (
	eventWelcome eventKind = iota // the owner has made its ends
	eventLive                     // a probe has completed: the queue pair works
	eventFailed                   // our end of a queue pair has failed; csrc/verbs has ended it
	eventBroken                   // the owner's end of a queue pair has failed
	eventReply                    // the owner has ended its end of a failed queue pair
	eventPort                     // the state of a port or a device has changed
)

// eventsMax bounds the queued events, since an owner can cause any number.
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

// post queues an event. It does not wait.
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

// run handles the queue pairs of the connection, from the welcome to the end.
func (m *mender) run() {
	defer close(m.done)
	for m.await() {
		// Handle the events.
		now := m.time.Look()
		for _, e := range m.takeEvents() {
			m.handle(e, now)
		}
		m.lookAtPorts(now)
		// Ask the owner to replace failed queue pairs whose pause is over.
		for _, i := range m.repair.asks(now) {
			m.askOwner(i)
		}
		// Check whether the peer is lost.
		if why := m.lost(now); why != "" {
			m.p.lose(errors.New(why), false)
			return
		}
		m.publish()
	}
}

// await waits for an event or for the next time of repair. It returns false after stop.
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

// lost returns why the peer is lost, or "". Time counts against the peer only while a call or a
// batch waits for it, from the first check that finds one.
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

// publish copies the states of the queue pairs for Explain.
func (m *mender) publish() {
	m.mu.Lock()
	defer m.mu.Unlock()
	for i := range m.states {
		m.states[i] = m.repair.pairs[i].state
	}
}

// pairStates returns the published states.
func (m *mender) pairStates() []pairState {
	m.mu.Lock()
	defer m.mu.Unlock()
	return append([]pairState(nil), m.states...)
}

func (m *mender) handle(e event, now time.Time) {
	if e.pair < 0 || e.pair >= len(m.repair.pairs) {
		return // the owner has named a queue pair that does not exist
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
	case eventFailed, eventBroken:
		// Either may be of a queue pair that was made anew meanwhile: then ours, which works, ends
		// as well, so that what repair knows is what C has.
		if m.repair.pairs[e.pair].mayWork() {
			m.endPair(e.pair, now)
		}
	case eventReply:
		m.handleReply(e.reply, now)
	case eventPort:
		m.repair.endPauses(now)
	}
}

// lookAtPorts ends the queue pairs whose ports were down for too long.
func (m *mender) lookAtPorts(now time.Time) {
	for i, pair := range m.p.pairs {
		r := m.p.b.rails[pair.ours]
		m.repair.port(i, r.usable(), now)
		if m.repair.failsByPort(i, now) || r.gone.Load() && m.repair.pairs[i].mayWork() {
			m.endPair(i, now)
		}
	}
}

// endPair ends our end of a queue pair that has not failed. If the NIC keeps it, csrc/verbs posts
// nothing on it any more.
func (m *mender) endPair(i int, now time.Time) {
	_ = m.p.link.PairEnd(i) // PairMake tries again
	m.repair.failed(i, m.moved(i) > m.movedBefore[i], now)
}

// moved returns the number of bytes that the rail of a queue pair has moved.
func (m *mender) moved(i int) uint64 {
	c, _ := m.p.b.net.Counters(m.p.pairs[i].ours) // the rail exists, so there is no error
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

// askOwner makes a new end of a failed queue pair, and asks the owner to end its old end and to
// make a new one. If our port is down, there is no new end. The owner must end its old one even so:
// after that, other queue pairs can repeat the requests of the failed one.
func (m *mender) askOwner(i int) {
	q := pairRequest{pair: uint8(i), attempt: m.repair.pairs[i].attempt}
	if m.p.b.rails[m.p.pairs[i].ours].usable() {
		end, err := m.p.link.PairMake(i, m.p.pairs[i].ours)
		q.there, q.end = err == nil, end
	}
	m.ends[i] = q
	m.p.ch.send(&q)
}

// handleReply handles the owner's answer to askOwner. The owner has ended its old end, so no
// request of the old queue pair can land any more, and those not done may be sent again.
func (m *mender) handleReply(r *pairReply, now time.Time) {
	i := int(r.pair)
	both := r.there && m.ends[i].there
	if !m.repair.answered(i, r.attempt, both, now) {
		return
	}
	if err := m.p.link.PairSettle(i, r.seen); err != nil {
		m.p.ch.close(err) // the owner claims to have seen messages that were not sent
		return
	}
	switch {
	case both:
		m.beginPair(i, &r.pairAnswer, now)
	case m.p.b.rails[m.p.pairs[i].ours].gone.Load():
		m.repair.remove(i, now)
	default:
		_ = m.p.link.PairEnd(i) // our new end, if there is one
	}
}

// repair is the state machine of a peer's queue pairs. It does no I/O; mender carries out its
// decisions.
//
//	probing -> live            the probe, a request without bytes, has completed
//	probing, live -> waiting   the queue pair has failed, and our end is ended
//	waiting -> asked           the mender has asked the owner to replace its end
//	asked -> probing           the owner has ended its end and made a new one
//	asked -> waiting           the owner has ended its end, but one side has no new one
//	any -> out                 our device is gone
//
// The first request to the owner follows the failure at once. Further ones follow after a pause
// that grows from pauseMin to pauseMax, until the queue pair is live again.
//
// A queue pair is sound when it has stayed live for soundAfter, or has moved bytes.
type repair struct {
	pairs      []pairRepair
	failure    time.Duration // Config.Failure: how long no queue pair may be live
	soundAfter time.Duration
	downMax    time.Duration // a queue pair whose port is down for so long has failed
	noneLive   time.Time     // since when no queue pair is live; zero: one is
	asked      time.Time     // from when to count the wait for the owner's answer; zero: no wait
	unsound    time.Time     // since when no queue pair was sound; zero: one was, or none failed
}

type pairRepair struct {
	state   pairState
	attempt uint32
	pause   time.Duration
	at      time.Time // waiting: when to ask; live: when it is sound
	down    time.Time // since when our port is down; zero: it is up
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
	unsoundMax = 10 // the peer is lost after so many times failure without a sound queue pair
)

func newRepair(pairs int, cfg *Config) *repair {
	least, _ := cfg.FailureTime()
	return &repair{
		pairs:   make([]pairRepair, pairs),
		failure: cfg.Failure, soundAfter: 2 * least, downMax: least,
	}
}

// begun notes that the owner has made its ends. From now on a queue pair must become live within
// failure; before, only the context of Connect bounds the time.
func (r *repair) begun(now time.Time) { r.noneLive = now }

// live notes that the probe of a queue pair has completed.
func (r *repair) live(i int, now time.Time) {
	l := &r.pairs[i]
	if l.state != pairProbing {
		return
	}
	l.state, l.pause, l.at = pairLive, 0, now.Add(r.soundAfter)
	r.noneLive = time.Time{}
}

// failed notes that our end of a queue pair has ended. moved says that it has moved bytes since it
// became live: then it counts as sound.
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

// remove gives a queue pair up for good. Its requests must have been settled.
func (r *repair) remove(i int, now time.Time) {
	r.pairs[i].state = pairOut
	r.noteLive(now)
}

// noteLive updates unsound and noneLive after a queue pair has stopped working.
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

// asks returns the queue pairs that the mender must ask the owner to replace now.
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

// discountAnswers does not count the time in which the owner owes an answer: its process may be
// stopped or get no CPU. hostWatch detects a host that is down.
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

// answered notes an answer of the owner. It returns false if the answer is not for the present
// attempt. there says that both sides have a new end.
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

// endPauses ends all pauses, because the state of a port has changed.
func (r *repair) endPauses(now time.Time) {
	for i := range r.pairs {
		if l := &r.pairs[i]; l.state == pairWaiting {
			l.pause, l.at = 0, now
		}
	}
}

// port notes whether our port of a queue pair is up.
func (r *repair) port(i int, up bool, now time.Time) {
	l := &r.pairs[i]
	switch {
	case up:
		l.down = time.Time{}
	case l.down.IsZero():
		l.down = now
	}
}

// failsByPort reports whether a queue pair is to end because its port is down. It is given nothing
// new meanwhile, so that it may not fail by itself. An outage that is shorter than what a NIC tries
// for it bears, as it bears one that nobody sees: its end would need an answer of the owner.
func (r *repair) failsByPort(i int, now time.Time) bool {
	l := &r.pairs[i]
	return l.mayWork() && !l.down.IsZero() && now.Sub(l.down) >= r.downMax
}

// mayWork reports whether the queue pair is live or may become so.
func (l *pairRepair) mayWork() bool { return l.state == pairLive || l.state == pairProbing }

// gone reports whether the devices of all queue pairs are gone.
func (r *repair) gone() bool {
	for i := range r.pairs {
		if r.pairs[i].state != pairOut {
			return false
		}
	}
	return true
}

// lost returns why the peer is lost, or "". A call or a batch waits for the peer.
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

// isTiming reports whether time counts against the peer.
func (r *repair) isTiming() bool {
	for i := range r.pairs {
		if r.pairs[i].state == pairAsked {
			return true
		}
	}
	return !r.noneLive.IsZero() || !r.unsound.IsZero()
}

// restartTimes restarts the times that count against the peer, since nothing was waiting for it.
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

// next returns when the mender must check again without an event; zero: never.
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
		if l.mayWork() && !l.down.IsZero() {
			sooner(l.down.Add(r.downMax))
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
