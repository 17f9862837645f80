// SPDX-License-Identifier: Apache-2.0

package ucx

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	ucp "github.com/sluicehq/sluice/csrc/ucx"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/session"
)

// peer is our end of a connection that we began: over it we reach the owner's
// memory and send notifications. It implements driver.Peer.
type peer struct {
	driver.PeerBase
	b     *Backend
	owner address
	link  link
	conn  uint64 // of answers
	hello []byte

	gate     session.Gate  // held by every call of the program; Close shuts it first
	hold     session.Gate  // held by every use of link; Close shuts it last
	closing  chan struct{} // closed when Close begins
	ending   sync.Once
	unwanted atomic.Bool // the program never had this connection
	gone     atomic.Bool
	lostCh   chan struct{}
	lostOnce sync.Once
	bound    bool          // a welcome came; of the control goroutine only
	welcomed chan error    // has one place
	farewell chan struct{} // closed when the owner has answered our bye
	parting  sync.Once

	lanes   sync.Once // guards overTCP
	overTCP bool

	mu      sync.Mutex
	asks    map[uint32]chan *importAnswer // each has one place
	askID   uint32
	imports map[uint32]struct{} // by key
}

var _ driver.Peer = (*peer)(nil)

func newPeer(b *Backend, owner address) *peer {
	p := &peer{
		b: b, owner: owner, conn: b.conns.Add(1),
		closing: make(chan struct{}), lostCh: make(chan struct{}), farewell: make(chan struct{}),
		welcomed: make(chan error, 1), asks: make(map[uint32]chan *importAnswer),
		imports: make(map[uint32]struct{}),
	}
	p.hold.Shut() // there is no link yet
	return p
}

// enter begins a call of the program; exit ends it.
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

// can is what every connection takes.
const can = driver.CanPattern | driver.CanNotify

// Can implements driver.Peer. Where UCX has nothing but TCP to the peer, it sends in plain text
// what other backends encrypt. It chooses its lanes once.
func (p *peer) Can() driver.Can {
	p.lanes.Do(func() {
		if p.enter() == nil {
			p.overTCP = overTCP(p.link.Lanes())
			p.gate.Exit()
		}
	})
	if p.overTCP {
		return can | driver.LastResort
	}
	return can
}

// Conn implements driver.Peer.
func (p *peer) Conn() uint64 { return p.conn }

// Submit implements driver.Peer.
func (p *peer) Submit(tag uint64, b *driver.Batch) error {
	if err := b.Check(can); err != nil {
		return err
	}
	if len(b.Descs) > descsMax || len(b.Notify) > messageMax || b.Pattern != nil &&
		tooMany(b.Pattern) {
		return driver.ErrBounds
	}
	if err := p.enter(); err != nil {
		return err
	}
	defer p.gate.Exit()
	return p.link.Submit(tag, b)
}

// tooMany reports whether a pattern has more than runsMax runs.
func tooMany(p *driver.Pattern) bool {
	runs := uint64(max(p.Count, 0))
	for i := range p.Loops {
		if runs > runsMax {
			break
		}
		runs *= uint64(p.Loops[i].N)
	}
	return runs > runsMax
}

// Cancel implements driver.Peer.
func (p *peer) Cancel(tag uint64) {
	if p.gate.Enter() {
		p.link.Cancel(tag)
		p.gate.Exit()
	}
}

// Help implements driver.Peer.
func (p *peer) Help(tag uint64, stop <-chan struct{}) bool {
	if p.enter() != nil {
		return false
	}
	defer p.gate.Exit()
	return p.link.Help(tag, stop)
}

// Lost implements driver.Peer.
func (p *peer) Lost() <-chan struct{} { return p.lostCh }

// heard implements end.
func (p *peer) heard(message any) {
	switch m := message.(type) {
	case *welcome:
		p.greeted(m)
	case *importAnswer:
		p.answered(m)
	case farewell:
		p.parting.Do(func() { close(p.farewell) })
	case quit: // all memory of the owner is closed
		p.markLost(true)
	}
}

// greeted binds our end to the owner's. Only the first welcome counts.
func (p *peer) greeted(m *welcome) {
	if p.bound || !p.hold.Enter() {
		return
	}
	defer p.hold.Exit()
	p.bound = true
	err := m.status.Err()
	if err != nil {
		p.gone.Store(true) // it knows nothing of us: no goodbye
		err = fmt.Errorf("%v refused: %w", &p.owner, err)
	} else {
		p.link.Bind(m.conn, m.grace)
	}
	p.welcomed <- err
}

// lost implements end.
func (p *peer) lost(over bool) { p.markLost(over) }

// there implements end.
func (p *peer) there() *address { return &p.owner }

// over implements end.
func (p *peer) over(f func(link)) {
	if p.hold.Enter() {
		f(p.link)
		p.hold.Exit()
	}
}

// markLost ends what is under way, and says so. What may land still ends later, unless the
// owner's end is over.
func (p *peer) markLost(over bool) {
	p.gone.Store(true)
	if p.hold.Enter() {
		p.link.End(ucp.Lost, over)
		p.hold.Exit()
	}
	p.lostOnce.Do(func() { close(p.lostCh) })
}

// Close implements driver.Peer. What has not begun ends at once, the rest within
// Config.Grace. Then the owner is told, and its answer is the proof that nothing
// of ours lands any more. An owner that does not answer within Config.Grace, since it is
// frozen or the way there is slow, asks us before it lands what it has not found by then.
func (p *peer) Close() error {
	p.ending.Do(p.end)
	return nil
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
	over := false
	if !p.gone.Load() {
		// What is under way still ends below; a peer that is silent as long is not waited for.
		if err := p.link.Drain(p.b.cfg.Grace); !errors.Is(err, driver.ErrPeerLost) {
			over = p.part()
		}
	}
	p.link.End(ucp.Closed, over)
	p.gate.Wait()
	p.lostOnce.Do(func() { close(p.lostCh) })
	p.giveBack()
}

// part says goodbye and reports whether the owner has answered.
func (p *peer) part() bool {
	m := bye{conn: p.link.ID(), from: p.b.address.owner, abandoned: p.unwanted.Load()}
	if p.link.Control(m.encode()) != nil {
		return false // lost by now
	}
	timer := time.NewTimer(p.b.cfg.Grace)
	defer timer.Stop()
	select {
	case <-p.farewell:
		return true
	case <-p.lostCh:
	case <-timer.C:
	}
	return false
}

// giveBack ends the use of the link.
func (p *peer) giveBack() {
	p.b.remove(p.link.ID())
	p.hold.Shut()
	p.hold.Wait()
	_ = p.link.Close(p.b.cfg.CloseMax) // by force, where time was too short
	p.b.mu.Lock()
	delete(p.b.peers, p)
	p.b.mu.Unlock()
}

// Connect implements driver.Backend. The hello goes to the peer's control
// goroutine, which connects back; nothing of it needs the peer's program.
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
	p := newPeer(b, owner)
	if err := p.begin(); err != nil {
		return nil, err
	}
	if err := p.awaitWelcome(ctx); err != nil {
		p.abandon() // the peer must forget us, which may take it long
		return nil, err
	}
	return p, nil
}

// begin makes our end and says hello.
func (p *peer) begin() error {
	workers := p.owner.workers
	turn := int(p.b.turn.Add(1) - 1)
	worker := turn % p.b.cfg.Workers
	link, err := p.b.net.connect(worker, workers[turn%len(workers)])
	if err != nil {
		return err
	}
	p.link = link
	p.hold.Reopen()
	p.b.mu.Lock()
	p.b.peers[p] = struct{}{}
	p.b.mu.Unlock()
	p.b.add(link.ID(), p)
	h := hello{conn: link.ID(), worker: uint8(worker), to: p.owner.owner,
		grace: uint64(p.b.cfg.Grace), from: p.b.addr}
	p.hello = h.encode()
	if err := link.Control(p.hello); err != nil {
		p.abandon()
		return err
	}
	return nil
}

// Between hellos there is a pause, which grows.
const pauseMin, pauseMax = time.Second, 8 * time.Second

// awaitWelcome returns when the peer has answered, or there is no point in waiting. It says hello
// again now and then: an owner that has too many connections, or no room to answer one, drops it.
func (p *peer) awaitWelcome(ctx context.Context) error {
	for pause := pauseMin; ; pause = min(2*pause, pauseMax) {
		again := time.NewTimer(pause)
		err := p.awaitAnswer(ctx, again.C)
		again.Stop()
		if err != errAgain {
			if p.gone.Load() && pause > pauseMin { // it refused one hello, and may take the next
				m := bye{conn: p.link.ID(), from: p.b.address.owner, abandoned: true}
				_ = p.link.Control(m.encode())
			}
			return err
		}
		_ = p.link.Control(p.hello) // where the peer is lost lostCh says so
	}
}

var errAgain = errors.New("no answer yet")

func (p *peer) awaitAnswer(ctx context.Context, again <-chan time.Time) error {
	select {
	case <-again:
		return errAgain
	case err := <-p.welcomed:
		return err
	case <-p.lostCh:
		return driver.ErrPeerLost
	case <-p.b.closing:
		return driver.ErrClosed
	case <-ctx.Done():
		return fmt.Errorf("no answer, %v may be frozen: %w", &p.owner, driver.ContextError(ctx))
	}
}

// Import implements driver.Peer. It asks the owner, whose control goroutine
// answers; imports at the same time do not wait for each other.
func (p *peer) Import(tok []byte) (key uint32, size uint64, err error) {
	if err := p.enter(); err != nil {
		return 0, 0, err
	}
	defer p.gate.Exit()
	t, err := session.DecodeToken(tok, &p.owner.owner)
	if err != nil {
		return 0, 0, fmt.Errorf("import memory: %w", err)
	}
	a, err := p.ask(&t)
	if err == nil {
		key, err = p.take(&t, a)
	}
	if err != nil {
		return 0, 0, fmt.Errorf("import memory: %w", err)
	}
	return key, t.Size, nil
}

// ask sends the question and waits for the answer.
func (p *peer) ask(t *session.Token) (*importAnswer, error) {
	done := make(chan *importAnswer, 1)
	p.mu.Lock()
	p.askID++
	id := p.askID
	p.asks[id] = done
	p.mu.Unlock()
	defer func() {
		p.mu.Lock()
		delete(p.asks, id)
		p.mu.Unlock()
	}()
	q := importRequest{id: id, key: t.Key, epoch: t.Epoch, secret: t.Secret}
	if err := p.link.Control(q.encode()); err != nil {
		return nil, err
	}
	timer := time.NewTimer(p.b.cfg.importMax)
	defer timer.Stop()
	select {
	case a := <-done:
		return a, a.status.Err()
	case <-p.lostCh:
		return nil, driver.ErrPeerLost
	case <-p.closing:
		return nil, driver.ErrClosed
	case <-timer.C:
		return nil, fmt.Errorf("no answer within %v, the peer may be frozen: %w",
			p.b.cfg.importMax, driver.ErrTimeout)
	}
}

// answered hands an answer to its asker; one that comes late is dropped.
func (p *peer) answered(a *importAnswer) {
	p.mu.Lock()
	done := p.asks[a.id]
	delete(p.asks, a.id)
	p.mu.Unlock()
	if done != nil {
		done <- a
	}
}

// take makes what the owner told known to C.
func (p *peer) take(t *session.Token, a *importAnswer) (uint32, error) {
	if a.size != t.Size {
		return 0, fmt.Errorf("the owner tells of %d bytes, the token of %d: %w", a.size, t.Size,
			driver.ErrBadToken)
	}
	key, err := p.link.Import(ucp.Import{Key: t.Key, Size: t.Size, Ticket: a.ticket,
		ReadOnly: a.readOnly})
	if err != nil {
		return 0, err
	}
	p.mu.Lock()
	p.imports[key] = struct{}{}
	p.mu.Unlock()
	return key, nil
}

// Drop implements driver.Peer.
func (p *peer) Drop(key uint32) {
	if !p.gate.Enter() {
		return
	}
	defer p.gate.Exit()
	p.mu.Lock()
	_, known := p.imports[key]
	delete(p.imports, key)
	p.mu.Unlock()
	if known {
		p.link.Drop(key)
	}
}
