// SPDX-License-Identifier: Apache-2.0

//go:build !cgo

package csrc

import (
	"strconv"
	"time"

	"github.com/sluicehq/sluice/driver"
)

// UCXContext needs cgo: without it OpenUCX makes none, and its methods are there
// for the compiler only.
type UCXContext struct{}

// NewUCXCounters makes counters, all of them 0.
func NewUCXCounters() *UCXCounters {
	return &UCXCounters{table: make([]ucxCounter, driver.CountersMax)}
}

// UCXAllocation needs cgo.
type UCXAllocation struct{}

// UCXSpots needs cgo.
type UCXSpots struct{}

// OpenUCX answers with the reason, as LoadUCX does.
func OpenUCX(UCXConfig) (*UCXContext, error) {
	reason, fix := loadUCX("")
	return nil, ucxUnavailable(reason, fix)
}

// Close does nothing.
func (*UCXContext) Close() error { return nil }

// Address is empty.
func (*UCXContext) Address(int) []byte { return nil }

// Blocked finds nothing.
func (*UCXContext) Blocked() bool { return false }

// Condemn does nothing.
func (*UCXContext) Condemn() {}

// Poll finds nothing.
func (*UCXContext) Poll([]Done) int { return 0 }

// Drive does nothing.
func (*UCXContext) Drive() {}

// Arm finds nothing.
func (*UCXContext) Arm() bool { return false }

// Receive finds nothing.
func (*UCXContext) Receive() (UCXNote, bool) { return UCXNote{}, false }

// Control finds nothing.
func (*UCXContext) Control() (UCXControl, bool) { return UCXControl{}, false }

// Map is not supported.
func (*UCXContext) Map(uint32, UCXMemory) error { return driver.ErrNotSupported }

// Unmap does nothing.
func (*UCXContext) Unmap(uint32) {}

// Fence is not supported.
func (*UCXContext) Fence(uint32, uint64, time.Duration) error { return driver.ErrNotSupported }

// Refresh is not supported.
func (*UCXContext) Refresh(uint32) error { return driver.ErrNotSupported }

// Beside does nothing.
func (*UCXContext) Beside(*UCXContext) {}

// Export finds nothing.
func (*UCXContext) Export(uint32) (UCXExport, bool) { return UCXExport{}, false }

// Words is none.
func (*UCXContext) Words() UCXExport { return UCXExport{} }

// Allocate is not supported.
func (*UCXContext) Allocate(uint64) (*UCXAllocation, error) { return nil, driver.ErrNotSupported }

// Bytes is none.
func (*UCXAllocation) Bytes() []byte { return nil }

// Close does nothing.
func (*UCXAllocation) Close() error { return nil }

// Connect is not supported.
func (*UCXContext) Connect(int, []byte) (*UCXConn, error) { return nil, driver.ErrNotSupported }

func ucxStatus(status int32) string { return strconv.Itoa(int(status)) }
