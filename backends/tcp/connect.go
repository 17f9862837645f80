// SPDX-License-Identifier: Apache-2.0

package tcp

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"time"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/identity"
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
	// An owner that is kept off its processors hangs up on peers that it has heard too late, and
	// one with too many waiting connections on the last of them. So Connect tries again until ctx
	// ends.
	var before error
	for pause := session.AcceptPauseMin; ; pause = min(2*pause, session.AcceptPauseMax) {
		p := newPeer(b, to, 1+b.cfg.Conns)
		err := p.open(ctx)
		if err == nil {
			return p, nil
		}
		p.closeConns()
		switch {
		case b.closed.Load():
			return nil, fmt.Errorf("connect: %w", driver.ErrClosed)
		case errors.Is(err, errHungUp) && b.pauseBeforeRetry(ctx, pause):
			before = err
		case errors.Is(err, errHungUp): // and ctx has ended
			return nil, fmt.Errorf("connect: %w: %w", driver.ContextError(ctx), err)
		case before != nil:
			return nil, fmt.Errorf("connect: %w (before: %v)", err, before)
		default:
			return nil, fmt.Errorf("connect: %w", err)
		}
	}
}

// pauseBeforeRetry waits. It reports false if ctx ends meanwhile.
func (b *Backend) pauseBeforeRetry(ctx context.Context, pause time.Duration) bool {
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
		b: b, owner: to, connID: b.lastConnID.Add(1),
		conns: make([]*conn, conns), parts: make([]partTable, conns),
		closing: make(chan struct{}), lost: make(chan struct{}),
		ownerStopped: make(chan struct{}, 1),
		byTag:        map[uint64]*batch{}, importAnswers: map[uint64]chan imported{},
	}
}

// open opens the control connection with a hello, and the others with joins, side by side.
func (p *peer) open(ctx context.Context) error {
	hello := header{
		kind: kindHello, count: uint32(len(p.conns)), key: uint32(p.b.cfg.MessageMax),
		id: uint64(p.b.cfg.NotifyMax), ticket: uint64(p.b.cfg.Grace),
	}
	welcome, secret, err := p.greet(ctx, control, hello, p.owner.proof())
	if err != nil {
		return err
	}
	if len(secret) != 16 {
		return fmt.Errorf("a welcome with a secret of %d bytes: %w", len(secret), driver.ErrCorrupt)
	}
	p.credit = int(min(welcome.count, creditMax))
	p.notifMax = min(p.b.cfg.MessageMax, int(welcome.key))
	p.noteOwnerClock(welcome.stamp)
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
	if !p.b.addPeer(p) {
		return driver.ErrClosed
	}
	for _, c := range p.conns {
		c.startReading()
		// On each connection, since any of them may be read first at the owner.
		c.sendFrame(header{kind: kindReady, ticket: uint64(p.grace)})
	}
	return nil
}

// closeConns closes what open has opened.
func (p *peer) closeConns() {
	for _, c := range p.conns {
		if c != nil {
			c.close(false)
		}
	}
}

// addPeer has Backend.Close end the peer. It reports false if Close has begun.
func (b *Backend) addPeer(p *peer) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.closed.Load() {
		return false
	}
	b.peers[p] = struct{}{}
	return true
}

// writeFrame and readFrame are for the frames of a handshake, before the conn is made.
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

// placeTime is how long open first waits for one place of several before it tries the next. It
// doubles when all places were tried.
const placeTime = time.Second

// errSilent says that a place has not answered in its time. A longer attempt may succeed.
var errSilent = errors.New("no answer")

// errHungUp says that the owner has closed a connection without a reason: the connection came late,
// or too many waited. The owner may welcome the next one.
var errHungUp = errors.New("the other side hung up")

// greet opens connection i, sends its first frame, and returns the owner's answer. Some of the
// owner's places may lead elsewhere, as an address of a network that both hosts have: to a silent
// host, or to another owner at the same port. So the control connection goes to the first place
// that welcomes it, and the others go to the same place.
func (p *peer) greet(ctx context.Context, i int, h header, body []byte) (header, []byte, error) {
	left := p.owner.places
	if i != control {
		left = []string{p.ownerPlace}
	}
	var errs []error
	for patience := placeTime; len(left) > 0; patience *= 2 {
		var silent []string
		for n, at := range left {
			once, cancel := ctx, func() {}
			if n < len(left)-1 || len(silent) > 0 { // others are left
				once, cancel = context.WithTimeout(ctx, patience)
			}
			answer, rest, err := p.greetAt(once, i, at, h, body)
			cancel()
			switch {
			case err == nil:
				if i == control {
					p.ownerPlace = at
				}
				return answer, rest, nil
			case ctx.Err() != nil:
				return h, nil, overdue(ctx, at, errs)
			case errors.Is(err, errSilent):
				silent = append(silent, at)
			case errors.Is(err, driver.ErrFull): // the right owner says so, and no other
				return h, nil, err
			default:
				errs = append(errs, fmt.Errorf("at %s: %w", at, err))
			}
		}
		left = silent
	}
	return h, nil, errors.Join(errs...)
}

// overdue returns the error of a ctx that has ended: which place was tried last, and what the
// others answered.
func overdue(ctx context.Context, at string, errs []error) error {
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("no answer from %s (%v): %w", at, err, driver.ContextError(ctx))
	}
	return fmt.Errorf("no answer from %s: %w", at, driver.ContextError(ctx))
}

// greetAt is greet at one place, for as long as ctx lasts.
func (p *peer) greetAt(ctx context.Context, i int, at string, h header, body []byte) (
	answer header, rest []byte, err error) {
	conn, err := (&net.Dialer{}).DialContext(ctx, "tcp", at)
	if err != nil {
		if op := (*net.OpError)(nil); errors.As(err, &op) {
			err = op.Err // without the place, which greet adds
		}
		if ctx.Err() != nil {
			return h, nil, errSilent
		}
		return h, nil, fmt.Errorf("%w: %w", err, driver.ErrPeerLost)
	}
	tcp := conn.(*net.TCPConn) // as the package net says
	stop := context.AfterFunc(ctx, func() { _ = tcp.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	p.b.setSocketOptions(tcp)
	secure, err := p.b.secureCall(ctx, tcp, &p.owner, at)
	if err == nil {
		answer, rest, err = p.hello(tcp, secure, h, body)
	}
	if err == nil && !stop() {
		err = driver.ErrTimeout
	}
	if err == nil {
		err = tcp.SetDeadline(time.Time{})
	}
	if err == nil {
		p.conns[i], err = newConn(p.b, p, i, tcp, secure)
	}
	if err != nil {
		_ = tcp.Close() // the error is in err already
		var why *identity.Error
		switch {
		case ctx.Err() != nil:
			err = errSilent
		case session.HungUp(err) && !errors.As(err, &why):
			err = fmt.Errorf("%w: %w", errHungUp, err)
		}
		return h, nil, err
	}
	return answer, rest, nil
}

// hello sends the first frame of a connection, and measures how long the answer takes.
func (p *peer) hello(tcp, secure net.Conn, h header, body []byte) (header, []byte, error) {
	begin := p.b.clock.Now()
	err := writeFrame(secure, h, body)
	if err == nil {
		h, body, err = readFrame(secure, kindWelcome)
	}
	took := p.b.clock.Now() - begin
	if errors.Is(err, driver.ErrVersion) {
		return h, nil, err
	}
	if err != nil {
		return h, nil, fmt.Errorf("await the welcome: %w",
			errors.Join(p.b.explainHangUp(err, tcp), driver.ErrPeerLost))
	}
	if err := refusalOf(session.Status(h.status)); err != nil {
		return h, nil, err
	}
	p.noteRoundTrip(took)
	return h, body, nil
}

// refusalOf returns the error of a status in a welcome.
func refusalOf(status session.Status) error {
	switch err := status.Err(); {
	case errors.Is(err, driver.ErrFull):
		return fmt.Errorf("the owner has as many peers as its Config.PeersMax allows, or half as "+
			"many of this host: %w", err)
	case errors.Is(err, driver.ErrPeerLost):
		return fmt.Errorf("another program has this port, or the owner closes: %w", err)
	case err != nil:
		return fmt.Errorf("the owner refuses: %w", err)
	}
	return nil
}
