// SPDX-License-Identifier: Apache-2.0

package tcp

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"sync"
	"time"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/clock"
	"github.com/sluicehq/sluice/internal/session"
)

// Connect implements driver.Backend.
func (b *Backend) Connect(ctx context.Context, addr []byte) (driver.Peer, error) {
	if b.closed.Load() {
		return nil, driver.ErrClosed
	}
	to, err := decodeAddress(addr)
	if err != nil {
		return nil, fmt.Errorf("connect: %w", err)
	}
	if to.security != b.address.security {
		return nil, fmt.Errorf("connect: the owner is spoken to %v, and this side speaks %v: set "+
			"the same on both sides: %w", to.security, b.address.security, driver.ErrNotSupported)
	}
	// An owner that is kept off its processors hangs up on those that it heard too late, and one at
	// which too many wait on the last of them: we come again, for as long as our caller waits.
	var before error
	for pause := session.AcceptPauseMin; ; pause = min(2*pause, session.AcceptPauseMax) {
		p := newPeer(b, to, 1+b.cfg.Conns)
		err := p.open(ctx)
		if err == nil {
			return p, nil
		}
		p.abandon()
		switch {
		case b.closed.Load():
			return nil, fmt.Errorf("connect: %w", driver.ErrClosed)
		case errors.Is(err, errHungUp) && b.rests(ctx, pause):
			before = err
		case errors.Is(err, errHungUp): // and our caller has no more time
			return nil, fmt.Errorf("connect: %w: %w", driver.ContextError(ctx), err)
		case before != nil:
			return nil, fmt.Errorf("connect: %w (before: %v)", err, before)
		default:
			return nil, fmt.Errorf("connect: %w", err)
		}
	}
}

// rests waits, and reports whether another try is worth it.
func (b *Backend) rests(ctx context.Context, pause time.Duration) bool {
	over, timer := clock.After(b.clock, pause)
	defer timer.Stop()
	select {
	case <-over:
		return true
	case <-ctx.Done():
		return false
	}
}

func newPeer(b *Backend, to address, conns int) *peer {
	return &peer{
		b: b, to: to, conn: b.lastConn.Add(1),
		conns: make([]*conn, conns), flight: make([]inFlight, conns),
		closing: make(chan struct{}), lost: make(chan struct{}), quit: make(chan struct{}),
		byTag: map[uint64]*batch{}, asked: map[uint64]chan imported{},
	}
}

// open says hello, and joins the other connections to the first.
func (p *peer) open(ctx context.Context) error {
	hello := header{
		kind: kindHello, count: uint32(len(p.conns)), key: uint32(p.b.cfg.MessageMax),
		id: uint64(p.b.cfg.NotifyMax), ticket: uint64(p.b.cfg.Grace),
	}
	welcome, secret, err := p.greet(ctx, ctl, hello, p.to.proof())
	if err != nil {
		return err
	}
	if len(secret) < 16 {
		return fmt.Errorf("a welcome with a secret of %d bytes: %w", len(secret), driver.ErrCorrupt)
	}
	secret, view := secret[:16], secret[16:]
	control := p.conns[ctl]
	ours := appendView(nil, control.tcp.LocalAddr(), control.tcp.RemoteAddr())
	p.direct = !control.tls && bytes.Equal(view, ours)
	p.credit = int(min(welcome.count, creditMax))
	p.notifMax = min(p.b.cfg.MessageMax, int(welcome.key))
	p.learn(welcome.stamp)
	join := header{kind: kindJoin, id: welcome.id}
	errs := make([]error, len(p.conns))
	var wg sync.WaitGroup
	for i := express; i < len(p.conns); i++ {
		h := join
		h.count = uint32(i)
		wg.Go(func() { _, _, errs[i] = p.greet(ctx, i, h, secret) })
	}
	wg.Wait()
	if err := errors.Join(errs...); errors.Is(err, driver.ErrBadToken) {
		return fmt.Errorf("it gave us up before all connections had come: %w: %w", errHungUp, err)
	} else if err != nil {
		return err
	}
	if err := p.setGrace(time.Duration(welcome.ticket)); err != nil {
		return err
	}
	if !p.b.enter(p) {
		return driver.ErrClosed
	}
	for _, c := range p.conns {
		c.run()
		// On each, since none of them knows which ends first.
		c.send(header{kind: kindReady, ticket: uint64(p.grace)})
	}
	return nil
}

// abandon closes what Connect opened.
func (p *peer) abandon() {
	for _, c := range p.conns {
		if c != nil {
			c.close(false)
		}
	}
}

// enter has Close end the peer, unless that has begun.
func (b *Backend) enter(p *peer) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.closed.Load() {
		return false
	}
	b.peers[p] = struct{}{}
	return true
}

// writeFrame and readFrame are for the first words, which are said in turn.
func writeFrame(w io.Writer, h header, body []byte) error {
	h.length = uint32(len(body))
	_, err := w.Write(append(h.append(nil), body...))
	return err
}

func readFrame(r io.Reader, kinds ...uint8) (h header, body []byte, err error) {
	var head [headBytes]byte
	if _, err := io.ReadFull(r, head[:]); err != nil {
		return h, nil, err
	}
	if err := h.decode(&head); err != nil {
		if h.kind != kinds[0] || h.length > bodyMax { // no frame of any version
			err = driver.ErrCorrupt
		}
		return h, nil, err
	}
	for _, k := range kinds {
		if k == h.kind {
			body = make([]byte, h.length) // at most bodyMax
			_, err = io.ReadFull(r, body)
			return h, body, err
		}
	}
	return h, nil, fmt.Errorf("frame of kind %d out of place: %w", h.kind, driver.ErrCorrupt)
}
