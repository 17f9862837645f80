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
	"net/netip"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/clock"
	"github.com/sluicehq/sluice/internal/session"
)

// listen opens our port and fills in where peers find it.
func (b *Backend) listen() error {
	host, low, high, err := parseListen(b.cfg.Listen)
	if err != nil {
		return fmt.Errorf("config: Listen %q: %w", b.cfg.Listen, err)
	}
	for port := low; ; port++ {
		l, err := net.Listen("tcp", net.JoinHostPort(host, strconv.Itoa(port)))
		if err == nil {
			b.listener = l.(*net.TCPListener) // as the package net says
			return b.advertise(l.Addr())
		}
		if port == high || !errors.Is(err, syscall.EADDRINUSE) {
			return fmt.Errorf("listen for peers, see Config.Listen: %w", err)
		}
	}
}

// parseListen reads "host", "host:port", ":port" and "host:low-high".
func parseListen(s string) (host string, low, high int, err error) {
	if s == "" {
		return "", 0, 0, nil
	}
	host, ports, err := net.SplitHostPort(s)
	if err != nil {
		return "", 0, 0, fmt.Errorf("want host:port, host:low-high, or :port: %w", driver.ErrBounds)
	}
	first, last, ranged := strings.Cut(ports, "-")
	if !ranged {
		last = first
	}
	from, err1 := strconv.ParseUint(first, 10, 16)
	to, err2 := strconv.ParseUint(last, 10, 16)
	if err1 != nil || err2 != nil || from > to || ranged && from == 0 {
		return "", 0, 0, fmt.Errorf("%q are no ports: %w", ports, driver.ErrBounds)
	}
	return host, int(from), int(to), nil
}

func (b *Backend) advertise(at net.Addr) error {
	bound, err := netip.ParseAddrPort(at.String())
	if err != nil {
		return fmt.Errorf("listen at %v: %w", at, err)
	}
	hosts := b.cfg.Advertise
	if len(hosts) == 0 {
		hosts = ownHosts(bound.Addr())
	}
	for _, h := range hosts {
		b.address.places = append(b.address.places,
			net.JoinHostPort(h, strconv.Itoa(int(bound.Port()))))
	}
	return nil
}

// ownHosts lists where a socket that is bound to an address is reached: the loopback only
// where there is nothing else.
func ownHosts(bound netip.Addr) (list []string) {
	if !bound.IsUnspecified() {
		return []string{bound.Unmap().String()}
	}
	addresses, _ := net.InterfaceAddrs() // none is an answer
	for _, a := range addresses {
		p, err := netip.ParsePrefix(a.String())
		if err == nil && p.Addr().IsGlobalUnicast() && len(list) < placesMax {
			list = append(list, p.Addr().Unmap().String())
		}
	}
	if len(list) == 0 {
		list = []string{"127.0.0.1"}
	}
	return list
}

// nearBuffer is the send buffer of a connection within this host: its pages stay in a cache as they
// come round, which is worth a third. For other peers the kernel finds a size as it goes.
const nearBuffer = 384 << 10

// setSocketOptions has the kernel see to what pulse cannot: see session.KeepAlive.
func (b *Backend) setSocketOptions(tcp *net.TCPConn) {
	session.KeepAlive(tcp, b.cfg.Failure)
	near, _ := tcp.LocalAddr().(*net.TCPAddr)
	far, _ := tcp.RemoteAddr().(*net.TCPAddr)
	if near != nil && far != nil && near.IP.Equal(far.IP) {
		_ = tcp.SetWriteBuffer(nearBuffer) // or as much as the kernel allows
	}
}

// welcome begins to hear a connection.
func (b *Backend) welcome(conn net.Conn, v *session.Visit) bool {
	return b.tasks.Start(func() { b.handshake(conn.(*net.TCPConn), v) })
}

// handshake opens a connection, for as long as Config.Handshake, from when it has a place. One that
// says anything but what a peer says is told nothing.
func (b *Backend) handshake(tcp *net.TCPConn, v *session.Visit) {
	if !v.Wait() {
		return
	}
	defer v.Leave()
	// Time in which we are kept off our processors is not the other side's.
	limit := clock.AfterRunning(b.clock, b.cfg.Handshake, func() {
		_ = tcp.SetDeadline(time.Unix(1, 0)) // fails only where it is closed
	})
	defer limit.Stop()
	b.setSocketOptions(tcp)
	secure, err := b.answer(context.Background(), tcp)
	if err == nil {
		err = b.firstFrame(tcp, v, secure, limit)
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

func (b *Backend) firstFrame(tcp *net.TCPConn, v *session.Visit, secure net.Conn,
	limit clock.Timer) error {
	h, body, err := readFrame(secure, kindHello, kindJoin)
	if err != nil {
		return err // without a word, but to a peer of another version
	}
	var g *inbound
	index := control
	if h.kind == kindHello {
		g, err = b.onHello(&h, v.Host, body)
	} else {
		index = int(h.count)
		g, err = b.onJoin(&h, body)
	}
	answer := header{kind: kindWelcome, status: uint8(session.StatusOf(err)), stamp: b.clock.Now()}
	if err != nil {
		return errors.Join(err, writeFrame(secure, answer, nil))
	}
	in := v.Leave()
	var secret []byte
	if h.kind == kindHello {
		answer.id, answer.ticket = g.session, uint64(g.ages.limit.Load())
		answer.count, answer.key = uint32(b.cfg.NotifyMax), uint32(b.cfg.MessageMax)
		secret = g.secret[:]
	}
	c, err := newConn(b, g, index, tcp, secure)
	if err != nil || !in || !g.addConn(c) {
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

// onHello makes the owner's end of a new peer. One that asks for several times as many connections
// as we open ourselves takes as many places of Config.PeersMax.
func (b *Backend) onHello(h *header, from session.Host, body []byte) (*inbound, error) {
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
	ours := max(b.cfg.Conns, ConnsDefault)
	g.places = min((len(g.conns)-1+ours-1)/ours, b.byHost.Share(from))
	if fits, _ := b.byHost.Fits(from, g.places); !fits {
		return nil, driver.ErrFull
	}
	b.byHost.Add(from, g.places)
	for g.session = newTicket(); b.accepted[g.session] != nil; {
		g.session = newTicket()
	}
	b.accepted[g.session], b.byConn[g.conn] = g, g
	g.limit = clock.AfterRunning(b.clock, b.cfg.Handshake, g.expire)
	return g, nil
}

// onJoin finds the peer that one more connection belongs to, which shows that it knows the
// secret of the first.
func (b *Backend) onJoin(h *header, secret []byte) (*inbound, error) {
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

// forget forgets an inbound that has ended. left: nothing that it sent is to be received.
func (b *Backend) forget(g *inbound, left bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	delete(b.accepted, g.session)
	delete(b.byConn, g.conn)
	if left {
		b.byHost.Add(g.host, -g.places)
	}
}

// freePlaces makes the place of an inbound free that has ended, once all that it sent is received.
func (b *Backend) freePlaces(g *inbound) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.byHost.Add(g.host, -g.places)
}
