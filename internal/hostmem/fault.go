// SPDX-License-Identifier: Apache-2.0

package hostmem

import (
	"runtime"
	"runtime/debug"

	"github.com/sluicehq/sluice/driver"
)

// CatchFault is deferred by a function that touches registered memory, which may be gone: a program
// unmaps it, protects it, or cuts the file under it, and a peer reaches for it. The runtime would
// end the process; here a fault ends the function with driver.ErrFault; what was copied before it
// stays. All other panics go on. Copies in C have csrc/guard.h for that, and the kernel's have
// EFAULT.
//
//	defer hostmem.CatchFault(&err, hostmem.PanicOnFault())
//
// One that is in a loop costs some nanoseconds a turn: it stands around the loop.
func CatchFault(err *error, before bool) {
	debug.SetPanicOnFault(before)
	switch r := recover().(type) {
	case nil:
	case addressed:
		*err = driver.ErrFault
	default:
		panic(r)
	}
}

// PanicOnFault has faults of this goroutine panic until CatchFault, which takes what it returns.
func PanicOnFault() (before bool) { return debug.SetPanicOnFault(true) }

// addressed is what the runtime panics with at an address that is not that of a nil pointer.
type addressed interface {
	runtime.Error
	Addr() uintptr
}

// RaiseFault does what a fault of this goroutine does, for one that C has told of.
func RaiseFault() { panic(inC{}) }

type inC struct{}

// Error says what CatchFault would have made of it.
func (inC) Error() string { return driver.ErrFault.Error() }
func (inC) RuntimeError() {}
func (inC) Addr() uintptr { return 0 }

// CopyCatchingFault is copy; a fault is driver.ErrFault.
func CopyCatchingFault(dst, src []byte) (n int, err error) {
	defer CatchFault(&err, PanicOnFault())
	return copy(dst, src), nil
}
