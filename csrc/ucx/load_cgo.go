// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package ucx

/*
#cgo LDFLAGS: -ldl
#include <stdlib.h>
#include "load.h"

static const char *sl_ucx_version(void) { return sl_ucx.ucp_get_version_string(); }
*/
import "C"

import "unsafe"

// load opens the library and returns "", or why not and what to do.
// Implements: int sl_ucx_load(const char *path, char *why, size_t size)
func load(path string) (reason, fix string) {
	name := C.CString(path)
	defer C.free(unsafe.Pointer(name))
	var why [512]C.char
	if rc := C.sl_ucx_load(name, &why[0], C.size_t(len(why))); rc != 0 {
		return C.GoString(&why[0]), "apt-get install libucx0"
	}
	return "", ""
}

// Version names the library that Load has opened, as in "1.13.1".
func Version() string {
	loaded.Lock()
	defer loaded.Unlock()
	if loaded.path == "" {
		return ""
	}
	return C.GoString(C.sl_ucx_version())
}
