// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package verbs

/*
#cgo CFLAGS: -O2 -std=c11 -Wall -Wextra
#cgo LDFLAGS: -ldl
#include <stdlib.h>
#include "load.h"
*/
import "C"

import (
	"syscall"
	"unsafe"
)

// tables has the functions of each library that was opened so far, by its path.
var tables = map[string]C.struct_sl_verbs_api{}

// loadLibrary opens the library and returns "", or why it cannot and what the user can do. From
// then on all calls go to that library, so the caller makes sure that no context is open.
// Implements: int sl_verbs_load(const char *path, char *why, size_t size)
func loadLibrary(path string) (reason, fix string) {
	if table, ok := tables[path]; ok {
		C.sl_verbs = table
		return "", ""
	}
	name := C.CString(path)
	defer C.free(unsafe.Pointer(name))
	var why [512]C.char
	if rc := C.sl_verbs_load(name, &why[0], C.size_t(len(why))); rc != 0 {
		return C.GoString(&why[0]),
			"apt-get install libibverbs1 ibverbs-providers, of rdma-core 28 or later"
	}
	tables[path] = C.sl_verbs
	return "", ""
}

// countDevices returns how many devices there are, or why that is not known: "ENOSYS" where the
// kernel has no support for RDMA.
func countDevices() (n int, why string) {
	rc := C.sl_verbs_devices()
	switch {
	case rc >= 0:
		return int(rc), ""
	case syscall.Errno(-rc) == syscall.ENOSYS:
		return 0, "ENOSYS"
	}
	return 0, syscall.Errno(-rc).Error()
}
