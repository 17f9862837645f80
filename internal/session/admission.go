// SPDX-License-Identifier: Apache-2.0

package session

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/clock"
)

// HandshakeMin is the time that each connection has for its handshake, however many wait. The Lobby
// counts it in beats of a timer, not by the clock: while this process is stopped there are no
// beats, so it does not take messages that it has not read yet for silence.
const HandshakeMin = 500 * time.Millisecond

const (
	lobbyBeat = HandshakeMin / 20

	// One beat had begun when the connection came, and one may have stood still.
	leastBeats = int(HandshakeMin/lobbyBeat) + 2
)

// Rank says how far a connection has authenticated.
//
// If a place is needed, the Lobby closes a connection of the lowest rank among those that have had
// HandshakeMin. It never closes one of rank ShownAll.
type Rank uint8

// Of connections that have had HandshakeMin one of the lowest rank goes first, and ShownAll never.
const (
	ShownNothing  Rank = iota
	ShownIdentity      // its user or certificate
	ShownAll           // all that the listener asks for
)

// Lobby holds connections from the time that they are accepted until they call Leave. Any goroutine
// may call its methods.
type Lobby struct {
	clock clock.Clock

	mu      sync.Mutex // guards what follows
	places  HostCount
	waiting HostCount
	in      []*Visit // that have a place, the oldest first
	queue   []*Visit // that wait, the oldest first
	beats   int
	timer   clock.Timer // nil: none waits
	closed  bool
	out     []net.Conn // that are closed once mu is not held: TLS may say good-bye
}

// Visit is a connection's stay in a Lobby.
type Visit struct {
	Host Host

	lobby *Lobby
	conn  net.Conn
	rank  Rank
	since int           // beats, when it got its place
	ready chan struct{} // closed when it has a place, or has none any more
	gone  bool          // it has left, or its connection is closed
}

// NewLobby returns a Lobby with a number of places. Eight times as many connections, and at
// least 128, may wait beside them, of which one host has at most half.
func NewLobby(places int, c clock.Clock) *Lobby {
	return &Lobby{clock: c, places: HostCount{Most: places},
		waiting: HostCount{Most: max(128, 8*places)}}
}

// Arrive adds a connection. It returns nil if too many connections of its host wait. If too many
// wait in all, Arrive closes the last one of the host with the most waiting connections.
func (l *Lobby) Arrive(conn net.Conn) *Visit {
	v := &Visit{Host: HostOf(conn), lobby: l, conn: conn, ready: make(chan struct{})}
	l.mu.Lock()
	defer l.unlock()
	if l.closed {
		return nil
	}
	if fits, share := l.waiting.Fits(v.Host, 1); !fits {
		last := l.last()
		if share || l.waiting.of[last.Host] <= l.waiting.of[v.Host]+1 {
			return nil
		}
		l.evict(last)
	}
	l.waiting.Add(v.Host, 1)
	l.queue = append(l.queue, v)
	l.admit()
	return v
}

// last returns the newest waiting connection of the host of which most wait.
func (l *Lobby) last() (last *Visit) {
	for _, v := range l.queue {
		if last == nil || l.waiting.of[v.Host] >= l.waiting.of[last.Host] {
			last = v
		}
	}
	return last
}

// admit gives places to waiting connections, as far as there are places for them.
func (l *Lobby) admit() {
	l.queue = slices.DeleteFunc(l.queue, func(v *Visit) bool {
		if !l.makeRoom(v.Host) {
			return false
		}
		l.waiting.Add(v.Host, -1)
		l.places.Add(v.Host, 1)
		v.since = l.beats
		l.in = append(l.in, v)
		close(v.ready)
		return true
	})
	if len(l.queue) > 0 && l.timer == nil {
		l.timer = l.clock.AfterFunc(lobbyBeat, l.tick)
	}
}

// makeRoom reports whether there is a place for a connection of a host, and closes another one for
// it if it may. For a host that has its share, it closes only connections of that host.
func (l *Lobby) makeRoom(host Host) bool {
	fits, share := l.places.Fits(host, 1)
	if fits {
		return true
	}
	var first *Visit
	for _, v := range l.in {
		if v.rank < ShownAll && l.beats-v.since >= leastBeats && (!share || v.Host == host) &&
			(first == nil || v.rank < first.rank) {
			first = v
		}
	}
	if first != nil {
		l.evict(first)
	}
	return first != nil
}

// tick counts a beat. If this process was stopped before, that is one beat, too.
func (l *Lobby) tick() {
	l.mu.Lock()
	defer l.unlock()
	l.timer = nil
	if !l.closed {
		l.beats++
		l.admit()
	}
}

// evict removes a connection and has unlock close it.
func (l *Lobby) evict(v *Visit) {
	l.remove(v)
	l.out = append(l.out, v.conn)
}

// remove removes a connection.
func (l *Lobby) remove(v *Visit) {
	v.gone = true
	if i := slices.Index(l.in, v); i >= 0 {
		l.in = slices.Delete(l.in, i, i+1)
		l.places.Add(v.Host, -1)
		return
	}
	i := slices.Index(l.queue, v)
	l.queue = slices.Delete(l.queue, i, i+1)
	l.waiting.Add(v.Host, -1)
	close(v.ready)
}

// unlock unlocks mu and closes the connections that were turned out.
func (l *Lobby) unlock() {
	out := l.out
	l.out = nil
	l.mu.Unlock()
	for _, conn := range out {
		_ = conn.Close() // nothing was said over it
	}
}

// Close closes all connections, and refuses new ones.
func (l *Lobby) Close() {
	l.mu.Lock()
	defer l.unlock()
	l.closed = true
	if l.timer != nil {
		l.timer.Stop()
	}
	for len(l.queue) > 0 {
		l.evict(l.queue[0])
	}
	for len(l.in) > 0 {
		l.evict(l.in[0])
	}
}

// Wait waits for a place. It returns false if the connection was closed instead.
func (v *Visit) Wait() bool {
	<-v.ready
	return v.Show(ShownNothing)
}

// Show records how far a connection has authenticated. It returns false if the connection was
// closed.
func (v *Visit) Show(rank Rank) bool {
	v.lobby.mu.Lock()
	defer v.lobby.mu.Unlock()
	v.rank = max(v.rank, rank)
	return !v.gone
}

// Leave frees the place of a connection. It returns false if the Lobby has closed the connection.
func (v *Visit) Leave() bool {
	v.lobby.mu.Lock()
	defer v.lobby.unlock()
	if v.gone {
		return false
	}
	v.lobby.remove(v)
	v.lobby.admit()
	return true
}

// Host identifies a machine on a network: by its IPv4 address, or by the network of its IPv6
// address, since a machine may have any number of addresses in that. Connections without an
// address, as over Unix sockets, have the zero Host.
type Host netip.Prefix

// String implements fmt.Stringer.
func (h Host) String() string {
	p := netip.Prefix(h)
	switch {
	case !p.IsValid():
		return "unknown"
	case p.IsSingleIP():
		return p.Addr().String()
	}
	return p.String()
}

// HostOf returns the Host at the other end of a connection.
func HostOf(conn net.Conn) Host {
	at := conn.RemoteAddr()
	if at == nil {
		return Host{}
	}
	from, err := netip.ParseAddrPort(at.String())
	if err != nil {
		return Host{}
	}
	ip := from.Addr().Unmap().WithZone("")
	bits := 64
	if ip.Is4() {
		bits = 32
	}
	p, _ := ip.Prefix(bits) // fails for more bits than an address has
	return Host(p)
}

// HostAddresses returns the global addresses of this host. There are none after an error of the
// kernel.
func HostAddresses() (list []netip.Addr) {
	addresses, _ := net.InterfaceAddrs()
	for _, a := range addresses {
		p, err := netip.ParsePrefix(a.String())
		if err == nil && p.Addr().IsGlobalUnicast() {
			list = append(list, p.Addr().Unmap())
		}
	}
	return list
}

// HostCount counts, by host, the uses of a limited resource. One host may have at most half of it,
// except the zero Host. Only one goroutine at a time may call its methods.
type HostCount struct {
	Most int // set before use

	sum int
	of  map[Host]int
}

// Sum returns the uses of all hosts.
func (c *HostCount) Sum() int { return c.sum }

// Share returns how many uses a host may have.
func (c *HostCount) Share(host Host) int {
	if host == (Host{}) {
		return c.Most
	}
	return max(1, c.Most/2)
}

// Fits reports whether a host may have n more uses. share says that it may not because of its
// share.
func (c *HostCount) Fits(host Host, n int) (fits, share bool) {
	share = n > c.Share(host)-c.of[host]
	return n <= c.Most-c.sum && !share, share
}

// Take adds one use to a host if that fits. Otherwise its error, a driver.ErrFull, says how many of
// what there are, and which field of the Config limits them.
func (c *HostCount) Take(host Host, what, field string) error {
	fits, share := c.Fits(host, 1)
	switch {
	case fits:
		c.Add(host, 1)
		return nil
	case share:
		return fmt.Errorf("%d %s of one host, raise Config.%s: %w", c.of[host], what, field,
			driver.ErrFull)
	}
	return fmt.Errorf("%d %s, raise Config.%s: %w", c.sum, what, field, driver.ErrFull)
}

// Add adds n uses to a host without a check; n may be negative.
func (c *HostCount) Add(host Host, n int) {
	if c.of == nil {
		c.of = map[Host]int{}
	}
	c.sum += n
	if c.of[host] += n; c.of[host] == 0 {
		delete(c.of, host)
	}
}

// acceptPause is how long Serve waits before it tries again: while the Lobby has no room for a
// connection of a Unix socket, or the kernel has no free descriptor.
const acceptPause = 5 * time.Millisecond

// Serve accepts connections until the listener ends, and returns its error. It calls start for each
// one that has arrived: start begins a goroutine, which first waits for the connection's place. If
// start returns false, it has begun none, and Serve closes the connection.
func (l *Lobby) Serve(from net.Listener, start func(net.Conn, *Visit) bool) error {
	for {
		conn, err := from.Accept()
		if err != nil && isTemporary(err) {
			time.Sleep(acceptPause)
			continue
		}
		if err != nil {
			return err
		}
		v := l.Arrive(conn)
		for v == nil && HostOf(conn) == (Host{}) && !l.isClosed() {
			time.Sleep(acceptPause) // the next ones wait in the kernel: all are of one host
			v = l.Arrive(conn)
		}
		if v == nil {
			_ = conn.Close()
		} else if !start(conn, v) {
			_ = conn.Close()
			v.Leave()
		}
	}
}

func (l *Lobby) isClosed() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.closed
}

// isTemporary reports whether a later Accept may succeed: other connections may use all descriptors
// now.
func isTemporary(err error) bool {
	var errno syscall.Errno
	return errors.As(err, &errno) &&
		!slices.Contains([]syscall.Errno{syscall.EBADF, syscall.EINVAL, syscall.ENOTSOCK}, errno)
}

// Between tries to connect to a listener that hung up there is a pause, which grows.
const AcceptPauseMin, AcceptPauseMax = 20 * time.Millisecond, time.Second

// HungUp reports whether a handshake failed because the other side ended the connection without a
// word: it was late, or too many waited there. A later try may do better.
func HungUp(err error) bool {
	return slices.ContainsFunc([]error{io.EOF, io.ErrUnexpectedEOF, syscall.ECONNRESET,
		syscall.EPIPE}, func(is error) bool { return errors.Is(err, is) })
}
