// SPDX-License-Identifier: Apache-2.0

//go:build !cgo

package cuda

// Stream is a stream; there is none without cgo.
type Stream struct{}

// OpenStream answers a *driver.UnavailableError without cgo.
func OpenStream(int) (*Stream, error) { return nil, noMover() }

// Handle is never called, and neither is anything else of a Stream.
func (*Stream) Handle() uintptr { return 0 }

// Copy is never called.
func (*Stream) Copy(uint64, uint64, uint64) error { return noMover() }

// NewEvent is never called.
func (*Stream) NewEvent() (uintptr, error) { return 0, noMover() }

// Drop is never called.
func (*Stream) Drop(uintptr) error { return noMover() }

// Record is never called.
func (*Stream) Record(uintptr) error { return noMover() }

// Await is never called.
func (*Stream) Await(uintptr) error { return noMover() }

// Sync is never called.
func (*Stream) Sync() error { return noMover() }

// Close is never called.
func (*Stream) Close() error { return noMover() }
