// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package csrc

/*
#cgo LDFLAGS: -ldl
#include <stdlib.h>
#include "ucx_load.h"

static const char *sl_ucx_version(void) { return sl_ucx.ucp_get_version_string(); }
*/
import "C"

import "unsafe"

// loadUCX opens the library and returns "", or why not and what to do.
// Implements: int sl_ucx_load(const char *path, char *why, size_t size)
func loadUCX(path string) (reason, fix string) {
	name := C.CString(path)
	defer C.free(unsafe.Pointer(name))
	var why [512]C.char
	if rc := C.sl_ucx_load(name, &why[0], C.size_t(len(why))); rc != 0 {
		return C.GoString(&why[0]), "apt-get install libucx0"
	}
	return "", ""
}

// UCXVersion names the library that LoadUCX has opened, as in "1.13.1".
func UCXVersion() string {
	ucxLoaded.Lock()
	defer ucxLoaded.Unlock()
	if ucxLoaded.path == "" {
		return ""
	}
	return C.GoString(C.sl_ucx_version())
}
