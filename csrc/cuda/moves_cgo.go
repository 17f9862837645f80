// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package cuda

/*
#cgo noescape sl_cuda_copy
#cgo nocallback sl_cuda_copy
#cgo noescape sl_cuda_sync
#cgo nocallback sl_cuda_sync
#cgo noescape sl_cuda_mark
#cgo nocallback sl_cuda_mark
#cgo noescape sl_cuda_await
#cgo nocallback sl_cuda_await
#cgo noescape sl_cuda_launch
#cgo nocallback sl_cuda_launch
#cgo noescape sl_cuda_replay
#cgo nocallback sl_cuda_replay
#include <stdlib.h>
#include "moves.h"
*/
import "C"

import (
	"fmt"
	"unsafe"

	"github.com/sluicehq/sluice/driver"
)

// Moves looks for what the driver has of Moves.
// Implements: int sl_cuda_moves(const char *path)
func (d *Device) Moves() Moves {
	loaded.Lock()
	defer loaded.Unlock()
	path := C.CString(loaded.path)
	defer C.free(unsafe.Pointer(path))
	has := C.sl_cuda_moves(path)
	return Moves{has&C.SL_CUDA_COPIES != 0, has&C.SL_CUDA_GRAPHS != 0}
}

// Copier copies on a device's stream without waiting. Its methods follow the rules of the
// device's, which must be open for as long.
type Copier struct {
	d      *Device
	marks  [Marks]C.CUevent
	opened int // of marks
}

// OpenCopier needs Moves.Copies.
func (d *Device) OpenCopier() (*Copier, error) {
	if !d.Moves().Copies {
		return nil, fmt.Errorf("copies without waiting: the driver lacks functions: %w",
			driver.ErrNotSupported)
	}
	p := &Copier{d: d}
	for i := range p.marks {
		var mark C.CUevent
		if err := d.with("create event", func(c *C.struct_sl_cuda) C.int {
			return C.sl_cuda_mark_open(c, &mark)
		}); err != nil {
			p.Close()
			return nil, err
		}
		p.marks[i], p.opened = mark, i+1
	}
	return p, nil
}

// Close frees the marks, after what is under way. The device must be open.
func (p *Copier) Close() {
	p.d.mu.Lock()
	defer p.d.mu.Unlock()
	if p.d.open {
		C.sl_cuda_sync(&p.d.c)
		for _, mark := range p.marks[:p.opened] {
			C.sl_cuda_mark_close(&p.d.c, mark)
		}
	}
	p.opened = 0
}

// Copy begins copies between memories that the device sees, each from src[i] to dst[i]. It may
// return before they are over, after a failure too: Sync.
func (p *Copier) Copy(dst, src, n []uint64) error {
	if len(dst) != len(n) || len(src) != len(n) {
		return driver.ErrBounds
	}
	p.d.mu.Lock()
	defer p.d.mu.Unlock()
	if !p.d.open {
		return driver.ErrClosed
	}
	return result("copy", C.sl_cuda_copy(&p.d.c, wordPtr(dst), wordPtr(src), wordPtr(n),
		C.size_t(len(n))))
}

func wordPtr(b []uint64) *C.uint64_t { return (*C.uint64_t)(unsafe.Pointer(unsafe.SliceData(b))) }

// Sync waits for all that was begun.
func (p *Copier) Sync() error {
	p.d.mu.Lock()
	defer p.d.mu.Unlock()
	if !p.d.open {
		return driver.ErrClosed
	}
	return result("wait for copies", C.sl_cuda_sync(&p.d.c))
}

// Mark notes under a number below Marks what has been begun.
func (p *Copier) Mark(i int) error {
	p.d.mu.Lock()
	defer p.d.mu.Unlock()
	if !p.d.open || i >= p.opened {
		return driver.ErrClosed
	}
	return result("record event", C.sl_cuda_mark(&p.d.c, p.marks[i]))
}

// Await waits for what had been begun at the last Mark of that number; without one for nothing.
func (p *Copier) Await(i int) error {
	p.d.mu.Lock()
	defer p.d.mu.Unlock()
	if !p.d.open || i >= p.opened {
		return driver.ErrClosed
	}
	return result("wait for event", C.sl_cuda_await(&p.d.c, p.marks[i]))
}

// Launch is Run with less to wait for: nothing is written before, and l.Tally comes back to tally,
// pinned memory; nil: the kernel's args say where it counts. Moves must have been called.
func (d *Device) Launch(l *Launch, tally []byte) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if !d.open {
		return driver.ErrClosed
	}
	rc := C.sl_cuda_launch(&d.c, C.int(l.Kernel), C.unsigned(l.Blocks), C.unsigned(l.Threads),
		C.unsigned(l.Shared),
		bytePtr(l.Args), C.CUdeviceptr(l.Tally), bytePtr(tally), C.size_t(len(tally)))
	return result("run kernel", rc)
}

// Sync waits for all that was begun on the device's stream. Moves must have been called.
func (d *Device) Sync() error {
	return d.with("wait for the device", func(c *C.struct_sl_cuda) C.int {
		return C.sl_cuda_sync(c)
	})
}

// Graph is a launch that is replayed.
type Graph struct {
	d      *Device
	exec   C.CUgraphExec
	kernel C.int
	shared C.unsigned
}

// Capture prepares a launch for Replay; needs Moves.Graphs. Args are read now.
func (d *Device) Capture(l *Launch) (*Graph, error) {
	if !d.Moves().Graphs {
		return nil, fmt.Errorf("capture a launch: the driver lacks functions: %w",
			driver.ErrNotSupported)
	}
	g := &Graph{d: d, kernel: C.int(l.Kernel), shared: C.unsigned(l.Shared)}
	var exec C.CUgraphExec
	err := d.with("capture launch", func(c *C.struct_sl_cuda) C.int {
		return C.sl_cuda_capture(c, g.kernel, C.unsigned(l.Blocks), C.unsigned(l.Threads), g.shared,
			bytePtr(l.Args), &exec)
	})
	if err != nil {
		return nil, err
	}
	g.exec = exec
	return g, nil
}

// Replay launches and waits: one crossing, without an allocation.
func (g *Graph) Replay() error {
	g.d.mu.Lock()
	defer g.d.mu.Unlock()
	if !g.d.open || g.exec == nil {
		return driver.ErrClosed
	}
	return result("replay launch", C.sl_cuda_replay(&g.d.c, g.exec, g.kernel, g.shared))
}

// Close frees the graph. It is idempotent.
func (g *Graph) Close() {
	g.d.mu.Lock()
	defer g.d.mu.Unlock()
	if g.d.open && g.exec != nil {
		C.sl_cuda_graph_close(&g.d.c, g.exec)
	}
	g.exec = nil
}
