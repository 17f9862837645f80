// SPDX-License-Identifier: Apache-2.0

package ucx

import (
	"fmt"
	"sync/atomic"

	"github.com/sluicehq/sluice/csrc/ring"
	"github.com/sluicehq/sluice/driver"
)

// Config says how to open a Context.
type Config struct {
	Transports string   // as UCX_TLS
	Devices    string   // as UCX_NET_DEVICES; "": UCX's own choice
	Settings   []string // NAME=VALUE, as ucp_config_modify takes them
	Shared     bool     // peers' memory can be mapped: no error mode; else UCX's peer mode
	// the kernel copies between processes (process_vm_readv) where it permits that
	Pull       bool
	Workers    int    // each with a thread; at least 1
	BatchesMax int    // of one worker, submitted and not polled; a power of two
	NotifyMax  int    // of one connection, on their way or not received
	SegmentMax int    // bytes of one eager message
	SpinNanos  uint64 // how long a thread looks before it sleeps
	// how old a message may be that lands unasked; a quarter of it drives the pings
	GraceNanos   uint64
	FailureNanos uint64 // how long a near peer that something waits for may be silent
	WakeFD       int    // an eventfd for completions and messages, when armed
	ControlFD    int    // an eventfd for control messages
	Spots        *Spots // of tests
}

// Memory is what Context.Map makes known.
type Memory struct {
	Mem      []byte
	ReadOnly bool
	Ticket   uint64      // what served messages must show; never 0
	In       *Allocation // nil: not UCX's own memory

	// Only is what messages may reach, in order; nil: all. It is pinned, and stays as it is,
	// until Unmap.
	Only driver.Ranges

	// Inside and Phase are what a write of this process counts itself in, and looks at, before it
	// goes on: as the Enter of the memory's driver.Shared. They stay where they are until Unmap.
	// Nil: none.
	Inside *atomic.Int64
	Phase  *atomic.Int32
}

// Export is what a peer needs to reach memory of ours. Without an Rkey it cannot be
// mapped; without a Base nothing is known of where it is.
type Export struct {
	Rkey       []byte
	Base       uint64
	Generation uint32
}

// Gate is where a peer of this host sees whether it may copy from our memory. The
// zero value says that it may not.
type Gate struct {
	At   uint64
	Mark [16]byte
}

// Peer is what Conn.Bind is told of the other end.
type Peer struct {
	ID    uint64 // of that end
	Words Export // its page of generations; without one no memory is mapped
	PID   int    // its process, known not to have ended; 0: on another host
	Gate  Gate   // zero: messages carry what we read
	Pulls bool   // it copies from our memory: messages carry nothing of what we write
	Grace uint64 // its Config.GraceNanos
}

// Import is a peer's memory.
type Import struct {
	Key          uint32 // of the owner
	Size, Ticket uint64
	ReadOnly     bool
	Export       Export // zero: the owner's thread moves all bytes
}

// Control is a control message, or the news that a connection is lost.
type Control struct {
	Worker int
	Conn   uint64 // the end it was sent to; 0: none, the first message of a connection
	Data   []byte
	Lost   bool // the peer was given up; Data is nil; once a connection
	Over   bool // and it has ended its end itself: nothing of it lands any more

	Suspect bool // nothing else is told: a peer is silent, and Blocked may know why
}

// Notif is a message that followed its data.
type Notif struct {
	Conn uint64
	Data []byte
}

// RkeyMax bounds Export.Rkey, ControlMax what Conn.Control takes and
// NotifMax the messages of Submit.
const (
	RkeyMax    = 256
	ControlMax = 4096
	NotifMax   = 4096
)

// Keys of Context.Map are below KeysMax; only memory whose key is below
// DirectMax can be mapped by peers.
const (
	KeysMax   = 4 << 20
	DirectMax = 64 << 10
)

// The outcomes of ring.Done.Status beside those of UCX itself.
const (
	OK       int32 = 0
	Aborted  int32 = -1001
	Revoked  int32 = -1002
	Closed   int32 = -1003
	Lost     int32 = -1004
	ReadOnly int32 = -1005
	Bounds   int32 = -1006
	Fault    int32 = -1007
)

// ErrKept is what Context.Close answers where a message to a peer cannot be taken any more: a peer
// of this host stands still, or was killed with a full queue, or a process was killed while it put
// a message into that queue. UCX has no call that ends such an endpoint. The context stays, with
// its descriptors, until Open or Kept finds that the peer has taken the message.
var ErrKept = fmt.Errorf("UCX keeps a context with its descriptors: a peer of this host stands "+
	"still or was killed with messages of ours unread; all is proven and at rest, and it is given "+
	"back at a later Open if the peer goes on: %w", driver.ErrTimeout)

var outcomes = map[int32]error{
	Aborted: driver.ErrAborted, Revoked: driver.ErrRevoked, Closed: driver.ErrClosed,
	Lost: driver.ErrPeerLost, ReadOnly: driver.ErrReadOnly, Bounds: driver.ErrBounds,
	Fault: driver.ErrFault,
}

// The fatal statuses of UCX that say that the peer is gone.
const (
	unreachable     = -6
	canceled        = -16
	rejected        = -23
	notConnected    = -24
	connectionReset = -25
	endpointTimeout = -80
)

// Error makes an error of the contract of a completion. It names the piece where
// that is known.
func Error(d ring.Done) error {
	if d.Status == OK {
		return nil
	}
	err, ours := outcomes[d.Status]
	switch {
	case ours && d.Piece < 0:
		return err
	case ours:
	case d.Status == canceled || d.Status == rejected || d.Status == notConnected ||
		d.Status == connectionReset || d.Status == unreachable ||
		d.Status == endpointTimeout:
		err = fmt.Errorf("move bytes over UCX: %s: %w", statusText(d.Status), driver.ErrPeerLost)
	default:
		err = fmt.Errorf("move bytes over UCX: %s", statusText(d.Status))
	}
	if d.Piece < 0 {
		return err
	}
	return &driver.PieceError{Piece: int(d.Piece), Err: err}
}
