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

// listen opens the port, and puts the places where peers find it into address.
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
	for _, a := range session.HostAddresses() {
		list = append(list, a.String())
	}
	list = list[:min(len(list), placesMax)]
	if len(list) == 0 {
		list = []string{"127.0.0.1"}
	}
	return list
}

// nearBuffer is the send buffer of a connection within this host: its pages are used again while a
// cache still holds them, which is worth a third. Between hosts the kernel chooses the size.
const nearBuffer = 384 << 10

// setSocketOptions sets keepalive probes (session.KeepAlive) and the send buffer.
func (b *Backend) setSocketOptions(tcp *net.TCPConn) {
	session.KeepAlive(tcp, b.cfg.Failure)
	near, _ := tcp.LocalAddr().(*net.TCPAddr)
	far, _ := tcp.RemoteAddr().(*net.TCPAddr)
	if near != nil && far != nil && near.IP.Equal(far.IP) {
		_ = tcp.SetWriteBuffer(nearBuffer) // or as much as the kernel allows
	}
}

// acceptStranger starts the handshake of a connection that the lobby has let in.
func (b *Backend) acceptStranger(conn net.Conn, v *session.Visit) bool {
	return b.tasks.Start(func() { b.handshake(conn.(*net.TCPConn), v) })
}

// handshake reads the first frame of a connection and answers it, within Config.Handshake from when
// the lobby has a place for it. A connection that breaks the protocol is closed without an answer.
func (b *Backend) handshake(tcp *net.TCPConn, v *session.Visit) {
	if !v.Wait() {
		return
	}
	defer v.Leave()
	// Time in which this process is kept off its processors does not count.
	limit := clock.AfterRunning(b.clock, b.cfg.Handshake, func() {
		_ = tcp.SetDeadline(time.Unix(1, 0)) // fails only where it is closed
	})
	defer limit.Stop()
	b.setSocketOptions(tcp)
	secure, err := b.secureAnswer(context.Background(), tcp)
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

// refuse answers a hello of another version with a frame of this one: every version reads the
// version of a frame first, so the peer's error can name both. Then it reads what the peer has
// sent, since a connection that is closed with unread bytes is reset, and its answer lost.
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
		return err // without an answer, but for refuse
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
	c.startReading()
	return nil
}

// onHello makes the inbound of a new peer. A peer that wants several times as many connections as
// this backend opens to a peer takes as many places of Config.PeersMax.
func (b *Backend) onHello(h *header, from session.Host, body []byte) (*inbound, error) {
	if len(body) > 64 || h.count < bulk || h.count > 1+connsMax {
		return nil, fmt.Errorf("a hello of %d bytes for %d connections: %w",
			len(body), h.count, driver.ErrCorrupt)
	}
	if subtle.ConstantTimeCompare(body, b.address.proof()) != 1 {
		return nil, driver.ErrPeerLost // it is for an earlier backend at this port
	}
	g := newInbound(b, int(h.count))
	g.host = from
	g.ages.begin(b.cfg.Grace, time.Duration(min(h.ticket, uint64(graceMax))))
	g.answerRoom, g.answerMax = int(min(h.id, creditMax)), int(min(h.key, messageLimit))
	_, _ = rand.Read(g.secret[:]) // never fails: it ends the program instead
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.closed.Load() {
		return nil, driver.ErrPeerLost
	}
	usual := max(b.cfg.Conns, ConnsDefault)
	g.places = min((len(g.conns)-1+usual-1)/usual, b.byHost.Share(from))
	if fits, _ := b.byHost.Fits(from, g.places); !fits {
		return nil, driver.ErrFull
	}
	b.byHost.Add(from, g.places)
	for g.session = newTicket(); b.accepted[g.session] != nil; {
		g.session = newTicket()
	}
	b.accepted[g.session], b.acceptedByConn[g.connID] = g, g
	g.joinTimer = clock.AfterRunning(b.clock, b.cfg.Handshake, g.expire)
	return g, nil
}

// onJoin returns the inbound that one more connection belongs to. The connection shows that it
// knows the secret which the first was told.
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

// forget removes an inbound that has ended. free says that its places are free as well: the program
// has received all of its messages.
func (b *Backend) forget(g *inbound, free bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	delete(b.accepted, g.session)
	delete(b.acceptedByConn, g.connID)
	if free {
		b.byHost.Add(g.host, -g.places)
	}
}

// freePlaces frees the places of a forgotten inbound, when the program has received all its
// messages.
func (b *Backend) freePlaces(g *inbound) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.byHost.Add(g.host, -g.places)
}
