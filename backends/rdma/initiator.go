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
	// An owner that is kept off its processors hangs up on those that it heard too late, and one at
	// which too many wait on the last of them: we come again, for as long as our caller waits.
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

func (b *Backend) dialOnce(ctx context.Context, owner address, pairs []pairing) (*peer, error) {
	dialing, stop := b.until(ctx)
	defer stop()
	conn, err := b.reach(dialing, &owner)
	if err != nil {
		return nil, b.unreached(ctx, &owner, err)
	}
	p := newPeer(b, owner)
	p.ch = newChannel(conn, &b.cfg)
	if err := p.begin(pairs); err != nil {
		p.ch.close(err)
		return nil, err
	}
	if err := p.awaitLive(ctx); err != nil {
		p.abandon() // the peer must forget us, which may take it long
		return nil, err
	}
	return p, nil
}

// until ends with ctx, or when the backend closes.
func (b *Backend) until(ctx context.Context) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancel(ctx)
	stop := make(chan struct{})
	go func() {
		select {
		case <-b.closing:
			cancel()
		case <-stop:
		}
	}()
	return ctx, func() { close(stop); cancel() }
}

// unreached says why there is no control connection.
func (b *Backend) unreached(ctx context.Context, owner *address, err error) error {
	select {
	case <-b.closing:
		return driver.ErrClosed
	default:
	}
	switch {
	case ctx.Err() != nil:
		return fmt.Errorf("reach the control of %v: %w", owner, driver.ContextError(ctx))
	case errors.Is(err, syscall.ECONNREFUSED):
		return fmt.Errorf("%v is gone: %w (%w)", owner, driver.ErrPeerLost, err)
	}
	return fmt.Errorf("reach the control of %v: %w (%w)", owner, driver.ErrNoRoute, err)
}

// begin makes our end and its queue pairs, and says hello.
func (p *peer) begin(pairs []pairing) error {
	link, err := p.b.net.connect(true, int(p.owner.notifs))
	if err != nil {
		return err
	}
	h := hello{to: p.owner.owner, from: p.b.addr}
	var refused error
	for _, pair := range pairs {
		end, err := link.PairMake(len(p.pairs), pair.ours)
		if err != nil {
			refused = errors.Join(refused, fmt.Errorf("make a queue pair over %v: %w",
				p.b.rails[pair.ours], err))
			continue // a device that is gone keeps no other from work
		}
		p.pairs = append(p.pairs, pair)
		h.pairs = append(h.pairs, pairOffer{rail: uint8(pair.theirs), end: end})
	}
	if len(h.pairs) == 0 {
		return errors.Join(refused, link.Close())
	}
	p.link, p.mender = link, newMender(p)
	p.hold.Reopen()
	p.b.mu.Lock()
	p.b.peers[p] = struct{}{}
	p.b.mu.Unlock()
	p.b.add(link.ID(), p)
	p.ch.send(h.encode())
	p.ch.start()
	p.running.Go(p.listen)
	p.running.Go(p.mender.run)
	return nil
}

// awaitLive returns when a queue pair is live, or there is no point in waiting.
func (p *peer) awaitLive(ctx context.Context) error {
	select {
	case <-p.ready:
		return nil
	case err := <-p.refused:
		return err
	case <-p.lostCh:
		return fmt.Errorf("%w: %w", p.whyLost(), driver.ErrPeerLost)
	case <-p.b.closing:
		return driver.ErrClosed
	case <-ctx.Done():
		return fmt.Errorf("no answer, %v may be frozen: %w", &p.owner, driver.ContextError(ctx))
	}
}

// imported is memory of the owner's that C knows.
type imported struct {
	key   uint32 // of the owner's
	epoch uint64
	pairs uint32 // a bit for each that reaches it
}

// asking is an import that waits for its answer.
type asking struct {
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
	a := &asking{token: *t, done: make(chan importResult, 1)}
	p.mu.Lock()
	p.askID++
	id := p.askID
	p.asks[id] = a
	p.mu.Unlock()
	defer p.forgetAsking(id, a)
	q := importRequest{id: id, key: t.Key, epoch: t.Epoch, secret: t.Secret}
	p.ch.send(q.encode())
	watch, host, heard := clock.NewStopwatch(p.b.cfg.clock, p.b.cfg.Failure), quiet{ch: p.ch},
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
			if silent := host.lasts(now); silent >= p.b.cfg.Failure {
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

// forgetAsking takes an import off the list, with what came for it too late.
func (p *peer) forgetAsking(id uint32, a *asking) {
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

// answered makes what the owner told known to C, before the next message is looked at: that
// may be the news that the epoch has ended. An answer that comes late is dropped.
func (p *peer) answered(m *importAnswer) {
	p.mu.Lock()
	defer p.mu.Unlock()
	a := p.asks[m.id]
	if a == nil {
		return
	}
	delete(p.asks, m.id)
	var r importResult
	r.slot, r.err = p.take(&a.token, m)
	a.done <- r
}

// take checks an answer and has C know the memory. Preconditions: p.mu is held.
func (p *peer) take(t *session.Token, m *importAnswer) (uint32, error) {
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
// silent for Config.Grace see proves.
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
	return p.giveBack()
}

// abandon is Close of a connection that the program does not get, beside. When the
// backend closes it does so itself.
func (p *peer) abandon() {
	p.unwanted.Store(true)
	p.b.tasks.Start(func() { _ = p.Close() })
}

func (p *peer) end() {
	p.gate.Shut()
	close(p.closing)
	p.gate.Wait()
	clean := true
	if !p.gone.Load() {
		clean = p.link.Drain(p.b.cfg.Grace) == nil
	}
	p.mender.stop()
	proved := clean
	if !p.gone.Load() {
		ended := p.endPairs()
		proved = p.part(p.lostCh) || clean || p.proves(ended)
	}
	p.losing.Do(func() { p.gone.Store(true); close(p.lostCh) })
	p.lostDone.Wait()
	_ = p.link.End(verbs.Closed, proved) // giveBack tries again
	p.ch.finish(p.b.cfg.Grace)
	p.ch.wait()
	p.running.Wait()
}

// part says goodbye and reports whether the owner has answered, in its time.
func (p *peer) part(stop <-chan struct{}) bool {
	p.ch.send((&bye{abandoned: p.unwanted.Load()}).encode())
	clock.Pass(p.b.cfg.clock, p.b.cfg.Grace, p.farewell, stop)
	return p.parted()
}

// proves reports whether nothing of ours lands at an owner that does not say so. The end of its
// control connection is no proof: its process may be there, and the kernel ends the queue pairs of
// one that was killed in its own time. ended says that our queue pairs are gone: then what was sent
// has landed or is lost once the fabric has had its time, if that is known.
func (p *peer) proves(ended bool) bool {
	life := p.b.cfg.PacketLife
	return ended && life > 0 && (clock.Pass(p.b.cfg.clock, life, p.farewell, nil) || p.parted())
}

// giveBack ends the use of the link, once no queue pair of it is left. Preconditions: p.ending is
// held.
func (p *peer) giveBack() error {
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
