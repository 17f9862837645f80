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

// peer is our end of a connection that we began: over it we reach the owner's memory and send
// notifications. It implements driver.Peer.
type peer struct {
	driver.PeerBase
	b     *Backend
	owner address
	link  link   // the connection of csrc/ucx
	conn  uint64 // number of the connection, by which answers come

	calls     session.Gate  // held by every call of the program; Close shuts it first
	linkUses  session.Gate  // held by every use of link; Close shuts it last
	closing   chan struct{} // closed when Close begins
	closeOnce sync.Once
	abandoned atomic.Bool // Connect failed: the program never had this connection
	gone      atomic.Bool // the peer is lost, or has refused us
	lostCh    chan struct{}
	lostOnce  sync.Once
	bound     bool       // a welcome has come; only the control goroutine uses it
	welcomed  chan error // has one place: the answer to our hello

	askLanes sync.Once // asks UCX once, for overTCP
	overTCP  bool      // UCX reaches the peer over TCP alone

	mu      sync.Mutex
	asks    map[uint32]chan *importAnswer // imports under way, by askID; each has one place
	askID   uint32
	imports map[uint32]struct{} // keys that Import has given out
}

var _ driver.Peer = (*peer)(nil)

func newPeer(b *Backend, owner address) *peer {
	p := &peer{
		b: b, owner: owner, conn: b.conns.Add(1),
		closing: make(chan struct{}), lostCh: make(chan struct{}),
		welcomed: make(chan error, 1), asks: make(map[uint32]chan *importAnswer),
		imports: make(map[uint32]struct{}),
	}
	p.linkUses.Shut() // there is no link yet
	return p
}

// Connect implements driver.Backend. It sends a hello to the peer's control goroutine, which
// connects back. The peer's program need not do anything.
func (b *Backend) Connect(ctx context.Context, addr []byte) (driver.Peer, error) {
	if !b.gate.Enter() {
		return nil, fmt.Errorf("connect peer: %w", driver.ErrClosed)
	}
	defer b.gate.Exit()
	p, err := b.connect(ctx, addr)
	if err != nil {
		return nil, fmt.Errorf("connect peer: %w", err)
	}
	return p, nil
}

// connect waits from pauseMin to pauseMax before it sends a hello once more.
const pauseMin, pauseMax = time.Second, 8 * time.Second

func (b *Backend) connect(ctx context.Context, addr []byte) (*peer, error) {
	if ctx.Err() != nil {
		return nil, driver.ContextError(ctx)
	}
	owner, err := decodeAddress(addr)
	if err != nil {
		return nil, err
	}
	// Make our end: from one of our workers to one of the owner's.
	p := newPeer(b, owner)
	turn := int(b.turn.Add(1) - 1)
	worker := turn % b.cfg.Workers
	if p.link, err = b.net.connect(worker, owner.workers[turn%len(owner.workers)]); err != nil {
		return nil, err
	}
	p.linkUses.Reopen()
	b.mu.Lock()
	b.peers[p] = struct{}{}
	b.mu.Unlock()
	b.add(p.link.ID(), p)
	// Send the hello, again and again until there is an answer: an owner that has too many
	// connections, or no room for the answer, drops a hello. The loop ends with err set, or
	// returns.
	h := hello{conn: p.link.ID(), worker: uint8(worker), to: owner.owner,
		grace: uint64(b.cfg.Grace), from: b.addr}
	hello := encodeControl(&h)
	err = p.link.Control(hello)
	for pause := pauseMin; err == nil; pause = min(2*pause, pauseMax) {
		again := time.NewTimer(pause)
		select {
		case <-again.C:
			_ = p.link.Control(hello) // if the peer is lost, lostCh is closed next
			continue
		case err = <-p.welcomed:
			again.Stop()
			if err == nil {
				return p, nil
			}
			if pause > pauseMin { // it refused one hello, and may yet accept a later one
				m := bye{conn: p.link.ID(), from: b.address.owner, abandoned: true}
				_ = p.link.Control(encodeControl(&m))
			}
		case <-p.lostCh:
			err = driver.ErrPeerLost
		case <-b.closing:
			err = driver.ErrClosed
		case <-ctx.Done():
			err = fmt.Errorf("no answer, %v may be frozen: %w", &p.owner, driver.ContextError(ctx))
		}
		again.Stop()
	}
	// A task closes the peer, since that may wait for the owner. If the backend has closed, Start
	// does nothing: Backend.Close closes all peers itself.
	p.abandoned.Store(true)
	b.tasks.Start(func() { _ = p.Close() })
	return nil, err
}

// onMessage implements end.
func (p *peer) onMessage(message any) {
	switch m := message.(type) {
	case *welcome:
		p.onWelcome(m)
	case *importAnswer: // dropped if Import has given up by now
		p.mu.Lock()
		asker := p.asks[m.id]
		delete(p.asks, m.id)
		p.mu.Unlock()
		if asker != nil {
			asker <- m
		}
	}
}

// onWelcome binds our end to the owner's. Only the first welcome counts.
func (p *peer) onWelcome(m *welcome) {
	if p.bound || !p.linkUses.Enter() {
		return
	}
	defer p.linkUses.Exit()
	p.bound = true
	err := m.status.Err()
	if err != nil {
		p.gone.Store(true) // the owner has no end for us, so Close sends no bye
		err = fmt.Errorf("%v refused: %w", &p.owner, err)
	} else {
		p.link.Bind(m.conn, m.grace)
	}
	p.welcomed <- err
}

// onLost implements end. It ends the batches and closes lostCh. A write whose bytes may still land
// ends later, unless over says that the owner's end is over.
func (p *peer) onLost(over bool) {
	why := ucp.Lost
	select {
	case <-p.closing: // the owner's answer to our bye
		why = ucp.Closed
	default:
	}
	p.gone.Store(true)
	p.withLink(func(l link) { l.End(why, over) })
	p.lostOnce.Do(func() { close(p.lostCh) })
}

// number implements end.
func (p *peer) number() uint64 { return p.conn }

// remote implements end.
func (p *peer) remote() *address { return &p.owner }

// withLink implements end.
func (p *peer) withLink(f func(link)) {
	if p.linkUses.Enter() {
		f(p.link)
		p.linkUses.Exit()
	}
}

// enter begins a call of the program, which ends with calls.Exit.
func (p *peer) enter() error {
	if !p.calls.Enter() {
		return driver.ErrClosed
	}
	if p.gone.Load() {
		p.calls.Exit()
		return driver.ErrPeerLost
	}
	return nil
}

// can are the bits that all connections have.
const can = driver.CanPattern | driver.CanNotify

// Can implements driver.Peer. If UCX reaches the peer over TCP alone, it sends in plain text what
// other backends encrypt, so the peer is a last resort. UCX chooses its lanes once, so they are
// asked for once.
func (p *peer) Can() driver.Can {
	p.askLanes.Do(func() {
		if p.enter() == nil {
			p.overTCP = overTCP(p.link.Lanes())
			p.calls.Exit()
		}
	})
	if p.overTCP {
		return can | driver.LastResort
	}
	return can
}

// Conn implements driver.Peer.
func (p *peer) Conn() uint64 { return p.conn }

// Lost implements driver.Peer.
func (p *peer) Lost() <-chan struct{} { return p.lostCh }

// Import implements driver.Peer. The owner's control goroutine answers; imports at the same time do
// not wait for each other.
func (p *peer) Import(tok []byte) (key uint32, size uint64, err error) {
	if err := p.enter(); err != nil {
		return 0, 0, err
	}
	defer p.calls.Exit()
	defer func() {
		if err != nil {
			err = fmt.Errorf("import memory: %w", err)
		}
	}()
	t, err := session.DecodeToken(tok, &p.owner.owner)
	if err != nil {
		return 0, 0, err
	}
	// Ask the owner.
	answer := make(chan *importAnswer, 1)
	p.mu.Lock()
	p.askID++
	id := p.askID
	p.asks[id] = answer
	p.mu.Unlock()
	defer func() {
		p.mu.Lock()
		delete(p.asks, id)
		p.mu.Unlock()
	}()
	q := importRequest{id: id, key: t.Key, epoch: t.Epoch, secret: t.Secret}
	if err := p.link.Control(encodeControl(&q)); err != nil {
		return 0, 0, err
	}
	timer := time.NewTimer(p.b.cfg.importMax)
	defer timer.Stop()
	var a *importAnswer
	select {
	case a = <-answer:
	case <-p.lostCh:
		return 0, 0, driver.ErrPeerLost
	case <-p.closing:
		return 0, 0, driver.ErrClosed
	case <-timer.C:
		return 0, 0, fmt.Errorf("no answer within %v, the peer may be frozen: %w",
			p.b.cfg.importMax, driver.ErrTimeout)
	}
	// Make the memory known to C.
	if err := a.status.Err(); err != nil {
		return 0, 0, err
	}
	if a.size != t.Size {
		return 0, 0, fmt.Errorf("the owner tells of %d bytes, the token of %d: %w", a.size, t.Size,
			driver.ErrBadToken)
	}
	key, err = p.link.Import(ucp.Import{Key: t.Key, Size: t.Size, Ticket: a.ticket,
		ReadOnly: a.readOnly})
	if err != nil {
		return 0, 0, err
	}
	p.mu.Lock()
	p.imports[key] = struct{}{}
	p.mu.Unlock()
	return key, t.Size, nil
}

// Drop implements driver.Peer.
func (p *peer) Drop(key uint32) {
	if !p.calls.Enter() {
		return
	}
	defer p.calls.Exit()
	p.mu.Lock()
	_, known := p.imports[key]
	delete(p.imports, key)
	p.mu.Unlock()
	if known {
		p.link.Drop(key)
	}
}

// Submit implements driver.Peer.
func (p *peer) Submit(tag uint64, b *driver.Batch) error {
	if err := b.Check(can); err != nil {
		return err
	}
	if len(b.Descs) > descsMax || len(b.Notify) > messageMax {
		return driver.ErrBounds
	}
	if err := p.enter(); err != nil {
		return err
	}
	defer p.calls.Exit()
	return p.link.Submit(tag, b)
}

// Cancel implements driver.Peer.
func (p *peer) Cancel(tag uint64) {
	if p.calls.Enter() {
		p.link.Cancel(tag)
		p.calls.Exit()
	}
}

// Help implements driver.Peer.
func (p *peer) Help(tag uint64, stop <-chan struct{}) bool {
	if p.enter() != nil {
		return false
	}
	defer p.calls.Exit()
	return p.link.Help(tag, stop)
}

// Close implements driver.Peer. It waits up to Config.Grace for the owner to confirm that nothing
// of ours lands any more. An owner that does not answer in time, because it is frozen or the
// network is slow, asks us before it lands older messages; we do not answer, so it does not land
// them.
func (p *peer) Close() error {
	p.closeOnce.Do(func() {
		grace := p.b.cfg.Grace
		p.calls.Shut()
		close(p.closing)
		// Batches of which nothing was sent end at once, the others within Grace. A peer that was
		// silent for that long is not waited for again: link.End below ends its batches.
		if !p.gone.Load() && !errors.Is(p.link.Drain(grace), driver.ErrPeerLost) {
			// Say bye. The owner ends its end and tells our C so, which calls onLost: this proves
			// that nothing of ours lands any more.
			m := bye{conn: p.link.ID(), from: p.b.address.owner, abandoned: p.abandoned.Load()}
			if p.link.Control(encodeControl(&m)) == nil {
				timer := time.NewTimer(grace)
				select {
				case <-p.lostCh:
				case <-timer.C:
				}
				timer.Stop()
			}
		}
		p.link.End(ucp.Closed, false)
		p.calls.Wait()
		p.lostOnce.Do(func() { close(p.lostCh) })
		// From now on no message is passed to this peer. Once no call uses the link, close it.
		p.b.remove(p.link.ID())
		p.linkUses.Shut()
		p.linkUses.Wait()
		_ = p.link.Close(grace)
		p.b.mu.Lock()
		delete(p.b.peers, p)
		p.b.mu.Unlock()
	})
	return nil
}
