// SPDX-License-Identifier: Apache-2.0

//go:build !cgo

package verbs

import (
	"time"

	"github.com/sluicehq/sluice/driver"
)

// Conn needs cgo: without it there is none.
type Conn struct{}

// ID is 0.
func (*Conn) ID() uint64 { return 0 }

// PairMake is not supported.
func (*Conn) PairMake(int, int) (End, error) { return End{}, driver.ErrNotSupported }

// PairBegin is not supported.
func (*Conn) PairBegin(int, End) error { return driver.ErrNotSupported }

// PairEnd does nothing.
func (*Conn) PairEnd(int) error { return nil }

// PairSettle is not supported.
func (*Conn) PairSettle(int, uint64) error { return driver.ErrNotSupported }

// Seen is 0.
func (*Conn) Seen() uint64 { return 0 }

// Import is not supported.
func (*Conn) Import(Import) (uint32, error) { return 0, driver.ErrNotSupported }

// Drop does nothing.
func (*Conn) Drop(uint32) {}

// Expire does nothing.
func (*Conn) Expire(uint32) {}

// Submit is not supported.
func (*Conn) Submit(uint64, *driver.Batch) error { return driver.ErrNotSupported }

// Cancel does nothing.
func (*Conn) Cancel(uint64) {}

// Busy is false.
func (*Conn) Busy() bool { return false }

// Drain does nothing.
func (*Conn) Drain(time.Duration) error { return nil }

// End does nothing.
func (*Conn) End(int32) error { return nil }

// Close does nothing.
func (*Conn) Close() error { return nil }
