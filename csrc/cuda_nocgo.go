// SPDX-License-Identifier: Apache-2.0

//go:build !cgo

package csrc

const (
	cudaNoCgo    = "this program was built without cgo"
	cudaNoCgoFix = "build it with CGO_ENABLED=1 and gcc"
)

func loadCUDA(string) (reason, fix string) { return cudaNoCgo, cudaNoCgoFix }

// CUDADevice is a device; there is none without cgo.
type CUDADevice struct{}

// OpenCUDA answers a *driver.UnavailableError without cgo.
func OpenCUDA(int) (*CUDADevice, error) { return nil, cudaUnavailable(cudaNoCgo, cudaNoCgoFix) }

// Facts is never called: there is no device.
func (*CUDADevice) Facts() CUDAFacts { return CUDAFacts{} }

// Close is never called.
func (*CUDADevice) Close() error { return nil }

// Load is never called.
func (*CUDADevice) Load(string, []string) error { return cudaUnavailable(cudaNoCgo, cudaNoCgoFix) }

// Alloc is never called.
func (*CUDADevice) Alloc(uint64) (uint64, error) {
	return 0, cudaUnavailable(cudaNoCgo, cudaNoCgoFix)
}

// Free is never called.
func (*CUDADevice) Free(uint64) error { return nil }

// Pin is never called.
func (*CUDADevice) Pin([]byte) (uint64, error) { return 0, cudaUnavailable(cudaNoCgo, cudaNoCgoFix) }

// Unpin is never called.
func (*CUDADevice) Unpin([]byte) error { return nil }

// Run is never called.
func (*CUDADevice) Run(*CUDALaunch, []byte) error { return cudaUnavailable(cudaNoCgo, cudaNoCgoFix) }

// Write is never called.
func (*CUDADevice) Write(uint64, []byte) error { return nil }

// Read is never called.
func (*CUDADevice) Read([]byte, uint64) error { return nil }
