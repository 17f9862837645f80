// SPDX-License-Identifier: Apache-2.0

//go:build !cgo

package ucx

import (
	"time"

	"github.com/sluicehq/sluice/driver"
)

// Loop needs cgo: without it OpenLoop makes none.
type Loop struct{}

// OpenLoop answers with the reason, as Load does.
func OpenLoop(_, _ string) (*Loop, error) {
	reason, fix := load("")
	return nil, unavailable(reason, fix)
}

// Allocate is not supported.
func (*Loop) Allocate(uint64) ([]byte, error) { return nil, driver.ErrNotSupported }

// Offer is not supported.
func (*Loop) Offer() (Offer, error) { return Offer{}, driver.ErrNotSupported }

// Connect is not supported.
func (*Loop) Connect(Offer) error { return driver.ErrNotSupported }

// Batch checks against no memory.
func (l *Loop) Batch(descs []driver.Desc, window int) (*Batch, error) {
	return newBatch(l, descs, window, 0, 0)
}

// Move is not supported.
func (*Loop) Move(driver.Op, *Batch, time.Duration) (time.Duration, error) {
	return 0, driver.ErrNotSupported
}

// Progress does nothing.
func (*Loop) Progress(time.Duration) {}

// Close does nothing.
func (*Loop) Close(time.Duration) {}
