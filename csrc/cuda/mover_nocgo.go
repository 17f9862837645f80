// SPDX-License-Identifier: Apache-2.0

//go:build !cgo

package cuda

import "github.com/sluicehq/sluice/csrc/ring"

func noMover() error { return unavailable(noCgo, noCgoFix) }

// Devices answers a *driver.UnavailableError without cgo.
func Devices() (int, error) { return 0, noMover() }

// Status is never called: nothing ends.
func Status(string, int32) error { return noMover() }

// Ends is where movers say which batches have ended.
type Ends struct{}

// NewEnds answers a *driver.UnavailableError without cgo.
func NewEnds(int, int, int) (*Ends, error) { return nil, noMover() }

// Poll is never called, and neither is anything else here.
func (*Ends) Poll([]ring.Done) int { return 0 }

// Arm is never called.
func (*Ends) Arm() bool { return false }

// Disarm is never called.
func (*Ends) Disarm() bool { return false }

// Heed is never called.
func (*Ends) Heed(int) {}

// Close is never called.
func (*Ends) Close() {}

// Mover is a device; there is none without cgo.
type Mover struct{}

// OpenMover answers a *driver.UnavailableError without cgo.
func OpenMover(int, *Ends, int, int, int) (*Mover, error) { return nil, noMover() }

// Close is never called, and neither is anything else of a Mover.
func (*Mover) Close() {}

// Patient is never called.
func (*Mover) Patient() int { return 0 }

// Gated is never called.
func (*Mover) Gated(int) (int, error) { return 0, noMover() }

// Load is never called.
func (*Mover) Load(string, []string) error { return noMover() }

// Submit is never called.
func (*Mover) Submit(int, int, uint64, []Piece, []uint64) error { return noMover() }

// SubmitRun is never called.
func (*Mover) SubmitRun(int, int, uint64, *Run, []uint64) error { return noMover() }

// SubmitEntries is never called.
func (*Mover) SubmitEntries(int, uint64, *Entries) error { return noMover() }

// Cancel is never called.
func (*Mover) Cancel(int, uint64) {}

// Follow is never called.
func (*Mover) Follow(int, uint64) error { return noMover() }

// Pin is never called.
func (*Mover) Pin([]byte) error { return noMover() }

// Unpin is never called.
func (*Mover) Unpin([]byte) error { return noMover() }

// HostAddress is never called.
func (*Mover) HostAddress([]byte) (uint64, error) { return 0, noMover() }

// HostPinned is never called.
func (*Mover) HostPinned([]byte) bool { return false }

// Whose is never called.
func (*Mover) Whose(uint64, uint64) (int, uint64, error) { return 0, 0, noMover() }

// Place is pinned memory with device memory beside it.
type Place struct {
	Host []byte
	At   uint64
}

// Place is never called.
func (*Mover) Place(int) (Place, error) { return Place{}, noMover() }

// Displace is never called.
func (*Mover) Displace(Place) {}

// Block is memory of a device.
type Block struct {
	At, Len uint64
	Maps    bool
}

// NewBlock answers a *driver.UnavailableError without cgo.
func NewBlock(int, uint64) (*Block, error) { return nil, noMover() }

// Close is never called.
func (*Block) Close() error { return noMover() }

// Export is never called.
func (*Block) Export() (int, uint64, error) { return -1, 0, noMover() }

// Share is never called.
func (*Block) Share() (int, error) { return -1, noMover() }

// Renew is never called.
func (*Block) Renew() error { return noMover() }

// Mapped is never called.
func (*Block) Mapped() uint64 { return 0 }

// ImportBlock is never called.
func ImportBlock(int, int, uint64) (*Block, error) { return nil, noMover() }

// UUID is never called.
func UUID(int) ([16]byte, error) { return [16]byte{}, noMover() }

// Pending is false.
func (*Ends) Pending() bool { return false }

// LoadMover answers a *driver.UnavailableError without cgo.
func LoadMover() error { return noMover() }
