// SPDX-License-Identifier: Apache-2.0

package cuda

// Way is which way a piece goes.
type Way uint32

// The ways. Any leaves it to the driver: between two devices, say.
const (
	Up     Way = iota // from host memory
	Down              // to host memory
	Within            // within the device
	Any
)

// Piece is one copy between addresses. It holds no pointer and crosses into C as it is.
type Piece struct {
	Dst, Src, Len uint64
	Way           Way
	Index         uint32 // what Done.Piece calls it
}

// WaitsMax is how many events a batch may wait for.
const WaitsMax = 64

// ArgsMax bounds Run.Args.
const ArgsMax = 256

// Canceled is the Done.Status of a batch whose rest was dropped. A positive one is a CUresult,
// for Status.
const Canceled = -125

// Run is the launch of a kernel behind a copy to device memory. It goes from Go to C as
// it is.
type Run struct {
	To, From, N uint64 // the copy
	// memory that must still be a device's; length 0: none
	OwnAt, OwnLen                   [2]uint64
	Kernel, Blocks, Threads, Shared uint32
	ArgsLen                         uint32
	Args                            [ArgsMax]byte // one struct, passed by value
}

// Entries are entries of host memory that a processor gathers, and dense ones of a device.
type Entries struct {
	Host                []byte // outside the Go heap, or it stays until the end
	Base, Stride, Entry uint64
	List                []uint32 // nil: entry i is at place i; copied
	Count               int
	Dense               uint64
	Up                  bool // to the device
}
