// SPDX-License-Identifier: Apache-2.0

package session

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

// IdleFailures is a number of Config.Failure: a backend gives up a host that has been silent for so
// long although no transfer waits for it.
const IdleFailures = 6

// ImportMax is how long an owner may take to answer an Import: as long as the longest timeout of a
// transfer that programs use, since an owner that is kept off its processors answers late. A peer
// whose host is gone is lost sooner.
const ImportMax = 2 * time.Minute

// Outbound is what this host's kernel knows of the bytes to be sent over TCP connections to another
// host.
type Outbound struct {
	Unacked  bool          // some bytes, or a probe, were sent and are not acknowledged
	Pending  bool          // some bytes are not acknowledged, or not sent yet
	SinceAck time.Duration // time since the last acknowledgement
}

// NoOutbound is the Outbound of no connection: joined with another it gives that one.
var NoOutbound = Outbound{SinceAck: math.MaxInt64}

// Join returns the Outbound of the connections of both. A host that lacks memory may drop the bytes
// of one connection silently, and still acknowledge those of another.
func (o Outbound) Join(p Outbound) Outbound {
	return Outbound{o.Unacked || p.Unacked, o.Pending || p.Pending, min(o.SinceAck, p.SinceAck)}
}

// QueryOutbound asks the kernel about a connection. For one that is closed, or not of TCP, it
// returns the zero value.
func QueryOutbound(conn syscall.RawConn) (o Outbound) {
	_ = conn.Control(func(fd uintptr) { o = QueryOutboundFD(int(fd)) })
	return o
}

// QueryOutboundFD is QueryOutbound for a file descriptor.
func QueryOutboundFD(fd int) (o Outbound) {
	i, err := unix.GetsockoptTCPInfo(fd, unix.IPPROTO_TCP, unix.TCP_INFO)
	if err == nil {
		o.Unacked = i.Unacked > 0 || i.Probes > 0
		o.Pending = i.Unacked > 0 || i.Notsent_bytes > 0
		o.SinceAck = time.Duration(i.Last_ack_recv) * time.Millisecond
	}
	return o
}

// OutboundByHost asks the kernel about all TCP connections of this process, and returns an Outbound
// for each other host: for connections of a library that does not give their descriptors.
func OutboundByHost() map[netip.Addr]Outbound {
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
			o = NoOutbound
		}
		hosts[host] = o.Join(QueryOutboundFD(fd))
	}
	return hosts
}

// SilenceWatch measures a host's silence. One goroutine at a time may use it.
type SilenceWatch struct {
	// since is the time of a Look. It and all later ones found unacknowledged bytes, and no later
	// one a newer acknowledgement. 0: the last Look found none.
	since int64
}

// Look returns for how long the host has acknowledged nothing of what it was sent. now is the time
// by the caller's clock, in nanoseconds, and not 0. paused says that this process did not run for a
// while since the last Look: then the silence so far proves nothing.
func (w *SilenceWatch) Look(o Outbound, now int64, paused bool) time.Duration {
	switch {
	case !o.Unacked || paused:
		w.since = 0
	case w.since == 0 || now-int64(o.SinceAck) > w.since:
		w.since = now
	default:
		return time.Duration(now - w.since)
	}
	return 0
}

// HostLost is the error of a peer whose host was silent for so long.
func HostLost(silent time.Duration) error {
	return fmt.Errorf("the peer's host has acknowledged nothing for %v: it is down, or out of "+
		"reach: %w", silent.Round(time.Millisecond), driver.ErrPeerLost)
}

// KeepAlive has the kernel probe the host of an idle connection, and close the connection when
// IdleFailures probes in a row, one each failure, have no answer. The probes also keep a NAT from
// forgetting the connection. TCP_USER_TIMEOUT is not used: it would close a connection whose host
// answers, but whose peer's process has read nothing for so long.
func KeepAlive(tcp *net.TCPConn, failure time.Duration) {
	each := max(failure, time.Second)
	_ = tcp.SetKeepAliveConfig(net.KeepAliveConfig{ // a kernel without one of these takes longer
		Enable: true, Idle: each, Interval: each, Count: IdleFailures,
	})
}
