// SPDX-License-Identifier: Apache-2.0

//go:build cgo && linux

package nvml

/*
#cgo CFLAGS: -O2 -std=gnu11 -Wall -Wextra
#cgo LDFLAGS: -ldl
#include <stdlib.h>
#include "nvml.h"
*/
import "C"

import (
	"fmt"
	"sync"
	"unsafe"
)

// asking is held by Examine, since sl_nvml is not thread-safe.
var asking sync.Mutex

// Examine opens the library of that path and asks the driver through it. If there is no library or
// no driver, the error is a *driver.UnavailableError. Examine may be called by any goroutine, and
// may take seconds while the driver wakes up its cards.
func Examine(library string) (f Findings, err error) {
	asking.Lock()
	defer asking.Unlock()
	path := C.CString(library)
	defer C.free(unsafe.Pointer(path))
	var n C.struct_sl_nvml
	var code C.int
	switch C.sl_nvml_open(&n, path, &code) {
	case C.SL_NVML_OK:
		defer C.sl_nvml_close(&n)
	case C.SL_NVML_INCOMPLETE:
		return f, unavailable(C.GoString(&n.why[0]), "install the whole NVIDIA driver of one "+
			"version")
	default:
		fix := map[C.int]string{ // by the result of nvmlInit
			4: "give this user /dev/nvidia*",
			9: "modprobe nvidia; containers: --gpus all",
			18: "reboot, or load the kernel modules again: they are of another version than " +
				"the library",
		}[code]
		if fix == "" {
			fix = installFix
		}
		return f, unavailable(C.GoString(&n.why[0]), fix)
	}
	f.Driver = C.GoString(&n.driver[0])
	if n.cuda > 0 {
		f.CUDA = fmt.Sprintf("%d.%d", n.cuda/1000, n.cuda%1000/10)
	}
	for i := range int(n.cards) {
		var c C.struct_sl_nvml_card
		C.sl_nvml_card(&n, C.uint(i), &c)
		g := GPU{Index: i, Name: C.GoString(&c.name[0]), Memory: uint64(c.memory),
			State: int(c.state)}
		if c.domain >= 0 {
			g.Bus = fmt.Sprintf("%04x:%02x:%02x.0", c.domain, c.bus, c.device)
		}
		if c.major > 0 {
			g.Compute = fmt.Sprintf("%d.%d", c.major, c.minor)
		}
		switch mode := map[C.int]string{0: "disabled", 1: "enabled"}; {
		case c.mig_now == c.mig_after:
			g.MIG = mode[c.mig_now]
		default:
			g.MIG = mode[c.mig_now] + ", " + mode[c.mig_after] + " after a reset"
		}
		f.GPUs = append(f.GPUs, g)
	}
	return f, nil
}
