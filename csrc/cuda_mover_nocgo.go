// SPDX-License-Identifier: Apache-2.0

//go:build !cgo

package csrc

func noMover() error { return cudaUnavailable(cudaNoCgo, cudaNoCgoFix) }

// CUDADevices answers a *driver.UnavailableError without cgo.
func CUDADevices() (int, error) { return 0, noMover() }

// CUDAStatus is never called: nothing ends.
func CUDAStatus(string, int32) error { return noMover() }

// CUDAEnds is where movers say which batches have ended.
type CUDAEnds struct{}

// NewCUDAEnds answers a *driver.UnavailableError without cgo.
func NewCUDAEnds(int, int, int) (*CUDAEnds, error) { return nil, noMover() }

// Poll is never called, and neither is anything else here.
func (*CUDAEnds) Poll([]Done) int { return 0 }

// Arm is never called.
func (*CUDAEnds) Arm() bool { return false }

// Disarm is never called.
func (*CUDAEnds) Disarm() bool { return false }

// Heed is never called.
func (*CUDAEnds) Heed(int) {}

// Close is never called.
func (*CUDAEnds) Close() {}

// CUDAMover is a device; there is none without cgo.
type CUDAMover struct{}

// OpenCUDAMover answers a *driver.UnavailableError without cgo.
func OpenCUDAMover(int, *CUDAEnds, int, int, int) (*CUDAMover, error) { return nil, noMover() }

// Close is never called, and neither is anything else of a CUDAMover.
func (*CUDAMover) Close() {}

// Patient is never called.
func (*CUDAMover) Patient() int { return 0 }

// Gated is never called.
func (*CUDAMover) Gated(int) (int, error) { return 0, noMover() }

// Load is never called.
func (*CUDAMover) Load(string, []string) error { return noMover() }

// Submit is never called.
func (*CUDAMover) Submit(int, int, uint64, []CUDAPiece, []uint64) error { return noMover() }

// SubmitRun is never called.
func (*CUDAMover) SubmitRun(int, int, uint64, *CUDARun, []uint64) error { return noMover() }

// SubmitEntries is never called.
func (*CUDAMover) SubmitEntries(int, uint64, *CUDAEntries) error { return noMover() }

// Cancel is never called.
func (*CUDAMover) Cancel(int, uint64) {}

// Follow is never called.
func (*CUDAMover) Follow(int, uint64) error { return noMover() }

// Pin is never called.
func (*CUDAMover) Pin([]byte) error { return noMover() }

// Unpin is never called.
func (*CUDAMover) Unpin([]byte) error { return noMover() }

// HostAddress is never called.
func (*CUDAMover) HostAddress([]byte) (uint64, error) { return 0, noMover() }

// HostPinned is never called.
func (*CUDAMover) HostPinned([]byte) bool { return false }

// Whose is never called.
func (*CUDAMover) Whose(uint64, uint64) (int, uint64, error) { return 0, 0, noMover() }

// CUDAPlace is pinned memory with device memory beside it.
type CUDAPlace struct {
	Host []byte
	At   uint64
}

// Place is never called.
func (*CUDAMover) Place(int) (CUDAPlace, error) { return CUDAPlace{}, noMover() }

// Displace is never called.
func (*CUDAMover) Displace(CUDAPlace) {}

// CUDABlock is memory of a device.
type CUDABlock struct {
	At, Len uint64
	Maps    bool
}

// NewCUDABlock answers a *driver.UnavailableError without cgo.
func NewCUDABlock(int, uint64) (*CUDABlock, error) { return nil, noMover() }

// Close is never called.
func (*CUDABlock) Close() error { return noMover() }

// Export is never called.
func (*CUDABlock) Export() (int, uint64, error) { return -1, 0, noMover() }

// Share is never called.
func (*CUDABlock) Share() (int, error) { return -1, noMover() }

// Renew is never called.
func (*CUDABlock) Renew() error { return noMover() }

// Mapped is never called.
func (*CUDABlock) Mapped() uint64 { return 0 }

// ImportCUDABlock is never called.
func ImportCUDABlock(int, int, uint64) (*CUDABlock, error) { return nil, noMover() }

// CUDAUUID is never called.
func CUDAUUID(int) ([16]byte, error) { return [16]byte{}, noMover() }
