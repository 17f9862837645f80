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
	NotifyMax  int      // messages of one connection, on their way or not received
	SpinNanos  uint64   // how long a thread polls before it sleeps
	// age up to which a message lands without a question to the peer; pings go out every quarter
	GraceNanos uint64
	WakeFD     int // an eventfd, written for completions and messages while armed
	ControlFD  int // an eventfd, written for each control message
}

// Memory describes memory to Context.Map, by which peers can then reach it.
type Memory struct {
	Mem      []byte
	ReadOnly bool
	Ticket   uint64 // the number that messages for this memory must carry; never 0

	// Only lists, in order, the ranges that messages may reach; nil: all. The caller must not
	// change it before Revoke has returned nil.
	Only driver.Ranges

	// Inside and Phase are those of the memory's driver.Shared, nil if there is none. A write by
	// this process increments Inside and then reads Phase before it goes on, as Shared.Enter does.
	// Both must stay at their addresses until Revoke has returned nil.
	Inside *atomic.Int64
	Phase  *atomic.Int32
}

// Import describes memory of a peer.
type Import struct {
	Key          uint32 // by which the owner knows it
	Size, Ticket uint64
	ReadOnly     bool
}

// Control is a control message, or says that a connection is lost.
type Control struct {
	Worker int
	Conn   uint64 // our end of the connection; 0: none yet, Data is the first message
	Data   []byte
	Lost   bool // the connection is lost, which is said once; Data is nil
	Over   bool // with Lost: the peer has ended the connection, so nothing of it lands any more
}

// Notif is a message of the peer's program. All bytes that it follows have landed.
type Notif struct {
	Conn uint64
	Data []byte
}

// The bounds of messages, in bytes.
const (
	ControlMax = 4096 // of Conn.Control
	NotifMax   = 4096 // of Submit
)

// The values of ring.Done.Status that are not statuses of UCX.
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

// ErrKept is returned by Context.Close if UCX has not returned all buffers of our messages in time.
// The context then keeps its descriptors, but does nothing, until a later Open finds that UCX has
// returned them, and frees it.
var ErrKept = fmt.Errorf("UCX keeps a context with its descriptors: all is proven and at rest, "+
	"and it is given back at a later Open: %w", driver.ErrTimeout)

var outcomes = map[int32]error{
	Aborted: driver.ErrAborted, Revoked: driver.ErrRevoked, Closed: driver.ErrClosed,
	Lost: driver.ErrPeerLost, ReadOnly: driver.ErrReadOnly, Bounds: driver.ErrBounds,
	Fault: driver.ErrFault,
}

// The statuses of UCX after which the peer is lost.
const (
	unreachable     = -6
	canceled        = -16
	rejected        = -23
	notConnected    = -24
	connectionReset = -25
	endpointTimeout = -80
)

// Error returns the error of package driver for the end of a batch, or nil. It names the piece if
// that is known.
func Error(d ring.Done) error {
	if d.Status == OK {
		return nil
	}
	err, ours := outcomes[d.Status]
	switch {
	case ours:
	case d.Status == canceled || d.Status == rejected || d.Status == notConnected ||
		d.Status == connectionReset || d.Status == unreachable ||
		d.Status == endpointTimeout:
		err = fmt.Errorf("move bytes over UCX: %s: %w", statusText(d.Status), driver.ErrPeerLost)
	default:
		err = fmt.Errorf("move bytes over UCX: %s", statusText(d.Status))
	}
	return d.PieceError(err)
}
