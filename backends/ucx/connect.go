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
