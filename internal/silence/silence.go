// SPDX-License-Identifier: Apache-2.0

// Package silence tells a host that is gone from a process that is late. The kernel of a live host
// acknowledges what a process does not read, because it is stopped or kept off its processors: how
// long that may take says the program that waits. A host that acknowledges nothing for a while is
// down, or out of reach.
package silence

import (
	"fmt"
	"math"
	"net"
	"net/netip"
	"os"
	"strconv"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/driver"
)

// IdleFailures is after how many times its limit a silent host is given up where no transfer waits.
const IdleFailures = 6

// ImportMax is how long an owner may take to answer an Import: as long as the slowest caller of a
// transfer waits for a process that is kept off its processors. One whose host is gone is lost
// before.
const ImportMax = 2 * time.Minute

// Outbound is what our kernel knows of the bytes that TCP connections to a host were given to send.
type Outbound struct {
	Waits bool          // some, or a probe, are out, and not acknowledged
	Left  bool          // some are out, or have not gone out
	Acked time.Duration // ago the last acknowledgement came
}

// None is what is known of no connection: Join anything to it.
var None = Outbound{Acked: math.MaxInt64}

// Join is what is known of both. A host that has no room for what one connection brings may drop it
// without a word, and answer on the other.
func (o Outbound) Join(p Outbound) Outbound {
	return Outbound{o.Waits || p.Waits, o.Left || p.Left, min(o.Acked, p.Acked)}
}

// Of asks the kernel. Of a connection that is closed, or is none of TCP, it knows nothing.
func Of(conn syscall.RawConn) (o Outbound) {
	_ = conn.Control(func(fd uintptr) { o = OfFD(int(fd)) })
	return o
}

// OfFD is Of for a descriptor.
func OfFD(fd int) (o Outbound) {
	i, err := unix.GetsockoptTCPInfo(fd, unix.IPPROTO_TCP, unix.TCP_INFO)
	if err == nil {
		o.Waits = i.Unacked > 0 || i.Probes > 0
		o.Left = i.Unacked > 0 || i.Notsent_bytes > 0
		o.Acked = time.Duration(i.Last_ack_recv) * time.Millisecond
	}
	return o
}

// ByHost asks the kernel about all connections of this process, by the other host's address: for a
// library that keeps its connections to itself.
func ByHost() map[netip.Addr]Outbound {
	hosts := map[netip.Addr]Outbound{}
	list, _ := os.ReadDir("/proc/self/fd") // without /proc none is known
	for _, f := range list {
		fd, err := strconv.Atoi(f.Name())
		if err != nil {
			continue
		}
		at, err := unix.Getpeername(fd)
		if err != nil {
			continue // no socket, or not connected
		}
		kind, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_PROTOCOL)
		if err != nil || kind != unix.IPPROTO_TCP {
			continue
		}
		var host netip.Addr
		switch at := at.(type) {
		case *unix.SockaddrInet4:
			host = netip.AddrFrom4(at.Addr)
		case *unix.SockaddrInet6:
			host = netip.AddrFrom16(at.Addr).Unmap()
		default:
			continue
		}
		o, known := hosts[host]
		if !known {
			o = None
		}
		hosts[host] = o.Join(OfFD(fd))
	}
	return hosts
}

// Watch measures a host's silence. One goroutine at a time may use it.
type Watch struct {
	since int64 // nothing was acknowledged since, while something waited; 0: nothing waited
}

// Look returns for how long the host has acknowledged nothing of what it was sent. now is by the
// caller's clock, never 0; stood: this process stood still since the last Look.
func (w *Watch) Look(o Outbound, now int64, stood bool) time.Duration {
	switch {
	case !o.Waits || stood:
		w.since = 0
	case w.since == 0 || now-int64(o.Acked) > w.since:
		w.since = now
	default:
		return time.Duration(now - w.since)
	}
	return 0
}

// Error says that a host was silent for so long.
func Error(silent time.Duration) error {
	return fmt.Errorf("the peer's host has acknowledged nothing for %v: it is down, or out of "+
		"reach: %w", silent.Round(time.Millisecond), driver.ErrPeerLost)
}

// KeepAlive has the kernel give up a host that answers no probe: on a connection that carries
// nothing there is nothing else that it could acknowledge. The probes also keep a NAT from
// forgetting it. TCP_USER_TIMEOUT would end a connection whose peer's process has read nothing for
// so long, although its host answers.
func KeepAlive(tcp *net.TCPConn, failure time.Duration) {
	each := max(failure, time.Second)
	_ = tcp.SetKeepAliveConfig(net.KeepAliveConfig{ // a kernel without one of these takes longer
		Enable: true, Idle: each, Interval: each, Count: IdleFailures,
	})
}
