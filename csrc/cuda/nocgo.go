// SPDX-License-Identifier: Apache-2.0

//go:build !cgo

package cuda

import "github.com/sluicehq/sluice/csrc/ring"

// Without cgo every function here answers the *driver.UnavailableError of Load. So there is no
// value of the types, and their methods, which the interfaces only name, are never called.

func loadLibrary(string) (reason, fix string) {
	return "this program was built without cgo", "build it with CGO_ENABLED=1 and gcc"
}

// The types.
type (
	// Device is a device with a stream.
	Device struct{ device }
	// Mover moves batches on the streams of a device.
	Mover struct{ mover }
	// Ends is where movers say which batches have ended.
	Ends struct{ ends }
	// Block is memory of a device.
	Block struct {
		At, Len uint64
		block
	}
)

// The functions.

func Open(int) (*Device, error)                           { return nil, Load("") }
func OpenMover(int, *Ends, int, int, int) (*Mover, error) { return nil, Load("") }
func NewEnds(int, int, int) (*Ends, error)                { return nil, Load("") }
func NewBlock(int, uint64) (*Block, error)                { return nil, Load("") }
func ImportBlock(int, int, uint64) (*Block, error)        { return nil, Load("") }
func Devices() (int, error)                               { return 0, Load("") }
func UUID(int) ([16]byte, error)                          { return [16]byte{}, Load("") }
func Status(string, int32) error                          { return Load("") }

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
	Copy(dst, src, n uint64) error
	Launch(l *Launch, tally []byte) error
	Await(event uintptr) error
	StreamDone() (bool, error)
	Sync() error
}

type mover interface {
	Close()
	BlockingWorker() int
	GatedWorker(i int) (worker int, err error)
	Load(ptx string, kernels []string) error
	Submit(worker, batch int, serial uint64, pieces []Piece, events []uint64) error
	SubmitRun(worker, batch int, serial uint64, r *Run, events []uint64) error
	SubmitEntries(batch int, serial uint64, e *Entries) error
	Cancel(batch int, serial uint64)
	Follow(batch int, stream uint64) error
	EventDone(event uint64) (bool, error)
	Pin([]byte) error
	Unpin([]byte) error
	HostAddress([]byte) (uint64, error)
	HostPinned([]byte) bool
	DeviceOf(at, n uint64) (device int, until uint64, err error)
	Place(int) (Place, error)
	Displace(Place)
}

type ends interface {
	Poll([]ring.Done) int
	Pending() bool
	Arm() bool
	Disarm() bool
	AddWaiting(int)
	Close()
}

type block interface {
	Close() error
	Export() (fd int, off uint64, err error)
	Share() (int, error)
	Renew() error
	Mapped() uint64
}
