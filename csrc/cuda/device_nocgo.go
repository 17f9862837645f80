// SPDX-License-Identifier: Apache-2.0

//go:build !cgo

package cuda

const (
	noCgo    = "this program was built without cgo"
	noCgoFix = "build it with CGO_ENABLED=1 and gcc"
)

func loadLibrary(string) (reason, fix string) { return noCgo, noCgoFix }

// Device is a device; there is none without cgo.
type Device struct{}

// Open answers a *driver.UnavailableError without cgo.
func Open(int) (*Device, error) { return nil, unavailable(noCgo, noCgoFix) }

// Facts is never called: there is no device.
func (*Device) Facts() Facts { return Facts{} }

// Close is never called.
func (*Device) Close() error { return nil }

// Load is never called.
func (*Device) Load(string, []string) error { return unavailable(noCgo, noCgoFix) }

// Alloc is never called.
func (*Device) Alloc(uint64) (uint64, error) {
	return 0, unavailable(noCgo, noCgoFix)
}

// Free is never called.
func (*Device) Free(uint64) error { return nil }

// Pin is never called.
func (*Device) Pin([]byte) (uint64, error) { return 0, unavailable(noCgo, noCgoFix) }

// Unpin is never called.
func (*Device) Unpin([]byte) error { return nil }

// Run is never called.
func (*Device) Run(*Launch, []byte) error { return unavailable(noCgo, noCgoFix) }

// Write is never called.
func (*Device) Write(uint64, []byte) error { return nil }

// Read is never called.
func (*Device) Read([]byte, uint64) error { return nil }
