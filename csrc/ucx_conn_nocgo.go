// SPDX-License-Identifier: Apache-2.0

//go:build !cgo

package csrc

import (
	"time"

	"github.com/sluicehq/sluice/driver"
)

// UCXConn needs cgo: without it there is none.
type UCXConn struct{}

// ID is 0.
func (*UCXConn) ID() uint64 { return 0 }

// Moved is nothing.
func (*UCXConn) Moved() (written, read uint64) { return 0, 0 }

// Bind is not supported.
func (*UCXConn) Bind(UCXPeer) error { return driver.ErrNotSupported }

// Gate is none.
func (*UCXConn) Gate() UCXGate { return UCXGate{} }

// Pulls is not supported.
func (*UCXConn) Pulls() error { return driver.ErrNotSupported }

// Control is not supported.
func (*UCXConn) Control([]byte) error { return driver.ErrNotSupported }

// Lanes is empty.
func (*UCXConn) Lanes() string { return "" }

// Import is not supported.
func (*UCXConn) Import(UCXImport) (uint32, error) { return 0, driver.ErrNotSupported }

// Drop does nothing.
func (*UCXConn) Drop(uint32) {}

// Direct is false.
func (*UCXConn) Direct(uint32) bool { return false }

// Submit is not supported.
func (*UCXConn) Submit(uint64, *driver.Batch) error { return driver.ErrNotSupported }

// Notify is not supported.
func (*UCXConn) Notify([]byte) error { return driver.ErrNotSupported }

// Cancel does nothing.
func (*UCXConn) Cancel(uint64) {}

// Help does nothing.
func (*UCXConn) Help(uint64, <-chan struct{}) bool { return false }

// Drain does nothing.
func (*UCXConn) Drain(time.Duration) error { return nil }

// End does nothing.
func (*UCXConn) End(int32, bool) {}

// Close does nothing.
func (*UCXConn) Close(time.Duration) error { return nil }
