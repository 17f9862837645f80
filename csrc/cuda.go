// SPDX-License-Identifier: Apache-2.0

package csrc

import (
	"fmt"
	"sync"

	"github.com/sluicehq/sluice/driver"
)

// cudaLibrary is what LoadCUDA opens when it is given no path.
const cudaLibrary = "libcuda.so.1"

var cudaLoaded struct {
	sync.Mutex
	path string // empty: not loaded
}

// LoadCUDA opens libcuda and initialises it, once in the life of the process. path names the
// library, "" the one of the system. When it cannot be used (missing, a function missing, no
// device, another one open already) nothing is changed, a later call may try again, and the
// error is a *driver.UnavailableError.
func LoadCUDA(path string) error {
	if path == "" {
		path = cudaLibrary
	}
	cudaLoaded.Lock()
	defer cudaLoaded.Unlock()
	switch cudaLoaded.path {
	case path:
		return nil
	case "":
	default:
		return cudaUnavailable(fmt.Sprintf("%s is open already, and a process has one driver: %s is not opened", cudaLoaded.path, path),
			"give the same path everywhere")
	}
	if reason, fix := loadCUDA(path); reason != "" {
		return cudaUnavailable(reason, fix)
	}
	cudaLoaded.path = path
	return nil
}

func cudaUnavailable(reason, fix string) error {
	return &driver.UnavailableError{Backend: "cuda", Reason: reason, Fix: fix}
}

// CUDAError is what the driver answered. Most of them end the process's use of the device.
type CUDAError struct {
	Call   string // "launch kernel"
	Result int    // a CUresult
	Name   string // "CUDA_ERROR_OUT_OF_MEMORY"
}

// Error names the call and the driver's word for what went wrong.
func (e *CUDAError) Error() string { return fmt.Sprintf("%s: %s (%d)", e.Call, e.Name, e.Result) }

// CUDAFacts are what a device says of itself.
type CUDAFacts struct {
	Name    string
	Bus     string // as in sysfs, but in upper case
	Driver  int    // 12040 for CUDA 12.4
	Compute int    // 10 * major + minor
	SMs     int
	Shared  uint32 // bytes of shared memory that a block may opt in to
}

// CUDALaunch is a kernel's launch.
type CUDALaunch struct {
	Kernel                  int // of CUDADevice.Load
	Blocks, Threads, Shared uint32
	Args                    []byte // one struct, passed by value
	Tally                   uint64 // device memory that is written before and read afterwards
}
