// SPDX-License-Identifier: Apache-2.0

//go:build !cgo

package csrc

// Moves is never called: there is no device.
func (*CUDADevice) Moves() CUDAMoves { return CUDAMoves{} }

// Urge is never called.
func (*CUDADevice) Urge() error { return cudaUnavailable(cudaNoCgo, cudaNoCgoFix) }

// Launch is never called.
func (*CUDADevice) Launch(*CUDALaunch, []byte, []byte) error {
	return cudaUnavailable(cudaNoCgo, cudaNoCgoFix)
}

// CUDACopier copies on a device's stream; there is none without cgo.
type CUDACopier struct{}

// OpenCopier is never called.
func (*CUDADevice) OpenCopier() (*CUDACopier, error) {
	return nil, cudaUnavailable(cudaNoCgo, cudaNoCgoFix)
}

// Close is never called.
func (*CUDACopier) Close() {}

// Copy is never called.
func (*CUDACopier) Copy(bool, []uint64, []uint64, []uint64) error {
	return cudaUnavailable(cudaNoCgo, cudaNoCgoFix)
}

// Sync is never called.
func (*CUDACopier) Sync() error { return nil }

// Mark is never called.
func (*CUDACopier) Mark(int) error { return nil }

// Await is never called.
func (*CUDACopier) Await(int) error { return nil }

// CUDAGraph is a launch that is replayed; there is none without cgo.
type CUDAGraph struct{}

// Capture is never called.
func (*CUDADevice) Capture(*CUDALaunch, []byte) (*CUDAGraph, error) {
	return nil, cudaUnavailable(cudaNoCgo, cudaNoCgoFix)
}

// Replay is never called.
func (*CUDAGraph) Replay([]byte) error { return cudaUnavailable(cudaNoCgo, cudaNoCgoFix) }

// Close is never called.
func (*CUDAGraph) Close() {}
