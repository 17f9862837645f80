// SPDX-License-Identifier: Apache-2.0

//go:build !cgo

package csrc

import (
	"time"

	"github.com/sluicehq/sluice/driver"
)

// VerbsConn needs cgo: without it there is none.
type VerbsConn struct{}

// ID is 0.
func (*VerbsConn) ID() uint64 { return 0 }

// LaneMake is not supported.
func (*VerbsConn) LaneMake(int, int) (VerbsEnd, error) { return VerbsEnd{}, driver.ErrNotSupported }

// LaneBegin is not supported.
func (*VerbsConn) LaneBegin(int, VerbsEnd) error { return driver.ErrNotSupported }

// LaneEnd does nothing.
func (*VerbsConn) LaneEnd(int) error { return nil }

// LaneSettle is not supported.
func (*VerbsConn) LaneSettle(int, uint64) error { return driver.ErrNotSupported }

// Seen is 0.
func (*VerbsConn) Seen() uint64 { return 0 }

// Import is not supported.
func (*VerbsConn) Import(VerbsImport) (uint32, error) { return 0, driver.ErrNotSupported }

// Drop does nothing.
func (*VerbsConn) Drop(uint32) {}

// Expire does nothing.
func (*VerbsConn) Expire(uint32) {}

// Submit is not supported.
func (*VerbsConn) Submit(uint64, *driver.Batch) error { return driver.ErrNotSupported }

// Cancel does nothing.
func (*VerbsConn) Cancel(uint64) {}

// Busy is false.
func (*VerbsConn) Busy() bool { return false }

// Drain does nothing.
func (*VerbsConn) Drain(time.Duration) error { return nil }

// End does nothing.
func (*VerbsConn) End(int32) {}

// Close does nothing.
func (*VerbsConn) Close() {}
