// SPDX-License-Identifier: Apache-2.0

//go:build !cgo

package cufile

import (
	"github.com/sluicehq/sluice/csrc/cuda"
	"github.com/sluicehq/sluice/csrc/ring"
)

func before() error { return nil }

func loadLibrary(string) (reason, fix string) {
	return "this program was built without cgo", "build it with CGO_ENABLED=1 and gcc"
}

// ReadFacts returns a *driver.UnavailableError.
func ReadFacts() (Facts, error) { return Facts{}, Load("") }

// Mover queues requests for cuFile. Without cgo OpenMover fails, so no method is ever called.
type Mover struct{ mover }

type mover interface {
	Close()
	Put([]Request)
	Cancel(slot uint32, yes bool)
	BatchesRefused() uint64
	Use(ordinal int) error
	DeviceOf(ordinal int, at, n uint64) (device int, until uint64, err error)
	Register(ordinal int, at, n uint64) error
	Deregister(ordinal int, at uint64) error
}

// OpenMover returns a *driver.UnavailableError.
func OpenMover(*cuda.Ends, int, int, int) (*Mover, error) { return nil, Load("") }

// Open returns a *driver.UnavailableError.
func Open(int) (uint64, error) { return 0, Load("") }

// Close is never called.
func Close(uint64) {}

// Status is never called.
func Status(string, *ring.Done) error { return Load("") }
