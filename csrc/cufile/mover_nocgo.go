// SPDX-License-Identifier: Apache-2.0

//go:build !cgo

package cufile

import (
	"github.com/sluicehq/sluice/csrc/cuda"
	"github.com/sluicehq/sluice/csrc/ring"
)

const (
	noCgo    = "this program was built without cgo"
	noCgoFix = "build it with CGO_ENABLED=1 and gcc"
)

func before() error { return unavailable(noCgo, noCgoFix) }

func loadLibrary(string, string) (reason, fix string) { return noCgo, noCgoFix }

// Environment returns nothing: there is no library to be told.
func Environment() (log, config string) { return "", "" }

// Look answers a *driver.UnavailableError without cgo.
func Look() (Facts, error) {
	return Facts{}, unavailable(noCgo, noCgoFix)
}

// Mover is a way to cuFile; there is none without cgo.
type Mover struct{}

// OpenMover answers a *driver.UnavailableError without cgo.
func OpenMover(*cuda.Ends, int, int, Way, int) (*Mover, error) {
	return nil, unavailable(noCgo, noCgoFix)
}

// Close is never called: there is no mover.
func (*Mover) Close() {}

// Put is never called.
func (*Mover) Put([]Request) {}

// Cancel is never called.
func (*Mover) Cancel(uint32, bool) {}

// Lessened is never called.
func (*Mover) Lessened() uint64 { return 0 }

// Use is never called.
func (*Mover) Use(int) error { return nil }

// Whose is never called.
func (*Mover) Whose(int, uint64, uint64) (device int, until uint64, err error) {
	return 0, 0, unavailable(noCgo, noCgoFix)
}

// Register is never called.
func (*Mover) Register(int, uint64, uint64) error { return nil }

// Deregister is never called.
func (*Mover) Deregister(int, uint64) error { return nil }

// Open answers a *driver.UnavailableError without cgo.
func Open(int) (uint64, error) { return 0, unavailable(noCgo, noCgoFix) }

// Close is never called.
func Close(uint64) {}

// Status is never called.
func Status(string, *ring.Done) error { return unavailable(noCgo, noCgoFix) }
