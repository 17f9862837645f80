// SPDX-License-Identifier: Apache-2.0

package tcp

import (
	"context"
	"crypto/rand"
	"crypto/subtle"
	"encoding/binary"
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
	var l net.Listener
	for port := low; ; port++ {
		l, err = net.Listen("tcp", net.JoinHostPort(host, strconv.Itoa(port)))
		if err == nil || port == high || !errors.Is(err, syscall.EADDRINUSE) {
			break
		}
	}
	if err != nil {
		return fmt.Errorf("listen for peers, see Config.Listen: %w", err)
	}
	tcp, ok := l.(*net.TCPListener)
	if !ok {
		return errors.Join(fmt.Errorf("listen at %v: no socket of TCP: %w",
			l.Addr(), driver.ErrNotSupported), l.Close())
	}
	b.listener = tcp
	return b.advertise(tcp.Addr())
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

// tune has the kernel see to what pulse cannot: see session.KeepAlive.
func (b *Backend) tune(tcp *net.TCPConn) {
	session.KeepAlive(tcp, b.cfg.Failure)
	near, _ := tcp.LocalAddr().(*net.TCPAddr)
	far, _ := tcp.RemoteAddr().(*net.TCPAddr)
	if near != nil && far != nil && near.IP.Equal(far.IP) {
		_ = tcp.SetWriteBuffer(nearBuffer) // or as much as the kernel allows
	}
}

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

// appendView appends the two ends of a connection as one side sees them: the initiator's, then the
// owner's. With a welcome the owner says what it sees. If the initiator sees the same, then
// no proxy on the way ended the connection and began another: its end is a word
// of the owner's kernel, which says it once the owner has stopped all its readers, or is dead.
// One that was reset proves nothing: kernels do that by themselves, and give the reader what
// had come before. Nor does one under TLS, whose end can be made up on the way.
func appendView(b []byte, initiator, owner net.Addr) []byte {
	for _, a := range []net.Addr{initiator, owner} {
		at, ok := a.(*net.TCPAddr)
		if !ok {
			return b
		}
		ip := at.AddrPort().Addr().As16()
		b = binary.LittleEndian.AppendUint16(append(b, ip[:]...), uint16(at.Port))
	}
	return b
}
