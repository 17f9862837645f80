// SPDX-License-Identifier: Apache-2.0

package csrc

import (
	"fmt"
	"syscall"

	"github.com/sluicehq/sluice/driver"
)

// VerbsConfig says how to open a VerbsContext.
type VerbsConfig struct {
	BatchesMax int    // submitted and not polled; a power of two
	NotesMax   int    // messages of one connection, on their way or not received
	ConnsMax   int    // connections that may receive
	Depth      int    // work requests under way on a lane
	SliceMax   uint64 // bytes of one work request
	FlightMax  uint64 // bytes under way on a lane: what a cancel waits for
	SpinNanos  uint64 // how long the thread looks before it sleeps
	StallNanos uint64 // a lane over which nothing comes back for so long has failed; 0: it may take for ever
	WakeFD     int    // an eventfd for completions and messages, when armed
	ControlFD  int    // an eventfd for news
}

// VerbsRailConfig says how to open a rail: a port of a device.
type VerbsRailConfig struct {
	Device       string // as "mlx5_0"
	Port, GID    int    // numbers; the GID's is its index
	MTU          int    // enum ibv_mtu at most; 0: the port's
	Timeout      int    // of an acknowledgement: 4.096 us << Timeout
	Retries      int    // 0 to 6
	Level        int    // service level
	TrafficClass int    // of the global route
	EntriesMax   int    // of local memory in one work request; 0: as many as the device takes
}

// VerbsRail is what a rail can do.
type VerbsRail struct {
	DepthMax, SGEMax, InlineMax int
	Reads                       int // under way at a time
	MTU, State, LinkLayer       int // enums of verbs
	Windows, DMABuf, Relaxed    bool
	LID                         uint16
	GID                         [16]byte
	RegistrationMax             uint64
	DriverName                  string // of the device in the kernel, as "uverbs0"
}

// VerbsCounters are counted since a rail was opened.
type VerbsCounters struct {
	BytesOut, BytesIn            uint64 // by writes, by reads; those that were acknowledged
	Requests, Posts, Completions uint64
	Again                        uint64 // requests posted once more after they failed on this rail
	Failures                     uint64 // of its queue pairs
	InFlight                     uint64 // bytes, now
	Rate                         uint64 // bytes a second over busy time; 0: not measured yet
}

// VerbsEnd is one end of a lane, as the other end needs it.
type VerbsEnd struct {
	QueuePair, Packet     uint32
	LID                   uint16
	MTU, Reads, LinkLayer uint8
	GID                   [16]byte
}

// VerbsImport is a peer's memory.
type VerbsImport struct {
	Base, Size uint64
	ReadOnly   bool
	RemoteKeys []uint32 // for each lane; 0: not reachable over it
}

// VerbsNote is a message that followed its data.
type VerbsNote struct {
	Conn uint64
	Data []byte
}

// The kinds of VerbsNews.
const (
	VerbsLaneLive   = 1
	VerbsLaneFailed = 2
	VerbsPortUp     = 3
	VerbsPortDown   = 4
	VerbsDeviceGone = 5
)

// VerbsNews is what whoever drives the connections must know of.
type VerbsNews struct {
	Conn   uint64 // 0: of a rail
	Kind   int
	Lane   int
	Rail   int
	Status int32 // of the completion that failed a lane, for VerbsStatus
}

// Flags of VerbsContext.Pin and VerbsContext.Grant.
const (
	VerbsReadOnly uint32 = 1
	VerbsRelaxed  uint32 = 2 // PCIe may reorder writes of the NIC, where it can
)

// VerbsDevice is memory of a device, such as a card's.
type VerbsDevice struct {
	Addr, Len uint64

	// FD is of a dma-buf, in which the memory begins at Offset, as far within a page as Addr
	// does. It must stay open until VerbsPin.Close. -1: none, then the kernel must know the
	// address, as it does with nvidia_peermem.
	FD     int
	Offset uint64
}

// Bounds of a context: rails, lanes of a connection, bytes of a message, keys and counters,
// which are below their bound.
const (
	VerbsRailsMax    = 16
	VerbsLanesMax    = 16
	VerbsNoteMax     = 4096
	VerbsKeysMax     = 4 << 20
	VerbsCountersMax = driver.CountersMax
)

// The outcomes of Done.Status beside those of completions, which are above 0.
const (
	VerbsOK      int32 = 0
	VerbsAborted int32 = -1001
	VerbsRevoked int32 = -1002
	VerbsClosed  int32 = -1003
	VerbsLost    int32 = -1004
)

var verbsOutcomes = map[int32]error{
	VerbsAborted: driver.ErrAborted, VerbsRevoked: driver.ErrRevoked, VerbsClosed: driver.ErrClosed,
	VerbsLost: driver.ErrPeerLost,
}

// verbsStatuses are the statuses of completions, by their number.
var verbsStatuses = [...]string{
	"success", "local length error", "local queue pair operation error", "local EE context operation error",
	"local protection error", "work request flushed", "memory window bind error", "bad response error",
	"local access error", "remote invalid request error", "remote access error", "remote operation error",
	"transport retry counter exceeded", "receiver-not-ready retry counter exceeded", "local RDD violation error",
	"remote invalid RD request", "remote aborted error", "invalid EE context number", "invalid EE context state",
	"fatal error", "response timeout error", "general error",
}

// VerbsStatus names the status of a completion, as in "transport retry counter exceeded (12)".
func VerbsStatus(status int32) string {
	if status < 0 || int(status) >= len(verbsStatuses) {
		return fmt.Sprintf("status %d", status)
	}
	return fmt.Sprintf("%s (%d)", verbsStatuses[status], status)
}

// VerbsError makes an error of the contract of a completion. It names the piece where
// that is known.
func VerbsError(d Done) error {
	if d.Status == VerbsOK {
		return nil
	}
	err, ours := verbsOutcomes[d.Status]
	if !ours {
		err = fmt.Errorf("move bytes over RDMA: %s", VerbsStatus(d.Status))
	}
	if d.Piece < 0 {
		return err
	}
	return &driver.PieceError{Piece: int(d.Piece), Err: err}
}

// verbsErrno makes an error of an errno; 0 is none.
func verbsErrno(what string, errno int64) error {
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
		return fmt.Errorf("%s over RDMA: %w (locked memory is limited: `ulimit -l unlimited`, or LimitMEMLOCK=infinity for a service)", what, e)
	default:
		return fmt.Errorf("%s over RDMA: %w", what, e)
	}
}

// verbsRefusal makes an error of what submit returns: it names the piece where one is wrong.
func verbsRefusal(rc int64) error {
	switch err := verbsErrno("submit", rc&0xffff); err {
	case driver.ErrBounds, driver.ErrReadOnly, driver.ErrRevoked, driver.ErrNoRoute:
		return &driver.PieceError{Piece: int(rc >> 16), Err: err}
	default:
		return err
	}
}
