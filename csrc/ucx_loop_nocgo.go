// SPDX-License-Identifier: Apache-2.0

//go:build !cgo

package csrc

import (
	"time"

	"github.com/sluicehq/sluice/driver"
)

// UCXLoop needs cgo: without it OpenUCXLoop makes none.
type UCXLoop struct{}

// OpenUCXLoop answers with the reason, as LoadUCX does.
func OpenUCXLoop(_, _ string) (*UCXLoop, error) {
	reason, fix := loadUCX("")
	return nil, ucxUnavailable(reason, fix)
}

// Allocate is not supported.
func (*UCXLoop) Allocate(uint64) ([]byte, error) { return nil, driver.ErrNotSupported }

// Offer is not supported.
func (*UCXLoop) Offer() (UCXOffer, error) { return UCXOffer{}, driver.ErrNotSupported }

// Connect is not supported.
func (*UCXLoop) Connect(UCXOffer) error { return driver.ErrNotSupported }

// Batch checks against no memory.
func (l *UCXLoop) Batch(descs []driver.Desc, window int) (*UCXBatch, error) {
	return newUCXBatch(l, descs, window, 0, 0)
}

// Move is not supported.
func (*UCXLoop) Move(driver.Op, *UCXBatch, time.Duration) (time.Duration, error) {
	return 0, driver.ErrNotSupported
}

// Progress does nothing.
func (*UCXLoop) Progress(time.Duration) {}

// Close does nothing.
func (*UCXLoop) Close(time.Duration) {}
