// SPDX-License-Identifier: Apache-2.0

package csrc

import (
	"errors"
	"fmt"
	"sync/atomic"

	"github.com/sluicehq/sluice/driver"
)

// UCXConfig says how to open a UCXContext.
type UCXConfig struct {
	Transports string   // as UCX_TLS
	Devices    string   // as UCX_NET_DEVICES; "": UCX's own choice
	Settings   []string // NAME=VALUE, as ucp_config_modify takes them
	Shared     bool     // peers' memory can be mapped: no error mode; else UCX's peer mode
	// the kernel copies between processes (process_vm_readv) where it permits that
	Pull       bool
	Workers    int    // each with a thread; at least 1
	BatchesMax int    // of one worker, submitted and not polled; a power of two
	NotesMax   int    // of one connection, on their way or not received
	SegmentMax int    // bytes of one eager message
	SpinNanos  uint64 // how long a thread looks before it sleeps
	// how old a message may be that lands unasked; a quarter of it drives the pings
	GraceNanos   uint64
	FailureNanos uint64 // how long a peer that something waits for may be silent
	WakeFD       int    // an eventfd for completions and messages, when armed
	ControlFD    int    // an eventfd for control messages
	Counters     *UCXCounters
	Spots        *UCXSpots // of tests
}

// UCXCounters are what peers count with the tails of their writes, at all contexts that
// were opened with them.
type UCXCounters struct{ table []ucxCounter }

// ucxCounter is sl_ucx_counter.
type ucxCounter struct {
	value   atomic.Uint64
	awaited atomic.Uint64 // 0: no wake-up is asked for
}

// Count returns how often peers have counted on a counter below driver.CountersMax.
func (c *UCXCounters) Count(counter uint32) uint64 { return c.table[counter].value.Load() }

// AwaitCount asks for one write to WakeFD, when armed, once Count has reached n, and reports
// whether it has already. The last call holds.
func (c *UCXCounters) AwaitCount(counter uint32, n uint64) bool {
	c.table[counter].awaited.Store(n)
	return c.Count(counter) >= n
}

// Arrive counts one, and reports whether a wake-up was asked for.
func (c *UCXCounters) Arrive(counter uint32) (wake bool) {
	value := c.table[counter].value.Add(1)
	n := c.table[counter].awaited.Load()
	return n != 0 && value >= n
}

// UCXMemory is what UCXContext.Map makes known.
type UCXMemory struct {
	Mem      []byte
	ReadOnly bool
	Ticket   uint64         // what served messages must show; never 0
	In       *UCXAllocation // nil: not UCX's own memory

	// Inside and Phase are what a write of this process counts itself in, and looks at, before it
	// goes on: as the Enter of the memory's driver.Shared. They stay where they are until Unmap.
	// Nil: none.
	Inside *atomic.Int64
	Phase  *atomic.Int32
}

// UCXExport is what a peer needs to reach memory of ours. Without an Rkey it cannot be
// mapped; without a Base nothing is known of where it is.
type UCXExport struct {
	Rkey       []byte
	Base       uint64
	Generation uint32
}

// UCXGate is where a peer of this host sees whether it may copy from our memory. The
// zero value says that it may not.
type UCXGate struct {
	At   uint64
	Mark [16]byte
}

// UCXPeer is what UCXConn.Bind is told of the other end.
type UCXPeer struct {
	ID    uint64    // of that end
	Words UCXExport // its page of generations; without one no memory is mapped
	PID   int       // its process, known not to have ended; 0: on another host
	Gate  UCXGate   // zero: messages carry what we read
	Pulls bool      // it copies from our memory: messages carry nothing of what we write
	Grace uint64    // its UCXConfig.GraceNanos
}

// UCXImport is a peer's memory.
type UCXImport struct {
	Key          uint32 // of the owner
	Size, Ticket uint64
	ReadOnly     bool
	Export       UCXExport // zero: the owner's thread moves all bytes
}

// UCXControl is a control message, or the news that a connection is lost.
type UCXControl struct {
	Worker int
	Conn   uint64 // the end it was sent to; 0: none, the first message of a connection
	Data   []byte
	Lost   bool // the peer was given up; Data is nil; once a connection
	Over   bool // and it has ended its end itself: nothing of it lands any more

	Suspect bool // nothing else is told: a peer is silent, and Blocked may know why
}

// UCXNote is a message that followed its data.
type UCXNote struct {
	Conn uint64
	Data []byte
}

// UCXRkeyMax bounds UCXExport.Rkey, UCXControlMax what UCXConn.Control takes and
// UCXNoteMax the messages of Submit.
const (
	UCXRkeyMax    = 256
	UCXControlMax = 4096
	UCXNoteMax    = 4096
)

// Keys of UCXContext.Map are below UCXKeysMax; only memory whose key is below
// UCXDirectMax can be mapped by peers.
const (
	UCXKeysMax   = 4 << 20
	UCXDirectMax = 64 << 10
)

// The outcomes of Done.Status beside those of UCX itself.
const (
	UCXOK       int32 = 0
	UCXAborted  int32 = -1001
	UCXRevoked  int32 = -1002
	UCXClosed   int32 = -1003
	UCXLost     int32 = -1004
	UCXReadOnly int32 = -1005
	UCXBounds   int32 = -1006
	UCXFault    int32 = -1007
)

var errUCXFault = errors.New("the kernel cannot read this memory, or cannot write to it: was it " +
	"unmapped before its registration was closed?")

var ucxOutcomes = map[int32]error{
	UCXAborted: driver.ErrAborted, UCXRevoked: driver.ErrRevoked, UCXClosed: driver.ErrClosed,
	UCXLost: driver.ErrPeerLost, UCXReadOnly: driver.ErrReadOnly, UCXBounds: driver.ErrBounds,
	UCXFault: errUCXFault,
}

// The fatal statuses of UCX that say that the peer is gone.
const (
	ucxUnreachable     = -6
	ucxCanceled        = -16
	ucxRejected        = -23
	ucxNotConnected    = -24
	ucxConnectionReset = -25
	ucxEndpointTimeout = -80
)

// UCXError makes an error of the contract of a completion. It names the piece where
// that is known.
func UCXError(d Done) error {
	if d.Status == UCXOK {
		return nil
	}
	err, ours := ucxOutcomes[d.Status]
	switch {
	case ours && d.Piece < 0:
		return err
	case ours:
	case d.Status == ucxCanceled || d.Status == ucxRejected || d.Status == ucxNotConnected ||
		d.Status == ucxConnectionReset || d.Status == ucxUnreachable ||
		d.Status == ucxEndpointTimeout:
		err = fmt.Errorf("move bytes over UCX: %s: %w", ucxStatus(d.Status), driver.ErrPeerLost)
	default:
		err = fmt.Errorf("move bytes over UCX: %s", ucxStatus(d.Status))
	}
	if d.Piece < 0 {
		return err
	}
	return &driver.PieceError{Piece: int(d.Piece), Err: err}
}
