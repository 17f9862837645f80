// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"fmt"

	"github.com/sluicehq/sluice/driver"
)

// Aliases for the types of package driver that a program needs. It need not import package driver,
// only the engine and its backends.
type (
	// Op is the direction of a Transfer.
	Op = driver.Op
	// Kind is a kind of memory: DRAM, HBM or File.
	Kind = driver.Kind
	// Backend moves bytes between two kinds of memory: see Config.Backends.
	Backend = driver.Backend
	// Segment is a range of memory or of a file to register.
	Segment = driver.Segment
	// DMABuf names device memory to other devices, such as NICs: see Segment.
	DMABuf = driver.DMABuf
	// Pattern describes scattered entries by lists of slots and nested loops.
	Pattern = driver.Pattern
	// Loop is one loop of a Pattern.
	Loop = driver.Loop
	// Side says where the entries of a Pattern lie in one of the two memories.
	Side = driver.Side
	// Range is a contiguous range of bytes of a region.
	Range = driver.Range
	// UnavailableError says why a backend cannot work on this machine, and how to fix that.
	UnavailableError = driver.UnavailableError
	// PieceError says which piece of a batch failed.
	PieceError = driver.PieceError
)

// The two operations: Read copies from the peer's memory, Write copies to it.
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

// The errors of the engine are those of package driver, so that a program need not import it.
var (
	ErrClosed       = driver.ErrClosed       // is os.ErrClosed
	ErrUnavailable  = driver.ErrUnavailable  // an UnavailableError says why and how to fix it
	ErrNotSupported = driver.ErrNotSupported // is errors.ErrUnsupported
	ErrFull         = driver.ErrFull         // a limit of Config is reached
	ErrBusy         = driver.ErrBusy         // in use, or the name is taken
	ErrBounds       = driver.ErrBounds       // outside a range or limit
	ErrPeerLost     = driver.ErrPeerLost     // the peer is dead, frozen for too long, or closed
	ErrAborted      = driver.ErrAborted      // ended by Abort
	ErrRevoked      = driver.ErrRevoked      // the owner ended the lease or the region
	ErrVersion      = driver.ErrVersion      // the other side speaks another version
	ErrNoRoute      = driver.ErrNoRoute      // no backend serves this pair of memories
	ErrCorrupt      = driver.ErrCorrupt      // received or stored bytes are malformed
	// the peer has not confirmed that it no longer accesses the memory: see Staged
	ErrUnproven = driver.ErrUnproven
	ErrTimeout  = driver.ErrTimeout  // is os.ErrDeadlineExceeded
	ErrReadOnly = driver.ErrReadOnly // peers may only read the memory
	ErrBadToken = driver.ErrBadToken // the token is cut, altered, or of another engine
	// registered memory, of either side, is unmapped or protected, or its file was truncated
	ErrFault = driver.ErrFault
)

// OpError is the error of calls off the hot path, such as Connect and Register. It says which
// operation failed, with which backend and peer, and why.
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
