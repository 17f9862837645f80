// SPDX-License-Identifier: Apache-2.0

//go:build !cgo

package csrc

// CUDAStream is a stream; there is none without cgo.
type CUDAStream struct{}

// OpenCUDAStream answers a *driver.UnavailableError without cgo.
func OpenCUDAStream(int) (*CUDAStream, error) { return nil, noMover() }

// Handle is never called, and neither is anything else of a CUDAStream.
func (*CUDAStream) Handle() uintptr { return 0 }

// Copy is never called.
func (*CUDAStream) Copy(uint64, uint64, uint64) error { return noMover() }

// NewEvent is never called.
func (*CUDAStream) NewEvent() (uintptr, error) { return 0, noMover() }

// Drop is never called.
func (*CUDAStream) Drop(uintptr) error { return noMover() }

// Record is never called.
func (*CUDAStream) Record(uintptr) error { return noMover() }

// Await is never called.
func (*CUDAStream) Await(uintptr) error { return noMover() }

// Sync is never called.
func (*CUDAStream) Sync() error { return noMover() }

// Close is never called.
func (*CUDAStream) Close() error { return noMover() }
