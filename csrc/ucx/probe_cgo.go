// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package ucx

/*
#include <errno.h>
#include <stdlib.h>
#include "ucx.h"
*/
import "C"

import (
	"runtime"
	"slices"
	"strings"
	"unsafe"
)

// cTexts are strings of C.
type cTexts []unsafe.Pointer

func (t *cTexts) add(s string) *C.char {
	p := C.CString(s)
	*t = append(*t, unsafe.Pointer(p))
	return p
}

func (t *cTexts) free() {
	for _, p := range *t {
		C.free(p)
	}
}

// foreign is a list of transports without that which serves a worker itself.
func foreign(list string) string {
	names := slices.DeleteFunc(strings.Split(list, ","), func(name string) bool {
		return name == "self"
	})
	return strings.Join(names, ",")
}

// Blocked reports whether messages of this host no longer arrive at a worker: a process that is
// killed, or stopped, while it puts a message into UCX's queue of shared memory leaves a place
// there that UCX waits for, with all that is behind it. It takes some milliseconds, or Grace.
// It must not run twice at once.
func (c *Context) Blocked() bool {
	defer runtime.KeepAlive(c)
	var texts cTexts
	defer texts.free()
	settings, err := settingsArray(c.settings, texts.add)
	if err != nil {
		return false
	}
	defer C.free(unsafe.Pointer(settings))
	for i := range c.rings {
		rc := C.sl_ucx_probe(c.c, C.uint32_t(i), texts.add(c.transports), settings,
			C.uint64_t(c.grace))
		if rc == -C.ETIMEDOUT {
			return true
		}
	}
	return false
}

// Condemn loses all connections, as after Blocked: the peers are told.
func (c *Context) Condemn() {
	C.sl_ucx_condemn(c.c)
	runtime.KeepAlive(c)
}
