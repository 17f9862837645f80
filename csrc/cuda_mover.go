// SPDX-License-Identifier: Apache-2.0

package csrc

// CUDAWay is which way a piece goes.
type CUDAWay uint32

// The ways. CUDAAny leaves it to the driver: between two devices, say.
const (
	CUDAUp     CUDAWay = iota // from host memory
	CUDADown                  // to host memory
	CUDAWithin                // within the device
	CUDAAny
)

// CUDAPiece is one copy between addresses. It holds no pointer and crosses into C as it is.
type CUDAPiece struct {
	Dst, Src, Len uint64
	Way           CUDAWay
	Index         uint32 // what Done.Piece calls it
}

// CUDAWaitsMax is how many events a batch may wait for.
const CUDAWaitsMax = 64

// CUDAArgsMax bounds CUDARun.Args.
const CUDAArgsMax = 256

// CUDACanceled is the Done.Status of a batch whose rest was dropped. A positive one is a CUresult,
// for CUDAStatus.
const CUDACanceled = -125

// CUDARun is the launch of a kernel behind a copy to device memory. It goes from Go to C as
// it is.
type CUDARun struct {
	To, From, N                     uint64    // the copy
	OwnAt, OwnLen                   [2]uint64 // memory that must still be a device's; length 0: none
	Kernel, Blocks, Threads, Shared uint32
	ArgsLen                         uint32
	Args                            [CUDAArgsMax]byte // one struct, passed by value
}

// CUDAEntries are entries of host memory that a processor gathers, and dense ones of a device.
type CUDAEntries struct {
	Host                []byte // outside the Go heap, or it stays until the end
	Base, Stride, Entry uint64
	List                []uint32 // nil: entry i is at place i; copied
	Count               int
	Dense               uint64
	Up                  bool // to the device
}
