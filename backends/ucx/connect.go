// SPDX-License-Identifier: Apache-2.0

package ucx

import (
	"context"
	"fmt"

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
	l, err := b.lineTo(&owner)
	if err != nil {
		return nil, err
	}
	if owner.host == b.address.host && owner.process == b.address.process && !registry.has(owner.owner) {
		return nil, fmt.Errorf("%v is closed: %w", &owner, driver.ErrPeerLost)
	}
	p := newPeer(l, owner)
	if err := p.begin(); err != nil {
		return nil, err
	}
	err = p.awaitWelcome(ctx)
	if err == nil {
		return p, nil
	}
	p.abandon() // the peer must forget us, which may take it long
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
	h := hello{conn: link.ID(), worker: uint8(worker), to: p.owner.owner, gate: link.Gate(), grace: uint64(p.b.cfg.Grace), from: p.b.addr}
	if err := link.Control(h.encode()); err != nil {
		p.abandon()
		return err
	}
	return nil
}

// awaitWelcome returns when the peer has answered, or there is no point in waiting.
func (p *peer) awaitWelcome(ctx context.Context) error {
	select {
	case err := <-p.welcomed:
		return err
	case <-p.lostCh:
		return driver.ErrPeerLost
	case <-p.b.closing:
		return driver.ErrClosed
	case <-ctx.Done():
		return fmt.Errorf("no answer, %v may be frozen%s: %w", &p.owner, p.l.blocked(), driver.ContextError(ctx))
	}
}
