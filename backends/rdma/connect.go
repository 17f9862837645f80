// SPDX-License-Identifier: Apache-2.0

package rdma

import (
	"context"
	"errors"
	"fmt"
	"syscall"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/clock"
	"github.com/sluicehq/sluice/internal/session"
)

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
