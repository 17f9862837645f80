// SPDX-License-Identifier: Apache-2.0

//go:build !cgo

package ucx

import (
	"strconv"
	"time"

	"github.com/sluicehq/sluice/csrc/ring"
	"github.com/sluicehq/sluice/driver"
)

// Context needs cgo: without it Open makes none, and its methods are there
// for the compiler only.
type Context struct{}

// NewCounters makes counters, all of them 0.
func NewCounters() *Counters {
	return &Counters{table: make([]counter, driver.CountersMax)}
}

// Allocation needs cgo.
type Allocation struct{}

// Spots needs cgo.
type Spots struct{}

// Open answers with the reason, as Load does.
func Open(Config) (*Context, error) {
	reason, fix := load("")
	return nil, unavailable(reason, fix)
}

// Kept is 0.
func Kept() int { return 0 }

// Close does nothing.
func (*Context) Close() error { return nil }

// Address is empty.
func (*Context) Address(int) []byte { return nil }

// Blocked finds nothing.
func (*Context) Blocked() bool { return false }

// Condemn does nothing.
func (*Context) Condemn() {}

// Poll finds nothing.
func (*Context) Poll([]ring.Done) int { return 0 }

// Drive does nothing.
func (*Context) Drive() {}

// Arm finds nothing.
func (*Context) Arm() bool { return false }

// Receive finds nothing.
func (*Context) Receive() (Notif, bool) { return Notif{}, false }

// Control finds nothing.
func (*Context) Control() (Control, bool) { return Control{}, false }

// Map is not supported.
func (*Context) Map(uint32, Memory) error { return driver.ErrNotSupported }

// Unmap does nothing.
func (*Context) Unmap(uint32) {}

// Fence is not supported.
func (*Context) Fence(uint32, uint64, time.Duration) error { return driver.ErrNotSupported }

// Refresh is not supported.
func (*Context) Refresh(uint32) error { return driver.ErrNotSupported }

// Beside does nothing.
func (*Context) Beside(*Context) {}

// Export finds nothing.
func (*Context) Export(uint32) (Export, bool) { return Export{}, false }

// Words is none.
func (*Context) Words() Export { return Export{} }

// Allocate is not supported.
func (*Context) Allocate(uint64) (*Allocation, error) { return nil, driver.ErrNotSupported }

// Bytes is none.
func (*Allocation) Bytes() []byte { return nil }

// Close does nothing.
func (*Allocation) Close() error { return nil }

// Connect is not supported.
func (*Context) Connect(int, []byte) (*Conn, error) { return nil, driver.ErrNotSupported }

func statusText(status int32) string { return strconv.Itoa(int(status)) }
