// SPDX-License-Identifier: Apache-2.0

package csrc

import (
	"fmt"
	"sync"

	"github.com/sluicehq/sluice/driver"
)

// cufileLibrary is what LoadCuFile opens when it is given no path.
const cufileLibrary = "libcufile.so.0"

var cufileLoaded struct {
	sync.Mutex
	path string // empty: not loaded
}

// LoadCuFile opens libcufile and its driver, once in the life of the process: neither is closed again, as other
// parts of the program may use the same. LoadCUDA must have succeeded, which is to say that cuInit did: without
// a device the library is not touched. path names the library, "" the one of the system; log is the file that it writes
// its messages to unless CUFILE_LOGFILE_PATH is set, "" leaves that alone. An error is a *driver.UnavailableError;
// then a later call may try again.
func LoadCuFile(path, log string) error {
	if path == "" {
		path = cufileLibrary
	}
	if err := beforeCuFile(); err != nil {
		return err
	}
	cufileLoaded.Lock()
	defer cufileLoaded.Unlock()
	switch cufileLoaded.path {
	case path:
		return nil
	case "":
	default:
		return cufileUnavailable(fmt.Sprintf("%s is open already, and a process has one: %s is not opened", cufileLoaded.path, path),
			"give the same path everywhere")
	}
	if reason, fix := loadCuFile(path, log); reason != "" {
		return cufileUnavailable(reason, fix)
	}
	cufileLoaded.path = path
	return nil
}

func cufileUnavailable(reason, fix string) error {
	return &driver.UnavailableError{Backend: "gds", Reason: reason, Fix: fix}
}

// CuFileError is what cuFile answered, other than an errno.
type CuFileError struct {
	Call   string // "register file"
	Code   int    // a CUfileOpError, from 5000 on
	Result int    // a CUresult, where Code is that of the CUDA driver
}

// Error names the call, and cuFile's word for what went wrong.
func (e *CuFileError) Error() string {
	text, ok := cufileWords[e.Code]
	if !ok {
		text = "an error that sluice does not know"
	}
	if e.Result != 0 {
		return fmt.Sprintf("%s: cuFile answers %d, %s (CUDA result %d)", e.Call, e.Code, text, e.Result)
	}
	return fmt.Sprintf("%s: cuFile answers %d, %s", e.Call, e.Code, text)
}

// cufileWords are those of the API reference, for what a program meets.
var cufileWords = map[int]string{
	5001: "nvidia-fs is not loaded, and compat mode is not allowed",
	5004: "nvidia-fs has another version",
	5007: "the platform is not supported",
	5008: "not supported for this file",
	5009: "not supported for this device",
	5010: "nvidia-fs failed",
	5011: "the CUDA driver failed",
	5012: "invalid device pointer",
	5013: "invalid kind of memory",
	5014: "beyond the memory that was allocated",
	5015: "another CUDA context",
	5016: "beyond what may be pinned",
	5017: "beyond what was registered",
	5018: "not supported for this type of file",
	5019: "the file was opened with flags that are not supported",
	5020: "the file was opened without O_DIRECT",
	5022: "invalid arguments",
	5023: "the memory is registered already",
	5024: "the memory is not registered",
	5025: "permission denied",
	5027: "the file is not registered",
	5028: "the file is registered already",
	5030: "internal error",
	5033: "nvidia-fs could not be set up",
	5034: "switched off for this file by cufile.json",
	5035: "a batch could not be submitted",
	5036: "no room to pin memory of the device",
	5037: "the batch is full",
	5038: "streams are not supported",
}

// Codes of cuFile that are not failures to whoever registers.
const (
	CuFileAlreadyRegistered = 5023
	cufileBase              = 5000
)

// CuFileFacts are what the library says of itself. Those of int8 are 1, 0, or -1: it does not say.
type CuFileFacts struct {
	Version              int // 1140 for 1.14; 0: older than 1.8
	Batches, Streams     bool
	AllowCompat          int8 // by its configuration
	ForceCompat          int8
	PCIP2PDMA            int8 // without nvidia-fs, by the kernel's own means
	NVFSMajor, NVFSMinor int  // of nvidia-fs; 0.0: it is not loaded
	StatusFlags          uint32
	ControlFlags         uint32
	FeatureFlags         uint32
	BatchMax             int    // entries; 0: it does not say
	DirectMax, PinnedMax uint64 // bytes
	CacheMax, PerBuffer  uint64
}

// CuFileWay is how requests are handed to the library.
type CuFileWay int

// The ways.
const (
	CuFileOne    CuFileWay = iota // cuFileRead and cuFileWrite, one in each thread
	CuFileBatch                   // cuFileBatchIOSubmit
	CuFileStream                  // cuFileReadAsync and cuFileWriteAsync
)

// CuFileRequest is a read or write of one range. It goes from Go to C as it is.
type CuFileRequest struct {
	Handle       uint64 // of OpenCuFile
	Base, Offset uint64 // memory: an address as it was registered, and where behind it
	At, Len      uint64 // in the file; at most 1 GiB
	Slot         uint32 // what Done.Tag names
	FD           int32  // for an edge: a descriptor without O_DIRECT
	Kind         CuFileKind
	Device       uint16 // whose context the call is made in
	_            uint32
}

// CuFileKind is what a request is. An edge is a write of less than whole blocks, at most CuFileEdge bytes, which goes by way
// of the host.
type CuFileKind uint16

// The kinds.
const (
	CuFileRead CuFileKind = iota
	CuFileWrite
	CuFileEdgeOfDevice
	CuFileEdgeOfHost
)

// CuFileEdge bounds an edge, in bytes.
const CuFileEdge = 8192

// CuFileDevices is how many devices a mover knows: ordinals are below.
const CuFileDevices = 64

// CuFileBatchMax bounds the entries of a batch.
const CuFileBatchMax = 256
