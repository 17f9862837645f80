// SPDX-License-Identifier: Apache-2.0

package ucx

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/sluicehq/sluice/driver"
)

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
	sides, err := b.sidesTo(&owner)
	if err != nil {
		return nil, err
	}
	if owner.host == b.address.host && owner.process == b.address.process &&
		!registry.has(owner.owner) {
		return nil, fmt.Errorf("%v is closed: %w", &owner, driver.ErrPeerLost)
	}
	for i, l := range sides {
		var p *peer
		if p, err = l.dial(ctx, owner, i+1 < len(sides)); err == nil {
			return p, nil
		}
		if !errors.Is(err, errUnanswered) {
			break
		}
	}
	return nil, err
}

// errUnanswered is the silence of an owner that can be reached another way as well.
var errUnanswered = errors.New("no answer over shared memory")

// dial connects by one of the two contexts. It waits for no more than Config.Grace where there is
// another way.
func (l *side) dial(ctx context.Context, owner address, another bool) (*peer, error) {
	p := newPeer(l, owner)
	if err := p.begin(); err != nil {
		return nil, err
	}
	var patience <-chan time.Time
	if another {
		timer := time.NewTimer(l.b.cfg.Grace)
		defer timer.Stop()
		patience = timer.C
	}
	err := p.awaitWelcome(ctx, patience)
	if err == nil {
		return p, nil
	}
	p.abandon() // the peer must forget us, which may take it long
	if errors.Is(err, errUnanswered) {
		l.b.avoid(owner.owner, silentFor)
		l.suspect()
	}
	return nil, err
}

// begin makes our end and says hello.
func (p *peer) begin() error {
	if err := p.watch(); err != nil {
		return err
	}
	workers := p.l.workersOf(&p.owner)
	turn := int(p.l.turn.Add(1) - 1)
	worker := turn % p.b.cfg.Workers
	link, err := p.l.net.connect(worker, workers[turn%len(workers)])
	if err != nil {
		p.unwatch()
		return err
	}
	p.link = link
	p.hold.Reopen()
	p.b.mu.Lock()
	p.b.peers[p] = struct{}{}
	p.b.mu.Unlock()
	p.l.add(link.ID(), p)
	h := hello{conn: link.ID(), worker: uint8(worker), to: p.owner.owner, gate: link.Gate(),
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
func (p *peer) awaitWelcome(ctx context.Context, patience <-chan time.Time) error {
	for pause := pauseMin; ; pause = min(2*pause, pauseMax) {
		again := time.NewTimer(pause)
		err := p.awaitAnswer(ctx, patience, again.C)
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

func (p *peer) awaitAnswer(ctx context.Context, patience, again <-chan time.Time) error {
	select {
	case <-again:
		return errAgain
	case <-patience:
		return errUnanswered
	case err := <-p.welcomed:
		return err
	case <-p.lostCh:
		return driver.ErrPeerLost
	case <-p.b.closing:
		return driver.ErrClosed
	case <-ctx.Done():
		return fmt.Errorf("no answer, %v may be frozen%s: %w", &p.owner, p.l.blocked(),
			driver.ContextError(ctx))
	}
}
