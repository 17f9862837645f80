// SPDX-License-Identifier: Apache-2.0

//go:build !cgo

package csrc

import "github.com/sluicehq/sluice/driver"

// VerbsContext needs cgo: without it OpenVerbs makes none, and its methods are there for
// the compiler only.
type VerbsContext struct{}

// VerbsPin needs cgo.
type VerbsPin struct{}

// OpenVerbs answers with the reason.
func OpenVerbs(VerbsConfig) (*VerbsContext, error) {
	return nil, &driver.UnavailableError{Backend: "rdma", Reason: "this program was built without cgo",
		Fix: "build it with CGO_ENABLED=1 and gcc"}
}

// Close does nothing.
func (*VerbsContext) Close() error { return nil }

// Poll finds nothing.
func (*VerbsContext) Poll([]Done) int { return 0 }

// Drive does nothing.
func (*VerbsContext) Drive() {}

// Arm finds nothing.
func (*VerbsContext) Arm() bool { return false }

// Receive finds nothing.
func (*VerbsContext) Receive() (VerbsNote, bool) { return VerbsNote{}, false }

// Count is 0.
func (*VerbsContext) Count(uint32) uint64 { return 0 }

// AwaitCount has nothing to wait for.
func (*VerbsContext) AwaitCount(uint32, uint64) bool { return false }

// News finds nothing.
func (*VerbsContext) News() (VerbsNews, bool) { return VerbsNews{}, false }

// OpenRail is not supported.
func (*VerbsContext) OpenRail(VerbsRailConfig) (int, error) { return 0, driver.ErrNotSupported }

// Rail is not supported.
func (*VerbsContext) Rail(int) (VerbsRail, error) { return VerbsRail{}, driver.ErrNotSupported }

// Counters is not supported.
func (*VerbsContext) Counters(int) (VerbsCounters, error) {
	return VerbsCounters{}, driver.ErrNotSupported
}

// RailUp does nothing.
func (*VerbsContext) RailUp(int, bool) {}

// Pin is not supported.
func (*VerbsContext) Pin(int, []byte, uint32) (*VerbsPin, error) {
	return nil, driver.ErrNotSupported
}

// PinDevice is not supported.
func (*VerbsContext) PinDevice(int, VerbsDevice, uint32) (*VerbsPin, error) {
	return nil, driver.ErrNotSupported
}

// Close does nothing.
func (*VerbsPin) Close() error { return nil }

// Map is not supported.
func (*VerbsContext) Map(uint32, []byte, []*VerbsPin, uint32) error { return driver.ErrNotSupported }

// MapDevice is not supported.
func (*VerbsContext) MapDevice(uint32, uint64, uint64, []*VerbsPin, uint32) error {
	return driver.ErrNotSupported
}

// Unmap does nothing.
func (*VerbsContext) Unmap(uint32) error { return nil }

// Grant is not supported.
func (*VerbsContext) Grant(uint32, int, uint32) (uint32, error) { return 0, driver.ErrNotSupported }

// Revoke is not supported.
func (*VerbsContext) Revoke(uint32) error { return driver.ErrNotSupported }

// Connect is not supported.
func (*VerbsContext) Connect(bool, int) (*VerbsConn, error) { return nil, driver.ErrNotSupported }
