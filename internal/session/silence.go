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

// IdleFailures is after how many times Config.Failure a backend gives up a silent host that no
// transfer waits for.
const IdleFailures = 6

// ImportMax is how long an owner may take to answer an Import: as long as the longest timeout of a
// transfer that programs use, since an owner that is kept off its processors answers late. A peer
// whose host is gone is lost sooner.
const ImportMax = 2 * time.Minute

// Outbound is what our kernel knows of the bytes that TCP connections to a host were given to send.
type Outbound struct {
	Unacked  bool          // some bytes, or a probe, are out and not acknowledged
	Pending  bool          // some bytes are not acknowledged, or have not gone out yet
	SinceAck time.Duration // since the last acknowledgement
}

// NoOutbound is what is known of no connection: Join anything to it.
var NoOutbound = Outbound{SinceAck: math.MaxInt64}

// Join is what is known of both. A host that has no room for what one connection brings may drop it
// without a word, and answer on the other.
func (o Outbound) Join(p Outbound) Outbound {
	return Outbound{o.Unacked || p.Unacked, o.Pending || p.Pending, min(o.SinceAck, p.SinceAck)}
}

// QueryOutbound asks the kernel. Of a connection that is closed, or is none of TCP, it knows
// nothing.
func QueryOutbound(conn syscall.RawConn) (o Outbound) {
	_ = conn.Control(func(fd uintptr) { o = QueryOutboundFD(int(fd)) })
	return o
}

// QueryOutboundFD is QueryOutbound for a descriptor.
func QueryOutboundFD(fd int) (o Outbound) {
	i, err := unix.GetsockoptTCPInfo(fd, unix.IPPROTO_TCP, unix.TCP_INFO)
	if err == nil {
		o.Unacked = i.Unacked > 0 || i.Probes > 0
		o.Pending = i.Unacked > 0 || i.Notsent_bytes > 0
		o.SinceAck = time.Duration(i.Last_ack_recv) * time.Millisecond
	}
	return o
}

// OutboundByHost asks the kernel about all connections of this process, by the other host's
// address: for a library that keeps its connections to itself.
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
	// from this Look on each saw unacknowledged bytes and no newer acknowledgement; 0: none did
	since int64
}

// Look returns for how long the host has acknowledged nothing of what it was sent. now is by the
// caller's clock, never 0; paused: this process did not run since the last Look, so that the
// silence proves nothing.
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
