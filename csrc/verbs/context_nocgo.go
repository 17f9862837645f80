// SPDX-License-Identifier: Apache-2.0

//go:build !cgo

package verbs

import "github.com/sluicehq/sluice/driver"

// Context needs cgo: without it Open makes none, and its methods are there for
// the compiler only.
type Context struct{}

// Pin needs cgo.
type Pin struct{}

// Open answers with the reason.
func Open(Config) (*Context, error) {
	return nil, &driver.UnavailableError{Backend: "rdma", Reason: "this program was built " +
		"without cgo",
		Fix: "build it with CGO_ENABLED=1 and gcc"}
}

// Close does nothing.
func (*Context) Close() error { return nil }

// Poll finds nothing.
func (*Context) Poll([]Done) int { return 0 }

// Drive does nothing.
func (*Context) Drive() {}

// Arm finds nothing.
func (*Context) Arm() bool { return false }

// Receive finds nothing.
func (*Context) Receive() (Notif, bool) { return Notif{}, false }

// Count is 0.
func (*Context) Count(uint32) uint64 { return 0 }

// AwaitCount has nothing to wait for.
func (*Context) AwaitCount(uint32, uint64) bool { return false }

// News finds nothing.
func (*Context) News() (News, bool) { return News{}, false }

// OpenRail is not supported.
func (*Context) OpenRail(RailConfig) (int, error) { return 0, driver.ErrNotSupported }

// Rail is not supported.
func (*Context) Rail(int) (Rail, error) { return Rail{}, driver.ErrNotSupported }

// Counters is not supported.
func (*Context) Counters(int) (Counters, error) {
	return Counters{}, driver.ErrNotSupported
}

// RailUp does nothing.
func (*Context) RailUp(int, bool) {}

// Pin is not supported.
func (*Context) Pin(int, []byte, uint32) (*Pin, error) {
	return nil, driver.ErrNotSupported
}

// PinDevice is not supported.
func (*Context) PinDevice(int, Device, uint32) (*Pin, error) {
	return nil, driver.ErrNotSupported
}

// Close does nothing.
func (*Pin) Close() error { return nil }

// Map is not supported.
func (*Context) Map(uint32, []byte, []*Pin, uint32) error { return driver.ErrNotSupported }

// MapDevice is not supported.
func (*Context) MapDevice(uint32, uint64, uint64, []*Pin, uint32) error {
	return driver.ErrNotSupported
}

// Unmap does nothing.
func (*Context) Unmap(uint32) error { return nil }

// Grant is not supported.
func (*Context) Grant(uint32, int, uint32) (uint32, error) { return 0, driver.ErrNotSupported }

// Revoke is not supported.
func (*Context) Revoke(uint32) error { return driver.ErrNotSupported }

// Connect is not supported.
func (*Context) Connect(bool, int) (*Conn, error) { return nil, driver.ErrNotSupported }
