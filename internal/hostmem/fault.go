// SPDX-License-Identifier: Apache-2.0

package hostmem

import (
	"runtime"
	"runtime/debug"

	"github.com/sluicehq/sluice/driver"
)

// CatchFault turns a fault of memory into driver.ErrFault. A function that reads or writes
// registered memory defers it:
//
//	defer hostmem.CatchFault(&err, hostmem.PanicOnFault())
//
// The program may have unmapped or protected that memory, or truncated the file under it, while a
// peer still accesses it. Without CatchFault the Go runtime would end the process. With it the
// function returns, and the bytes that it copied before the fault stay copied. All other panics go
// on. C code is protected by csrc/guard.h, and system calls return EFAULT.
//
// The pair costs some nanoseconds: defer it outside of a loop. restore is the result of
// PanicOnFault, the setting of the goroutine before.
func CatchFault(err *error, restore bool) {
	debug.SetPanicOnFault(restore)
	switch r := recover().(type) {
	case nil:
	case memoryFault:
		*err = driver.ErrFault
	default:
		panic(r)
	}
}

// PanicOnFault makes faults of this goroutine panic until CatchFault, to which its result is
// passed.
func PanicOnFault() (restore bool) { return debug.SetPanicOnFault(true) }

// memoryFault is implemented by the error with which the runtime panics at a bad address that is
// not that of a nil pointer.
type memoryFault interface {
	runtime.Error
	Addr() uintptr
}

// RaiseFault panics as a fault of this goroutine does. It is called when C code reports a fault.
func RaiseFault() { panic(faultInC{}) }

// faultInC implements memoryFault.
type faultInC struct{}

// Error returns the text that the error of CatchFault has.
func (faultInC) Error() string { return driver.ErrFault.Error() }
func (faultInC) RuntimeError() {}
func (faultInC) Addr() uintptr { return 0 }

// CopyCatchingFault is the built-in copy, except that a fault is driver.ErrFault.
func CopyCatchingFault(dst, src []byte) (n int, err error) {
	defer CatchFault(&err, PanicOnFault())
	return copy(dst, src), nil
}
