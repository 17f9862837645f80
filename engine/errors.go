// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"fmt"

	"github.com/sluicehq/sluice/driver"
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

// OpError is what cold calls return: which operation failed, on which backend,
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
