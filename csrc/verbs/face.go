// SPDX-License-Identifier: Apache-2.0

package verbs

import (
	"fmt"
	"syscall"

	"github.com/sluicehq/sluice/csrc/ring"
	"github.com/sluicehq/sluice/driver"
)

// Done is the end of a batch.
type Done = ring.Done

// Config says how to open a Context.
type Config struct {
	BatchesMax int    // submitted and not polled; a power of two
	NotifyMax  int    // messages of one connection, on their way or not received
	ConnsMax   int    // connections that may receive
	Depth      int    // work requests under way on a queue pair
	SliceMax   uint64 // bytes of one work request
	FlightMax  uint64 // bytes under way on a queue pair: what a cancel waits for
	SpinNanos  uint64 // how long the thread looks before it sleeps
	// a queue pair over which nothing comes back for so long has failed; 0: it may take for ever
	StallNanos uint64
	WakeFD     int // an eventfd for completions and messages, when armed
	ControlFD  int // an eventfd for news
}

// RailConfig says how to open a rail: a port of a device.
type RailConfig struct {
	Device       string // as "mlx5_0"
	Port, GID    int    // numbers; the GID's is its index
	MTU          int    // enum ibv_mtu at most; 0: the port's
	Timeout      int    // of an acknowledgement: 4.096 us << Timeout
	Retries      int    // 0 to 6
	Level        int    // service level
	TrafficClass int    // of the global route
	EntriesMax   int    // of local memory in one work request; 0: as many as the device takes
}

// Rail is what a rail can do.
type Rail struct {
	DepthMax, SGEMax, InlineMax int
	MTU                         int // enum ibv_mtu
	DMABuf                      bool
	GID                         [16]byte
}

// Counters are counted since a rail was opened.
type Counters struct {
	BytesOut, BytesIn uint64 // by writes, by reads; those that were acknowledged
	Requests          uint64
	Again             uint64 // requests posted once more after they failed on this rail
	Failures          uint64 // of its queue pairs
	InFlight          uint64 // bytes, now
}

// End is one end of a queue pair, as the other end needs it.
type End struct {
	QueuePair, Packet     uint32
	LID                   uint16
	MTU, Reads, LinkLayer uint8
	GID                   [16]byte
}

// Import is a peer's memory.
type Import struct {
	Base, Size uint64
	ReadOnly   bool
	RemoteKeys []uint32 // for each queue pair; 0: not reachable over it
}

// Notif is a message that followed its data.
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

// News is what the driver of the connections must know of.
type News struct {
	Conn   uint64 // 0: of a rail
	Kind   int
	Pair   int
	Rail   int
	Status int32 // of the completion that failed a queue pair, for Status
}

// Flags of Context.Pin and Context.Grant.
const (
	ReadOnly uint32 = 1
	Relaxed  uint32 = 2 // PCIe may reorder writes of the NIC, where it can
)

// Device is memory of a device, such as a card's.
type Device struct {
	Addr, Len uint64

	// FD is of a dma-buf, in which the memory begins at Offset, as far within a page as Addr
	// does. It must stay open until Pin.Close. -1: none, then the kernel must know the
	// address, as it does with nvidia_peermem.
	FD     int
	Offset uint64
}

// Bounds of a context: rails, queue pairs of a connection, bytes of a message, and keys, which
// are below their bound.
const (
	RailsMax = 16
	PairsMax = 16
	NotifMax = 4096
	KeysMax  = 4 << 20
)

// The outcomes of Done.Status beside those of completions, which are above 0.
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

// Error makes an error of the contract of a completion. It names the piece where
// that is known.
func Error(d Done) error {
	if d.Status == OK {
		return nil
	}
	err, ours := outcomeErrors[d.Status]
	if !ours {
		err = fmt.Errorf("move bytes over RDMA: %s", Status(d.Status))
	}
	if d.Piece < 0 {
		return err
	}
	return &driver.PieceError{Piece: int(d.Piece), Err: err}
}

// errnoError makes an error of an errno; 0 is none.
func errnoError(what string, errno int64) error {
	switch e := syscall.Errno(errno); e {
	case 0:
		return nil
	case syscall.EAGAIN:
		return driver.ErrFull
	case syscall.ERANGE:
		return driver.ErrBounds
	case syscall.EROFS:
		return driver.ErrReadOnly
	case syscall.EPIPE:
		return driver.ErrPeerLost
	case syscall.EBADF:
		return driver.ErrClosed
	case syscall.ESTALE:
		return driver.ErrRevoked
	case syscall.EBUSY:
		return driver.ErrBusy
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

// refusalError makes an error of what submit returns: it names the piece where one is wrong.
func refusalError(rc int64) error {
	switch err := errnoError("submit", rc&0xffff); err {
	case driver.ErrBounds, driver.ErrReadOnly, driver.ErrRevoked, driver.ErrNoRoute:
		return &driver.PieceError{Piece: int(rc >> 16), Err: err}
	default:
		return err
	}
}
