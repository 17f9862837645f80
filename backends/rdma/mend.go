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

// repair is what becomes of the queue pairs of a connection that we began. It decides, and does
// nothing itself: peer.mend carries it out.
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
	pairs   []pairRepair
	failure time.Duration // how long no queue pair may be live
	steady  time.Duration // a queue pair that stays live for so long is sound
	dark    time.Duration // a queue pair whose port is down for so long has failed
	none    time.Time     // since when none is live; zero: one is
	owed    time.Time     // since when the owner owes an answer; zero: it does not
	shaky   time.Time     // since when none was sound; zero: one is, or has not failed
}

type pairRepair struct {
	state   pairState
	attempt uint32
	pause   time.Duration
	due     time.Time // waiting: when to ask; live: when it is sound
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
	pauseMin = 50 * time.Millisecond
	pauseMax = time.Second
	shakyMax = 10 // times failure
)

func newRepair(pairs int, cfg *Config) *repair {
	least, _ := cfg.FailureTime()
	return &repair{
		pairs:   make([]pairRepair, pairs),
		failure: cfg.Failure, steady: 2 * least, dark: least,
	}
}

// begun notes that the owner has made its ends: from now on a queue pair must come to life. What it
// takes until then is for the context of Connect to bound.
func (r *repair) begun(now time.Time) { r.none = now }

// live notes that a probe came back.
func (r *repair) live(i int, now time.Time) {
	l := &r.pairs[i]
	if l.state != pairProbing {
		return
	}
	l.state, l.pause, l.due = pairLive, 0, now.Add(r.steady)
	r.none = time.Time{}
}

// failed notes the end of our queue pair. moved says that bytes have passed since it was
// live: then it was sound, however short that was.
func (r *repair) failed(i int, moved bool, now time.Time) {
	l := &r.pairs[i]
	if moved {
		r.shaky = time.Time{}
	}
	switch l.state {
	case pairLive:
		l.due = now
	case pairProbing:
		r.later(l, now)
	default:
		return
	}
	l.state = pairWaiting
	r.count(now)
}

// later sets a pause, longer than the one before.
func (r *repair) later(l *pairRepair, now time.Time) {
	l.pause = min(max(pauseMin, 2*l.pause), pauseMax)
	l.due = now.Add(l.pause)
}

// out takes a queue pair out for good. What it held must have been settled.
func (r *repair) out(i int, now time.Time) {
	r.pairs[i].state = pairOut
	r.count(now)
}

// count notes how many queue pairs are live, and since when none is.
func (r *repair) count(now time.Time) {
	if r.shaky.IsZero() {
		r.shaky = now
	}
	for i := range r.pairs {
		if r.pairs[i].state == pairLive {
			return
		}
	}
	if r.none.IsZero() {
		r.none = now
	}
}

// asks returns the queue pairs whose owner is to be asked now.
func (r *repair) asks(now time.Time) (list []int) {
	for i := range r.pairs {
		l := &r.pairs[i]
		if l.state == pairWaiting && !now.Before(l.due) {
			l.state = pairAsked
			l.attempt++
			list = append(list, i)
		}
	}
	r.excuse(now)
	return list
}

// excuse leaves out the time that the owner takes to answer, as far as it has passed: its process
// may be stopped, or kept off its processors. The caller knows whether its host is there.
func (r *repair) excuse(now time.Time) {
	if !r.owed.IsZero() {
		for _, since := range []*time.Time{&r.none, &r.shaky} {
			if !since.IsZero() {
				*since = since.Add(min(now.Sub(r.owed), now.Sub(*since)))
			}
		}
	}
	r.owed = time.Time{}
	for i := range r.pairs {
		if r.pairs[i].state == pairAsked {
			r.owed = now
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
		r.later(l, now)
	}
	r.excuse(now)
	return true
}

// hurry ends the pauses: a port is up again.
func (r *repair) hurry(now time.Time) {
	for i := range r.pairs {
		if l := &r.pairs[i]; l.state == pairWaiting {
			l.pause, l.due = 0, now
		}
	}
}

// port notes whether our port of a queue pair is up. While it is down the queue pair is given
// nothing new, so nothing of it fails by itself: see darkened.
func (r *repair) port(i int, up bool, now time.Time) {
	l := &r.pairs[i]
	switch {
	case up:
		l.down = time.Time{}
	case l.down.IsZero():
		l.down = now
	}
}

// darkened returns the queue pairs that have failed because their port was down for as long as a
// NIC would have tried. A shorter outage the queue pairs bear by themselves.
func (r *repair) darkened(now time.Time) (list []int) {
	for i := range r.pairs {
		if l := &r.pairs[i]; l.carries() && !l.down.IsZero() && now.Sub(l.down) >= r.dark {
			list = append(list, i)
		}
	}
	return list
}

// carries reports whether there is a queue pair that may work.
func (l *pairRepair) carries() bool { return l.state == pairLive || l.state == pairProbing }

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
	r.settle(now)
	r.excuse(now)
	switch {
	case !r.none.IsZero() && now.Sub(r.none) > r.failure:
		return "no queue pair came to life in Config.Failure"
	case !r.shaky.IsZero() && now.Sub(r.shaky) > shakyMax*r.failure:
		return "its queue pairs fail over and over"
	}
	return ""
}

// settle notes whether a queue pair has been live for long enough to be sound.
func (r *repair) settle(now time.Time) {
	for i := range r.pairs {
		if l := &r.pairs[i]; l.state == pairLive && !now.Before(l.due) {
			r.shaky = time.Time{}
		}
	}
}

// troubled reports whether time runs that lost looks at.
func (r *repair) troubled() bool {
	for i := range r.pairs {
		if r.pairs[i].state == pairAsked {
			return true
		}
	}
	return !r.none.IsZero() || !r.shaky.IsZero()
}

// bear gives a peer all of its time once more: nothing waits for it yet.
func (r *repair) bear(now time.Time) {
	r.settle(now)
	r.excuse(now)
	if !r.none.IsZero() {
		r.none = now
	}
	if !r.shaky.IsZero() {
		r.shaky = now
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
		if l.state == pairWaiting || l.state == pairLive && !r.shaky.IsZero() {
			sooner(l.due)
		}
		if l.carries() && !l.down.IsZero() {
			sooner(l.down.Add(r.dark))
		}
	}
	if !r.none.IsZero() {
		sooner(r.none.Add(r.failure))
	}
	if !r.owed.IsZero() {
		sooner(r.owed.Add(r.failure))
	}
	if at.IsZero() {
		return at
	}
	return at.Add(time.Millisecond) // past it, however clocks are cut
}
