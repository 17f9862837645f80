// SPDX-License-Identifier: Apache-2.0

// Package memfault has Go code outlive registered memory that is gone: a program unmaps it,
// protects it, or cuts the file under it, and a peer reaches for it. The runtime would end the
// process; here the fault is an error of the transfer. Copies in C have csrc/guard.h for that, and
// the kernel's have EFAULT.
package memfault

import (
	"runtime"
	"runtime/debug"

	"github.com/sluicehq/sluice/driver"
)

// Catch is deferred by a function that touches registered memory. A fault there ends the function
// with driver.ErrFault; what was copied before it stays. All other panics go on.
//
//	defer memfault.Catch(&err, memfault.Begin())
//
// One that is in a loop costs some nanoseconds a turn: it stands around the loop.
func Catch(err *error, before bool) {
	debug.SetPanicOnFault(before)
	switch r := recover().(type) {
	case nil:
	case addressed:
		*err = driver.ErrFault
	default:
		panic(r)
	}
}

// Begin has faults of this goroutine panic until Catch, which takes what it returns.
func Begin() (before bool) { return debug.SetPanicOnFault(true) }

// addressed is what the runtime panics with at an address that is not that of a nil pointer.
type addressed interface {
	runtime.Error
	Addr() uintptr
}

// Panic does what a fault of this goroutine does, for one that C has told of.
func Panic() { panic(inC{}) }

type inC struct{}

// Error says what Catch would have made of it.
func (inC) Error() string { return driver.ErrFault.Error() }
func (inC) RuntimeError() {}
func (inC) Addr() uintptr { return 0 }

// Copy is copy.
func Copy(dst, src []byte) (n int, err error) {
	defer Catch(&err, Begin())
	return copy(dst, src), nil
}
