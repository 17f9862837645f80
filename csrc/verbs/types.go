// SPDX-License-Identifier: Apache-2.0

package verbs

import (
	"fmt"
	"syscall"

	"github.com/sluicehq/sluice/csrc/ring"
	"github.com/sluicehq/sluice/driver"
)

// Done says how a batch ended.
type Done = ring.Done

// Config says how to open a Context.
type Config struct {
	BatchesMax int    // submitted and not polled; a power of two
	NotifyMax  int    // messages of one connection, on their way or not received
	ConnsMax   int    // connections over which peers may send messages
	Depth      int    // work requests under way on a queue pair
	SliceMax   uint64 // bytes of one work request
	FlightMax  uint64 // bytes under way on a queue pair: what a cancel waits for
	SpinNanos  uint64 // how long the thread polls before it sleeps
	WakeFD     int    // an eventfd, written for completions and messages while armed
	ControlFD  int    // an eventfd, written for each News

	// StallNanos is the time after which a queue pair has failed that has requests posted and
	// completes none. 0: without limit.
	StallNanos uint64
}

// RailConfig says how to open a rail: a port of a device.
type RailConfig struct {
	Device       string // its name, such as "mlx5_0"
	Port         int    // number of the port
	GID          int    // index in the port's table of GIDs
	MTU          int    // the largest to use, as enum ibv_mtu; 0: the port's
	Timeout      int    // an acknowledgement may take 4.096 us << Timeout
	Retries      int    // of an unacknowledged packet, 0 to 6
	Level        int    // service level
	TrafficClass int    // in the global route header
	EntriesMax   int    // most scatter-gather entries of a work request; 0: the device's limit
}

// Rail describes a rail that is open.
type Rail struct {
	DepthMax, SGEMax, InlineMax int
	MTU                         int // enum ibv_mtu
	DMABuf                      bool
	GID                         [16]byte
}

// Counters count what a rail has done since it was opened.
type Counters struct {
	BytesOut, BytesIn uint64 // acknowledged bytes of writes and of reads
	Requests          uint64 // work requests that were posted
	Reposted          uint64 // work requests posted once more after they failed on this rail
	Failures          uint64 // queue pairs that failed
	InFlight          uint64 // bytes that are posted now; the one value that also falls
}

// End describes one end of a queue pair to the other, which connects to it by that.
type End struct {
	QueuePair, Packet     uint32
	LID                   uint16
	MTU, Reads, LinkLayer uint8
	GID                   [16]byte
}

// Import describes memory of a peer.
type Import struct {
	Base, Size uint64
	ReadOnly   bool
	RemoteKeys []uint32 // the rkey for each queue pair; 0: not reachable over it
}

// Notif is a message of the peer's program. All bytes that it follows have landed.
type Notif struct {
	Conn uint64
	Data []byte
}

// The kinds of News.
const (
	PairLive   = 1
	PairFailed = 2
	PortUp     = 3
	PortDown   = 4
	DeviceGone = 5
)

// News is a change of a queue pair, a port or a device. The caller of this package, backends/rdma,
// reacts to it: it connects new queue pairs.
type News struct {
	Conn   uint64 // the connection of Pair; 0: it is news of Rail
	Kind   int    // PairLive to DeviceGone
	Pair   int
	Rail   int
	Status int32 // of the completion that failed the queue pair; Status names it
}

// Flags of Context.Pin and Context.Grant.
const (
	ReadOnly uint32 = 1
	Relaxed  uint32 = 2 // PCIe may reorder writes of the NIC, where it can
)

// Range is memory of this host or of a device, such as a GPU.
type Range struct {
	Addr, Len uint64

	// FD is a dma-buf, in which the memory begins at Offset; Offset and Addr are equal modulo the
	// page size. It must stay open until Pin.Close. -1: there is no dma-buf, and the kernel must
	// know the address itself, as it does for memory of the host, and with nvidia_peermem.
	FD     int
	Offset uint64
}

// Pin is a Range that the NIC of a rail knows for local use. Close makes the NIC forget it, and is
// idempotent. It returns driver.ErrBusy while a key uses the Pin.
type Pin interface{ Close() error }

// The bounds of a context.
const (
	RailsMax = 16      // rails
	PairsMax = 16      // queue pairs of a connection
	NotifMax = 4096    // bytes of a message
	KeysMax  = 4 << 20 // keys: each is below it
)

// The values of Done.Status that are not statuses of a work completion, which are above 0.
const (
	OK      int32 = 0
	Aborted int32 = -1001
	Revoked int32 = -1002
	Closed  int32 = -1003
	Lost    int32 = -1004

	ClosedUnproven int32 = -1005
	LostUnproven   int32 = -1006
)

var outcomeErrors = map[int32]error{
	Aborted: driver.ErrAborted, Revoked: driver.ErrRevoked, Closed: driver.ErrClosed,
	Lost:           driver.ErrPeerLost,
	ClosedUnproven: unproven(driver.ErrClosed), LostUnproven: unproven(driver.ErrPeerLost),
}

func unproven(why error) error {
	return fmt.Errorf("%w: what was sent may still land at the peer, until it revokes or ends: %w",
		why, driver.ErrUnproven)
}

// statusNames are the statuses of completions, by their number.
var statusNames = [...]string{
	"success", "local length error", "local queue pair operation error",
	"local EE context operation error",
	"local protection error", "work request flushed", "memory window bind error",
	"bad response error",
	"local access error", "remote invalid request error", "remote access error",
	"remote operation error",
	"transport retry counter exceeded", "receiver-not-ready retry counter exceeded",
	"local RDD violation error",
	"remote invalid RD request", "remote aborted error", "invalid EE context number",
	"invalid EE context state",
	"fatal error", "response timeout error", "general error",
}

// Status names the status of a completion, as in "transport retry counter exceeded (12)".
func Status(status int32) string {
	if status < 0 || int(status) >= len(statusNames) {
		return fmt.Sprintf("status %d", status)
	}
	return fmt.Sprintf("%s (%d)", statusNames[status], status)
}

// Error returns the error of package driver for the end of a batch, or nil. It names the piece if
// that is known.
func Error(d Done) error {
	if d.Status == OK {
		return nil
	}
	err, known := outcomeErrors[d.Status]
	if !known {
		err = fmt.Errorf("move bytes over RDMA: %s", Status(d.Status))
	}
	return d.PieceError(err)
}

// errnoError returns the error of package driver for an errno of a C function, or nil for 0. what
// is the operation, as a verb phrase.
func errnoError(what string, errno int64) error {
	e := syscall.Errno(errno)
	if err, known := ring.ErrnoErrors[e]; known {
		return err
	}
	switch e {
	case syscall.EHOSTUNREACH:
		return driver.ErrNoRoute
	case syscall.ETIMEDOUT:
		return fmt.Errorf("%s over RDMA: it takes too long: %w", what, driver.ErrTimeout)
	case syscall.ENOMEM:
		return fmt.Errorf("%s over RDMA: %w (locked memory is limited: `ulimit -l unlimited`, or "+
			"LimitMEMLOCK=infinity for a service)", what, e)
	default:
		return fmt.Errorf("%s over RDMA: %w", what, e)
	}
}
