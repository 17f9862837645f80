// SPDX-License-Identifier: Apache-2.0

package rdma

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"syscall"

	"github.com/sluicehq/sluice/csrc/verbs"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/clock"
	"github.com/sluicehq/sluice/internal/session"
	"github.com/sluicehq/sluice/internal/testpoint"
)

// peer is the initiator's end of a connection. Over it the program accesses the owner's memory and
// sends messages. It implements driver.Peer.
type peer struct {
	driver.PeerBase

	b      *Backend
	owner  address
	pairs  []pairing // the rails of each queue pair
	ch     *channel
	link   link
	mender *mender

	gate       session.Gate // entered by every call of the program; Close shuts it first
	hold       session.Gate // entered by every use of link; Close shuts it last
	closing    chan struct{}
	ending     sync.Mutex  // held by Close; guards the next two
	ended      bool        // end has run
	linkClosed bool        // closeLink has succeeded
	unwanted   atomic.Bool // Connect has failed: the program never had this connection
	gone       atomic.Bool
	lostCh     chan struct{}
	losing     sync.Once
	cause      error          // why the peer was lost; set before lostCh is closed
	running    sync.WaitGroup // readControl and the mender
	lostDone   sync.WaitGroup // endLost

	ready     chan struct{} // closed when the first queue pair is live
	refused   chan error    // capacity 1
	greeted   bool          // a welcome has arrived; for readControl
	byeAnswer chan struct{} // closed when the owner has answered our bye

	mu      sync.Mutex
	asks    map[uint32]*importAsk
	askID   uint32
	imports map[uint32]imported // by key

	answersIn, answersOut uint64 // answers received, and taken by the program; under answers.mu
}

var _ driver.Peer = (*peer)(nil)

// canDo has the bits of driver.Peer.Can for every peer.
const canDo = driver.CanPattern | driver.CanNotify

func newPeer(b *Backend, owner address) *peer {
	p := &peer{
		b: b, owner: owner,
		closing: make(chan struct{}), lostCh: make(chan struct{}), byeAnswer: make(chan struct{}),
		ready: make(chan struct{}), refused: make(chan error, 1),
		asks: make(map[uint32]*importAsk), imports: make(map[uint32]imported),
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
	testpoint.At("rdma: submit")
	return p.link.Submit(tag, b)
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

// onNews implements end.
func (p *peer) onNews(n verbs.News) {
	switch n.Kind {
	case verbs.PairLive:
		p.mender.post(event{kind: eventLive, pair: n.Pair})
	case verbs.PairFailed:
		p.mender.post(event{kind: eventFailed, pair: n.Pair})
	}
}

// readControl handles the owner's messages until the connection ends.
func (p *peer) readControl() {
	for {
		m, err := p.ch.receive()
		if err != nil && p.byeAnswered() {
			return
		}
		if err != nil {
			p.lose(fmt.Errorf("its control connection ended: %w", err), false)
			return
		}
		if !p.handle(m) {
			p.lose(p.ch.failed(fmt.Errorf("a control message that does not fit: %w",
				driver.ErrCorrupt)), false)
			return
		}
	}
}

// handle handles one message. It returns false if the message violates the protocol.
func (p *peer) handle(message any) bool {
	switch m := message.(type) {
	case *welcome:
		return p.handleWelcome(m)
	case *importAnswer:
		p.handleImported(m)
	case *expired:
		p.expire(m)
	case *answer:
		return p.b.answers.add(p, m.data)
	case *pairReply:
		p.mender.post(event{kind: eventReply, pair: int(m.pair), reply: m})
	case *broken:
		p.mender.post(event{kind: eventBroken, pair: int(m.pair)})
	case signal:
		switch {
		case m == farewell && !p.byeAnswered():
			close(p.byeAnswer)
		case m == quit:
			p.lose(errors.New("it has closed"), true)
		default:
			return false
		}
	default:
		return false
	}
	return true
}

// byeAnswered reports whether the owner has answered our bye.
func (p *peer) byeAnswered() bool {
	select {
	case <-p.byeAnswer:
		return true
	default:
		return false
	}
}

// handleWelcome connects our queue pairs to the owner's ends.
func (p *peer) handleWelcome(m *welcome) bool {
	if p.greeted || m.status == 0 && len(m.pairs) != len(p.pairs) {
		return false
	}
	p.greeted = true
	if err := m.status.Err(); err != nil {
		p.gone.Store(true) // the owner has no state of the connection: send no bye
		p.refused <- fmt.Errorf("%v refused: %w", &p.owner, err)
		return true
	}
	p.mender.post(event{kind: eventWelcome, welcome: m})
	return true
}

// hasWaiters reports whether anything waits for the peer: a connect, an import or a batch.
func (p *peer) hasWaiters() bool {
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

// lose marks the peer lost and closes Lost at once. The batches under way end later, when their
// writes can no longer land. proved says that the owner has ended its queue pairs.
func (p *peer) lose(err error, proved bool) {
	p.losing.Do(func() {
		p.cause = err
		p.gone.Store(true)
		close(p.lostCh)
		p.lostDone.Go(func() { p.endLost(proved) })
	})
}

// endLost ends our queue pairs, so that no read can write here any more. Then it waits, at most
// Config.Grace, for the owner to say that it has ended its own.
func (p *peer) endLost(proved bool) {
	p.mender.stop()
	ended := p.endPairs()
	proved = proved || p.sayBye(p.ch.over) || p.packetsAreGone(ended)
	_ = p.link.End(verbs.Lost, proved) // Close tries again after an error
	p.ch.closeWhenSent(p.b.cfg.Grace)
}

func (p *peer) whyLost() error {
	select {
	case <-p.lostCh:
		return p.cause
	default:
		return nil
	}
}

// endPairs ends all our queue pairs, and reports whether none is left.
func (p *peer) endPairs() (ended bool) {
	ended = true
	for i := range p.pairs {
		ended = p.link.PairEnd(i) == nil && ended // End tries again
	}
	return ended
}

// Connect implements driver.Backend. The owner's backend makes its ends of the queue pairs and
// answers, without its program.
func (b *Backend) Connect(ctx context.Context, addr []byte) (driver.Peer, error) {
	if !b.gate.Enter() {
		return nil, fmt.Errorf("connect peer: %w", driver.ErrClosed)
	}
	defer b.gate.Exit()
	p, err := b.dial(ctx, addr)
	if err != nil {
		return nil, fmt.Errorf("connect peer: %w", err)
	}
	return p, nil
}

// dial connects, and tries again if the owner closes the connection during the handshake. An owner
// does that if it got no CPU and sees the connection too late, or if too many connections wait.
func (b *Backend) dial(ctx context.Context, addr []byte) (*peer, error) {
	if ctx.Err() != nil {
		return nil, driver.ContextError(ctx)
	}
	owner, err := decodeAddress(addr)
	if err != nil {
		return nil, err
	}
	pairs, err := match(b.address.rails, owner.rails)
	if err != nil {
		return nil, err
	}
	for pause := session.AcceptPauseMin; ; pause = min(2*pause, session.AcceptPauseMax) {
		p, err := b.dialOnce(ctx, owner, pairs)
		if err == nil {
			return p, nil
		}
		switch {
		case !session.HungUp(err):
			return nil, err
		case clock.Pass(b.cfg.clock, pause, ctx.Done(), b.closing):
		case ctx.Err() != nil:
			return nil, fmt.Errorf("%w: %w", driver.ContextError(ctx), err)
		default:
			return nil, driver.ErrClosed
		}
	}
}

// dialOnce makes one attempt to connect.
func (b *Backend) dialOnce(ctx context.Context, owner address, pairs []pairing) (*peer, error) {
	// Dial the control connection, until ctx ends or the backend closes.
	dialing, cancel := context.WithCancel(ctx)
	go func() {
		select {
		case <-b.closing:
			cancel()
		case <-dialing.Done():
		}
	}()
	conn, err := b.reach(dialing, &owner)
	cancel()
	select {
	case <-b.closing:
		if err != nil {
			return nil, driver.ErrClosed
		}
	default:
	}
	switch {
	case err == nil:
	case ctx.Err() != nil:
		return nil, fmt.Errorf("reach the control of %v: %w", &owner, driver.ContextError(ctx))
	case errors.Is(err, syscall.ECONNREFUSED):
		return nil, fmt.Errorf("%v is gone: %w (%w)", &owner, driver.ErrPeerLost, err)
	default:
		return nil, fmt.Errorf("reach the control of %v: %w (%w)", &owner, driver.ErrNoRoute, err)
	}

	// Make our ends of the queue pairs for the hello. A rail that fails does not prevent the
	// others.
	p := newPeer(b, owner)
	p.ch = newChannel(conn, &b.cfg)
	link, err := b.net.connect(true, int(owner.notifs))
	if err != nil {
		p.ch.close(err)
		return nil, err
	}
	h := hello{to: owner.owner, from: b.addr}
	for _, pair := range pairs {
		end, e := link.PairMake(len(p.pairs), pair.ours)
		if e != nil {
			err = errors.Join(err, fmt.Errorf("make a queue pair over %v: %w",
				b.rails[pair.ours], e))
			continue
		}
		p.pairs = append(p.pairs, pair)
		h.pairs = append(h.pairs, pairOffer{rail: uint8(pair.theirs), end: end})
	}
	if len(h.pairs) == 0 {
		err = errors.Join(err, link.Close())
		p.ch.close(err)
		return nil, err
	}

	// From here on Backend.Close closes the peer, and the peer gets the events of its queue pairs.
	p.link, p.mender = link, newMender(p)
	p.hold.Reopen()
	b.mu.Lock()
	b.peers[p] = struct{}{}
	b.mu.Unlock()
	b.add(link.ID(), p)
	p.ch.send(&h)
	p.ch.start()
	p.running.Go(p.readControl)
	p.running.Go(p.mender.run)

	// The mender begins the queue pairs after the welcome. Wait until one is live.
	select {
	case <-p.ready:
		return p, nil
	case err = <-p.refused:
	case <-p.lostCh:
		err = fmt.Errorf("%w: %w", p.whyLost(), driver.ErrPeerLost)
	case <-b.closing:
		err = driver.ErrClosed
	case <-ctx.Done():
		err = fmt.Errorf("no answer, %v may be frozen: %w", &owner, driver.ContextError(ctx))
	}
	p.abandon() // in the background, since the owner may take long to end its queue pairs
	return nil, err
}

// imported is an imported memory of the owner.
type imported struct {
	key   uint32 // the owner's key
	epoch uint64
	pairs uint32 // one bit for each queue pair that can access it
}

// importAsk is an import that waits for its answer.
type importAsk struct {
	token session.Token
	done  chan importResult // capacity 1
}

type importResult struct {
	slot uint32
	err  error
}

// Import implements driver.Peer. The owner's backend answers, without its program. Concurrent
// imports do not wait for each other.
func (p *peer) Import(tok []byte) (key uint32, size uint64, err error) {
	if err := p.enter(); err != nil {
		return 0, 0, err
	}
	defer p.gate.Exit()
	t, err := session.DecodeToken(tok, &p.owner.owner)
	if err != nil {
		return 0, 0, fmt.Errorf("import memory: %w", err)
	}
	if key, err = p.ask(&t); err != nil {
		return 0, 0, fmt.Errorf("import memory: %w", err)
	}
	return key, t.Size, nil
}

// importsMax times session.ImportMax is the longest time for an import.
const importsMax = 10

// ask sends an import and waits for the answer. To register large memory takes an owner's NICs
// long. So ask waits while the owner sends any message within session.ImportMax, but not longer
// than importsMax times that.
func (p *peer) ask(t *session.Token) (uint32, error) {
	a := &importAsk{token: *t, done: make(chan importResult, 1)}
	p.mu.Lock()
	p.askID++
	id := p.askID
	p.asks[id] = a
	p.mu.Unlock()
	defer p.removeAsk(id, a)
	q := importRequest{id: id, key: t.Key, epoch: t.Epoch, secret: t.Secret}
	p.ch.send(&q)
	watch, host, heard := clock.NewStopwatch(p.b.cfg.clock, p.b.cfg.Failure), hostWatch{ch: p.ch},
		p.ch.heard.Load()
	begin := watch.Look()
	for since := begin; ; {
		tick, timer := watch.Tick(since.Add(session.ImportMax))
		select {
		case r := <-a.done:
			timer.Stop()
			return r.slot, r.err
		case <-p.lostCh:
			timer.Stop()
			return 0, driver.ErrPeerLost
		case <-p.closing:
			timer.Stop()
			return 0, driver.ErrClosed
		case <-tick:
			now := watch.Look()
			if n := p.ch.heard.Load(); n != heard {
				heard, since = n, now
			}
			if silent := host.silentFor(now); silent >= p.b.cfg.Failure {
				return 0, session.HostLost(silent)
			}
			if now.Sub(begin) >= importsMax*session.ImportMax {
				return 0, fmt.Errorf("the peer has not answered within %v: %w",
					importsMax*session.ImportMax, driver.ErrTimeout)
			}
			if now.Sub(since) >= session.ImportMax {
				return 0, fmt.Errorf("the peer says nothing for %v, it may be frozen: %w",
					session.ImportMax, driver.ErrTimeout)
			}
		}
	}
}

// removeAsk removes an import from the list. It drops the memory if the answer arrived too late.
func (p *peer) removeAsk(id uint32, a *importAsk) {
	p.mu.Lock()
	delete(p.asks, id)
	p.mu.Unlock()
	select {
	case r := <-a.done:
		if r.err == nil {
			p.Drop(r.slot)
		}
	default:
	}
}

// handleImported imports the memory of an answer into csrc/verbs. It does so before the next
// message is handled, since that may be an expired for this memory. It ignores an answer that no
// caller waits for.
func (p *peer) handleImported(m *importAnswer) {
	p.mu.Lock()
	defer p.mu.Unlock()
	a := p.asks[m.id]
	if a == nil {
		return
	}
	delete(p.asks, m.id)
	var r importResult
	r.slot, r.err = p.importMemory(&a.token, m)
	a.done <- r
}

// importMemory checks an answer and imports the memory. Preconditions: p.mu is held.
func (p *peer) importMemory(t *session.Token, m *importAnswer) (uint32, error) {
	if err := m.status.Err(); err != nil {
		return 0, err
	}
	if m.size != t.Size || len(m.keys) != len(p.pairs) || m.base+m.size < m.base {
		return 0, fmt.Errorf("the owner tells of %d bytes over %d queue pairs, the token "+
			"of %d bytes: %w",
			m.size, len(m.keys), t.Size, driver.ErrBadToken)
	}
	if !p.hold.Enter() {
		return 0, driver.ErrClosed
	}
	defer p.hold.Exit()
	slot, err := p.link.Import(verbs.Import{Base: m.base, Size: m.size, ReadOnly: m.readOnly,
		RemoteKeys: m.keys})
	if err != nil {
		return 0, err
	}
	i := imported{key: t.Key, epoch: t.Epoch}
	for pair, k := range m.keys {
		if k != 0 {
			i.pairs |= 1 << pair
		}
	}
	p.imports[slot] = i
	return slot, nil
}

// expire ends the imports of an epoch that the owner has ended.
func (p *peer) expire(m *expired) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.hold.Enter() {
		return
	}
	defer p.hold.Exit()
	for slot, i := range p.imports {
		if i.key == m.key && i.epoch <= m.epoch {
			p.link.Expire(slot)
		}
	}
}

// Drop implements driver.Peer.
func (p *peer) Drop(key uint32) {
	if !p.gate.Enter() {
		return
	}
	defer p.gate.Exit()
	p.mu.Lock()
	defer p.mu.Unlock()
	if _, known := p.imports[key]; known {
		delete(p.imports, key)
		p.link.Drop(key)
	}
}

// Close implements driver.Peer. Requests that are not posted end at once; the others have
// Config.Grace to complete. Then Close ends our queue pairs and sends a bye. The owner's answer
// proves that its own queue pairs have ended, too, so that none of our writes can land any more.
// For an owner that does not answer within Config.Grace see packetsAreGone.
//
// The error is driver.ErrUnproven if a NIC keeps one of our queue pairs. Then the batches have not
// ended, and Close may be called again.
func (p *peer) Close() error {
	p.ending.Lock()
	defer p.ending.Unlock()
	if !p.ended {
		p.ended = true
		p.end()
	}
	return p.closeLink()
}

// abandon closes a connection whose Connect has failed, in the background. If the backend is
// closing, that closes the connection.
func (p *peer) abandon() {
	p.unwanted.Store(true)
	p.b.tasks.Start(func() { _ = p.Close() })
}

// end ends the connection, except for closeLink.
func (p *peer) end() {
	// Refuse further calls of the program, and wait for those that run.
	p.gate.Shut()
	close(p.closing)
	p.gate.Wait()

	// Cancel requests that are not posted, and wait for the others.
	drained := true
	if !p.gone.Load() {
		drained = p.link.Drain(p.b.cfg.Grace) == nil
	}
	p.mender.stop()

	// End our queue pairs, then ask the owner to end its own. Its answer to our bye is the proof
	// for writes that are still under way.
	proved := drained
	if !p.gone.Load() {
		ended := p.endPairs()
		proved = p.sayBye(p.lostCh) || drained || p.packetsAreGone(ended)
	}

	// End the batches with the outcome. If lose has run meanwhile, endLost determines the outcome.
	p.losing.Do(func() { p.gone.Store(true); close(p.lostCh) })
	p.lostDone.Wait()
	_ = p.link.End(verbs.Closed, proved) // closeLink tries again
	p.ch.closeWhenSent(p.b.cfg.Grace)
	p.ch.wait()
	p.running.Wait()
}

// sayBye sends a bye, and reports whether the owner has answered within Config.Grace.
func (p *peer) sayBye(stop <-chan struct{}) bool {
	p.ch.send(&bye{abandoned: p.unwanted.Load()})
	clock.Pass(p.b.cfg.clock, p.b.cfg.Grace, p.byeAnswer, stop)
	return p.byeAnswered()
}

// packetsAreGone reports whether no write of ours can land at an owner that has not answered the
// bye. The end of its control connection is no proof: its process may still run, and after a kill
// the kernel ends the queue pairs at some later time. ended says that our queue pairs have ended.
// Then every packet has landed or is lost after Config.PacketLife, if that is set.
func (p *peer) packetsAreGone(ended bool) bool {
	life := p.b.cfg.PacketLife
	if !ended || life == 0 {
		return false
	}
	return clock.Pass(p.b.cfg.clock, life, p.byeAnswer, nil) || p.byeAnswered()
}

// closeLink closes the link. It fails while a NIC keeps a queue pair. Preconditions: p.ending is
// held.
func (p *peer) closeLink() error {
	if p.linkClosed {
		return nil
	}
	if err := p.link.End(verbs.Closed, false); err != nil {
		return fmt.Errorf("close peer: %w", err)
	}
	p.b.remove(p.link.ID())
	p.hold.Shut()
	p.hold.Wait()
	p.b.answers.forget(p)
	_ = p.link.Close() // it has ended
	p.b.mu.Lock()
	delete(p.b.peers, p)
	p.b.mu.Unlock()
	p.linkClosed = true
	return nil
}
