// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package ucx

// #include "ucx.h"
import "C"

import (
	"runtime"
	"slices"
	"sync"
)

func (c *Context) end(grace uint64) bool {
	if C.sl_ucx_close(c.c, C.uint64_t(grace)) != 0 {
		return false
	}
	runtime.AddCleanup(c, func(p *C.struct_sl_ucx_context) { C.sl_ucx_free(p) }, c.c)
	return true
}

// kept are the contexts whose Close answered ErrKept.
var kept struct {
	sync.Mutex
	contexts []*Context
}

func (c *Context) keep() error {
	kept.Lock()
	defer kept.Unlock()
	kept.contexts = append(kept.contexts, c)
	return ErrKept
}

// Kept counts what UCX keeps in this process of contexts that were closed, after it has tried
// once more to give them back.
func Kept() int {
	kept.Lock()
	defer kept.Unlock()
	kept.contexts = slices.DeleteFunc(kept.contexts, func(c *Context) bool { return c.end(0) })
	return len(kept.contexts)
}
