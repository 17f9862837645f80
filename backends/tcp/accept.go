// SPDX-License-Identifier: Apache-2.0

package tcp

import (
	"context"
	"crypto/rand"
	"crypto/subtle"
	"errors"
	"fmt"
	"io"
	"net"
	"time"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/clock"
	"github.com/sluicehq/sluice/internal/session"
)

// welcome begins to hear a connection.
func (b *Backend) welcome(conn net.Conn, v *session.Visit) bool {
	return b.tasks.Start(func() { b.hear(conn.(*net.TCPConn), v) })
}

// hear has a connection open, for as long as Config.Handshake, from when it has a place. One that
// says anything but what a peer says is told nothing.
func (b *Backend) hear(tcp *net.TCPConn, v *session.Visit) {
	if !v.Wait() {
		return
	}
	defer v.Leave()
	// Time in which we are kept off our processors is not the other side's.
	limit := clock.AfterRunning(b.clock, b.cfg.Handshake, func() {
		_ = tcp.SetDeadline(time.Unix(1, 0)) // fails only where it is closed
	})
	defer limit.Stop()
	b.tune(tcp)
	secure, err := b.answer(context.Background(), tcp)
	if err == nil {
		err = b.introduce(tcp, v, secure, limit)
	}
	if errors.Is(err, driver.ErrVersion) {
		refuse(tcp, secure)
	}
	if err != nil {
		_ = tcp.Close()
	}
}

// refuse answers a hello of another version with a frame of ours: each version reads the version
// of a frame first, so the peer can name both. Then it reads what the peer has said, since
// a connection that is closed with bytes unread is reset, and the answer with it.
func refuse(tcp *net.TCPConn, secure net.Conn) {
	answer := header{kind: kindWelcome, status: uint8(session.StatusFailed)}
	if writeFrame(secure, answer, nil) == nil && tcp.CloseWrite() == nil {
		_, _ = io.CopyN(io.Discard, tcp, bodyMax) // until Config.Handshake
	}
}

func (b *Backend) introduce(tcp *net.TCPConn, v *session.Visit, secure net.Conn,
	limit clock.Timer) error {
	h, body, err := readFrame(secure, kindHello, kindJoin)
	if err != nil {
		return err // without a word, but to a peer of another version
	}
	var g *inbound
	index := ctl
	if h.kind == kindHello {
		g, err = b.meet(&h, v.Host, body)
	} else {
		index = int(h.count)
		g, err = b.join(&h, body)
	}
	answer := header{kind: kindWelcome, status: uint8(session.StatusOf(err)), stamp: b.clock.Now()}
	if err != nil {
		return errors.Join(err, writeFrame(secure, answer, nil))
	}
	in := v.Leave() // that it is closed says now that nothing of this peer lands any more
	var secret []byte
	if h.kind == kindHello {
		answer.id, answer.ticket = g.session, uint64(g.ages.limit.Load())
		answer.count, answer.key = uint32(b.cfg.NotifyMax), uint32(b.cfg.MessageMax)
		secret = appendView(g.secret[:], tcp.RemoteAddr(), tcp.LocalAddr())
	}
	c, err := newConn(b, g, index, tcp, secure)
	if err != nil || !in || !g.place(c) {
		g.end(true)
		return errors.Join(err, driver.ErrPeerLost)
	}
	err = writeFrame(secure, answer, secret)
	if err == nil && !limit.Stop() {
		err = driver.ErrTimeout
	}
	if err != nil {
		g.end(true)
		return err
	}
	c.run()
	return nil
}

// meet makes the owner's end of a new peer.
func (b *Backend) meet(h *header, from session.Host, body []byte) (*inbound, error) {
	if len(body) > 64 || h.count < bulk || h.count > 1+connsMax {
		return nil, fmt.Errorf("a hello of %d bytes for %d connections: %w",
			len(body), h.count, driver.ErrCorrupt)
	}
	if subtle.ConstantTimeCompare(body, b.address.proof()) != 1 {
		return nil, driver.ErrPeerLost // it means a backend that is gone, and we have its port
	}
	g := newInbound(b, int(h.count))
	g.host = from
	g.ages.begin(b.cfg.Grace, time.Duration(min(h.ticket, uint64(graceMax))))
	g.room, g.answerMax = int(min(h.id, creditMax)), int(min(h.key, messageLimit))
	_, _ = rand.Read(g.secret[:]) // never fails: it ends the program instead
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.closed.Load() {
		return nil, driver.ErrPeerLost
	}
	if err := b.byHost.Take(from, "peers", "PeersMax"); err != nil {
		return nil, err
	}
	if g.further = max(0, len(g.conns)-1-max(b.cfg.Conns, ConnsDefault)); !b.quotas.add(
		&b.quotas.conns, from, g.further) {
		b.quotas.add(&b.quotas.conns, from, -g.further)
		b.byHost.Add(from, -1)
		return nil, fmt.Errorf("too many connections, raise Config.PeersMax: %w", driver.ErrFull)
	}
	for g.session = newTicket(); b.accepted[g.session] != nil; {
		g.session = newTicket()
	}
	b.accepted[g.session], b.byConn[g.conn] = g, g
	g.limit = clock.AfterRunning(b.clock, b.cfg.Handshake, g.expire)
	return g, nil
}

// join finds the peer that one more connection belongs to, which shows that it knows the
// secret of the first.
func (b *Backend) join(h *header, secret []byte) (*inbound, error) {
	b.mu.Lock()
	g := b.accepted[h.id]
	b.mu.Unlock()
	if g == nil || subtle.ConstantTimeCompare(g.secret[:], secret) != 1 {
		return nil, driver.ErrBadToken
	}
	if h.count < express || int(h.count) >= len(g.conns) {
		return nil, driver.ErrCorrupt
	}
	return g, nil
}

// dismiss forgets an inbound that has ended. left: nothing that it sent is to be received.
func (b *Backend) dismiss(g *inbound, left bool) {
	b.quotas.add(&b.quotas.conns, g.host, -g.further)
	b.mu.Lock()
	defer b.mu.Unlock()
	delete(b.accepted, g.session)
	delete(b.byConn, g.conn)
	if left {
		b.byHost.Add(g.host, -1)
	}
}

// depart makes the place of an inbound free that has ended, once all that it sent is received.
func (b *Backend) depart(g *inbound) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.byHost.Add(g.host, -1)
}
