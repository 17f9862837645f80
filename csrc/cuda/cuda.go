// SPDX-License-Identifier: Apache-2.0

package cuda

import (
	"fmt"
	"sync"

	"github.com/sluicehq/sluice/driver"
)

// libraryName is what Load opens when it is given no path.
const libraryName = "libcuda.so.1"

var loaded struct {
	sync.Mutex
	path string // empty: not loaded
}

// Load opens libcuda and initialises it, once in the life of the process. path names the
// library, "" the one of the system. When it cannot be used (missing, a function missing, no
// device, another one open already) nothing is changed, a later call may try again, and the
// error is a *driver.UnavailableError.
func Load(path string) error {
	if path == "" {
		path = libraryName
	}
	loaded.Lock()
	defer loaded.Unlock()
	switch loaded.path {
	case path:
		return nil
	case "":
	default:
		return unavailable(fmt.Sprintf("%s is open already, and a process has one driver: %s "+
			"is not opened", loaded.path, path),
			"give the same path everywhere")
	}
	if reason, fix := loadLibrary(path); reason != "" {
		return unavailable(reason, fix)
	}
	loaded.path = path
	return nil
}

// Loaded answers a *driver.UnavailableError unless Load has succeeded.
func Loaded() error {
	loaded.Lock()
	defer loaded.Unlock()
	if loaded.path == "" {
		return unavailable("libcuda is not open", "call Load first")
	}
	return nil
}

func unavailable(reason, fix string) error {
	return &driver.UnavailableError{Backend: "cuda", Reason: reason, Fix: fix}
}

// Error is what the driver answered. Most of them end the process's use of the device.
type Error struct {
	Call   string // "launch kernel"
	Result int    // a CUresult
	Name   string // "CUDA_ERROR_OUT_OF_MEMORY"
}

// Error names the call and the driver's word for what went wrong.
func (e *Error) Error() string { return fmt.Sprintf("%s: %s (%d)", e.Call, e.Name, e.Result) }

// Facts are what a device says of itself.
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

// Place is pinned memory with device memory of the same length beside it.
type Place struct {
	Host []byte
	At   uint64
}
