// SPDX-License-Identifier: Apache-2.0

package rdma

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"

	"github.com/sluicehq/sluice/csrc/verbs"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/session"
)

// peer is our end of a connection that we began: over it we reach the owner's memory and
// send messages. It implements driver.Peer.
type peer struct {
	driver.PeerBase

	b      *Backend
	owner  address
	pairs  []pairing // of each queue pair
	ch     *channel
	link   link
	mender *mender

	gate     session.Gate // held by every call of the program; Close shuts it first
	hold     session.Gate // held by every use of link; Close shuts it last
	closing  chan struct{}
	ending   sync.Mutex // held by Close; guards the next two
	ended    bool
	over     bool
	unwanted atomic.Bool // the program never had this connection
	gone     atomic.Bool
	lostCh   chan struct{}
	losing   sync.Once
	cause    error          // why it was lost; before lostCh is closed
	running  sync.WaitGroup // the listener, and the mender
	lostDone sync.WaitGroup // the end of a lost connection

	ready    chan struct{} // closed when the first queue pair is live
	refused  chan error    // has one place
	greeted  bool          // of listen
	farewell chan struct{} // closed when the owner has answered our bye

	mu      sync.Mutex
	asks    map[uint32]*asking
	askID   uint32
	imports map[uint32]imported // by key

	answersIn, answersOut uint64 // that came, that the program took; guarded by answers.mu
}

var _ driver.Peer = (*peer)(nil)

// canDo is what every peer takes.
const canDo = driver.CanPattern | driver.CanNotify

func newPeer(b *Backend, owner address) *peer {
	p := &peer{
		b: b, owner: owner,
		closing: make(chan struct{}), lostCh: make(chan struct{}), farewell: make(chan struct{}),
		ready: make(chan struct{}), refused: make(chan error, 1),
		asks: make(map[uint32]*asking), imports: make(map[uint32]imported),
	}
	p.hold.Shut() // there is no link yet
	return p
}

// enter begins a call of the program; gate.Exit ends it.
func (p *peer) enter() error {
	if !p.gate.Enter() {
		return driver.ErrClosed
	}
	if p.gone.Load() {
		p.gate.Exit()
		return driver.ErrPeerLost
	}
	return nil
}

// Can implements driver.Peer.
func (p *peer) Can() driver.Can { return canDo }

// Conn implements driver.Peer.
func (p *peer) Conn() uint64 { return p.link.ID() }

// Submit implements driver.Peer.
func (p *peer) Submit(tag uint64, b *driver.Batch) error {
	if err := p.enter(); err != nil {
		return err
	}
	defer p.gate.Exit()
	if err := b.Check(canDo); err != nil {
		return err
	}
	if len(b.Descs) > descsMax || len(b.Notify) > messageMax {
		return driver.ErrBounds
	}
	if b.Pattern != nil && !fits(b.Pattern) {
		return driver.ErrBounds
	}
	parked.At(spotSubmit)
	return p.link.Submit(tag, b)
}

// fits reports whether a pattern has at most runsMax runs.
func fits(p *driver.Pattern) bool {
	runs := uint64(max(p.Count, 0))
	for i := range p.Loops {
		if runs *= uint64(p.Loops[i].N); runs > runsMax {
			return false
		}
	}
	return runs <= runsMax
}

// Cancel implements driver.Peer.
func (p *peer) Cancel(tag uint64) {
	if p.gate.Enter() {
		p.link.Cancel(tag)
		p.gate.Exit()
	}
}

// Lost implements driver.Peer.
func (p *peer) Lost() <-chan struct{} { return p.lostCh }

// news implements end.
func (p *peer) news(n verbs.News) {
	switch n.Kind {
	case verbs.PairLive:
		p.mender.post(event{kind: eventLive, pair: n.Pair})
	case verbs.PairFailed:
		p.mender.post(event{kind: eventFailed, pair: n.Pair, status: n.Status})
	}
}

// listen handles what the owner says, until the connection ends.
func (p *peer) listen() {
	for {
		m, err := p.ch.receive()
		if err != nil && p.parted() {
			return
		}
		if err != nil {
			p.lose(fmt.Errorf("its control connection ended: %w", err), false)
			return
		}
		if !p.heard(m) {
			p.lose(p.ch.failed(fmt.Errorf("a control message that does not fit: %w",
				driver.ErrCorrupt)), false)
			return
		}
	}
}

// heard handles one message, and reports whether it made sense.
func (p *peer) heard(message any) bool {
	switch m := message.(type) {
	case *welcome:
		return p.greet(m)
	case *importAnswer:
		p.answered(m)
	case *expired:
		p.expire(m)
	case *answer:
		return p.b.answers.add(p, m.data)
	case *pairReply:
		p.mender.post(event{kind: eventReply, pair: int(m.pair), reply: m})
	case *broken:
		p.mender.post(event{kind: eventBroken, pair: int(m.pair)})
	case farewell:
		if p.parted() {
			return false
		}
		close(p.farewell)
	case quit:
		p.lose(errors.New("it has closed"), true)
	default:
		return false
	}
	return true
}

// parted reports whether the owner has answered our bye.
func (p *peer) parted() bool {
	select {
	case <-p.farewell:
		return true
	default:
		return false
	}
}

// greet connects our queue pairs to the owner's ends.
func (p *peer) greet(m *welcome) bool {
	if p.greeted || m.status == 0 && len(m.pairs) != len(p.pairs) {
		return false
	}
	p.greeted = true
	if err := m.status.Err(); err != nil {
		p.gone.Store(true) // it knows nothing of us: no goodbye
		p.refused <- fmt.Errorf("%v refused: %w", &p.owner, err)
		return true
	}
	p.mender.post(event{kind: eventWelcome, welcome: m})
	return true
}

// awaited reports whether anything waits for the peer: a connect, an import or a batch.
func (p *peer) awaited() bool {
	select {
	case <-p.ready:
	default:
		return true
	}
	p.mu.Lock()
	asks := len(p.asks)
	p.mu.Unlock()
	return asks > 0 || p.link.Busy()
}

// lose gives the peer up: what is under way ends once nothing of it can land any more,
// and the program is told at once. proved says that the owner has ended its queue pairs.
func (p *peer) lose(err error, proved bool) {
	p.losing.Do(func() {
		p.cause = err
		p.gone.Store(true)
		close(p.lostCh)
		p.lostDone.Go(func() { p.endLost(proved) })
	})
}

// endLost ends our queue pairs, which no answer of a read passes any more, and gives the owner its
// time to say that it has ended its own.
func (p *peer) endLost(proved bool) {
	p.mender.stop()
	ended := p.endPairs()
	proved = proved || p.part(p.ch.over) || p.proves(ended)
	_ = p.link.End(verbs.Lost, proved) // Close tries again
	p.ch.finish(p.b.cfg.Grace)
}

func (p *peer) whyLost() error {
	select {
	case <-p.lostCh:
		return p.cause
	default:
		return nil
	}
}

// endPairs ends all queue pairs of ours, and reports whether none is left.
func (p *peer) endPairs() (ended bool) {
	ended = true
	for i := range p.pairs {
		ended = p.link.PairEnd(i) == nil && ended // End tries again
	}
	return ended
}
