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
	Workers    int      // each with a thread; at least 1
	BatchesMax int      // of one worker, submitted and not polled; a power of two
	NotifyMax  int      // of one connection, on their way or not received
	SpinNanos  uint64   // how long a thread looks before it sleeps
	// how old a message may be that lands unasked; a quarter of it drives the pings
	GraceNanos uint64
	WakeFD     int // an eventfd for completions and messages, when armed
	ControlFD  int // an eventfd for control messages
}

// Memory is what Context.Map makes known.
type Memory struct {
	Mem      []byte
	ReadOnly bool
	Ticket   uint64 // what messages must show; never 0

	// Only is what messages may reach, in order; nil: all. It is pinned, and stays as it is,
	// until Revoke is nil.
	Only driver.Ranges

	// Inside and Phase are what a write of this process counts itself in, and looks at, before it
	// goes on: as the Enter of the memory's driver.Shared. They stay where they are until Revoke is
	// nil. Nil: none.
	Inside *atomic.Int64
	Phase  *atomic.Int32
}

// Import is a peer's memory.
type Import struct {
	Key          uint32 // of the owner
	Size, Ticket uint64
	ReadOnly     bool
}

// Control is a control message, or the news that a connection is lost.
type Control struct {
	Worker int
	Conn   uint64 // the end it was sent to; 0: none, the first message of a connection
	Data   []byte
	Lost   bool // the peer was given up; Data is nil; once a connection
	Over   bool // and it has ended its end itself: nothing of it lands any more
}

// Notif is a message that followed its data.
type Notif struct {
	Conn uint64
	Data []byte
}

// ControlMax bounds what Conn.Control takes, NotifMax the messages of Submit.
const (
	ControlMax = 4096
	NotifMax   = 4096
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

// ErrKept is what Context.Close answers where UCX did not give our messages back in time. The
// context stays, at rest, with its descriptors, until a later Open finds that UCX has.
var ErrKept = fmt.Errorf("UCX keeps a context with its descriptors: all is proven and at rest, "+
	"and it is given back at a later Open: %w", driver.ErrTimeout)

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
