// SPDX-License-Identifier: Apache-2.0

package cuda

import (
	"fmt"

	"github.com/sluicehq/sluice/csrc/ring"
)

var library = &ring.Library{Backend: "cuda", System: "libcuda.so.1", Open: loadLibrary}

// Load opens libcuda and initialises it, once in the life of the process. path names the library;
// "" is the one of the system. If it cannot be used (it or a function is missing, there is no
// device, another library is open already), the error is a *driver.UnavailableError, and a later
// call may try again.
func Load(path string) error { return library.Load(path) }

// Loaded returns a *driver.UnavailableError unless Load has succeeded.
func Loaded() error { return library.Loaded() }

// Error is an error of the driver. After most of them the process cannot use the device any more.
type Error struct {
	Call   string // "launch kernel"
	Result int    // a CUresult
	Name   string // "CUDA_ERROR_OUT_OF_MEMORY"
}

// Error names the call and the driver's name of the error.
func (e *Error) Error() string { return fmt.Sprintf("%s: %s (%d)", e.Call, e.Name, e.Result) }

// Facts are properties of a device.
type Facts struct {
	Name    string
	Bus     string // as in sysfs, but in upper case
	Driver  int    // 12040 for CUDA 12.4
	Compute int    // 10 * major + minor
	SMs     int
	Shared  uint32 // bytes of shared memory that a block may opt in to
}

// Launch is a kernel's launch.
type Launch struct {
	Kernel                  int // of Device.Load
	Blocks, Threads, Shared uint32
	Args                    []byte // one struct, passed by value
	Tally                   uint64 // device memory that is read afterwards; 0: none
}

// Way is the direction of a copy.
type Way uint32

// The directions. With Any the driver finds it out, as for a copy between two devices.
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
	Index         uint32 // Done.Piece of an error of this piece
}

// WaitsMax is how many events a batch may wait for.
const WaitsMax = 64

// ArgsMax bounds Run.Args.
const ArgsMax = 256

// Canceled is the Done.Status of a batch of which a cancel has dropped the rest. A positive status
// is a CUresult, for Status.
const Canceled = -125

// Run is the launch of a kernel behind a copy to device memory. It crosses into C as it lies in Go.
type Run struct {
	To, From, N uint64 // the copy
	// memory that the launch is refused without, if the program has freed it; length 0: none
	OwnAt, OwnLen                   [2]uint64
	Kernel, Blocks, Threads, Shared uint32
	ArgsLen                         uint32
	Args                            [ArgsMax]byte // one struct, passed by value
}

// Entries are a gather by the CPU: scattered entries in host memory, contiguous ones on the device.
type Entries struct {
	Host                []byte // outside the Go heap
	Base, Stride, Entry uint64
	List                []uint32 // SubmitEntries copies it; nil: entry i is at place i
	Count               int
	Dense               uint64 // address of the contiguous entries
	Up                  bool   // to the device
}

// Place is pinned memory with device memory of the same length beside it.
type Place struct {
	Host []byte
	At   uint64
}
