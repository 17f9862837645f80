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

// HandshakeMin is what a connection has for its handshake in any case. It is counted in beats of
// a timer that runs while others wait. While this process stands still there are no beats: it
// would take for silence what it has not read yet.
const HandshakeMin = 500 * time.Millisecond

const (
	lobbyBeat = HandshakeMin / 20

	// One beat had begun when the connection came, and one may have stood still.
	leastBeats = int(HandshakeMin/lobbyBeat) + 2
)

// Rank says what a connection has shown of itself.
type Rank uint8

// Of connections that have had HandshakeMin one of the lowest rank goes first, and ShownAll never.
const (
	ShownNothing  Rank = iota
	ShownIdentity      // its user or certificate
	ShownAll           // all that the listener asks for
)

// Lobby holds connections from when they are accepted until they leave. Its methods may be called
// by any goroutine.
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

// Arrive takes a connection in; nil: too many of its host wait. Where too many of all hosts wait,
// the last of the host that has most of them is closed for it.
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
		l.turnOut(last)
	}
	l.waiting.Add(v.Host, 1)
	l.queue = append(l.queue, v)
	l.admit()
	return v
}

// last returns the connection that came last of the host of which most wait.
func (l *Lobby) last() (last *Visit) {
	for _, v := range l.queue {
		if last == nil || l.waiting.of[v.Host] >= l.waiting.of[last.Host] {
			last = v
		}
	}
	return last
}

// admit gives places to those that wait and may have one.
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

// makeRoom reports whether there is a place for a host. One that has its share gets a place of its
// own connections alone.
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
		l.turnOut(first)
	}
	return first != nil
}

// tick counts a beat, however long this process stood still before it.
func (l *Lobby) tick() {
	l.mu.Lock()
	defer l.unlock()
	l.timer = nil
	if !l.closed {
		l.beats++
		l.admit()
	}
}

// turnOut takes a connection out, and has it closed.
func (l *Lobby) turnOut(v *Visit) {
	l.remove(v)
	l.out = append(l.out, v.conn)
}

// remove takes a connection out.
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

// unlock closes what was turned out.
func (l *Lobby) unlock() {
	out := l.out
	l.out = nil
	l.mu.Unlock()
	for _, conn := range out {
		_ = conn.Close() // nothing was said over it
	}
}

// Close closes all connections, and lets none in.
func (l *Lobby) Close() {
	l.mu.Lock()
	defer l.unlock()
	l.closed = true
	if l.timer != nil {
		l.timer.Stop()
	}
	for len(l.queue) > 0 {
		l.turnOut(l.queue[0])
	}
	for len(l.in) > 0 {
		l.turnOut(l.in[0])
	}
}

// Wait waits for a place. It reports false when the connection was closed instead.
func (v *Visit) Wait() bool {
	<-v.ready
	return v.Show(ShownNothing)
}

// Show says what a connection has shown. It reports false for one that was closed.
func (v *Visit) Show(rank Rank) bool {
	v.lobby.mu.Lock()
	defer v.lobby.mu.Unlock()
	v.rank = max(v.rank, rank)
	return !v.gone
}

// Leave makes the place of a connection free, and reports whether it had one: the Lobby may have
// closed it.
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

// Host is what one machine on a network can be told apart by: an IPv4 address, or the network of
// an IPv6 address, in which a machine may have as many addresses as it likes. The zero Host is
// that of connections without an address, as over Unix sockets.
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

// HostOf returns where a connection comes from.
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

// HostCount counts what hosts hold of a bound: one host at most half of it, but for the zero Host.
// Its methods may be called by one goroutine at a time.
type HostCount struct {
	Most int // set before use

	sum int
	of  map[Host]int
}

// Sum is what all hosts hold.
func (c *HostCount) Sum() int { return c.sum }

// Share is what a host may hold.
func (c *HostCount) Share(host Host) int {
	if host == (Host{}) {
		return c.Most
	}
	return max(1, c.Most/2)
}

// Fits reports whether a host may hold n more. share: it would have more than its share.
func (c *HostCount) Fits(host Host, n int) (fits, share bool) {
	share = n > c.Share(host)-c.of[host]
	return n <= c.Most-c.sum && !share, share
}

// Take has a host hold one more, or says that it may not: one of what, of which that field of a
// Config allows only so many.
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

// Add has a host hold n more, whether they fit or not; n may be negative.
func (c *HostCount) Add(host Host, n int) {
	if c.of == nil {
		c.of = map[Host]int{}
	}
	c.sum += n
	if c.of[host] += n; c.of[host] == 0 {
		delete(c.of, host)
	}
}

// breath is how long Serve waits for room, or where the kernel has no more descriptors.
const breath = 5 * time.Millisecond

// Serve accepts connections until the listener ends, and says how it ended. start begins a
// goroutine for each, which waits for its place first; it reports false where it may not.
func (l *Lobby) Serve(from net.Listener, start func(net.Conn, *Visit) bool) error {
	for {
		conn, err := from.Accept()
		if err != nil && passes(err) {
			time.Sleep(breath)
			continue
		}
		if err != nil {
			return err
		}
		v := l.Arrive(conn)
		for v == nil && HostOf(conn) == (Host{}) && !l.isClosed() {
			time.Sleep(breath) // the next ones wait in the kernel: all are of one host
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

// passes reports whether Accept may do better later: others may hold all descriptors.
func passes(err error) bool {
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
