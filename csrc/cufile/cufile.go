// SPDX-License-Identifier: Apache-2.0

package cufile

import (
	"fmt"

	"github.com/sluicehq/sluice/csrc/ring"
)

var library = &ring.Library{Backend: "gds", System: "libcufile.so.0", Open: loadLibrary}

// Load opens libcufile and its driver, once in the life of the process: neither is closed again,
// since other parts of the program may use them. Load of csrc/cuda must have succeeded: without a
// device the library is not opened. path names the library; "" is the one of the system. An error
// is a *driver.UnavailableError; then a later call may try again.
func Load(path string) error {
	if err := before(); err != nil {
		return err
	}
	return library.Load(path)
}

// Error is an error that cuFile has returned, other than an errno.
type Error struct {
	Call   string // "register file"
	Code   int    // a CUfileOpError, from 5000 on
	Result int    // a CUresult, where Code is that of the CUDA driver
}

// Error names the call and cuFile's error.
func (e *Error) Error() string {
	text, ok := words[e.Code]
	if !ok {
		text = "an error that sluice does not know"
	}
	if e.Result != 0 {
		text += fmt.Sprintf(" (CUDA result %d)", e.Result)
	}
	return fmt.Sprintf("%s: cuFile answers %d, %s; see its log", e.Call, e.Code, text)
}

// words explain the errors that a program may meet, as the API reference does.
var words = map[int]string{
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
	5027: "the file is not registered: where that comes of registering it, libcufile did not " +
		"find its device in udev's database (/run/udev), which containers seldom have",
	5028: "the file is registered already",
	5030: "internal error",
	5031: "the file could not be opened anew: libcufile opens it by its name, so it must have one",
	5033: "nvidia-fs could not be set up",
	5034: "switched off for this file by cufile.json",
	5035: "a batch could not be submitted",
	5036: "no room to pin memory of the device",
	5037: "the batch is full",
}

// AlreadyRegistered is the Error.Code of memory that is registered with cuFile already.
const AlreadyRegistered = 5023

const base = 5000 // where cuFile's error codes begin

// Facts are the properties that the library reports. Those of int8 are 1, 0, or -1: not reported.
type Facts struct {
	Version              int // 1140 for 1.14; 0: older than 1.8
	Batches              bool
	ForceCompat          int8   // by its configuration
	PCIP2PDMA            int8   // without nvidia-fs, by the kernel's own means
	NVFSMajor, NVFSMinor int    // of nvidia-fs; 0.0: it is not loaded
	BatchMax             int    // entries; 0: not reported
	DirectMax, PinnedMax uint64 // bytes
	CacheMax             uint64
}

// Request is a read or write of one range. It goes from Go to C as it is.
type Request struct {
	Handle       uint64 // of Open
	Base, Offset uint64 // memory: the address that was registered, and the offset from it
	At, Len      uint64 // in the file; at most 1 GiB
	Slot         uint32 // Done.Tag of its completion
	FD           int32  // for an edge: a descriptor without O_DIRECT
	Kind         Kind
	Device       uint16 // the one in whose context the call is made
	_            uint32
}

// Kind is the kind of a request. An edge is a write of less than whole blocks, of at most EdgeMax
// bytes, which is copied to the host and written from there.
type Kind uint16

// The kinds.
const (
	Read Kind = iota
	Write
	Edge
)

// EdgeMax bounds an edge, in bytes.
const EdgeMax = 8192

// Devices bounds the ordinals of devices.
const Devices = 64

// BatchMax bounds the entries of a batch.
const BatchMax = 256
