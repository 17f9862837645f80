// SPDX-License-Identifier: Apache-2.0

//go:build !cgo

package cuda

// Moves is never called: there is no device.
func (*Device) Moves() Moves { return Moves{} }

// Urge is never called.
func (*Device) Urge() error { return unavailable(noCgo, noCgoFix) }

// Launch is never called.
func (*Device) Launch(*Launch, []byte, []byte) error {
	return unavailable(noCgo, noCgoFix)
}

// Copier copies on a device's stream; there is none without cgo.
type Copier struct{}

// OpenCopier is never called.
func (*Device) OpenCopier() (*Copier, error) {
	return nil, unavailable(noCgo, noCgoFix)
}

// Close is never called.
func (*Copier) Close() {}

// Copy is never called.
func (*Copier) Copy(bool, []uint64, []uint64, []uint64) error {
	return unavailable(noCgo, noCgoFix)
}

// Sync is never called.
func (*Copier) Sync() error { return nil }

// After is never called.
func (*Copier) After(uint64) error { return nil }

// Mark is never called.
func (*Copier) Mark(int) error { return nil }

// Await is never called.
func (*Copier) Await(int) error { return nil }

// Graph is a launch that is replayed; there is none without cgo.
type Graph struct{}

// Capture is never called.
func (*Device) Capture(*Launch, []byte) (*Graph, error) {
	return nil, unavailable(noCgo, noCgoFix)
}

// Replay is never called.
func (*Graph) Replay([]byte) error { return unavailable(noCgo, noCgoFix) }

// Close is never called.
func (*Graph) Close() {}
