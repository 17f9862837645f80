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

	ready     chan struct{} // closed when the first queue pair is live
	refused   chan error    // has one place
	greeted   bool          // of listen
	byeAnswer chan struct{} // closed when the owner has answered our bye

	mu      sync.Mutex
	asks    map[uint32]*importAsk
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
	if b.Pattern != nil && !fits(b.Pattern) {
		return driver.ErrBounds
	}
	testpoint.At("rdma: submit")
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

// onNews implements end.
func (p *peer) onNews(n verbs.News) {
	switch n.Kind {
	case verbs.PairLive:
		p.mender.post(event{kind: eventLive, pair: n.Pair})
	case verbs.PairFailed:
		p.mender.post(event{kind: eventFailed, pair: n.Pair})
	}
}

// readControl handles what the owner says, until the connection ends.
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

// handle handles one message, and reports whether it made sense.
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
	case farewell:
		if p.byeAnswered() {
			return false
		}
		close(p.byeAnswer)
	case quit:
		p.lose(errors.New("it has closed"), true)
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
		p.gone.Store(true) // it knows nothing of us: no goodbye
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
	proved = proved || p.sayBye(p.ch.over) || p.packetsAreGone(ended)
	_ = p.link.End(verbs.Lost, proved) // Close tries again
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

// endPairs ends all queue pairs of ours, and reports whether none is left.
func (p *peer) endPairs() (ended bool) {
	ended = true
	for i := range p.pairs {
		ended = p.link.PairEnd(i) == nil && ended // End tries again
	}
	return ended
}

// Connect implements driver.Backend. The hello goes to the peer's control, which makes
// its ends of the queue pairs and answers; nothing of it needs the peer's program.
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

// dial connects, and comes again where the owner hangs up: one that is kept off its processors does
// so on those that it heard too late, and one at which too many wait on the last of them.
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

// dialOnce is the initiator's part in the beginning of a connection.
func (b *Backend) dialOnce(ctx context.Context, owner address, pairs []pairing) (*peer, error) {
	// The control connection, until ctx ends or we close.
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

	// Our ends of the queue pairs go into the hello. A device that is gone keeps no other from
	// work.
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

	// From here on Close knows the peer, and news of its queue pairs find it.
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

	// The mender begins the queue pairs once the owner has welcomed us. One that is live is enough.
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
	p.abandon() // the peer must forget us, which may take it long
	return nil, err
}

// imported is memory of the owner's that C knows.
type imported struct {
	key   uint32 // of the owner's
	epoch uint64
	pairs uint32 // a bit for each that reaches it
}

// importAsk is an import that waits for its answer.
type importAsk struct {
	token session.Token
	done  chan importResult // has one place
}

type importResult struct {
	slot uint32
	err  error
}

// Import implements driver.Peer. It asks the owner, whose control answers; imports at
// the same time do not wait for each other.
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

// importsMax is how many times session.ImportMax an owner may take that says something meanwhile.
const importsMax = 10

// ask sends the question and waits for the answer: for as long as the owner says something now and
// then, since large memory takes its NICs long, but not for ever.
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

// removeAsk takes an import off the list, with what came for it too late.
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

// handleImported makes what the owner told known to C, before the next message is looked at: that
// may be the news that the epoch has ended. An answer that comes late is dropped.
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

// importMemory checks an answer and has C know the memory. Preconditions: p.mu is held.
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

// expire ends what was imported of an epoch that is over.
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

// Close implements driver.Peer. What has not begun ends at once, the rest is given
// Config.Grace. Then our queue pairs end, and the owner is told; its answer is the proof
// that its own have ended too, so that nothing of ours lands any more. For an owner that is
// silent for Config.Grace see packetsAreGone.
//
// driver.ErrUnproven: a NIC keeps a queue pair of ours. The batches have not ended then, and
// Close may be called again.
func (p *peer) Close() error {
	p.ending.Lock()
	defer p.ending.Unlock()
	if !p.ended {
		p.ended = true
		p.end()
	}
	return p.closeLink()
}

// abandon is Close of a connection that the program does not get, beside. When the
// backend closes it does so itself.
func (p *peer) abandon() {
	p.unwanted.Store(true)
	p.b.tasks.Start(func() { _ = p.Close() })
}

// end is the initiator's part in the end of a connection that it closes.
func (p *peer) end() {
	// No call of the program runs any more, and none comes.
	p.gate.Shut()
	close(p.closing)
	p.gate.Wait()

	// What has not begun ends; what is under way has its time.
	drained := true
	if !p.gone.Load() {
		drained = p.link.Drain(p.b.cfg.Grace) == nil
	}
	p.mender.stop()

	// Our queue pairs end, then the owner's: its answer to our bye is the proof for what is still
	// under way.
	proved := drained
	if !p.gone.Load() {
		ended := p.endPairs()
		proved = p.sayBye(p.lostCh) || drained || p.packetsAreGone(ended)
	}

	// The outcomes follow. A loss at the same time has told its own.
	p.losing.Do(func() { p.gone.Store(true); close(p.lostCh) })
	p.lostDone.Wait()
	_ = p.link.End(verbs.Closed, proved) // closeLink tries again
	p.ch.closeWhenSent(p.b.cfg.Grace)
	p.ch.wait()
	p.running.Wait()
}

// sayBye says goodbye and reports whether the owner has answered, in its time.
func (p *peer) sayBye(stop <-chan struct{}) bool {
	p.ch.send(&bye{abandoned: p.unwanted.Load()})
	clock.Pass(p.b.cfg.clock, p.b.cfg.Grace, p.byeAnswer, stop)
	return p.byeAnswered()
}

// packetsAreGone reports whether nothing of ours lands at an owner that does not say so. The end of
// its control connection is no proof: its process may be there, and the kernel ends the queue pairs
// of one that was killed in its own time. ended says that our queue pairs are gone: then what was
// sent has landed or is lost once the fabric has had its time, if that is known.
func (p *peer) packetsAreGone(ended bool) bool {
	life := p.b.cfg.PacketLife
	if !ended || life == 0 {
		return false
	}
	return clock.Pass(p.b.cfg.clock, life, p.byeAnswer, nil) || p.byeAnswered()
}

// closeLink ends the use of the link, once no queue pair of it is left. Preconditions: p.ending is
// held.
func (p *peer) closeLink() error {
	if p.over {
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
	p.over = true
	return nil
}
