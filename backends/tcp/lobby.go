// SPDX-License-Identifier: Apache-2.0

package tcp

import (
	"errors"
	"net"
	"net/netip"
	"sync"
	"time"

	"github.com/sluicehq/sluice/internal/clock"
)

// accept takes connections until the listener is closed.
func (b *Backend) accept() {
	for {
		tcp, err := b.listener.AcceptTCP()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil {
			b.breathe() // out of descriptors: others may be given back
			continue
		}
		from := hostOf(tcp)
		if !b.handshakes.arrive(from) || !b.tasks.Start(func() { b.hear(tcp, from) }) {
			_ = tcp.Close()
		}
	}
}

// breathe waits a little.
func (b *Backend) breathe() {
	tick, timer := clock.After(b.clock, lobbyTick)
	defer timer.Stop()
	select {
	case <-tick:
	case <-b.stop:
	}
}

// host is what one machine on a network can be told apart by: an IPv4 address, or the network of
// an IPv6 address, in which a machine may have as many addresses as it likes.
type host netip.Prefix

func hostOf(c net.Conn) host {
	at, ok := c.RemoteAddr().(*net.TCPAddr)
	if !ok {
		return host{}
	}
	ip := at.AddrPort().Addr().Unmap().WithZone("")
	bits := 64
	if ip.Is4() {
		bits = 32
	}
	p, _ := ip.Prefix(bits) // fails for no address
	return host(p)
}

// perHost is how many of all places one host may have.
func perHost(all int) int { return max(1, all/2) }

// lobby is the connections that have not said yet what they are for. No more than Config.Handshakes
// are heard at a time, and of one host half as many: the others wait their turn.
type lobby struct {
	clock   clock.Clock
	mu      sync.Mutex
	most    int
	over    bool
	heard   map[net.Conn]visitor
	waiting map[host]int
}

type visitor struct {
	from  host
	since int64
}

const (
	// heardMin is what a connection has in any case to say what it is for. Where others wait,
	// the one that has had most is closed after it.
	heardMin = 500 * time.Millisecond

	lobbyTick = 5 * time.Millisecond
)

// queuedMax is how many connections of one host may wait.
func queuedMax(most int) int { return max(64, 4*most) }

func (l *lobby) open(most int, c clock.Clock) {
	l.clock = c
	l.most, l.heard, l.waiting = most, map[net.Conn]visitor{}, map[host]int{}
}

// arrive counts a connection that waits. It reports false if too many of its host do.
func (l *lobby) arrive(from host) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.over || l.waiting[from] >= queuedMax(l.most) {
		return false
	}
	l.waiting[from]++
	return true
}

// await waits for a place. It reports false if there is none within limit.
func (l *lobby) await(c net.Conn, from host, limit time.Duration, stop chan struct{}) bool {
	defer func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		if l.waiting[from]--; l.waiting[from] == 0 {
			delete(l.waiting, from)
		}
	}()
	for begin := l.clock.Now(); !l.enter(c, from); {
		if l.clock.Now()-begin > int64(limit) {
			return false
		}
		tick, timer := clock.After(l.clock, lobbyTick)
		select {
		case <-stop:
			timer.Stop()
			return false
		case <-tick:
		}
	}
	return true
}

// enter gives a connection a place if there is one, or if one that has been heard for long can
// be closed for it.
func (l *lobby) enter(c net.Conn, from host) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.over {
		return false
	}
	n := 0
	var oldest, oldestOfHost net.Conn
	for v, s := range l.heard {
		if oldest == nil || s.since < l.heard[oldest].since {
			oldest = v
		}
		if s.from != from {
			continue
		}
		if n++; oldestOfHost == nil || s.since < l.heard[oldestOfHost].since {
			oldestOfHost = v
		}
	}
	switch {
	case n >= perHost(l.most):
		oldest = oldestOfHost
	case len(l.heard) < l.most:
		oldest = nil
	}
	if oldest != nil {
		if l.clock.Now()-l.heard[oldest].since < int64(heardMin) {
			return false
		}
		_ = oldest.Close()
		delete(l.heard, oldest)
	}
	l.heard[c] = visitor{from, l.clock.Now()}
	return true
}

// leave takes a connection out that has said what it is for, or is closed.
func (l *lobby) leave(c net.Conn) {
	l.mu.Lock()
	delete(l.heard, c)
	l.mu.Unlock()
}

// close closes all connections, and lets none in.
func (l *lobby) close() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.over = true
	for c := range l.heard {
		_ = c.Close()
	}
}
