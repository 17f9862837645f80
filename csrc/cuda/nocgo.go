// SPDX-License-Identifier: Apache-2.0

//go:build !cgo

package cuda

import "github.com/sluicehq/sluice/csrc/ring"

func loadLibrary(string) (reason, fix string) {
	return "this program was built without cgo", "build it with CGO_ENABLED=1 and gcc"
}

// Device is a device. Without cgo there is no value of it, nor of the other types here, and their
// methods are never called.
type Device struct{ device }

type device interface {
	Facts() Facts
	Close() error
	Load(ptx string, kernels []string) error
	Alloc(n uint64) (uint64, error)
	Free(at uint64) error
	Pin([]byte) (uint64, error)
	Unpin([]byte) error
	Write(to uint64, from []byte) error
	Read(to []byte, from uint64) error
	Moves() Moves
	Launch(l *Launch, tally []byte) error
	OpenCopier() (*Copier, error)
	Sync() error
	Capture(l *Launch) (*Graph, error)
}

// Open answers a *driver.UnavailableError, as do all functions here.
func Open(int) (*Device, error) { return nil, Load("") }

// Copier copies on a device's stream.
type Copier struct{ copier }

type copier interface {
	Close()
	Copy(dst, src, n []uint64) error
	Sync() error
	Mark(int) error
	Await(int) error
}

// Graph is a launch that is replayed.
type Graph struct{ graph }

type graph interface {
	Replay() error
	Close()
}

// Ends is where movers say which batches have ended.
type Ends struct{ ends }

type ends interface {
	Poll([]ring.Done) int
	Pending() bool
	Arm() bool
	Disarm() bool
	Heed(int)
	Close()
}

// NewEnds is one of the functions.
func NewEnds(int, int, int) (*Ends, error) { return nil, Load("") }

// Mover is a device.
type Mover struct{ mover }

type mover interface {
	Close()
	Patient() int
	Gated(i int) (worker int, err error)
	Load(ptx string, kernels []string) error
	Submit(worker, batch int, serial uint64, pieces []Piece, events []uint64) error
	SubmitRun(worker, batch int, serial uint64, r *Run, events []uint64) error
	SubmitEntries(batch int, serial uint64, e *Entries) error
	Cancel(batch int, serial uint64)
	Follow(batch int, stream uint64) error
	Came(event uint64) (bool, error)
	Pin([]byte) error
	Unpin([]byte) error
	HostAddress([]byte) (uint64, error)
	HostPinned([]byte) bool
	Whose(at, n uint64) (device int, until uint64, err error)
	Place(int) (Place, error)
	Displace(Place)
}

// OpenMover is one of the functions.
func OpenMover(int, *Ends, int, int, int) (*Mover, error) { return nil, Load("") }

// Place is pinned memory with device memory beside it.
type Place struct {
	Host []byte
	At   uint64
}

// Stream is a stream of the program's own.
type Stream struct{ stream }

type stream interface {
	Await(event uintptr) error
	Over() (bool, error)
	Close() error
}

// OpenStream is one of the functions.
func OpenStream(int) (*Stream, error) { return nil, Load("") }

// Block is memory of a device.
type Block struct {
	At, Len uint64
	Maps    bool
	block
}

type block interface {
	Close() error
	Export() (fd int, off uint64, err error)
	Share() (int, error)
	Renew() error
	Mapped() uint64
}

// NewBlock is one of the functions.
func NewBlock(int, uint64) (*Block, error) { return nil, Load("") }

// ImportBlock is one of the functions.
func ImportBlock(int, int, uint64) (*Block, error) { return nil, Load("") }

// Devices is one of the functions.
func Devices() (int, error) { return 0, Load("") }

// UUID is one of the functions.
func UUID(int) ([16]byte, error) { return [16]byte{}, Load("") }

// Status is never called: nothing ends.
func Status(string, int32) error { return Load("") }
