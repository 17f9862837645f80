// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"fmt"

	"github.com/sluicehq/sluice/driver"
)

// The types of package driver that a program needs stand here under the same names, so that it
// imports the engine and the backends that it wants.
type (
	// Op is the direction of a Transfer.
	Op = driver.Op
	// Kind is where bytes live.
	Kind = driver.Kind
	// Backend moves bytes; Config.Backends takes them.
	Backend = driver.Backend
	// Segment is a range to register.
	Segment = driver.Segment
	// DMABuf is what other devices know device memory by, for a Segment.
	DMABuf = driver.DMABuf
	// Pattern is scattered entries, by lists of slots and nests of loops.
	Pattern = driver.Pattern
	// Loop is one loop of a Pattern.
	Loop = driver.Loop
	// Side is where the entries of a Pattern lie in one of the two memories.
	Side = driver.Side
	// Range is some contiguous bytes of a region.
	Range = driver.Range
	// UnavailableError says why a backend cannot work on this machine, and what mends that.
	UnavailableError = driver.UnavailableError
	// PieceError names the piece of a batch that failed.
	PieceError = driver.PieceError
)

// The two operations: Read fetches from the peer, Write places there.
const (
	Read  = driver.Read
	Write = driver.Write
)

// The kinds of memory.
const (
	DRAM = driver.DRAM
	HBM  = driver.HBM
	File = driver.File
)

// The errors of the engine are those of package driver, so that a program
// needs to import only one of the two.
var (
	ErrClosed       = driver.ErrClosed       // is os.ErrClosed
	ErrUnavailable  = driver.ErrUnavailable  // *driver.UnavailableError says why and what mends it
	ErrNotSupported = driver.ErrNotSupported // is errors.ErrUnsupported
	ErrFull         = driver.ErrFull         // a limit of Config is reached
	ErrBusy         = driver.ErrBusy         // in use: posted, listed by a transfer, name taken
	ErrBounds       = driver.ErrBounds       // outside a range or limit
	ErrPeerLost     = driver.ErrPeerLost     // dead, frozen for too long, or closed
	ErrAborted      = driver.ErrAborted      // ended by Abort
	ErrRevoked      = driver.ErrRevoked      // the owner ended the lease or the region
	ErrVersion      = driver.ErrVersion      // the other side speaks another version
	ErrNoRoute      = driver.ErrNoRoute      // no backend serves this pair of memories
	ErrCorrupt      = driver.ErrCorrupt      // bytes that are not what they claim
	// the peer has not said that it is done with what it has in hand: see Staged
	ErrUnproven = driver.ErrUnproven
	ErrTimeout  = driver.ErrTimeout  // is os.ErrDeadlineExceeded
	ErrReadOnly = driver.ErrReadOnly // peers may only read it
	ErrBadToken = driver.ErrBadToken // cut, altered, or of another engine
	// registered memory, of either side, was unmapped, is protected, or its file was cut
	ErrFault = driver.ErrFault
)

// OpError is the error of cold calls: which operation failed, on which backend,
// towards which peer, and why.
type OpError struct {
	Op      string // "connect", "register", …
	Backend string // may be empty
	Peer    string // may be empty
	Err     error
}

// Error reads "connect peer decode-0 with shm: …".
func (e *OpError) Error() string {
	text := e.Op
	if e.Peer != "" {
		text += " peer " + e.Peer
	}
	if e.Backend != "" {
		text += " with " + e.Backend
	}
	return fmt.Sprintf("%s: %v", text, e.Err)
}

// Unwrap returns the cause.
func (e *OpError) Unwrap() error { return e.Err }
