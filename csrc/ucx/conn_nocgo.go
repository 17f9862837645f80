// SPDX-License-Identifier: Apache-2.0

//go:build !cgo

package ucx

import (
	"time"

	"github.com/sluicehq/sluice/driver"
)

// Conn needs cgo: without it there is none.
type Conn struct{}

// ID is 0.
func (*Conn) ID() uint64 { return 0 }

// Moved is nothing.
func (*Conn) Moved() (written, read uint64) { return 0, 0 }

// Bind is not supported.
func (*Conn) Bind(Peer) error { return driver.ErrNotSupported }

// Gate is none.
func (*Conn) Gate() Gate { return Gate{} }

// Pulls is not supported.
func (*Conn) Pulls() error { return driver.ErrNotSupported }

// Control is not supported.
func (*Conn) Control([]byte) error { return driver.ErrNotSupported }

// Lanes is empty.
func (*Conn) Lanes() string { return "" }

// Import is not supported.
func (*Conn) Import(Import) (uint32, error) { return 0, driver.ErrNotSupported }

// Drop does nothing.
func (*Conn) Drop(uint32) {}

// Direct is false.
func (*Conn) Direct(uint32) bool { return false }

// Submit is not supported.
func (*Conn) Submit(uint64, *driver.Batch) error { return driver.ErrNotSupported }

// Notify is not supported.
func (*Conn) Notify([]byte) error { return driver.ErrNotSupported }

// Cancel does nothing.
func (*Conn) Cancel(uint64) {}

// Help does nothing.
func (*Conn) Help(uint64, <-chan struct{}) bool { return false }

// Drain does nothing.
func (*Conn) Drain(time.Duration) error { return nil }

// End does nothing.
func (*Conn) End(int32, bool) {}

// Close does nothing.
func (*Conn) Close(time.Duration) error { return nil }
